"""Pieces: the minimum number of affine pieces that approximate a network along a path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.measure import Value
from nlbench.options import Option
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, rounding

from .path_measure import PathMeasure, PathSums

CURVE = (0.1, 0.03, 0.01, 0.003, 0.001)
"""Tolerances at which the number of pieces is recorded."""

# Vertices tested at once, at the start of a piece and at most, since most pieces are short.
MIN_BLOCK_VERTICES = 4
MAX_BLOCK_VERTICES = 16
# Elements in memory at once, vertices above which only their hull is kept.
BLOCK_ELEMENTS = 2**21
MIN_HULL_VERTICES = 512

Array: TypeAlias = npt.NDArray[np.float64]


def piece_count(trace: SegmentTrace | SegmentEstimate, tolerance: float = 0.01) -> int:
    """Count the affine pieces that are needed to approximate all logits along a segment.

    The segment is cut into as few intervals as possible such that, on each, every logit j has a
    straight line g_j with ``|f_j - g_j| ≤ tolerance · (max f_j - min f_j)``. Lines of neighbouring
    intervals need not meet. Cuts may lie anywhere, so breakpoints at which no slope changes don't
    affect the count. Extending each interval as far as possible is optimal, since any part of a
    valid interval is valid too.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        Exact for a trace. For an estimate, values are interpolated linearly between points.
    tolerance : float
        As a fraction of the logit's range on this segment; rounding errors are always allowed.

    Returns
    -------
    int
        At least 1, and at most the number of regions.

    Raises
    ------
    nlbench.RequestError
        If the tolerance is negative or not finite.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.Hardtanh(), torch.tensor([-2.0]), torch.tensor([2.0]))
    >>> [piece_count(trace, tolerance) for tolerance in (0.0, 0.01, 0.3)]
    [3, 3, 1]
    """
    if not 0 <= tolerance < math.inf:
        raise RequestError(f"a tolerance of {tolerance}, expected a finite, non-negative number")
    t = trace.t.cpu().numpy()
    y = trace.values.cpu().numpy().astype(np.float64)
    size = np.abs(y).max(0)
    margin = np.maximum(tolerance * np.ptp(y, axis=0), rounding(trace).cpu().numpy())
    # Scaling a logit does not change its pieces; unscaled, the products below may overflow.
    unit = np.maximum(size, np.finfo(np.float64).tiny)
    y = y / unit
    margin = margin / unit
    count = 0
    while True:
        count += 1
        end = _longest_piece(t, y, margin)
        if end is None:
            return count
        (vertex, cut, values) = end
        t = np.append(cut, t[vertex:])
        y = np.vstack([values, y[vertex:]])


def _longest_piece(t: Array, y: Array, margin: Array) -> tuple[int, float, Array] | None:
    """Return the end of the longest piece that starts at the first vertex.

    Lines of slope m pass through all margins seen so far if m lies between the largest `low` and
    the smallest `high` slope from the margin of one vertex to that of a later one.

    Returns
    -------
    vertex, cut, values
        The first vertex after the piece, its end in t, and the logits there; None if the piece
        reaches the last vertex.
    """
    low, high = np.full(len(margin), -np.inf), np.full(len(margin), np.inf)
    hull = np.array([0])
    limit = MIN_HULL_VERTICES
    done = 1
    vertices = MIN_BLOCK_VERTICES
    while done < len(t):
        rows = max(1, min(vertices, BLOCK_ELEMENTS // (len(hull) * len(margin))))
        block = np.arange(done, min(len(t), done + rows))
        vertices = min(2 * vertices, MAX_BLOCK_VERTICES)
        earlier = np.concatenate([hull, block])
        width = t[block, None] - t[earlier]
        rise = y[block, None] - y[earlier]
        width = np.where(width > 0, width, np.nan)[:, :, None]
        # Unlike `max`, `fmax` ignores the vertices after each vertex of the block.
        lows = np.fmax.reduce((rise - 2 * margin) / width, 1)
        highs = np.fmin.reduce((rise + 2 * margin) / width, 1)
        lows = np.maximum.accumulate(np.concatenate([low[None], lows]))
        highs = np.minimum.accumulate(np.concatenate([high[None], highs]))
        impossible = (lows > highs).any(1)
        if impossible.any():
            last = int(impossible.argmax()) - 1
            vertex = done + last
            return vertex, *_cut(t, y, margin, vertex, lows[last], highs[last])
        low = lows[-1]
        high = highs[-1]
        done = int(block[-1]) + 1
        hull = earlier
        if len(hull) > limit:
            hull = np.unique(np.concatenate([_hull(t, y[:, j], hull) for j in range(len(margin))]))
            limit = max(MIN_HULL_VERTICES, 2 * len(hull))
    return None


def _cut(
    t: Array, y: Array, margin: Array, vertex: int, low: Array, high: Array
) -> tuple[float, Array]:
    """Return the point on the edge before `vertex` where a piece ends, and the logits there.

    The steepest and the flattest line bound all others on this edge.
    """
    seen = slice(vertex)
    last = vertex - 1
    past = (t[seen] - t[last])[:, None]
    above = (y[seen] - margin - high * past).max(0) - (y[last] - margin)
    below = (y[last] + margin) - (y[seen] + margin - low * past).min(0)
    slope = (y[vertex] - y[last]) / (t[vertex] - t[last])
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(slope > high, above / (slope - high), np.inf)
        reach = np.minimum(reach, np.where(slope < low, below / (low - slope), np.inf)).min()
    step = float(np.clip(reach / (t[vertex] - t[last]), 0, 1))
    return float(t[last] + step * (t[vertex] - t[last])), y[last] + step * (y[vertex] - y[last])


def _hull(t: Array, y: Array, vertices: npt.NDArray[np.int_]) -> npt.NDArray[np.int_]:
    """Return the vertices of the convex hull of the points (t, y) at increasing `vertices`."""
    corners: list[int] = []
    for sign in (1.0, -1.0):
        chain: list[int] = []
        for c in vertices.tolist():
            while len(chain) > 1:
                a, b = chain[-2:]
                turn = (t[b] - t[a]) * (y[c] - y[a]) - (t[c] - t[a]) * (y[b] - y[a])
                if sign * turn > 0:
                    break
                chain.pop()
            chain.append(c)
        corners += chain
    return np.array(corners)


@dataclass(frozen=True)
class _PathPieces(PathSums):
    """Number of pieces on each segment of a path, keyed by tolerance."""

    counts: Mapping[float, tuple[int, ...]]

    def total(self, tolerance: float) -> int:
        return 1 + sum(count - 1 for count in self.counts[tolerance])


class Pieces(PathMeasure):
    r"""Number of affine pieces that approximate all logits along a path, to a relative tolerance.

    Traced, estimated and integrated segments are treated equally, so networks with ReLU, GELU or
    softmax are comparable. Consecutive segments of a path share a piece, so the value is 1 for an
    affine network. ``within:0.1`` to ``within:0.001`` are the values at other tolerances,
    ``segment0``, ``segment1``, … the pieces on each segment. The measure is nlbench's own.

    Definition
    ----------
    The minimum number of intervals of a segment such that, on each, every logit :math:`f_j` has a
    line :math:`a_j + b_j t` with

    .. math::

        |f_j(t) - a_j - b_j t| \le \varepsilon \, (\max_t f_j - \min_t f_j), \qquad
        \varepsilon = \text{tolerance} .

    Units
    -----
    Pieces per path.

    Undefined
    ---------
    Inputs that can't be interpolated; a stochastic network.

    Cost
    ----
    The cost of the trace or estimate; the count itself is linear in the number of breakpoints.

    Limits
    ------
    The tolerance is relative to the logit's range, so small logits need as many pieces as large
    ones. Below a tolerance of 0.01, an estimate has too few points to find all pieces.

    Published code
    --------------
    None: the definition is nlbench's.
    """

    name = "pieces"
    bounds = (1.0, math.inf)
    options: ClassVar[Mapping[str, Option]] = {
        "tolerance": Option(
            0.01, "maximum error of a piece relative to the logit's range", minimum=0, maximum=1
        )
    }
    parts = ("within",)
    source = Source("nlbench's own definition; no paper defines it")

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> _PathPieces:
        """Count the pieces of one segment."""
        tolerances = {float(self.settings["tolerance"]), *CURVE}
        return _PathPieces({e: (piece_count(trace, e),) for e in tolerances})

    def compute_value(self, place: str, path: _PathPieces) -> Value:
        """Return the number of pieces of a path."""
        tolerance = float(self.settings["tolerance"])
        segments = path.counts[tolerance]
        within = {f"{e:g}": path.total(e) for e in CURVE}
        statistics = {"value": float(path.total(tolerance)), "segments": float(len(segments))}
        return Value(
            place, statistics, len(segments), parts={"within": within, "segment": segments}
        )
