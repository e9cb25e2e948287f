"""Correlations of density and deviation with the test error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import Correlation, spearman
from nlbench.request import Request

from .framework import Context, Findings, Runs, Verdict
from .framework.figures import draw_groups, page_figure
from .framework.verdicts import correlates, correlation_text
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CRITERION = "Spearman's ρ over networks with its 95% interval"
MAX_UNRELATED = 0.5
"""Maximum absolute value of an interval's ends that counts as no correlation."""


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
        rho = {name: spearman(table[name], table.error) for name in MEASURES}
        verdicts = [
            Verdict(
                "Networks that deviate more have the larger test error",
                "deviation predicts the test error",
                correlation_text("ρ", rho["absdev"]),
                correlates(rho["absdev"]),
                _CRITERION,
            ),
            Verdict(
                "Density does not predict the test error",
                "any density goes with very different errors",
                correlation_text("ρ", rho["density"]),
                _is_unrelated(rho["density"]),
                _CRITERION + "; disagrees if the interval excludes 0",
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


def _is_unrelated(correlation: Correlation) -> bool | None:
    # An interval around 0 shows the absence of a correlation only if it is narrow.
    if correlation.low > 0 or correlation.high < 0:
        return False
    return True if max(-correlation.low, correlation.high) < MAX_UNRELATED else None


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
