"""Points on segments during an exact trace, and the insertion of breakpoints between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Values:
    """Live values at P points, (P, ...), and their rounding errors, keyed by value index."""

    tensors: dict[int, Tensor]
    bounds: dict[int, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Consecutive points of one or more segments, before a step of the program.

    Their values are not stored but interpolated between the points of a parent, which several
    chunks may share.

    Parameters
    ----------
    step : int
        The next step.
    t, origins, segment_index : tensor of shape (P,)
        Position, site and segment of each point.
    parent : Values
    left, weight : tensor of shape (P,)
        Point r lies `weight[r]` of the way from the parent's point `left[r]` to the next.
    new_rows : tensor of shape (m,), optional
        Points that the parent doesn't have; by default those with a nonzero weight.
    """

    step: int
    t: Tensor
    origins: Tensor
    segment_index: Tensor
    parent: Values
    left: Tensor
    weight: Tensor
    new_rows: Tensor | None = None

    def rows(self, start: int, stop: int) -> Chunk:
        """Return consecutive points as a chunk with the same parent."""
        part = slice(start, stop)
        return Chunk(
            self.step,
            self.t[part],
            self.origins[part],
            self.segment_index[part],
            self.parent,
            self.left[part],
            self.weight[part],
        )

    def values(self) -> Values:
        """Interpolate the values at the chunk's points."""
        new = self.weight.nonzero().squeeze(1) if self.new_rows is None else self.new_rows
        left = self.left[new]
        weights = self.weight[new]
        columns = [] if weights.is_cuda else [column.tolist() for column in (new, left, weights)]

        def select_rows(x: Tensor) -> Tensor:
            result = x.index_select(0, self.left)
            # Number of elements per point above which a CPU interpolates faster row by row than in
            # a batch.
            if x[:1].numel() >= 8192 and not x.is_cuda:
                # Avoid copying the values on both sides.
                rows = result.unbind()
                ends = x.unbind()
                for row, before, weight in zip(*columns, strict=True):
                    rows[row].lerp_(ends[before + 1], weight)
            elif len(new):
                weight = weights.to(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
                between = x.index_select(0, left)
                between.lerp_(x.index_select(0, left + 1), weight)
                result.index_copy_(0, new, between)
            return result

        return Values(
            {i: select_rows(x) for i, x in self.parent.tensors.items()},
            {i: select_rows(x) for i, x in self.parent.bounds.items()},
        )


def insert_breakpoints(chunk: Chunk, site: int, min_gap: float) -> Chunk:
    """Insert new breakpoints into a chunk.

    Parameters
    ----------
    chunk : Chunk
        Its `left` and `weight` (m,) refer to the new breakpoints.
    site : int
        Site of the new breakpoints.
    min_gap : float
        Minimum distance in t; closer breakpoints are dropped.

    Returns
    -------
    Chunk
        With the new breakpoints in `t`, `origins` and `segment_index`.
    """
    t = chunk.t
    origins = chunk.origins
    segment_index = chunk.segment_index
    interval = chunk.left
    weight = chunk.weight.double()
    # Synchronising with a GPU costs more than an unnecessary sort by segment.
    has_several = segment_index.is_cuda or bool(segment_index[0] != segment_index[-1])
    before = t[interval]
    after = t[interval + 1]
    new = before + weight * (after - before)
    is_apart = (new - before > min_gap) & (after - new > min_gap)
    if has_several:
        # The end of a segment and the start of the next are not connected.
        is_apart &= segment_index[interval] == segment_index[interval + 1]
    chosen = is_apart.nonzero().squeeze(1)
    interval = interval[chosen]
    weight = weight[chosen]
    new = new[chosen]
    order = _order(new, segment_index[interval]) if has_several else new.argsort()
    new = new[order]
    interval = interval[order]
    weight = weight[order]
    distinct = thin_out(new, min_gap, segment_index[interval])
    if distinct is not None:
        interval = interval[distinct]
        weight = weight[distinct]
        new = new[distinct]
    # A breakpoint comes after the left end of its interval and all previous breakpoints.
    place = interval + torch.arange(1, len(new) + 1, device=t.device)
    is_old = torch.ones(len(t) + len(new), dtype=torch.bool, device=t.device)
    is_old.index_fill_(0, place, False)
    left = is_old.cumsum(0) - 1
    t = t[left].index_copy_(0, place, new)
    origins = origins[left].index_fill_(0, place, site)
    weights = torch.zeros_like(t).index_copy_(0, place, weight)
    return Chunk(chunk.step, t, origins, segment_index[left], chunk.parent, left, weights, place)


def thin_out(t: Tensor, gap: float, segment_index: Tensor) -> Tensor | None:
    """Return a mask (m,) that thins increasing values to a minimum gap within each segment.

    Each selected value is more than `gap` away from the last selected one, not just from its
    neighbour, so a long run of close values is thinned, not merged. Return None to select all.

    Examples
    --------
    >>> t = torch.tensor([0.0, 0.6, 1.2, 1.8, 2.4, 9.0])
    >>> thin_out(t, 1.0, torch.zeros(6)).tolist()
    [True, False, True, False, True, True]
    """
    close = (t.diff() <= gap) & (segment_index.diff() == 0)
    if not bool(close.any()):
        return None
    # On the host, since each comparison depends on the previous one.
    is_selected = [True] * len(t)
    last = -1
    places = t.tolist()
    for i in (close.nonzero().squeeze(1) + 1).tolist():
        if i - 1 > last or is_selected[i - 1]:
            selected = i - 1
        if places[i] - places[selected] <= gap:
            is_selected[i] = False
        else:
            selected = i
        last = i
    return torch.tensor(is_selected, device=t.device)


def _order(t: Tensor, segment_index: Tensor) -> Tensor:
    """Return the permutation that sorts by segment, and by t within each."""
    by_t = t.argsort()
    return by_t[segment_index[by_t].argsort(stable=True)]


def split(chunk: Chunk, limit: int) -> Sequence[Chunk]:
    """Split a chunk at breakpoints into parts of nearly equal length."""
    intervals = len(chunk.t) - 1
    parts = -(-intervals // (limit - 1))
    cuts = [intervals * i // parts for i in range(parts + 1)]
    return [chunk.rows(a, b + 1) for a, b in itertools.pairwise(cuts)]
