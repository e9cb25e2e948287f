"""Fractions of paths on which one network is more nonlinear than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.parsers import unique

from .framework import Findings, Runs, Verdict
from .framework.figures import COLOURS, legend_below, page_figure
from .framework.verdicts import in_most_networks
from .shared.linear_regions import (
    AXIS_LABELS,
    MEASURES,
    NETWORKS,
    ColumnPaths,
    PathComparison,
    compare_paths,
    path_remarks,
    path_values,
    sorted_settings,
)

# Table 2, CIFAR-10: fraction of paths on which the first of a pair has the larger deviation, and
# the larger density; mean ± standard deviation over three pairs.
PUBLISHED = {
    "VGG8": {
        ("clean", "augmented"): ("0.98 ± 0.01", "0.66 ± 0.40"),
        ("noise 0.2", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
        ("noise 0.4", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
        ("noise 0.6", "clean"): ("1.00 ± 0.00", "0.00 ± 0.01"),
        ("noise 0.8", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
        ("noise 1", "clean"): ("1.00 ± 0.00", "0.00 ± 0.00"),
        ("clean", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
        ("augmented", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
        ("noise 0.2", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
        ("noise 0.4", "initialised"): ("1.00 ± 0.00", "1.00 ± 0.00"),
        ("noise 0.6", "initialised"): ("1.00 ± 0.00", "0.99 ± 0.01"),
        ("noise 0.8", "initialised"): ("1.00 ± 0.00", "0.96 ± 0.03"),
        ("noise 1", "initialised"): ("1.00 ± 0.00", "0.96 ± 0.01"),
    },
    "ResNet18": {
        ("clean", "augmented"): ("1.00 ± 0.00", "0.03 ± 0.04"),
        ("noise 0.4", "clean"): ("1.00 ± 0.00", "0.78 ± 0.02"),
        ("clean", "initialised"): ("1.00 ± 0.00", "0.79 ± 0.05"),
        ("augmented", "initialised"): ("1.00 ± 0.00", "0.99 ± 0.01"),
        ("noise 0.4", "initialised"): ("1.00 ± 0.00", "0.96 ± 0.01"),
    },
}
NEARLY_ALL = 0.9
"""Minimum fraction of paths that counts as nearly all; published fractions are at least 0.98."""
FEW = 1 - NEARLY_ALL
OTHER_SEEDS = "different seeds"
PathComparisons: TypeAlias = Mapping[tuple[tuple[str, str], str, bool], PathComparison]
"""Fractions of paths keyed by pair of settings, measure, and True for networks with one seed."""


class Paired(ColumnPaths):
    """Fraction of paths on which wrong labels, no augmentation and training raise a measure."""

    question = "Is the harder task's network more nonlinear on nearly every path?"

    def analyse(self, runs: Runs) -> Findings:
        """Compare networks path by path, with the same seed and with different seeds."""
        verdicts = []
        tables = []
        remarks = []
        for part, network in NETWORKS.items():
            if part not in runs:
                continue
            values = {name: path_values(runs[part], name) for name in MEASURES}
            comparisons = compare_pairs(values)
            verdicts += comparison_verdicts(network, comparisons)
            tables.append(_table(network, comparisons))
            remarks += path_remarks(runs[part], network)
        table = pd.concat(tables, ignore_index=True)
        vgg8 = {name: path_values(runs["paths"], name) for name in MEASURES}
        return Findings(
            verdicts,
            {"Share of paths on which the first has the larger value": table},
            {
                "Fraction of paths: same seed (left), different seeds (right)": _figure(
                    table[table.network == "VGG8"]
                ),
                "Differences per path, networks with one seed (figure 9)": _differences(vgg8),
            },
            [*remarks, "All networks share the same paths."],
        )


def compare_pairs(values: Mapping[str, pd.DataFrame]) -> PathComparisons:
    """Compute the fractions of paths for all pairs of settings, given `path_values` by measure."""
    settings = sorted_settings(next(iter(values.values())).setting)
    return {
        (pair, name, same): compare_paths(table, *pair, same_seed=same)
        for pair in _pairs(settings)
        for name, table in values.items()
        for same in (True, False)
    }


def comparison_verdicts(network: str, comparisons: PathComparisons) -> list[Verdict]:
    """Evaluate a column of table 2, and whether density separates networks of different seeds."""
    published = PUBLISHED[network]
    prefix = "" if network == "VGG8" else f"{network}: "
    verdicts = []
    for (pair, name, same), comparison in comparisons.items():
        if same:
            claim = published.get(pair, ("", ""))[MEASURES.index(name)]
            verdicts.append(_is_above(prefix, pair, name, claim, comparison))
    for (pair, name, same), comparison in comparisons.items():
        if pair[1] != "clean" or name != "density" or same or not len(comparison.fractions):
            continue
        verdicts.append(
            Verdict(
                f"{prefix}Density separates {pair[0]} from clean labels across seeds too",
                "",
                f"{comparison.text}, {comparison.networks} networks",
                in_most_networks(comparison.fractions >= NEARLY_ALL, comparison.networks),
                "each network trained on wrong labels vs. each clean one with a different seed, on "
                f"the same paths; agrees if most pairs have at least {NEARLY_ALL}, by a sign test "
                "over networks",
            )
        )
    return verdicts


def _table(network: str, comparisons: PathComparisons) -> pd.DataFrame:
    names = {**AXIS_LABELS, "density": "density"}
    seeds = {True: "one seed", False: OTHER_SEEDS}
    rows = []
    for (pair, name, same), comparison in comparisons.items():
        if len(comparison.fractions):
            mean = comparison.fractions.mean()
            rows.append((network, *pair, names[name], seeds[same], comparison.networks, mean))
    columns = ["network", "higher", "lower", "measure", "networks of", "networks"]
    return pd.DataFrame(rows, columns=[*columns, "share"])


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of settings, the one expected to be higher first."""
    trained = [name for name in names if name != "initialised"]
    noisy = [name for name in trained if name.startswith("noise")]
    pairs = [("clean", "augmented")] if "augmented" in names else []
    pairs += [(name, "clean") for name in noisy]
    return pairs + [(name, "initialised") for name in trained if "initialised" in names]


