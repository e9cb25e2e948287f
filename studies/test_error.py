"""Correlations of density and deviation with the test error."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from nlbench.reports.agreement import spearman
from nlbench.request import Request

from .framework import Context, Findings, Runs, Verdict
from .framework.figures import draw_groups, page_figure
from .framework.trends import trend_test
from .framework.verdicts import correlates_weakly, correlation_text, rises_in_networks
from .shared.linear_regions import (
    AXIS_LABELS,
    DATA,
    MEASURES,
    MODEL,
    ClosedPaths,
    medians,
    network_values,
    path_remarks,
    path_values,
    sorted_settings,
    trained_networks,
)

WEAK = 0.5
"""Maximum size of a correlation that counts as none: it explains a quarter of the variance."""


class TestError(ClosedPaths):
    """Test error of networks vs. their median density and deviation over paths."""

    __test__ = False  # The name would make pytest collect the class.

    question = "Does deviation along training images predict a network's error on others?"

    def measure(self, context: Context) -> Runs:
        """Measure trained networks along closed paths, and their accuracy on the test split."""
        weights = tuple(map(str, trained_networks(context)))
        request = Request(("accuracy",), (MODEL,), (context.data or DATA,), weights, samples=0)
        return {**super().measure(context), "accuracy": context.run(request, "accuracy")}

    def analyse(self, runs: Runs) -> Findings:
        """Correlate the test error with the medians of each measure, over networks."""
        error = 1 - network_values(runs["accuracy"], "accuracy")
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        by_measure = {name: medians(table) for name, table in values.items()}
        table = pd.DataFrame({"error": error, **by_measure}).dropna()
        table = table.reset_index(names=["setting", "seed"])
        curves = [group.sort_values("absdev").error for _, group in table.groupby("seed")]
        verdicts = [
            Verdict(
                "Networks that deviate more have the larger test error",
                "deviation predicts the test error",
                f"τ = {trend_test(curves).tau:.2f} within {len(curves)} seeds; "
                + correlation_text("ρ", spearman(table.absdev, table.error)),
                rises_in_networks(curves),
                "exact trend test over the networks of each seed, in the order of their deviation",
            ),
            Verdict(
                "Density does not predict the test error",
                "any density goes with very different errors",
                correlation_text("ρ", rho := spearman(table.density, table.error)),
                # The variance of Spearman's coefficient grows with its square (`spearman`).
                correlates_weakly(rho, WEAK, math.sqrt(1 + rho.value**2 / 2)),
                "Spearman's ρ over networks; agrees if its 95% interval lies within "
                f"±{WEAK} (equivalence), disagrees if it lies outside",
            ),
        ]
        return Findings(
            verdicts,
            {"Test error and medians over paths": table},
            {"Test error vs. the median over paths": _figure(table)},
            [
                *path_remarks(runs["paths"]),
                "The error is the error rate on the test split; the paper uses the loss.",
            ],
        )


def _figure(table: pd.DataFrame) -> Figure:
    shown = table.assign(percent=100 * table.error)
    shown = shown.sort_values("setting", key=lambda s: s.map(sorted_settings(s).index))
    figure, panels = page_figure(2.9, columns=2)
    for axes, name in zip(panels, MEASURES, strict=True):
        draw_groups(axes, shown, name, "percent", "setting", markersize=5)
        axes.set_xlabel(f"median {AXIS_LABELS[name]}")
    panels[0].set_ylabel("test error, %")
    panels[0].legend(fontsize=7.5)
    return figure
