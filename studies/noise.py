"""Distributions of density and absolute deviation over paths, for clean and wrong labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from .framework import Findings, Runs, Verdict
from .framework.figures import COLOURS
from .framework.verdicts import networks_ordered
from .shared.linear_regions import (
    MEASURES,
    ClosedPaths,
    distribution_figure,
    medians,
    over_seeds,
    path_remarks,
    path_values,
    sorted_settings,
)


class Noise(ClosedPaths):
    """Distribution of density and deviation over paths, for clean and wrong labels."""

    question = "Are networks that memorise wrong labels more nonlinear, along the same paths?"

    def analyse(self, runs: Runs) -> Findings:
        """Compare the medians of the networks between settings."""
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        by_measure = {name: medians(table) for name, table in values.items()}
        deviation = by_measure["absdev"]
        density = by_measure["density"]
        noisy = [name for name in sorted_settings(values["absdev"].setting) if "noise" in name]
        verdicts = [
            is_lower(
                "Networks of wrong labels deviate more than those of clean ones",
                "deviation lowest for clean labels, higher the more labels are wrong",
                deviation,
                ["clean"],
                noisy,
            ),
            is_lower(
                "VGG8 has more regions for clean labels than for any share of wrong ones",
                "yes, on CIFAR-10",
                density,
                noisy,
                ["clean"],
            ),
        ]
        if "augmented" in deviation.index.get_level_values(0):
            augmented = is_lower(
                "Augmented training deviates less than plain training",
                "clearly apart",
                deviation,
                ["augmented"],
                ["clean"],
            )
            verdicts.insert(1, augmented)
        figure = distribution_figure(values, _curves)
        return Findings(
            verdicts,
            {"Median over paths": _table(by_measure)},
            {"Distribution over paths: deviation left, density right": figure},
            [
                *path_remarks(runs["paths"]),
                "ResNet18 is compared only at 40% wrong labels, in the study paired: all levels "
                "would require 24 more networks, over twenty minutes on two cores.",
            ],
        )


def is_lower(
    claim: str, published: str, by_network: pd.Series, lower: Sequence[str], higher: Sequence[str]
) -> Verdict:
    """Test whether all networks of some settings have a lower median than those of others."""
    lower_values = [value for name in lower for value in by_network[name]]
    higher_values = [value for name in higher for value in by_network[name]]
    return Verdict(
        claim,
        published,
        "; ".join(f"{name}: {over_seeds(by_network[name])}" for name in (*lower, *higher)),
        networks_ordered(lower_values, higher_values),
        "median over paths, mean ± standard deviation over networks; decided only if all pairs of "
        "networks agree, and if there are enough of them that this is unlikely by chance; a number "
        "needed is that of the smaller group",
    )


def _table(by_measure: Mapping[str, pd.Series]) -> pd.DataFrame:
    names = sorted_settings(by_measure["absdev"].index.get_level_values(0))
    rows = []
    for name in names:
        means = [over_seeds(by_measure[measure][name]) for measure in MEASURES]
        rows.append((name, len(by_measure["absdev"][name]), *means))
    return pd.DataFrame(rows, columns=["setting", "networks", "absolute deviation", "density"])


def _curves(table: pd.DataFrame) -> Iterator[tuple[pd.Series, dict[str, Any]]]:
    for number, name in enumerate(sorted_settings(table.setting)):
        style = {"color": COLOURS[number % len(COLOURS)], "label": name}
        yield table[table.setting == name].value, style
