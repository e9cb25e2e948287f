"""Ledoit and Wolf's covariances against the sample's, by dimensions and samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.request import Request

from .drawing import page_figure
from .single_functions import NINE, NORMAL, normal_score, one_batch, values
from .site_scores import AFFINITY
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Shrinkage"]


# Where the slides' curves without shrinkage end, as far as their labels can be read.
ENDS = {"sigmoid": 0.95, "tanh": 0.90, "hardtanh": 0.88, "hardswish": 0.83, "gelu": 0.78}
CLOSE = 0.02
SHRINKAGES = ("ledoit-wolf", "none")


class Shrinkage(Study):
    """Affinity of nine activations of many normal numbers, with and without shrinkage."""

    question = "Does shrinkage make the affinity independent of samples and dimensions?"
    source = AFFINITY
    needs = "nothing"
    minutes, quick_minutes = 0.4, 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity by either covariance, at several numbers of samples and dimensions."""
        if context.quick:
            grid = [(128, 16), (128, 64), (128, 256), (32, 64)]
        else:
            grid = [(256, 16), (256, 64), (256, 128), (256, 256), (256, 512), (32, 64), (512, 64)]
        runs = {}
        for samples, dimensions in grid:
            for shrinkage in SHRINKAGES:
                request = Request(
                    ("affinity",),
                    tuple(f"functions/{name}" for name in NINE),
                    ("normal/0:1",),
                    ("init",),
                    context.seeds_or(3),
                    samples=samples,
                    settings=one_batch(samples, shrinkage)
                    | {
                        "normal.shape": str(dimensions),
                        "normal.spacing": "random",
                        "normal.count": 4 * samples,
                    },
                )
                part = f"{samples}-of-{dimensions}-{shrinkage}"
                runs[part] = context.run(request, part)
        return runs

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Scores at each size, beside theory and the slides."""
        found = pd.concat([_labelled(part, run) for part, run in runs.items()])
        keys = ["function", "shrinkage", "samples", "dimensions"]
        table = found.groupby(keys, sort=False).value.agg(["mean", "std"]).reset_index()
        means = found.groupby(keys).value.mean()
        most = table[table.dimensions == table.dimensions.max()].samples.max()
        at = means.xs(most, level="samples")
        verdicts = []
        for name, published in NORMAL.items():
            ours = means[name, "ledoit-wolf"]
            low, high = ours.min(), ours.max()
            verdicts.append(
                Verdict(
                    f"With shrinkage {name} has one score at all sizes",
                    f"{published:.2f}",
                    f"{low:.3f} to {high:.3f}",
                    bool(abs(low - published) <= CLOSE and abs(high - published) <= CLOSE),
                    f"in theory {normal_score(name):.4f}; agrees if all {len(ours)} sizes are "
                    f"within {CLOSE} of what was published",
                )
            )
        rises = {name: at[name, "none"] for name in NINE}
        by_samples = means.xs(64, level="dimensions")
        falls = {name: by_samples[name, "none"] for name in NINE}
        sizes = at.index.get_level_values("dimensions")
        counts = by_samples.index.get_level_values("samples")
        verdicts += [
            Verdict(
                "Without it all scores rise with the number of dimensions",
                "; ".join(f"{name} to {end:.2f}" for name, end in ENDS.items()),
                _from_to(rises),
                bool(all(one.is_monotonic_increasing for one in rises.values())),
                f"{most} samples of {sizes.min()} to {sizes.max()} dimensions; the slides' sizes "
                "can't be read",
            ),
            Verdict(
                "Without it all scores depend on the number of samples",
                "not robust",
                _from_to(falls),
                bool(all(one.is_monotonic_decreasing for one in falls.values())),
                f"64 dimensions, {counts.min()} to {counts.max()} samples",
            ),
        ]
        return Findings(
            verdicts,
            {"Affinity by size and covariance": table},
            {f"Affinity of {most} samples by dimensions; lines: theory": _figure(at)},
            [f"Independent standard normal numbers; draws: {found.seed.nunique()}."],
        )


def _from_to(scores: Mapping[str, pd.Series]) -> str:
    ends = {name: (scores[name].iloc[0], scores[name].iloc[-1]) for name in ENDS}
    return "; ".join(f"{name} {first:.2f} to {last:.2f}" for name, (first, last) in ends.items())


def _labelled(part: str, run: Run) -> pd.DataFrame:
    samples, _, dimensions, shrinkage = part.split("-", 3)
    return values(run).assign(samples=int(samples), dimensions=int(dimensions), shrinkage=shrinkage)


def _figure(at: pd.Series) -> Figure:
    titles = {"ledoit-wolf": "Ledoit-Wolf", "none": "sample covariance"}
    figure, panels = page_figure(3.0, columns=2, sharey=True)
    for axes, (shrinkage, title) in zip(panels, titles.items(), strict=True):
        for color, name in enumerate(NORMAL):
            one = at[name, shrinkage]
            axes.axhline(normal_score(name), color=f"C{color}", lw=0.6)
            axes.plot(one.index, one.to_numpy(), "o-", ms=3.5, color=f"C{color}", label=name)
        sizes = at.index.unique("dimensions")
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("dimensions")
        axes.set_title(title)
    panels[0].set_ylabel("affinity")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure
