"""What training does to a network's signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import kendall, paired_share

from .drawing import page_figure
from .site_scores import AFFINITY, signatures, site_scores
from .small_networks import measured_networks, seeds_of_each
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Training"]


NEARLY_LINEAR = 0.95
_DEEP = ("drawn", "vgg16")


class Training(Study):
    """Signatures before and after training: drawn weights are nearly linear in the last layers."""

    question = "Does training make a network's activations more nonlinear, and where?"
    source = AFFINITY
    needs = "digits; trains 15 networks"
    minutes, quick_minutes = 4.0, 0.6
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of networks drawn and trained on digits, and of VGG16 as drawn."""
        trained = seeds_of_each(context, of_vgg8=9)
        drawn = {**trained, "vgg16": context.seeds_or(3)}
        return {"run": measured_networks(context, trained, drawn=drawn)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Signatures by depth at the beginning, and what training adds."""
        table = site_scores(runs["run"])
        found = {
            (str(state), str(model), int(seed)): values
            for (state, model, seed), values in signatures(table, ["state", "model", "seed"])
        }
        pairs = {
            (model, seed): (values, found["trained", model, seed])
            for (state, model, seed), values in found.items()
            if state == "drawn" and ("trained", model, seed) in found
        }
        rows = [
            (model, seed, before.mean(), after.mean(), after.min() - before.min(), after[-1])
            for (model, seed), (before, after) in pairs.items()
        ]
        columns = ["network", "seed", "mean before", "mean after", "change of min", "last after"]
        verdicts = [
            *_at_first(found),
            *_more_nonlinear(pairs),
            _not_monotone(pairs),
        ]
        return Findings(
            verdicts,
            {"Before and after training": pd.DataFrame(rows, columns=columns)},
            {"Signatures before (dashed) and after training": _figure(found, pairs)},
            [
                "The published figure is of VGG16, drawn and trained on ImageNet, on CIFAR10; here "
                "VGG16 is as it is drawn, and smaller networks are trained on digits. Batch norm's "
                "statistics before training are those of the samples.",
            ],
        )


Signatures = Mapping[tuple[str, str, int], np.ndarray]
Pairs = Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]


def _at_first(found: Signatures) -> list[Verdict]:
    """As drawn: rising with depth, nearly linear at the end."""
    drawn = [one for (state, model, _), one in found.items() if (state, model) == _DEEP]
    rise = [kendall(range(len(one)), one) for one in drawn]
    last = np.array([one[-3:].mean() for one in drawn])
    return [
        Verdict(
            "Before training, VGG16's activations are the more linear the deeper they are",
            "increasing",
            "τ = " + ", ".join(f"{r.value:.2f} ({r.low:.2f} to {r.high:.2f})" for r in rise),
            above(min(r.low for r in rise), max(r.high for r in rise)),
            "Kendall's τ of score and depth over the sites, a seed each",
        ),
        Verdict(
            "Before training, VGG16's last layers are almost linear",
            "almost 1",
            f"{last.mean():.3f} over the last three ({last.min():.3f} to {last.max():.3f})",
            above(last.min(), last.max(), NEARLY_LINEAR),
            f"almost 1: above {NEARLY_LINEAR} for each seed; not, if below it for each",
        ),
    ]


def _more_nonlinear(pairs: Pairs) -> list[Verdict]:
    verdicts = []
    for network in dict.fromkeys(model for model, _ in pairs):
        change = np.array(
            [
                after.mean() - before.mean()
                for (model, _), (before, after) in pairs.items()
                if model == network
            ]
        )
        share = paired_share(-change)
        verdicts.append(
            Verdict(
                f"Training makes {network}'s activations more nonlinear",
                "more nonlinear",
                f"mean score {change.mean():+.3f} ({change.min():+.3f} to {change.max():+.3f})",
                above((-change).min(), (-change).max()),
                f"the same seed before and after, lower in {share.value:.0%} of {share.n}; all "
                "have to agree",
            )
        )
    return verdicts


def _not_monotone(pairs: Pairs) -> Verdict:
    steps = [np.diff(after - before) for before, after in pairs.values()]
    both = [bool((step > 0).any() and (step < 0).any()) for step in steps]
    share = np.mean([float((step > 0).mean()) for step in steps])
    return Verdict(
        "What training changes neither rises nor falls steadily with depth",
        "non-monotone",
        f"{sum(both)} of {len(both)} networks; {share:.0%} of the steps are upwards",
        all(both),
        "difference of both signatures, from site to site",
    )


def _figure(found: Signatures, pairs: Pairs) -> Figure:
    from matplotlib.ticker import MaxNLocator

    networks = ["vgg16", *dict.fromkeys(model for model, _ in pairs)]
    figure, grid = page_figure(4.4, rows=2, columns=2, sharey=True)
    panels = grid.flat
    for axes, network in zip(panels, networks, strict=False):
        for state, colour, line in (("drawn", "#777777", "--"), ("trained", "#0072B2", "-")):
            for (which, model, _), values in found.items():
                if (which, model) == (state, network):
                    depth = range(1, len(values) + 1)
                    axes.plot(depth, values, line, color=colour, linewidth=0.9, marker=".")
        axes.set_title(network)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("affinity")
    for axes in figure.axes[2:]:
        axes.set_xlabel("site, in order of call")
    return figure
