"""Carry points of a segment through a recorded program and put in where it bends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import NotFinite

from .program import Program
from .rules import peak
from .threads import work_off

__all__ = ["SegmentTrace", "default_limit", "trace_program"]

COINCIDENT = 1e-12
"""Breakpoints closer than this in t are one."""

# Points carried at once: as many as keep the numbers alive at them inside the cache,
# where a batched forward pass is fastest (measured by benchmarks/cost_per_region.py).
# A GPU needs larger batches to be busy.
POINTS = (16, 128)
BYTES = 5 * 2**20
POINTS_GPU = (16, 8192)
BYTES_GPU = 2**30


@dataclass(frozen=True)
class SegmentTrace:
    """A network restricted to a segment: all that there is to know of it.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Breakpoints in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        The network's output at each; between neighbours it is the linear interpolation.
    length : float
        Euclidean length of the segment in input space.
    origins : int64 tensor of shape (n,)
        Whose unit makes each breakpoint, as an index into `sites`; -1 for the two ends.
        Where units of several sites bend at one place, the first in order of call.
    sites : tuple of str
        Names of the network's activation calls.
    """

    t: Tensor
    values: Tensor
    length: float
    origins: Tensor
    sites: tuple[str, ...]

    @property
    def regions(self) -> int:
        """Number of affine pieces."""
        return len(self.t) - 1

    @property
    def crossings(self) -> int:
        """Number of boundaries between affine pieces."""
        return self.regions - 1


@dataclass(frozen=True)
class _Values:
    """What is alive at P points: tensors (P, ...) and the bounds of their terms."""

    tensors: Mapping[int, Tensor]
    bounds: Mapping[int, Tensor]


@dataclass(frozen=True)
class _Chunk:
    """Consecutive points of a segment on their way through the program.

    `t` and `origins` (P',) are those of the chunk; its values before step `step` lie on
    the lines between the points of `parent`: at row r, a share `share[r]` of the way
    from the parent's point `left[r]` to the next.
    """

    step: int
    t: Tensor
    origins: Tensor
    parent: _Values
    left: Tensor
    share: Tensor

    def rows(self, start: int, stop: int) -> _Chunk:
        part = slice(start, stop)
        return _Chunk(
            self.step,
            self.t[part],
            self.origins[part],
            self.parent,
            self.left[part],
            self.share[part],
        )

    def values(self) -> _Values:
        new = self.share.nonzero().squeeze(1)
        left, share = self.left[new], self.share[new]

        def at_rows(x: Tensor) -> Tensor:
            result = x.index_select(0, self.left)
            if len(new):
                weight = share.reshape((-1,) + (1,) * (x.ndim - 1))
                between = torch.lerp(x.index_select(0, left), x.index_select(0, left + 1), weight)
                result.index_copy_(0, new, between)
            return result

        return _Values(
            {i: at_rows(x) for i, x in self.parent.tensors.items()},
            {i: at_rows(x) for i, x in self.parent.bounds.items()},
        )


def trace_program(
    program: Program, start: Tensor, end: Tensor, *, limit: int | None = None
) -> SegmentTrace:
    """Trace a recorded program; see `trace_segment`.

    Depth first: as soon as a run of points outgrows the limit it is cut at breakpoints,
    and each part goes through the rest of the program by itself. Memory is bounded by
    limit times depth, however many regions there are, and the result doesn't depend
    on the limit. On a CPU as many parts are under way as PyTorch has threads.

    Parameters
    ----------
    program : nlbench.probes.program.Program
    start, end : float64 tensor of shape (*input)
    limit : int, optional
        Most points carried at once, at least 2; by default as many as fit the cache.

    Returns
    -------
    SegmentTrace
    """
    limit = default_limit(program, start.device) if limit is None else limit
    t = torch.tensor([0.0, 1.0], dtype=torch.float64, device=start.device)
    ends = torch.tensor([-1, -1], device=start.device)
    with torch.inference_mode():
        x = torch.stack([start, end])
        values = _Values({0: x}, {0: peak(x)})
        whole = _Chunk(-1, t, ends, values, torch.arange(2, device=x.device), torch.zeros_like(t))
        threads = torch.get_num_threads() if x.device.type == "cpu" else 1

        def work(chunk: _Chunk) -> tuple[Sequence[_Chunk], Sequence[tuple[Tensor, ...]]]:
            with torch.inference_mode():
                finished = _advance(program, chunk, limit)
                if isinstance(finished, _Chunk):
                    return _split(finished, limit), []
                return [], [finished]

        done = sorted(work_off(whole, work, threads), key=lambda part: float(part[0][0]))
        # Neighbouring chunks share a point.
        parts = [done[0], *((t[1:], y[1:], o[1:]) for t, y, o in done[1:])]
        t, y, origins = (torch.cat(column) for column in zip(*parts, strict=True))
    if not torch.isfinite(y).all():
        raise NotFinite("the network's output is not finite on the segment")
    length = float(torch.linalg.vector_norm(end - start))
    return SegmentTrace(t.clone(), y.clone(), length, origins.clone(), program.sites)


def default_limit(program: Program, device: torch.device) -> int:
    """Most points of a program to carry at once on a device."""
    (least, most), size = (POINTS_GPU, BYTES_GPU) if device.type == "cuda" else (POINTS, BYTES)
    return max(least, min(most, size // (8 * program.width)))


def _advance(program: Program, chunk: _Chunk, limit: int) -> _Chunk | tuple[Tensor, Tensor, Tensor]:
    """Take a chunk through the program until it outgrows the limit or has arrived.

    Returns
    -------
    The chunk as it is to be cut, or its t, outputs (P, k) and origins.
    """
    t, origins, values = chunk.t, chunk.origins, chunk.values()
    tensors, bounds = dict(values.tensors), dict(values.bounds)
    for index in range(max(chunk.step, 0), len(program.steps)):
        step = program.steps[index]
        # The chunk begins at a step whose bends have been put in.
        if step.rule.bend is not None and index != chunk.step:
            x, b = [tensors[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            if not all(torch.isfinite(bound).all() for bound in b):
                raise NotFinite(f"the input of {step.site} is not finite on the segment")
            found = step.rule.bend(x, b)
            if len(found[0]):
                site = program.sites.index(step.site)
                t, origins, left, share = _insert(t, origins, *found, site)
                refined = _Chunk(index, t, origins, _Values(tensors, bounds), left, share)
                if len(t) > limit:
                    return refined
                values = refined.values()
                tensors, bounds = dict(values.tensors), dict(values.bounds)
        x, b = [tensors[i] for i in step.inputs], [bounds[i] for i in step.inputs]
        tensors[step.output] = step.rule.land(x, b) if step.rule.land else step.rule.apply(x)
        bounds[step.output] = step.rule.bound(x, b, tensors[step.output])
        for value in step.ends:
            del tensors[value], bounds[value]
    return t, tensors[program.output].reshape(len(t), -1), origins


def _insert(
    t: Tensor, origins: Tensor, interval: Tensor, share: Tensor, site: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put new breakpoints, given by interval and share, into a list of P.

    Returns
    -------
    t, origins : tensor of shape (P',)
        Those of the longer list.
    left : tensor of shape (P',)
        Old point at or before each new one.
    share : tensor of shape (P',)
        How far each is from there to the next old one; 0 for the old ones.
    """
    before, after = t[interval], t[interval + 1]
    new = before + share * (after - before)
    new, order = new.sort()
    interval, share, before, after = interval[order], share[order], before[order], after[order]
    apart = (new - before > COINCIDENT) & (after - new > COINCIDENT)
    apart[1:] &= new.diff() > COINCIDENT
    interval, share, new = interval[apart], share[apart], new[apart]
    t, order = torch.cat([t, new]).sort()
    left = torch.cat([torch.arange(len(origins), device=t.device), interval])[order]
    share = torch.cat([torch.zeros(len(origins), dtype=t.dtype, device=t.device), share])[order]
    origins = torch.cat([origins, torch.full_like(interval, site)])[order]
    return t, origins, left, share


def _split(chunk: _Chunk, limit: int) -> Sequence[_Chunk]:
    """Cut a chunk at breakpoints into parts of nearly equal length."""
    intervals = len(chunk.t) - 1
    parts = -(-intervals // (limit - 1))
    cuts = [intervals * i // parts for i in range(parts + 1)]
    return [chunk.rows(a, b + 1) for a, b in itertools.pairwise(cuts)]
