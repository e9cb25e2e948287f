"""Consecutive points of segments on their way through a program: refined, and cut in parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COINCIDENT", "Chunk", "Values", "refined", "split"]

COINCIDENT = {torch.float64: 1e-12, torch.float32: 1e-7}
"""Breakpoints closer than this in t are one: what rounding leaves of a tie."""


@dataclass(frozen=True)
class Values:
    """What is alive at P points: tensors (P, ...) and the bounds of their terms."""

    tensors: Mapping[int, Tensor]
    bounds: Mapping[int, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Consecutive points, of one segment after another, on their way through the program.

    `t` and `origins` (P',) are those of the chunk, `owner` says to which segment each point
    belongs; its values before step `step` lie on the lines between the points of `parent`:
    at row r, a share `share[r]` of the way from the parent's point `left[r]` to the next.
    """

    step: int
    t: Tensor
    origins: Tensor
    owner: Tensor
    parent: Values
    left: Tensor
    share: Tensor

    def rows(self, start: int, stop: int) -> Chunk:
        """Give a run of its points as a chunk; the parent is shared."""
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
        """Interpolate what is alive at its points."""
        new = self.share.nonzero().squeeze(1)
        left, share = self.left[new], self.share[new]

        def at_rows(x: Tensor) -> Tensor:
            result = x.index_select(0, self.left)
            if len(new):
                weight = share.to(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
                between = torch.lerp(x.index_select(0, left), x.index_select(0, left + 1), weight)
                result.index_copy_(0, new, between)
            return result

        return Values(
            {i: at_rows(x) for i, x in self.parent.tensors.items()},
            {i: at_rows(x) for i, x in self.parent.bounds.items()},
        )


def refined(chunk: Chunk, site: int, coincident: float) -> Chunk:
    """Put new breakpoints into a list of P points.

    Parameters
    ----------
    chunk : Chunk
        Its `left` and `share` (m,) are those of the breakpoints to be put in.
    site : int
        Whose they are.
    coincident : float
        Those that are closer to others are left out.

    Returns
    -------
    Chunk
        Its `t`, `origins` and `owner` are those of the longer list.
    """
    t, origins, owner = chunk.t, chunk.origins, chunk.owner
    interval, share = chunk.left, chunk.share.double()
    several = bool(owner[0] != owner[-1])
    if several:
        # Between the end of a segment and the start of the next there is nothing.
        inside = owner[interval] == owner[interval + 1]
        interval, share = interval[inside], share[inside]
    before, after = t[interval], t[interval + 1]
    new = before + share * (after - before)
    order = _order(new, owner[interval]) if several else new.argsort()
    new, interval, share = new[order], interval[order], share[order]
    apart = (new - before[order] > coincident) & (after[order] - new > coincident)
    distinct = new.diff() > coincident
    if several:
        distinct |= owner[interval].diff() > 0
    apart[1:] &= distinct
    interval, share, new = interval[apart], share[apart], new[apart]
    t, owner = torch.cat([t, new]), torch.cat([owner, owner[interval]])
    order = _order(t, owner) if several else t.argsort()
    old = torch.arange(len(origins), device=t.device)
    return Chunk(
        chunk.step,
        t[order],
        torch.cat([origins, torch.full_like(interval, site)])[order],
        owner[order],
        chunk.parent,
        torch.cat([old, interval])[order],
        torch.cat([torch.zeros(len(old), dtype=t.dtype, device=t.device), share])[order],
    )


def _order(t: Tensor, owner: Tensor) -> Tensor:
    """How to sort by segment, and by t within each."""
    by_t = t.argsort()
    return by_t[owner[by_t].argsort(stable=True)]


def split(chunk: Chunk, limit: int) -> Sequence[Chunk]:
    """Cut a chunk at breakpoints into parts of nearly equal length."""
    intervals = len(chunk.t) - 1
    parts = -(-intervals // (limit - 1))
    cuts = [intervals * i // parts for i in range(parts + 1)]
    return [chunk.rows(a, b + 1) for a, b in itertools.pairwise(cuts)]
