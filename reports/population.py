"""The reference population: values of many networks for comparison."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fingerprint import Scale
from .tables import RELATIVE, MeasureInfo

FILE = Path(__file__).parent / "reference_networks.json"
AFFINE = {"affinity": 1.0, "r2": 1.0, "cka": 1.0, "absdev": 0.0, "nlc": 1.0, "pathlength": 0.0}
"""Value of an affine network, or of an activation that acts as an affine map."""
STATISTICS = dict(RELATIVE.values())
"""Statistic for comparing networks, for measures whose value depends on units."""
MIN_NETWORKS = 5


@dataclass(frozen=True)
class Population:
    """Values of one measure on the reference networks.

    Parameters
    ----------
    values : array of shape (n,)
    trained : int
        Number of networks that are trained; the others are initialised.
    affine : float
        Value of an affine network; NaN if unknown.
    sense : int
        1 if larger is more nonlinear, else -1.
    """

    values: NDArray[np.float64]
    affine: float
    sense: int
    trained: int = 0

    def fraction_below(self, value: float) -> float:
        """Return the fraction of reference networks that are less nonlinear."""
        return float((self.sense * self.values < self.sense * value).mean())

    def sentence(self, value: float) -> str:
        """Describe where a value ranks among the reference networks.

        Examples
        --------
        >>> Population(np.array([0.8, 0.9, 0.9, 1.0]), 1.0, -1).sentence(0.85)
        'More nonlinear than 75 % of 4 reference networks (4 initialised; 0.8 to 1)'
        """
        below = self.fraction_below(value)
        n = len(self.values)
        fraction = {0.0: "none", 1.0: "all"}.get(below, f"{100 * below:.0f} %")
        low, high = float(self.values.min()), float(self.values.max())
        return (
            f"More nonlinear than {fraction} of {n} reference networks "
            f"({self.composition}; {low:.3g} to {high:.3g})"
        )

    @property
    def composition(self) -> str:
        """How many of the networks are trained, and how many initialised."""
        counts = {"trained": self.trained, "initialised": len(self.values) - self.trained}
        return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def colour_scale(measure: str, info: MeasureInfo, values: Iterable[float]) -> Scale | None:
    """Return the scale of colours for a measure, or None if there is no value.

    It is the same on every page. It extends from an affine network to the most nonlinear reference
    network, over the bounds of a measure without reference networks, or else over the values.
    """
    sense = -1 if info.sense < 0 else 1
    population = find_population(measure, info)
    fitted = Scale.of(values, sense, clip=True)
    if fitted is None:
        return None
    if population is not None:
        low = float(population.values.min())
        high = float(population.values.max())
        if math.isfinite(population.affine):
            low, high = (population.affine, high) if sense > 0 else (low, population.affine)
        source = f"range of {len(population.values)} reference networks"
        return Scale(low, high, False, sense, source, is_cut=True)
    least, greatest = info.bounds
    if least is not None and greatest is not None and math.isfinite(greatest - least):
        return Scale(float(least), float(greatest), False, sense, "bounds of the measure")
    return replace(fitted, source="values on this page")


def reference_fraction(value: float, measure: str, info: MeasureInfo) -> float:
    """Return the fraction of reference networks that are less nonlinear than a value.

    The result is NaN if there is no value or the measure has no reference population.
    """
    population = find_population(measure, info)
    return population.fraction_below(value) if population and math.isfinite(value) else math.nan


def find_population(measure: str, info: MeasureInfo) -> Population | None:
    """Return the reference population for a measure.

    The result is None if the measure depends on units or has no direction, if there are too few
    networks, or if its version or options differ from those used for the reference networks.
    """
    base = info.base or measure
    entry = _load().get(base)
    sense = info.sense
    if entry is None or not sense or len(entry["values"]) < MIN_NETWORKS:
        return None
    if base == measure and measure in STATISTICS:
        return None
    if any(entry[key] != getattr(info, key) for key in ("version", "options")):
        return None
    values = np.array(list(entry["values"].values()), dtype=np.float64)
    # Networks of installed packages are trained, unless their name says otherwise.
    trained = sum(not name.endswith(" init") for name in entry["values"])
    return Population(values, AFFINE.get(base, math.nan), sense, trained)


@functools.cache
def _load() -> Mapping[str, Any]:
    if not FILE.is_file():
        return {}
    return json.loads(FILE.read_text(encoding="utf-8"))
