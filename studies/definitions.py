"""Counts of linear regions under three definitions."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.verdicts import below, ordered, within

NAMES = ("activation", "connected", "affine")
TWINS = {name: f"ladders/twin-{name}" for name in ("plain", "doubled", "cancelling")}
TRAINED = "vgg8, trained"
EXACT = {"lines.method": "exact"}
STEPS = (1000, 10_000)
MIN_MISSED = 0.01


class Definitions(Study):
    """Linear regions of a trained network and of variants of one function, by three definitions."""

    question = "How much do counts of linear regions depend on the definition of a region?"
    needs = "digits"
    minutes = 0.8
    quick_minutes = 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Count the regions of the variants between random points, and of VGG8 around digits."""
        twins = Request(
            ("regions",),
            tuple(TWINS.values()),
            ("normal/0:1",),
            ("init",),
            seeds=context.seeds_or(8, 4),
            samples=16,
            settings={
                **EXACT,
                "normal.shape": "8",
                "normal.spacing": "random",
                "lines.paths": "pairs",
                "lines.number": 8,
            },
            precision="float64",
        )
        trained = Request(
            ("regions",),
            ("vgg8",),
            ("digits",),
            samples=16,
            settings={
                **EXACT,
                "lines.number": 1,
                "lines.anchors": 2 if context.quick else 8,
                "lines.radius": 1.0 if context.quick else 4.0,
            },
        )
        runs = {"twins": context.run(twins, "twins"), "vgg8": context.run(trained, "vgg8")}
        for steps in (50, 200) if context.quick else STEPS:
            sampling: dict[str, str | int] = {"lines.method": "sampling", "lines.resolution": steps}
            request = replace(
                trained, measures=("density",), settings={**trained.settings, **sampling}
            )
            runs[f"sampled{steps}"] = context.run(request, f"sampled{steps}")
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the three counts for VGG8, and the counts for variants of one function."""
        table = pd.concat([_counts(runs["twins"]), _counts(runs["vgg8"])], ignore_index=True)
        means = table.groupby("network", sort=False)[list(NAMES)].mean()
        vgg8, plain, cancelling = (means.loc[name] for name in (TRAINED, "plain", "cancelling"))
        spread = 1 - vgg8.affine / vgg8.activation
        by_network = table.set_index(["network", "seed"])
        same = by_network.connected["cancelling"] - by_network.connected["plain"]
        verdicts = [
            Verdict(
                "In the bundled VGG8 the three counts agree",
                "",
                f"{vgg8.activation:,.0f} activation regions, {vgg8.affine:,.0f} affine maps on the "
                f"path: {spread:.2%} apart",
                within(spread, 0, 0.01),
                "one network",
            ),
            Verdict(
                "Units that cancel add activation regions, and no others",
                "",
                f"{cancelling.activation:.1f} for {plain.activation:.1f} activation regions; "
                f"connected ones differ by at most {same.abs().max():.0f}",
                bool(
                    ordered(plain.activation, cancelling.activation) and within(same, 0, 0) is True
                ),
                f"{len(same)} networks, each with and without 16 pairs of units that cancel",
            ),
            Verdict(
                "Units that are doubled add no region",
                "",
                f"{means.loc['doubled'].activation:.1f} for {plain.activation:.1f}",
                within(by_network.activation["doubled"] - by_network.activation["plain"], 0, 0),
            ),
            _compare_sampling(runs, means.activation[TRAINED]),
        ]
        figures = {"Regions of each network by definition": _figure(means)}
        return Findings(verdicts, {"Regions per path": means.reset_index().round(1)}, figures)


def _compare_sampling(runs: Runs, regions: float) -> Verdict:
    """Compare the boundaries found by uniform sampling with those of the exact method."""
    fractions = {}
    for part, run in runs.items():
        if part.startswith("sampled"):
            (record,) = run.records
            steps = int(part.removeprefix("sampled"))
            fractions[steps] = record.result.summary["value"] / (regions - 1)
    listed = (f"{fraction:.1%} at {steps:,} steps" for steps, fraction in fractions.items())
    return Verdict(
        "Uniform sampling misses regions",
        "might miss small regions if the step is large",
        f"finds {', '.join(listed)} per segment",
        below(list(fractions.values()), 1 - MIN_MISSED),
        "fraction found of the boundaries on VGG8's path; agrees if all miss at least "
        f"{MIN_MISSED:.0%}",
    )


def _counts(run: Run) -> pd.DataFrame:
    scores = run.scores
    rows = scores[(scores.place == "") & scores.statistic.isin(NAMES)]
    table = rows.pivot_table(index=["model", "seed"], columns="statistic", values="value")
    names = {model: name for name, model in TWINS.items()} | {"vgg8": TRAINED}
    table = table.reset_index()
    table.insert(0, "network", table.model.map(names))
    return table


def _figure(means: pd.DataFrame) -> Figure:
    figure, panels = page_figure(2.6, columns=2, width_ratios=[3, 1.2])
    for axes, part in zip(panels, (means.drop(index=TRAINED), means.loc[[TRAINED]]), strict=True):
        for place, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=False)):
            positions = [row + 0.25 * (place - 1) for row in range(len(part))]
            axes.bar(positions, part[name], 0.23, color=colour, label=name)
        axes.set_xticks(range(len(part)), part.index)
    panels[0].set_ylabel("regions per path")
    panels[0].legend()
    return figure
