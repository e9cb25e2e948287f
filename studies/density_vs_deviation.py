"""Whether paths that cross more regions are those on which the network deviates more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import Correlation, spearman

from .drawing import COLOURS, page_figure
from .linear_regions import ClosedPaths, path_values, settings_in, size_of, unfitted
from .study import Findings, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["DensityVsDeviation"]


# Table 1, VGG8 on CIFAR-10: mean and standard deviation over three networks.
PUBLISHED = {
    "clean": (-0.15, 0.00),
    "augmented": (-0.08, 0.02),
    "noise 0.2": (0.04, 0.02),
    "noise 0.4": (0.11, 0.02),
    "noise 0.6": (0.18, 0.07),
    "noise 0.8": (0.26, 0.04),
    "noise 1": (0.14, 0.04),
}
Row = tuple[str, int, str, float, float, float]
WEAK = 0.3
"""Just above the strongest rank correlation that was published, 0.27 (ResNet18)."""


class DensityVsDeviation(ClosedPaths):
    """Rank correlation over paths of density and absolute deviation."""

    question = "Does a path that crosses more regions deviate more?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Correlate both over the paths of each network."""
        deviation, density = (path_values(runs["paths"], name) for name in ("absdev", "density"))
        both = deviation.merge(
            density, on=["setting", "seed", "place"], suffixes=("_deviation", "_density")
        )
        rows: list[Row] = []
        verdicts = []
        for setting in settings_in(both.setting):
            networks = [one for _, one in both[both.setting == setting].groupby("seed")]
            found = [spearman(one.value_density, one.value_deviation) for one in networks]
            mean, low, high = _together(found)
            published = PUBLISHED.get(setting)
            said = "{:.2f} ± {:.2f}".format(*published) if published else ""
            rows.append((setting, len(networks), said, mean, low, high))
            if setting == "initialised":
                continue
            verdicts.append(
                Verdict(
                    f"Density hardly says how much a path deviates: {setting}",
                    said,
                    f"ρ = {mean:.2f} ({low:.2f} to {high:.2f})",
                    _is_weak(low, high),
                    f"mean of Spearman's ρ over paths, {len(networks)} network"
                    f"{'s' * (len(networks) > 1)}, with its 95 % interval; agrees where that lies "
                    f"within ±{WEAK}, does not where it lies beyond",
                )
            )
        columns = ["setting", "networks", "published", "correlation", "low", "high"]
        return Findings(
            verdicts,
            {
                "Rank correlation of density and deviation over paths": pd.DataFrame(
                    rows, columns=columns
                )
            },
            {"Rank correlation by setting, and the paths of clean networks": _figure(rows, both)},
            [size_of(deviation), *unfitted(runs["paths"])],
        )


def _together(found: Sequence[Correlation]) -> tuple[float, float, float]:
    """Mean of correlations of several networks, with its interval: Fisher's transformation."""
    middle = np.arctanh([one.value for one in found])
    half = np.arctanh([one.high for one in found]) - middle
    mean, width = float(middle.mean()), float(np.sqrt((half**2).sum())) / len(found)
    return math.tanh(mean), math.tanh(mean - width), math.tanh(mean + width)


def _is_weak(low: float, high: float) -> bool | None:
    if low >= -WEAK and high <= WEAK:
        return True
    return False if low > WEAK or high < -WEAK else None


def _figure(
    rows: Sequence[tuple[str, int, str, float, float, float]], both: pd.DataFrame
) -> Figure:
    figure, (left, right) = page_figure(2.9, columns=2)
    for place, (setting, _, _, mean, low, high) in enumerate(rows):
        left.plot([low, high], [place, place], color=COLOURS[0])
        left.plot(mean, place, "o", color=COLOURS[0])
        if setting in PUBLISHED:
            left.plot(PUBLISHED[setting][0], place, "D", color=COLOURS[1], markersize=5)
    left.plot([], [], "o-", color=COLOURS[0], label="here, 95 % interval")
    left.plot([], [], "D", color=COLOURS[1], label="published")
    left.axvline(0, color="#777777", linewidth=0.8)
    left.set_yticks(range(len(rows)), [row[0] for row in rows])
    left.invert_yaxis()
    left.set_xlim(-1, 1)
    left.set_xlabel("Spearman's ρ over paths")
    left.legend(fontsize=7.5, loc="lower left")
    clean = both[both.setting == "clean"]
    for number, (seed, one) in enumerate(clean.groupby("seed")):
        right.plot(
            one.value_density,
            one.value_deviation,
            "o",
            color=COLOURS[number % len(COLOURS)],
            markersize=3.5,
            label=f"seed {seed}",
        )
    right.set_xlabel("crossings")
    right.set_ylabel("absolute deviation")
    right.set_title("clean labels")
    return figure
