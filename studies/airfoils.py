"""Trends of measures over the eight sizes of NeuralFoil, all trained on the same task."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.models.zoo.catalogue import MEMBERS
from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.trends import SIGNIFICANCE, Trend, holm, trend_test

SIZES = {
    "xxsmall": (13_302, 0.078),
    "xsmall": (15_654, 0.057),
    "small": (22_854, 0.050),
    "medium": (27_014, 0.039),
    "large": (78_406, 0.030),
    "xlarge": (94_918, 0.024),
    "xxlarge": (320_710, 0.022),
    "xxxlarge": (1_428_166, 0.020),
}
"""Number of parameters, and mean absolute error of the log drag on test airfoils, from the README
of NeuralFoil 0.3.3."""

MEASURES = (
    "affinity",
    "r2",
    "cka",
    "elementwise-residual",
    "affine-residual",
    "nlc",
    "geometric-complexity",
    "substitution",
    "norm",
    "entropy",
    "effective-rank",
)
SAMPLES = 1024
"""R² requires more samples than the widest layer has units."""


class Airfoils(Study):
    """Measures of eight networks with 13,302 to 1,428,166 parameters, trained and initialised."""

    question = "Does any measure rise with the size and fit of networks trained on one task?"
    source = Source(MEMBERS["neuralfoil-xxxlarge"].source.citation)
    needs = "the package neuralfoil"
    minutes = 2
    quick_minutes = 0.4
    takes = ("seeds",)

    def missing(self) -> str:
        """Return the package to install."""
        return MEMBERS["neuralfoil-xxxlarge"].problem

    def measure(self, context: Context) -> Runs:
        """Measure the networks with trained and with initial weights."""
        sizes = ("xxsmall", "medium", "xxlarge") if context.quick else SIZES
        models = tuple(f"zoo/neuralfoil-{size}" for size in sizes)
        seeds = context.seeds_or(3)
        # The outputs are not class logits.
        settings: dict[str, str | int] = {"substitution.cost": "squared", "airfoils.count": SAMPLES}
        # The ordinary R² of as many samples rises with the number of channels.
        settings["r2.kind"] = "adjusted"
        weights = ("trained", "init")
        request = Request(MEASURES, models, ("airfoils",), weights, seeds, 0, settings=settings)
        return {"run": context.run(request)}

    def analyse(self, runs: Runs) -> Findings:
        """Test each measure for a trend over the sizes, trained and initialised."""
        values = value_table(runs["run"])
        trends = trend_table(values)
        return Findings(
            [_verdict(*row) for row in trends.itertuples(index=False)],
            {"Trend over the sizes": trends, "Values": values},
            {"Measures vs. the number of parameters": _figure(values)},
            _remarks(values),
            headline=[_headline(trends)],
        )


def value_table(run: Run) -> pd.DataFrame:
    """Return the mean over seeds of each measure for each network, sorted by size."""
    rows = [
        (
            record.measure.name,
            record.measure.more_means,
            "drawn" if record.subject.weights == "init" else "trained",
            record.subject.model.rpartition("-")[2],
            record.result.summary.get("value", math.nan),
        )
        for record in run.records
    ]
    columns = ["measure", "more means", "weights", "size", "value"]
    table = pd.DataFrame(rows, columns=columns)
    means = table.groupby(columns[:-1], sort=False, dropna=False).value.mean().reset_index()
    means["parameters"] = means["size"].map({size: count for size, (count, _) in SIZES.items()})
    means["published error"] = means["size"].map(
        {size: error for size, (_, error) in SIZES.items()}
    )
    return means.sort_values(["measure", "weights", "parameters"], ignore_index=True)


def trend_table(values: pd.DataFrame) -> pd.DataFrame:
    """Test each measure for a trend towards nonlinearity over the sizes.

    The p-values are two-sided and adjusted for the number of measures.
    """
    trends: dict[tuple[str, str], Trend] = {}
    senses: dict[str, str] = {}
    for (measure, weights), rows in values.groupby(["measure", "weights"], sort=False):
        senses[str(measure)] = str(rows["more means"].iloc[0])
        sign = -1 if senses[str(measure)] == "less nonlinear" else 1
        if rows.value.notna().all() and rows.value.min() < rows.value.max():
            trends[str(measure), str(weights)] = trend_test([sign * rows.value])
    p_values = {key: min(1.0, 2 * min(t.p_rises, t.p_falls)) for key, t in trends.items()}
    adjusted = {}
    for weights in ("trained", "drawn"):
        by_measure = {measure: p for (measure, state), p in p_values.items() if state == weights}
        adjusted[weights] = holm(by_measure)
    table = []
    for measure, sense in senses.items():
        row: dict[str, object] = {"measure": measure, "more means": sense}
        for weights in ("trained", "drawn"):
            trend = trends.get((measure, weights))
            row[f"tau {weights}"] = math.nan if trend is None else trend.tau
            row[f"p {weights}"] = adjusted[weights].get(measure, math.nan)
        table.append(row)
    return pd.DataFrame(table).sort_values("tau trained", ascending=False, ignore_index=True)


def _verdict(
    measure: str, sense: str, tau: float, p: float, tau_drawn: float, p_drawn: float
) -> Verdict:
    is_directed = sense in ("more nonlinear", "less nonlinear")
    return Verdict(
        f"Larger and more accurate networks have more nonlinearity by {measure}"
        if is_directed
        else f"{measure} rises with the size and the fit",
        "",
        "undefined or constant"
        if math.isnan(float(tau))
        else f"τ = {tau:+.2f}, p = {p:.2g}; initialised {tau_drawn:+.2f}, p = {p_drawn:.2g}",
        bool(tau > 0) if p < SIGNIFICANCE else None,
        "Kendall's exact test for size and value over networks, two-sided, adjusted by Holm's "
        "method",
    )


def _headline(trends: pd.DataFrame) -> str:
    trained, drawn = (
        np.sign(trends[f"tau {weights}"]) * (trends[f"p {weights}"] < SIGNIFICANCE)
        for weights in ("trained", "drawn")
    )
    rising, falling, alone = (
        ", ".join(trends.measure[mask]) or "none"
        for mask in (trained > 0, trained < 0, (trained * drawn <= 0) & (trained != 0))
    )
    return (
        f"More nonlinear with size and fit: {rising}; less: {falling}; different or no trend in "
        f"initialised networks: {alone}."
    )


def _remarks(values: pd.DataFrame) -> list[str]:
    undefined = values[values.value.isna()].measure.unique()
    remarks = [
        "The published error falls from each size to the next, so size and fit are confounded; "
        "initialised networks of the same shapes show the effect of the shape alone.",
        "Inputs are drawn from a normal distribution fitted to the training inputs; values are "
        "means over draws. There is one trained network per size, so trends are over sizes.",
    ]
    if len(undefined):
        remarks.append(f"Undefined for some networks: {', '.join(undefined)}.")
    return remarks


def _figure(values: pd.DataFrame) -> Figure:
    measures = [m for m, rows in values.groupby("measure", sort=False) if rows.value.notna().any()]
    columns = 3
    count = -(-len(measures) // columns)
    figure, panels = page_figure(1.7 * count, rows=count, columns=columns, squeeze=False)
    for axes, measure in zip(panels.flat, measures, strict=False):
        rows = values[values.measure == measure]
        for colour, weights in zip(COLOURS, ("trained", "drawn"), strict=False):
            series = rows[rows.weights == weights]
            axes.plot(series.parameters, series.value, ".-", color=colour, label=weights)
        axes.set_title(measure, fontsize="small")
        axes.set_xscale("log")
    for axes in panels.flat[len(measures) :]:
        axes.set_axis_off()
    panels[0, 0].legend(fontsize="small")
    figure.supxlabel("parameters", fontsize="small")
    return figure