def _is_above(
    prefix: str, pair: tuple[str, str], measure: str, published: str, comparison: PathComparison
) -> Verdict:
    """Test whether most pairs have a fraction near 1, near 0 or between, as published."""
    name = {"absdev": "Deviation", "density": "Density"}[measure]
    value = float(published.split()[0]) if published else 1.0
    if value >= NEARLY_ALL:
        side = "nearly all"
        holds = comparison.fractions >= NEARLY_ALL
    elif value <= FEW:
        side = "almost no"
        holds = comparison.fractions <= FEW
    else:
        side = "some"
        holds = (comparison.fractions > FEW) & (comparison.fractions < NEARLY_ALL)
    return Verdict(
        f"{prefix}{name} of {pair[0]} is above that of {pair[1]} on {side} paths",
        published,
        f"{comparison.text}, so in {np.count_nonzero(holds)} of {comparison.networks} pairs",
        in_most_networks(holds, comparison.networks),
        "fraction of paths, mean over pairs of networks with the same seed; nearly all: at least "
        f"{NEARLY_ALL}, almost no: at most {FEW:g}; agrees if so in most pairs, by a sign test",
    )


def _figure(table: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.4, columns=2)
    names = unique(zip(table.higher, table.lower, strict=True))
    for axes, seeds in zip(panels, ("one seed", OTHER_SEEDS), strict=True):
        part = table[table["networks of"] == seeds]
        for index, measure in enumerate(unique(table.measure)):
            rows = part[part.measure == measure]
            places = [
                names.index(pair) + 0.2 * (index - 0.5)
                for pair in zip(rows.higher, rows.lower, strict=True)
            ]
            style = {"color": COLOURS[index], "markersize": 4}
            axes.plot(rows["share"], places, "os"[index], label=measure, **style)
        axes.axvline(0.5, color="#777777", linewidth=0.8)
        axes.set_yticks(range(len(names)), [f"{a} > {b}" for a, b in names], fontsize=7.5)
        axes.set(
            xlim=(-0.03, 1.03),
            ylim=(len(names) - 0.5, -0.5),
            title="same seed" if seeds == "one seed" else seeds,
            xlabel="fraction of paths",
        )
        if part.empty:
            axes.text(0.5, 0.5, "one seed only", transform=axes.transAxes, ha="center")
    panels[1].set_yticklabels([])
    legend_below(figure, panels[0], 2)
    return figure


def _differences(values: Mapping[str, pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, (measure, table) in zip(panels, values.items(), strict=True):
        pairs = [("clean", "initialised"), ("clean", "augmented"), ("noise 0.4", "clean")]
        known = [pair for pair in pairs if set(pair) <= set(table.setting)]
        for index, (higher, lower) in enumerate(known):
            first, second = (table[table.setting == name] for name in (higher, lower))
            both = first.merge(second, on=["place", "seed"], suffixes=("", "_lower"))
            difference = both.value - both.value_lower
            axes.ecdf(difference, color=COLOURS[index], label=f"{higher} - {lower}")
        axes.axvline(0, color="#777777", linewidth=0.8)
        axes.set(xlabel=f"difference in {AXIS_LABELS[measure]}", ylim=(0, 1.02))
    panels[0].set_ylabel("fraction of paths")
    panels[0].legend(loc="lower right", fontsize=7.5)
    return figure
