"""Number of linear regions that a path crosses, by three definitions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, find_breakpoints, rounding

from .papers import bibtex
from .path_measure import PathMeasure

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RegionCounts:
    """Numbers of linear regions along a segment, by three definitions.

    Parameters
    ----------
    activation : int
        Intervals with a constant activation pattern; boundaries of units that don't affect the
        output also separate them.
    connected : int
        Maximal intervals on which the network is affine.
    affine : int
        Distinct affine maps; all intervals with the same map form one region.
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
    through the ends of the shorter one within rounding.

    Returns
    -------
    RegionCounts
        In decreasing order: ``activation`` ≥ ``connected`` ≥ ``affine``.

    Raises
    ------
    nlbench.Undefined
        If the trace was sampled, or has less than double precision.

    References
    ----------
    M. Stargalla, C. Hertrich and D. Reichman, "The Computational Complexity of Counting Linear
    Regions in ReLU Neural Networks", NeurIPS 2025.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.Hardtanh(0, 1), torch.tensor([-1.0]), torch.tensor([2.0]))
    >>> count_regions(trace)
    RegionCounts(activation=3, connected=3, affine=3)
    """
    t, values, error = (part.cpu().numpy() for part in (*find_breakpoints(trace), rounding(trace)))
    return RegionCounts(trace.regions, len(t) - 1, _distinct_lines(t, values, error))


def _distinct_lines(t: Array, values: Array, error: Array) -> int:
    """Count the distinct lines through neighbours in `values` (m, k), known to `error` (k,)."""
    width = np.diff(t)
    slopes = np.diff(values, axis=0) / width[:, None]
    widest = int(np.ptp(values, axis=0).argmax())
    # Lines found so far, in the order of one logit's slope.
    known: list[int] = []
    known_slopes: list[float] = []
    for interval in np.argsort(-width, kind="stable").tolist():
        slope = slopes[interval, widest]
        # Lines with slopes outside the window miss an end: the lever in `_passes` is at most this.
        lever = 2 * (1 + 2 / width[interval])
        window = 2 * lever * error[widest] / width[interval]
        begin = bisect_left(known_slopes, slope - window)
        candidates = known[begin : bisect_right(known_slopes, slope + window)]
        if candidates and _passes(t, values, slopes, candidates, interval, error).any():
            continue
        position = bisect_left(known_slopes, slope)
        known.insert(position, interval)
        known_slopes.insert(position, slope)
    return len(known)


def _passes(
    t: Array, values: Array, slopes: Array, lines: list[int], interval: int, error: Array
) -> npt.NDArray[np.bool_]:
    """Return a mask of the `lines` that pass through both ends of an interval."""
    ends = slice(interval, interval + 2)
    width = np.diff(t)
    step = t[ends] - t[lines, None]
    line = values[lines, None] + slopes[lines, None] * step[:, :, None]
    # The ends of a line are known to `error`; its uncertainty grows with the distance from them.
    lever = 2 * (1 + 2 * np.abs(step) / width[lines, None])
    passes: npt.NDArray[np.bool_] = np.abs(line - values[ends]) <= lever[:, :, None] * error
    return np.asarray(passes.all((1, 2)))


class Regions(PathMeasure):
    """Number of linear regions that a path crosses, by three definitions from the literature.

    ``value`` and ``connected`` count the maximal intervals on which the network is affine,
    ``activation`` those with a constant activation pattern (``density`` counts the boundaries
    between them), and ``affine`` the distinct affine maps on each segment. Consecutive segments
    share a region, so the value is 1 for an affine network.

    Definition
    ----------
    Along a segment, the number of intervals with a constant activation pattern (activation
    regions), of maximal intervals on which the network is affine (connected regions), and of
    distinct affine functions of t on the latter (affine regions).

    Units
    -----
    Regions per path.

    Undefined
    ---------
    Networks that are not piecewise affine, and segments whose breakpoints are estimated rather
    than traced; ``lines.method=exact`` traces them.

    Cost
    ----
    The cost of the exact trace; the count itself is roughly linear in the number of breakpoints.

    Limits
    ------
    Maps are compared only along the segment, where different maps may agree. Maps that differ by
    less than rounding count as one.

    Published code
    --------------
    Most implementations count activation patterns; counts of distinct slopes or Jacobians
    correspond to one of the other definitions.
    """

    name = "regions"
    bounds = (1.0, math.inf)
    means = ("activation", "connected", "affine")
    source = Source(
        'M. Stargalla, C. Hertrich, D. Reichman, "The Computational Complexity of Counting Linear '
        'Regions in ReLU Neural Networks", NeurIPS 2025',
        "definitions of activation regions, connected regions and affine regions, along paths",
        bibtex("stargalla2025computational"),
    )

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> tuple[RegionCounts, ...]:
        """Count the regions of one segment."""
        if isinstance(trace, SegmentEstimate):
            hint = "breakpoints are estimated; --set lines.method=exact traces them"
            raise Undefined(trace.refused or hint)
        return (count_regions(trace),)

    def compute_value(self, place: str, path: tuple[RegionCounts, ...]) -> Value:
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
