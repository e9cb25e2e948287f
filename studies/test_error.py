"""Whether what is measured on training images goes with the error on others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import Correlation, spearman
from nlbench.request import Request

from .drawing import COLOURS, page_figure
from .linear_regions import (
    AXES,
    DATA,
    MEASURES,
    MODEL,
    ClosedPaths,
    medians,
    network_values,
    path_values,
    settings_in,
    size_of,
    trained_networks,
    unfitted,
)
from .study import Context, Findings, Verdict, above, over_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["TestError"]


class TestError(ClosedPaths):
    """Test error of networks against their median density and deviation."""

    __test__ = False  # pytest takes the name for a test's

    question = "Does deviation along training images tell a network's error on others?"

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Trained networks along closed paths, and their accuracy on the whole test split."""
        weights = tuple(map(str, trained_networks(context)))
        request = Request(("accuracy",), (MODEL,), (context.data or DATA,), weights, samples=0)
        return {**super().measure(context), "accuracy": context.run(request, "accuracy")}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Correlate the test error with each measure's median, over networks."""
        error = 1 - network_values(runs["accuracy"], "accuracy")
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        table = pd.DataFrame(
            {"error": error, **{name: medians(one) for name, one in values.items()}}
        ).dropna()
        table = table.reset_index(names=["setting", "seed"])
        found = {name: spearman(table[name], table.error) for name in MEASURES}
        verdicts = [
            Verdict(
                "Networks that deviate more have the larger test error",
                "deviation predicts the test error",
                over_networks("ρ", found["absdev"]),
                above(found["absdev"].low, found["absdev"].high),
                _HOW,
            ),
            Verdict(
                "Density does not tell the test error",
                "any density goes with very different errors",
                over_networks("ρ", found["density"]),
                _is_unrelated(found["density"]),
                _HOW + "; does not agree where the interval leaves out 0",
            ),
        ]
        return Findings(
            verdicts,
            {"Test error and medians over paths": table},
            {"Test error against the median over paths": _figure(table)},
            [
                size_of(values["absdev"]),
                *unfitted(runs["paths"]),
                "The error is the share of wrong answers on the test split; the paper takes the "
                "loss.",
            ],
        )


_HOW = "Spearman's ρ over networks with its 95 % interval"


def _is_unrelated(found: Correlation) -> bool | None:
    # An interval around 0 is no proof that there is nothing, unless it is narrow.
    if above(found.low, found.high) is not None:
        return False
    return True if max(-found.low, found.high) < 0.5 else None


def _figure(table: pd.DataFrame) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, name in zip(panels, MEASURES, strict=True):
        for number, setting in enumerate(settings_in(table.setting)):
            one = table[table.setting == setting]
            axes.plot(
                one[name],
                100 * one.error,
                "o",
                color=COLOURS[number % len(COLOURS)],
                markersize=5,
                label=setting,
            )
        label = AXES[name]
        axes.set_xlabel(f"median {label}")
    panels[0].set_ylabel("test error, %")
    panels[0].legend(fontsize=7.5)
    return figure
