"""The reference population: values of many networks for comparison."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .leaderboard import Row, sense_of
from .tables import Scores

if TYPE_CHECKING:
    from nlbench.store.run import Run

FILE = Path(__file__).parent / "reference_networks.json"
STATISTICS = {"absdev": "over_range"}
"""Statistic for comparing networks, for measures whose ``value`` is not comparable."""
AFFINE = {"affinity": 1.0, "r2": 1.0, "cka": 1.0, "absdev": 0.0, "nlc": 1.0, "pathlength": 0.0}
"""Value of an affine network, or of an activation that acts as an affine map."""
MIN_NETWORKS = 5
_DIGITS = 5


@dataclass(frozen=True)
class Population:
    """Values of one measure on the reference networks.

    Parameters
    ----------
    values : array of shape (n,)
    affine : float
        Value of an affine network; NaN if unknown.
    sense : int
        1 if larger is more nonlinear, else -1.
    """

    values: NDArray[np.float64]
    affine: float
    sense: int

    def share_below(self, value: float) -> float:
        """Return the fraction of reference networks that are less nonlinear."""
        return float((self.sense * self.values < self.sense * value).mean())

    def sentence(self, value: float) -> str:
        """Describe where a value ranks among the reference networks.

        Examples
        --------
        >>> Population(np.array([0.8, 0.9, 0.9, 1.0]), 1.0, -1).sentence(0.85)
        'More nonlinear than 75 % of 4 reference networks (0.8 to 1)'
        """
        below, n = self.share_below(value), len(self.values)
        share = {0.0: "none", 1.0: "all"}.get(below, f"{100 * below:.0f} %")
        low, high = float(self.values.min()), float(self.values.max())
        return f"More nonlinear than {share} of {n} reference networks ({low:.3g} to {high:.3g})"


def comparable_value(row: Row, scores: Scores, measure: str) -> float:
    """Return the mean over seeds of the statistic for comparing networks; NaN without a value."""
    statistic = STATISTICS.get(measure, "value")
    values = [scores[s.label, measure].statistics.get(statistic, math.nan) for s in row.subjects]
    finite = [value for value in values if math.isfinite(value)]
    return float(np.mean(finite)) if finite and row.entries[measure].status == "ok" else math.nan


def reference_share(row: Row, scores: Scores, measure: str, info: Mapping[str, Any]) -> float:
    """Return the fraction of reference networks that are less nonlinear than a row's network.

    The result is NaN if the row has no value or the measure has no reference population.
    """
    population, value = population_of(measure, info), comparable_value(row, scores, measure)
    return population.share_below(value) if population and math.isfinite(value) else math.nan


def population_of(measure: str, info: Mapping[str, Any]) -> Population | None:
    """Return the reference population for a measure.

    The result is None if there are too few networks, if the measure has no direction, or if its
    version or options differ from those used for the reference networks.
    """
    entry = _load().get(measure)
    sense = sense_of(info)
    if entry is None or not sense or len(entry["values"]) < MIN_NETWORKS:
        return None
    if any(entry[key] != info.get(key) for key in ("version", "options")):
        return None
    values = np.array(list(entry["values"].values()), dtype=np.float64)
    return Population(values, AFFINE.get(measure, math.nan), sense)


@functools.cache
def _load() -> Mapping[str, Any]:
    if not FILE.is_file():
        return {}
    content: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def build_population(runs: Iterable[Run]) -> dict[str, Any]:
    """Build the content of ``reference_networks.json`` from runs.

    Only measures with a direction are included, each with one version and one set of options.

    Raises
    ------
    ValueError
        If two runs used different versions or options.
    """
    population: dict[str, Any] = {}
    for run in runs:
        table = run.scores
        rows = table[(table["place"] == "") & (table["status"] == "ok")]
        for measure, info in run.manifest["measures"].items():
            if not sense_of(info):
                continue
            settings = {key: info.get(key) for key in ("version", "options")}
            entry = population.setdefault(measure, {**settings, "values": {}})
            if any(entry[key] != settings[key] for key in settings):
                raise ValueError(f"{measure} has a different version or options in {run.name}")
            statistic = STATISTICS.get(measure, "value")
            selected = rows[(rows["measure"] == measure) & (rows["statistic"] == statistic)]
            columns = (selected[name] for name in ("model", "weights", "value"))
            for model, weights, value in zip(*columns, strict=True):
                entry["values"][f"{model} {weights}"] = float(f"{value:.{_DIGITS}g}")
    return population
