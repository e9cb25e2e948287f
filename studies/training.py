"""The effect of training on a network's signature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.parsers import unique
from nlbench.reports.agreement import kendall

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import mean_above, mean_below, range_text
from .shared.site_scores import AFFINITY, signatures, site_scores
from .shared.small_networks import measure_networks, seeds_by_model

NEARLY_LINEAR = 0.95
STEADY_TAU = 0.5
"""Mean size of Kendall's tau from which a change counts as steady."""
Signatures = Mapping[tuple[str, str, int], np.ndarray]
"""Signatures keyed by state, model and seed."""
Pairs = Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]
"""Signatures before and after training, keyed by model and seed."""


class Training(Study):
    """Signatures of networks before and after training."""

    question = "Does training make a network's activations more nonlinear, and where?"
    source = AFFINITY
    needs = "digits; trains 15 networks"
    minutes = 4.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks before and after training on digits, and an untrained VGG16."""
        trained = seeds_by_model(context, vgg8=9)
        drawn = {**trained, "vgg16": context.seeds_or(3)}
        return {"run": measure_networks(context, trained, drawn=drawn)}

    def analyse(self, runs: Runs) -> Findings:
        """Test signatures for a trend over depth before training and for changes due to it."""
        table = site_scores(runs["run"])
        by_network = {
            (str(state), str(model), int(seed)): values
            for (state, model, seed), values in signatures(table, ["state", "model", "seed"])
        }
        pairs = {
            (model, seed): (values, by_network["trained", model, seed])
            for (state, model, seed), values in by_network.items()
            if state == "drawn" and ("trained", model, seed) in by_network
        }
        rows = [
            (model, seed, before.mean(), after.mean(), after.min() - before.min(), after[-1])
            for (model, seed), (before, after) in pairs.items()
        ]
        columns = ["network", "seed", "mean before", "mean after", "change of min", "last after"]
        verdicts = [
            *_before_training(by_network),
            *_is_more_nonlinear(pairs),
            _is_not_monotone(pairs),
        ]
        return Findings(
            verdicts,
            {"Before and after training": pd.DataFrame(rows, columns=columns)},
            {"Signatures before (dashed) and after training": _figure(by_network, pairs)},
            [
                "The published figure shows VGG16 on CIFAR10, initialised and trained on ImageNet; "
                "here VGG16 is only initialised, and smaller networks are trained on digits. "
                "Before training, batch norm uses the statistics of the samples."
            ],
        )


def _before_training(by_network: Signatures) -> list[Verdict]:
    drawn = [
        values
        for (state, model, _), values in by_network.items()
        if (state, model) == ("drawn", "vgg16")
    ]
    taus = [kendall(range(len(values)), values) for values in drawn]
    last = np.array([values[-3:].mean() for values in drawn])
    return [
        Verdict(
            "Before training, VGG16's activations are the more linear the deeper they are",
            "increasing",
            "τ = " + ", ".join(f"{t.value:.2f}" for t in taus),
            mean_above([t.value for t in taus]),
            "Kendall's τ between score and depth over the sites, for each seed; 95% t interval "
            "over seeds",
        ),
        Verdict(
            "Before training, VGG16's last layers are almost linear",
            "almost 1",
            f"{last.mean():.3f} over the last three ({last.min():.3f} to {last.max():.3f})",
            mean_above(last, NEARLY_LINEAR),
            f"almost 1: above {NEARLY_LINEAR}; 95% t interval over seeds",
        ),
    ]


def _is_more_nonlinear(pairs: Pairs) -> list[Verdict]:
    verdicts = []
    for network in unique(model for model, _ in pairs):
        changes = np.array(
            [
                after.mean() - before.mean()
                for (model, _), (before, after) in pairs.items()
                if model == network
            ]
        )
        verdicts.append(
            Verdict(
                f"Training makes {network}'s activations more nonlinear",
                "more nonlinear",
                f"mean score {range_text(changes, '+.3f')}",
                mean_below(changes),
                f"same seed before and after; lower in {(changes < 0).sum()} of {len(changes)} "
                "networks; 95% t interval of the mean over networks",
            )
        )
    return verdicts


def _is_not_monotone(pairs: Pairs) -> Verdict:
    changes = [after - before for before, after in pairs.values()]
    taus = np.array([kendall(range(len(change)), change).value for change in changes])
    return Verdict(
        "What training changes neither rises nor falls steadily with depth",
        "non-monotone",
        f"mean size of τ {range_text(np.abs(taus), '.2f')}; τ > 0 in {(taus > 0).sum()} networks",
        mean_below(np.abs(taus), STEADY_TAU),
        "Kendall's τ of site and difference between the two signatures; agrees if its mean size "
        f"over networks is below {STEADY_TAU:g}, by its 95% t interval",
    )


def _figure(by_network: Signatures, pairs: Pairs) -> Figure:
    from matplotlib.ticker import MaxNLocator

    networks = ["vgg16", *dict.fromkeys(model for model, _ in pairs)]
    styles = {"drawn": {"color": "#777777", "ls": "--"}, "trained": {"color": "#0072B2"}}
    figure, grid = page_figure(4.4, rows=2, columns=2, sharey=True)
    for axes, network in zip(grid.flat, networks, strict=False):
        for (state, model, _), values in by_network.items():
            if model == network:
                depth = range(1, len(values) + 1)
                axes.plot(depth, values, linewidth=0.9, marker=".", **styles[state])
        axes.set(title=network, ylabel="affinity")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[-1]:
        axes.set_xlabel("site, in call order")
    return figure
