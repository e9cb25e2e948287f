"""Density: how many affine regions a path through input space meets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nlbench.errors import Undefined
from nlbench.measure import Measure, Parts, Result, Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, TracedSegment
from nlbench.probes.lines.lines import slope_changes

from ._path_results import Method, with_means
from ._sources import traced_regions

__all__ = ["Density"]


@dataclass(frozen=True)
class _Tally:
    """What is known of one path so far; ``changes`` is None where slopes can't be told."""

    crossings: tuple[float, ...]
    length: float
    changes: int | None
    sites: dict[str, float]
    at_least: int
    error: float
    estimated: bool

    @classmethod
    def of(cls, trace: SegmentTrace | SegmentEstimate) -> _Tally:
        sites: dict[str, float] = dict(trace.contributions)
        if isinstance(trace, SegmentEstimate):
            count = trace.crossings or 0.0
            return cls((count,), trace.length, None, sites, trace.at_least, trace.error, True)
        count, changes = trace.crossings, _slope_changes(trace)
        return cls((float(count),), trace.length, changes, sites, count, 0.0, False)

    def __add__(self, other: _Tally) -> _Tally:
        known = self.changes is not None and other.changes is not None
        names = dict.fromkeys([*self.sites, *other.sites])
        return _Tally(
            self.crossings + other.crossings,
            self.length + other.length,
            (self.changes or 0) + (other.changes or 0) if known else None,
            {name: self.sites.get(name, 0) + other.sites.get(name, 0) for name in names},
            self.at_least + other.at_least,
            self.error + other.error,
            self.estimated or other.estimated,
        )

    def statistics(self) -> dict[str, float]:
        total, segments = sum(self.crossings), len(self.crossings)
        found = {"value": float(total)}
        if self.length > 0:
            found["per_length"] = total / self.length
        found["per_segment"] = total / segments
        if self.changes is not None:
            found["slope_changes"] = float(self.changes)
        if self.estimated:
            found |= {"at_least": float(self.at_least), "error": self.error}
        return found | {"length": self.length, "segments": float(segments)}

    def parts(self) -> Parts:
        return {"segment": self.crossings, "site": self.sites}


def _slope_changes(trace: SegmentTrace) -> int | None:
    try:
        return slope_changes(trace)
    except Undefined:
        return None


class Density(Measure):
    """Number of region boundaries that a path crosses.

    Of each path: ``value``, crossings summed over its segments, which counts each
    region on a closed path once per visit; ``per_length``, the same per unit of
    length, left out where the length is 0; ``per_segment``, their mean; ``slope_changes``,
    the crossings at which a logit's slope changes; ``segment0``, ``segment1``, …, each
    segment's own crossings; ``site:NAME``, those that each activation call makes, of
    which the value is the sum; ``length``; ``segments``. Where segments were estimated the
    value is what they come to, ``error`` how far off they may be, ``at_least`` what was seen,
    and ``slope_changes`` is left out.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import observe_paths
    >>> density = Density()
    >>> density.reset()
    >>> for observation in observe_paths(torch.nn.ReLU(), torch.tensor([[[-1.0], [1.0], [-1.0]]])):
    ...     density.update(observation)
    >>> density.compute().summary["value"]
    2.0
    """

    name = "density"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    source = traced_regions("section 2.2")

    def reset(self) -> None:
        """Forget all paths."""
        self._tallies: dict[str, _Tally] = {}
        self._method = Method()

    def update(self, observation: TracedSegment) -> None:
        """Add one segment to its path.

        Raises
        ------
        nlbench.Undefined
            If the network has no breakpoints; the operation is the reason.
        """
        trace = observation.trace
        if isinstance(trace, SegmentEstimate) and trace.crossings is None:
            raise Undefined(trace.refused or "the network is not piecewise affine")
        new, old = _Tally.of(observation.trace), self._tallies.get(observation.place)
        self._tallies[observation.place] = new if old is None else old + new
        self._method = self._method.and_of(observation)

    def compute(self) -> Result:
        """Give the number of crossings of each path."""
        values = [
            Value(place, tally.statistics(), len(tally.crossings), parts=tally.parts())
            for place, tally in self._tallies.items()
        ]
        result = Result.of(values, n=sum(value.n for value in values))
        names = ("per_length", "per_segment", "slope_changes", "at_least", "error")
        return self._method.on(with_means(result, names, parts=("site",)))
