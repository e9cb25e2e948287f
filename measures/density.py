"""Density: how many affine regions a path through input space meets."""

from __future__ import annotations

from dataclasses import dataclass

from nlbench.errors import Undefined
from nlbench.measure import Parts, Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, slope_changes

from .papers import traced_regions
from .path_measure import PathMeasure

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
            if trace.crossings is None:
                raise Undefined(trace.refused or "the network is not piecewise affine")
            return cls(
                (trace.crossings,), trace.length, None, sites, trace.at_least, trace.error, True
            )
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


class Density(PathMeasure):
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
    means = ("per_length", "per_segment", "slope_changes", "at_least", "error")
    parts = ("site",)
    source = traced_regions("section 2.2")

    def of(self, trace: SegmentTrace | SegmentEstimate) -> _Tally:
        """Count the crossings of one segment.

        Raises
        ------
        nlbench.Undefined
            If the network has no breakpoints; the operation is the reason.
        """
        return _Tally.of(trace)

    def value_of(self, place: str, path: _Tally) -> Value:
        """Give the number of crossings of a path."""
        return Value(place, path.statistics(), len(path.crossings), parts=path.parts())
