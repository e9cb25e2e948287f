"""Regions: how many a path crosses, by three definitions of a linear region."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.measure import Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, bends, rounding

from .papers import region_definitions_paper
from .path_measure import PathMeasure

__all__ = ["RegionCounts", "Regions", "count_regions"]


@dataclass(frozen=True)
class RegionCounts:
    """Numbers of linear regions along a segment, by three definitions.

    Parameters
    ----------
    activation : int
        Regions of one activation pattern. Units that cross their boundary where nothing depends
        on them separate two.
    connected : int
        Longest intervals on which the network is affine.
    affine : int
        Different affine maps; intervals with the same map, wherever they lie, are one region.
    """

    activation: int
    connected: int
    affine: int

    def __add__(self, other: RegionCounts) -> RegionCounts:
        """Join two segments: the last region of one is the first of the next."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return RegionCounts(*(a + b - 1 for a, b in pairs))


def count_regions(trace: SegmentTrace) -> RegionCounts:
    """Count the linear regions of a network along a segment, by three definitions.

    Two intervals have the same affine map if the line through the ends of the longer one passes
    the ends of the shorter one within rounding.

    Parameters
    ----------
    trace : SegmentTrace

    Returns
    -------
    RegionCounts
        Decreasing: ``activation`` is at least ``connected``, and that at least ``affine``.

    Raises
    ------
    nlbench.Undefined
        For a trace by sampling, or below double precision.

    References
    ----------
    M. Stargalla, C. Hertrich and D. Reichman, "The Computational Complexity of Counting Linear
    Regions in ReLU Neural Networks", NeurIPS 2025.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.Hardtanh(0, 1), torch.tensor([-1.0]), torch.tensor([2.0]))
    >>> count_regions(trace)
    RegionCounts(activation=3, connected=3, affine=3)
    """
    t, values = (side.cpu() for side in bends(trace))
    affine = _distinct_lines(t, values, rounding(trace).cpu())
    return RegionCounts(trace.regions, len(t) - 1, affine)


def _distinct_lines(t: Tensor, values: Tensor, error: Tensor) -> int:
    """Count the different lines through neighbours of `values` (m, k), known to `error` (k,)."""
    width = t.diff()
    slopes = values.diff(dim=0) / width[:, None]
    order = width.argsort(descending=True)
    known = order[:1]
    for interval in order[1:]:
        is_same = torch.ones(len(known), dtype=torch.bool)
        for end in (interval, interval + 1):
            step = t[end] - t[known]
            line = values[known] + slopes[known] * step[:, None]
            # Both ends of a line are within the error, and a point far from them further off.
            lever = 2 * (1 + 2 * step.abs() / width[known])
            is_same &= ((line - values[end]).abs() <= lever[:, None] * error).all(1)
        if not bool(is_same.any()):
            known = torch.cat([known, interval[None]])
    return len(known)


class Regions(PathMeasure):
    """Number of linear regions that a path crosses, by three definitions of the literature.

    ``value`` and ``connected`` count the longest intervals on which the network is affine,
    ``activation`` those of one activation pattern (``density`` counts the boundaries between
    them), and ``affine`` the different affine maps of each segment. The regions of a path are 1
    plus those of each segment minus 1; an affine network has 1. Segments whose breakpoints are
    estimated rather than traced have none to compare: ``lines.method=exact`` traces them.
    """

    name = "regions"
    bounds = (1.0, math.inf)
    means = ("activation", "connected", "affine")
    source = region_definitions_paper()

    def of(self, trace: SegmentTrace | SegmentEstimate) -> tuple[RegionCounts, ...]:
        """Count the regions of one segment.

        Raises
        ------
        nlbench.Undefined
            Without exact breakpoints.
        """
        if isinstance(trace, SegmentEstimate):
            hint = "breakpoints are estimated; --set lines.method=exact traces them"
            raise Undefined(trace.refused or hint)
        return (count_regions(trace),)

    def value_of(self, place: str, path: tuple[RegionCounts, ...]) -> Value:
        """Return the numbers of regions of a path."""
        total = path[0]
        for counts in path[1:]:
            total += counts
        statistics = {
            "value": float(total.connected),
            "activation": float(total.activation),
            "connected": float(total.connected),
            "affine": float(total.affine),
            "segments": float(len(path)),
        }
        return Value(place, statistics, len(path))
