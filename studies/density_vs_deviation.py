"""Correlation between density and absolute deviation over paths."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.reports.agreement import Correlation, spearman

from .framework import Findings, Runs, Verdict
from .framework.figures import COLOURS, draw_groups, draw_intervals, page_figure
from .framework.trends import mean_correlation
from .framework.verdicts import correlates_weakly
from .shared.linear_regions import (
    AXIS_LABELS,
    MEASURES,
    NETWORKS,
    ColumnPaths,
    path_remarks,
    path_values,
    sorted_settings,
)

# Table 1, CIFAR-10: mean and standard deviation over three networks.
PUBLISHED = {
    "VGG8": {
        "clean": (-0.15, 0.00),
        "augmented": (-0.08, 0.02),
        "noise 0.2": (0.04, 0.02),
        "noise 0.4": (0.11, 0.02),
        "noise 0.6": (0.18, 0.07),
        "noise 0.8": (0.26, 0.04),
        "noise 1": (0.14, 0.04),
    },
    "ResNet18": {"clean": (0.05, 0.03), "augmented": (0.17, 0.06), "noise 0.4": (0.21, 0.04)},
}
WEAK = 0.3
"""Maximum weak correlation: just above the strongest published value, 0.26 (VGG8)."""


class DensityVsDeviation(ColumnPaths):
    """Rank correlation between density and absolute deviation over paths."""

    question = "Does a path that crosses more regions deviate more?"

    def analyse(self, runs: Runs) -> Findings:
        """Correlate the two measures over the paths of each network."""
        verdicts = []
        tables = []
        remarks = []
        both = {}
        for part, network in NETWORKS.items():
            if part in runs:
                deviation, density = (path_values(runs[part], name) for name in MEASURES)
                both[network] = merge_measures(deviation, density)
                table = correlate_measures(network, both[network])
                tables.append(table)
                verdicts += correlation_verdicts(table)
                remarks += path_remarks(runs[part], network)
        figure = _figure(tables[0], both["VGG8"])
        return Findings(
            verdicts,
            {
                "Rank correlation of density and deviation over paths": pd.concat(tables).drop(
                    columns="text"
                )
            },
            {"VGG8: rank correlation by setting, and the paths of clean networks": figure},
            remarks,
        )


def merge_measures(deviation: pd.DataFrame, density: pd.DataFrame) -> pd.DataFrame:
    """Merge the `path_values` of both measures into one row per network and path."""
    return deviation.merge(
        density, on=["setting", "seed", "place"], suffixes=("_deviation", "_density")
    )


def correlate_measures(network: str, both: pd.DataFrame) -> pd.DataFrame:
    """Correlate the two measures over the paths of each network, by setting."""
    rows = []
    for setting in sorted_settings(both.setting):
        networks = [paths for _, paths in both[both.setting == setting].groupby("seed")]
        correlation = mean_correlation(
            [spearman(paths.value_density, paths.value_deviation).value for paths in networks]
        )
        numbers = PUBLISHED[network].get(setting)
        published = "{:.2f} ± {:.2f}".format(*numbers) if numbers else ""
        interval = (correlation.value, correlation.low, correlation.high)
        rows.append((network, setting, correlation.n, published, *interval, correlation.text))
    columns = ["network", "setting", "networks", "published", "correlation", "low", "high", "text"]
    return pd.DataFrame(rows, columns=columns)


def correlation_verdicts(table: pd.DataFrame) -> list[Verdict]:
    """Evaluate a column of table 1 by the correlations of its settings."""
    return [
        Verdict(
            ("" if row.network == "VGG8" else f"{row.network}: ")
            + f"Density hardly predicts how much a path deviates: {row.setting}",
            row.published,
            f"ρ = {row.text}",
            correlates_weakly(Correlation(row.correlation, row.low, row.high, row.networks), WEAK),
            f"mean of Spearman's ρ over paths, {row.networks} network{'s' * (row.networks > 1)}, "
            f"with the 95% t interval over networks; agrees if the interval lies within ±{WEAK}, "
            "disagrees if it lies outside",
        )
        for _, row in table[table.setting != "initialised"].iterrows()
    ]


def _figure(table: pd.DataFrame, both: pd.DataFrame) -> Figure:
    figure, (left, right) = page_figure(2.9, columns=2)
    places = np.arange(len(table))
    draw_intervals(
        left, table, "correlation", places, fmt="o", color=COLOURS[0], label="here, 95% interval"
    )
    is_published = table.setting.isin(PUBLISHED["VGG8"])
    published = [PUBLISHED["VGG8"][setting][0] for setting in table.setting[is_published]]
    left.plot(
        published, places[is_published], "D", color=COLOURS[1], markersize=5, label="published"
    )
    left.axvline(0, color="#777777", linewidth=0.8)
    left.set_yticks(places, table.setting)
    left.invert_yaxis()
    left.set(xlim=(-1, 1), xlabel="Spearman's ρ over paths")
    left.legend(fontsize=7.5, loc="lower left")
    clean = both[both.setting == "clean"]
    draw_groups(right, clean, "value_density", "value_deviation", "seed", markersize=3.5)
    right.set(
        xlabel=AXIS_LABELS["density"], ylabel=AXIS_LABELS["absdev"], title="clean labels, by seed"
    )
    return figure
