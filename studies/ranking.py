"""Ranking of tasks by density and by absolute deviation."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from .framework import Findings, Runs, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.trends import trend_test
from .framework.verdicts import rises_in_networks
from .shared.linear_regions import (
    AXIS_LABELS,
    MEASURES,
    ClosedPaths,
    medians,
    path_remarks,
    path_values,
)

_CRITERION = "median over paths; exact trend test over the levels of each seed"


class Ranking(ClosedPaths):
    """Median density and deviation vs. the fraction of wrong labels."""

    question = "Do density and deviation rank tasks by their fraction of wrong labels?"

    def analyse(self, runs: Runs) -> Findings:
        """Correlate each measure's median over paths with the fraction of wrong labels."""
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        by_level = {name: _medians_by_level(table) for name, table in values.items()}
        curves = {
            name: list(table.pivot_table("value", "seed", "level").to_numpy())
            for name, table in by_level.items()
        }
        taus = {
            name: f"τ = {trend_test(rows).tau:.2f} within {len(rows)} seeds"
            for name, rows in curves.items()
        }
        verdicts = [
            Verdict(
                "Deviation rises with the share of wrong labels",
                "rises; 0.2 and 0.4 are not separated for VGG8",
                taus["absdev"],
                rises_in_networks(curves["absdev"]),
                _CRITERION,
            ),
            Verdict(
                "Density falls with the share of wrong labels",
                "falls for VGG8, rises for ResNet18",
                taus["density"],
                rises_in_networks([-row for row in curves["density"]]),
                _CRITERION,
            ),
        ]
        table = pd.concat(
            [rows.assign(measure=name) for name, rows in by_level.items()], ignore_index=True
        )
        return Findings(
            verdicts,
            {"Median over paths of each network": table},
            {"Median over paths vs. the fraction of wrong labels": _figure(by_level)},
            path_remarks(runs["paths"]),
        )


def _medians_by_level(values: pd.DataFrame) -> pd.DataFrame:
    """Return the noise level and the median of each network trained without augmentation."""
    table = medians(values).reset_index()
    table = table[table.setting.isin(["clean"]) | table.setting.str.startswith("noise")]
    levels = [0.0 if name == "clean" else float(name.split()[1]) for name in table.setting]
    return table.assign(level=levels)[["level", "seed", "value"]].sort_values(["level", "seed"])


def _figure(by_level: Mapping[str, pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, (name, table) in zip(panels, by_level.items(), strict=True):
        axes.plot(table.level, table.value, "o", color=COLOURS[0], markersize=4, alpha=0.5)
        groups = table.groupby("level").value
        means = groups.mean()
        axes.errorbar(means.index, means, groups.std(ddof=0), color=COLOURS[0], capsize=2)
        axes.set(xlabel="fraction of wrong labels", ylabel=f"median {AXIS_LABELS[name]}")
    return figure
