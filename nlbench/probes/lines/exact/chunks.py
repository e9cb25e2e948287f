"""Points of segments during an exact trace, and the insertion of breakpoints between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_NUMBERS_ROWWISE = 8192
"""Numbers per point from which a CPU interpolates points faster one by one than together."""


@dataclass(frozen=True)
class Values:
    """Live values at P points, (P, ...), and their rounding errors, by number."""

    tensors: dict[int, Tensor]
    bounds: dict[int, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Consecutive points of one or more segments, on their way through the program.

    Its values before step `step` are not stored: they are interpolated between the points of a
    parent, which several chunks may share.

    Parameters
    ----------
    step : int
        The next step.
    t, origins, owner : tensor of shape (P,)
        Place, site and segment of each point.
    parent : Values
    left, share : tensor of shape (P,)
        Point r lies `share[r]` of the way from the parent's point `left[r]` to the next.
    new_rows : tensor of shape (m,), optional
        Points that are not the parent's; by default those with a share.
    """

    step: int
    t: Tensor
    origins: Tensor
    owner: Tensor
    parent: Values
    left: Tensor
    share: Tensor
    new_rows: Tensor | None = None

    def rows(self, start: int, stop: int) -> Chunk:
        """Return consecutive points as a chunk with the same parent."""
        part = slice(start, stop)
        return Chunk(
            self.step,
            self.t[part],
            self.origins[part],
            self.owner[part],
            self.parent,
            self.left[part],
            self.share[part],
        )

    def values(self) -> Values:
        """Interpolate the values at its points."""
        new = self.share.nonzero().squeeze(1) if self.new_rows is None else self.new_rows
        left, share = self.left[new], self.share[new]
        columns = [] if share.is_cuda else [column.tolist() for column in (new, left, share)]

        def at_rows(x: Tensor) -> Tensor:
            result = x.index_select(0, self.left)
            if x[:1].numel() >= MIN_NUMBERS_ROWWISE and not x.is_cuda:
                # Avoids copies of the values on both sides.
                rows, ends = result.unbind(), x.unbind()
                for row, before, weight in zip(*columns, strict=True):
                    rows[row].lerp_(ends[before + 1], weight)
            elif len(new):
                weight = share.to(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
                between = x.index_select(0, left)
                between.lerp_(x.index_select(0, left + 1), weight)
                result.index_copy_(0, new, between)
            return result

        return Values(
            {i: at_rows(x) for i, x in self.parent.tensors.items()},
            {i: at_rows(x) for i, x in self.parent.bounds.items()},
        )


def insert_breakpoints(chunk: Chunk, site: int, min_gap: float) -> Chunk:
    """Insert new breakpoints into a chunk.

    Parameters
    ----------
    chunk : Chunk
        Its `left` and `share` (m,) are those of the new breakpoints.
    site : int
        Site of the new breakpoints.
    min_gap : float
        Breakpoints closer than this in t to others are left out.

    Returns
    -------
    Chunk
        With the longer `t`, `origins` and `owner`.
    """
    t, origins, owner = chunk.t, chunk.origins, chunk.owner
    interval, share = chunk.left, chunk.share.double()
    # Synchronising with a GPU costs more than an unnecessary sort by owner.
    several = owner.is_cuda or bool(owner[0] != owner[-1])
    before, after = t[interval], t[interval + 1]
    new = before + share * (after - before)
    apart = (new - before > min_gap) & (after - new > min_gap)
    if several:
        # Nothing lies between the end of a segment and the start of the next.
        apart &= owner[interval] == owner[interval + 1]
    chosen = apart.nonzero().squeeze(1)
    interval, share, new = interval[chosen], share[chosen], new[chosen]
    order = _order(new, owner[interval]) if several else new.argsort()
    new, interval, share = new[order], interval[order], share[order]
    distinct = spaced(new, min_gap, owner[interval])
    if distinct is not None:
        interval, share, new = interval[distinct], share[distinct], new[distinct]
    # After the left end of its interval and the breakpoints inserted before.
    place = interval + torch.arange(1, len(new) + 1, device=t.device)
    is_old = torch.ones(len(t) + len(new), dtype=torch.bool, device=t.device)
    is_old.index_fill_(0, place, False)
    left = is_old.cumsum(0) - 1
    t = t[left].index_copy_(0, place, new)
    origins = origins[left].index_fill_(0, place, site)
    whole = torch.zeros_like(t).index_copy_(0, place, share)
    return Chunk(chunk.step, t, origins, owner[left], chunk.parent, left, whole, place)


def spaced(t: Tensor, gap: float, owner: Tensor) -> Tensor | None:
    """Select increasing numbers, segment by segment, with a minimal gap: (m,).

    Each is farther than `gap` from the last selected one, not only from its neighbour, so that a
    long run of close numbers is thinned and not merged into one. Returns None to select all.

    Examples
    --------
    >>> t = torch.tensor([0.0, 0.6, 1.2, 1.8, 2.4, 9.0])
    >>> spaced(t, 1.0, torch.zeros(6)).tolist()
    [True, False, True, False, True, True]
    """
    close = (t.diff() <= gap) & (owner.diff() == 0)
    if not bool(close.any()):
        return None
    # On the host, since each comparison depends on the previous one.
    is_selected = [True] * len(t)
    last, places = -1, t.tolist()
    for i in (close.nonzero().squeeze(1) + 1).tolist():
        if i - 1 > last or is_selected[i - 1]:
            anchor = i - 1  # The last selected number.
        if places[i] - places[anchor] <= gap:
            is_selected[i] = False
        else:
            anchor = i
        last = i
    return torch.tensor(is_selected, device=t.device)


def _order(t: Tensor, owner: Tensor) -> Tensor:
    """Return the permutation that sorts by segment, and by t within each."""
    by_t = t.argsort()
    return by_t[owner[by_t].argsort(stable=True)]


def split(chunk: Chunk, limit: int) -> Sequence[Chunk]:
    """Split a chunk at breakpoints into parts of nearly equal length."""
    intervals = len(chunk.t) - 1
    parts = -(-intervals // (limit - 1))
    cuts = [intervals * i // parts for i in range(parts + 1)]
    return [chunk.rows(a, b + 1) for a, b in itertools.pairwise(cuts)]
