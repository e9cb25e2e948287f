"""Count regions of segments by the activation patterns at uniform steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nlbench.errors import NotFinite

from .memory import load_of, share_out
from .program import Program
from .rules import peak
from .segment import SegmentTrace

__all__ = ["trace_by_sampling"]

POINTS = 64
"""Points at once: as many as keep a forward pass busy."""

Segment = tuple[Tensor, Tensor]


def trace_by_sampling(
    program: Program,
    segments: Iterable[Segment],
    *,
    resolution: int = 1000,
    memory: int | None = None,
) -> Iterator[SegmentTrace]:
    """Sample a recorded program on one segment after another; see `trace_segment`.

    Where the pattern differs between neighbouring samples there is a breakpoint, put in
    the middle; several boundaries in one step are one. As regions are convex no pattern
    comes back, so that regions are the different patterns met. Each trace notes its
    ``resolution``.

    Parameters
    ----------
    program : nlbench.probes.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
    resolution : int
        Number of steps.
    memory : int, optional
        Bytes that may be used; by default half of what is free.

    Yields
    ------
    SegmentTrace
        In the order of the segments.
    """
    points = 0
    for start, end in segments:
        if not points:
            load = load_of(program, torch.stack([start, end]))
            _, points = share_out(load, start.device, memory, POINTS, needed=3)
        yield _trace(program, start, end, resolution, points)


def _trace(
    program: Program, start: Tensor, end: Tensor, resolution: int, points: int
) -> SegmentTrace:
    found, sites = [], []
    # A batch begins with two samples of the one before, as a sample may lie on a boundary.
    for first in range(0, resolution, points - 2):
        last = min(first + points - 2, resolution)
        before = min(first, 1)
        t = torch.arange(first - before, last + 1, dtype=torch.float64, device=start.device)
        _, site = _look(program, _between(start, end, t / resolution))
        interval = (site[before:] >= 0).nonzero().squeeze(1)
        found.append((interval + first + 0.5) / resolution)
        sites.append(site[before:][interval])
    inside = torch.cat(found).double()
    ends = inside.new_tensor([0.0, 1.0])
    t = torch.cat([ends[:1], inside, ends[1:]])
    none = torch.full((1,), -1, device=start.device)
    values = [_look(program, _between(start, end, part))[0] for part in torch.split(t, points)]
    return SegmentTrace(
        t,
        torch.cat(values).double(),
        float(torch.linalg.vector_norm((end - start).double())),
        torch.cat([none, *sites, none]),
        program.sites,
        "sampling",
        {"resolution": float(resolution)},
        torch.finfo(start.dtype).eps,
    )


def _between(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    return torch.lerp(start[None], end[None], t.reshape(-1, *[1] * start.ndim).to(start.dtype))


def _look(program: Program, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Give outputs (P, k), and the first site that differs between neighbours (P - 1,), or -1."""
    values, bounds = {0: inputs}, {0: peak(inputs)}
    site = torch.full((len(inputs) - 1,), -1, device=inputs.device)
    with torch.no_grad():
        for step in program.steps:
            x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            if step.rule.differ is not None and len(inputs) > 1:
                number = program.sites.index(step.site)
                site = torch.where((site < 0) & step.rule.differ(x, b), number, site)
            values[step.output] = step.rule.land(x, b) if step.rule.land else step.rule.apply(x)
            bounds[step.output] = step.rule.bound(x, b, values[step.output])
            for value in step.ends:
                del values[value], bounds[value]
    output = values[program.output].reshape(len(inputs), -1)
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite on the segment")
    return output, site
