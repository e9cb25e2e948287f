"""Density: how many affine regions a path through input space meets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nlbench.measure import Measure, Reading, Value
from nlbench.probes.lines import LineLook

from ._sources import traced_regions

__all__ = ["Density"]


@dataclass(frozen=True)
class _Tally:
    crossings: int = 0
    length: float = 0.0
    segments: int = 0


class Density(Measure):
    """Number of region boundaries that a path crosses, exact.

    Of each path: ``value``, crossings summed over its segments, which counts each
    region on a closed path once per visit; ``per_length``, the same per unit of
    length, left out where the length is 0; ``length``; ``segments``.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import look_along
    >>> density = Density()
    >>> density.start()
    >>> for look in look_along(torch.nn.ReLU(), torch.tensor([[[-1.0], [1.0], [-1.0]]])):
    ...     density.update(look)
    >>> density.finish().summary["value"]
    2.0
    """

    name = "density"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    source = traced_regions("section 2.2")

    def start(self) -> None:
        """Forget all paths."""
        self._tallies: dict[str, _Tally] = {}

    def update(self, look: LineLook) -> None:
        """Add one segment to its path."""
        tally = self._tallies.get(look.place, _Tally())
        self._tallies[look.place] = _Tally(
            tally.crossings + look.trace.crossings,
            tally.length + look.trace.length,
            tally.segments + 1,
        )

    def finish(self) -> Reading:
        """Give the number of crossings of each path."""
        values = []
        for place, tally in self._tallies.items():
            statistics = {"value": float(tally.crossings)}
            if tally.length > 0:
                statistics["per_length"] = tally.crossings / tally.length
            statistics |= {"length": tally.length, "segments": float(tally.segments)}
            values.append(Value(place, statistics, tally.segments))
        segments = sum(tally.segments for tally in self._tallies.values())
        return Reading.of(values, n=segments, notes={"method": "exact"})
