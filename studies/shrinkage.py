"""Affinity with Ledoit-Wolf and sample covariances, by numbers of dimensions and samples."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import falls, rises, within
from .shared.single_functions import (
    PAPER_ACTIVATIONS,
    PUBLISHED_NORMAL_SCORES,
    normal_score,
    one_batch,
    summary_values,
)
from .shared.site_scores import AFFINITY

# Rightmost values of the curves without shrinkage in the slides, where labels are legible.
ENDS = {"sigmoid": 0.95, "tanh": 0.90, "hardtanh": 0.88, "hardswish": 0.83, "gelu": 0.78}
TOLERANCE = 0.02
SHRINKAGES = ("ledoit-wolf", "none")


class Shrinkage(Study):
    """Affinity of nine activations on normally distributed inputs, with and without shrinkage."""

    question = "Does shrinkage make affinity independent of the number of samples and dimensions?"
    source = AFFINITY
    needs = "nothing"
    minutes = 0.4
    quick_minutes = 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure affinity with both covariances for several numbers of samples and dimensions."""
        if context.quick:
            grid = [(128, 16), (128, 64), (128, 256), (32, 64)]
        else:
            grid = [(256, 16), (256, 64), (256, 128), (256, 256), (256, 512), (32, 64), (512, 64)]
        runs = {}
        for samples, dimensions in grid:
            for shrinkage in SHRINKAGES:
                request = Request(
                    ("affinity",),
                    tuple(f"functions/{name}" for name in PAPER_ACTIVATIONS),
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

    def analyse(self, runs: Runs) -> Findings:
        """Compare the scores at each size with theory and the slides."""
        scores = pd.concat([_read_part(part, run) for part, run in runs.items()])
        keys = ["function", "shrinkage", "samples", "dimensions"]
        table = scores.groupby(keys, sort=False).value.agg(["mean", "std"]).reset_index()
        means = scores.groupby(keys).value.mean()
        max_samples = table[table.dimensions == table.dimensions.max()].samples.max()
        by_dimensions = means.xs(max_samples, level="samples")
        by_samples = means.xs(64, level="dimensions")
        verdicts = []
        for name, published in PUBLISHED_NORMAL_SCORES.items():
            ours = means[name, "ledoit-wolf"]
            verdicts.append(
                Verdict(
                    f"With shrinkage {name} has one score at all sizes",
                    f"{published:.2f}",
                    f"{ours.min():.3f} to {ours.max():.3f}",
                    within(ours, published, TOLERANCE),
                    f"in theory {normal_score(name):.4f}; agrees if the scores at all {len(ours)} "
                    f"sizes are within {TOLERANCE} of the published one",
                )
            )
        rising = {name: by_dimensions[name, "none"] for name in PAPER_ACTIVATIONS}
        falling = {name: by_samples[name, "none"] for name in PAPER_ACTIVATIONS}
        sizes = by_dimensions.index.get_level_values("dimensions")
        counts = by_samples.index.get_level_values("samples")
        verdicts += [
            Verdict(
                "Without it all scores rise with the number of dimensions",
                "; ".join(f"{name} to {end:.2f}" for name, end in ENDS.items()),
                _ends_text(rising),
                rises(list(rising.values())),
                f"{max_samples} samples with {sizes.min()} to {sizes.max()} dimensions; the sizes "
                "in the slides are illegible",
            ),
            Verdict(
                "Without it all scores depend on the number of samples",
                "not robust",
                _ends_text(falling),
                falls(list(falling.values())),
                f"64 dimensions, {counts.min()} to {counts.max()} samples",
            ),
        ]
        return Findings(
            verdicts,
            {"Affinity by size and covariance": table},
            {
                f"Affinity of {max_samples} samples by dimensions; lines: theory": _figure(
                    by_dimensions
                )
            },
            [f"Independent standard normal samples; draws: {scores.seed.nunique()}."],
        )


def _ends_text(curves: Mapping[str, pd.Series]) -> str:
    ends = {name: (curves[name].iloc[0], curves[name].iloc[-1]) for name in ENDS}
    return "; ".join(f"{name} {first:.2f} to {last:.2f}" for name, (first, last) in ends.items())


def _read_part(part: str, run: Run) -> pd.DataFrame:
    samples, _, dimensions, shrinkage = part.split("-", 3)
    return summary_values(run).assign(
        samples=int(samples), dimensions=int(dimensions), shrinkage=shrinkage
    )


def _figure(scores: pd.Series) -> Figure:
    titles = {"ledoit-wolf": "Ledoit-Wolf", "none": "sample covariance"}
    figure, panels = page_figure(3.0, columns=2, sharey=True)
    for axes, (shrinkage, title) in zip(panels, titles.items(), strict=True):
        for colour, name in enumerate(PUBLISHED_NORMAL_SCORES):
            curve = scores[name, shrinkage]
            axes.axhline(normal_score(name), color=f"C{colour}", lw=0.6)
            axes.plot(curve.index, curve.to_numpy(), "o-", ms=3.5, color=f"C{colour}", label=name)
        sizes = scores.index.unique("dimensions")
        axes.set(xscale="log", xlabel="dimensions", title=title)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    panels[0].set_ylabel("affinity")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure
