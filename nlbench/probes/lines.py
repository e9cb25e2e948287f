"""Probe `lines`: a piecewise-affine network on straight segments of input space, exactly.

On a segment x(t) = x0 + t (x1 - x0) such a network is affine between finitely many
breakpoints. They are found layer by layer (Sotoudeh and Thakur, "Computing Linear
Restrictions of Neural Networks", NeurIPS 2019): the network's values are carried at all
breakpoints found so far; where a unit passes through zero between two of them, a
breakpoint is put in, every value that is still needed is interpolated there, and the
next layer goes on from the longer list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError

from .program import Program, check_values, double_copy, record
from .tracing import SegmentTrace, trace_program

__all__ = ["LineLook", "SegmentTrace", "look_along", "trace_segment", "trace_segments"]

CHECKED = 5
"""In how many regions, besides the widest, a trace is compared with the network."""


@dataclass(frozen=True)
class LineLook:
    """What the probe `lines` shows a measure: one traced segment of one path.

    Parameters
    ----------
    path : int
        Which path.
    segment : int
        Which segment of it.
    trace : SegmentTrace
    """

    path: int
    segment: int
    trace: SegmentTrace

    @property
    def place(self) -> str:
        """Name of the path: ``path0``, ``path1``, …."""
        return f"path{self.path}"


def trace_segment(model: nn.Module, start: Tensor, end: Tensor) -> SegmentTrace:
    """Find every breakpoint of a network on a straight segment.

    Parameters
    ----------
    model : torch.nn.Module
        Piecewise affine in eval mode. It is copied, not changed; the work is done in
        float64 on the model's device.
    start, end : tensor of shape (*input)
        One input each, without the axis of samples.

    Returns
    -------
    SegmentTrace

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network does something that is not piecewise affine, or if the values found
        are not those that it gives when it is run.
    nlbench.NotFinite
        If an input, a weight or an output is not finite.
    nlbench.RequestError
        If the ends don't fit each other or the network.

    References
    ----------
    Sotoudeh and Thakur, "Computing Linear Restrictions of Neural Networks", NeurIPS 2019.

    Examples
    --------
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([3.0]))
    >>> trace.t.tolist(), trace.values.flatten().tolist(), trace.regions
    ([0.0, 0.25, 1.0], [0.0, 0.0, 3.0], 2)
    """
    return next(trace_segments(model, start[None], end[None]))


def trace_segments(model: nn.Module, starts: Tensor, ends: Tensor) -> Iterator[SegmentTrace]:
    """Trace one segment after another; the model is recorded once.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, which also says what is raised.
    starts, ends : tensor of shape (n, *input)

    Yields
    ------
    SegmentTrace

    Examples
    --------
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> [trace.crossings for trace in trace_segments(torch.nn.ReLU(), x, 3 * x)]
    [0, 0]
    """
    _check_ends(starts, ends)
    network = double_copy(model)
    device = next((t.device for t in _tensors(network)), starts.device)
    starts = starts.detach().to(device, torch.float64)
    ends = ends.detach().to(device, torch.float64)
    program: Program | None = None
    for start, end in zip(starts, ends, strict=True):
        points = torch.stack([start, end])
        if program is None:
            program = record(network, torch.cat([points, points.mean(0, keepdim=True)]))
        trace = trace_program(program, start, end)
        _check_trace(program, network, points, trace)
        yield trace


def look_along(model: nn.Module, paths: Tensor) -> Iterator[LineLook]:
    """Trace paths: consecutive anchors of each are joined by segments.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, which also says what is raised.
    paths : tensor of shape (p, a, *input)
        p paths of a anchors each.

    Yields
    ------
    LineLook
        p (a - 1) of them, path by path.

    Examples
    --------
    >>> paths = torch.tensor([[[-1.0], [1.0], [-1.0]]])
    >>> [(look.place, look.trace.crossings) for look in look_along(torch.nn.ReLU(), paths)]
    [('path0', 1), ('path0', 1)]
    """
    if paths.ndim < 3 or paths.shape[1] < 2:
        raise RequestError(
            f"paths of shape {tuple(paths.shape)}, expected (paths, 2 anchors or more, *input)"
        )
    segments = paths.shape[1] - 1
    traces = trace_segments(model, paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1))
    for index, trace in enumerate(traces):
        yield LineLook(index // segments, index % segments, trace)


def _check_trace(program: Program, network: nn.Module, points: Tensor, trace: SegmentTrace) -> None:
    """Compare a trace with the network itself, at both ends and inside a few regions."""
    spread = torch.arange(CHECKED) * trace.regions // CHECKED + trace.regions // (2 * CHECKED)
    widest = trace.t.diff().argmax().reshape(1)
    left = torch.unique(torch.cat([spread.to(widest.device), widest]))
    t = torch.cat([trace.t[[0, -1]], (trace.t[left] + trace.t[left + 1]) / 2])
    values = torch.cat([trace.values[[0, -1]], (trace.values[left] + trace.values[left + 1]) / 2])
    inputs = torch.lerp(points[:1], points[1:], t.reshape(-1, *[1] * (points.ndim - 1)))
    check_values(program, network, inputs, values, trace.values)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()


def _check_ends(starts: Tensor, ends: Tensor) -> None:
    if starts.shape != ends.shape:
        raise RequestError(
            f"a segment from shape {tuple(starts.shape[1:])} to {tuple(ends.shape[1:])}, "
            "expected the same shape"
        )
    if starts.ndim < 2:
        raise RequestError("a segment's ends are single numbers, expected tensors with an axis")
    for name, end in (("start", starts), ("end", ends)):
        if not end.is_floating_point():
            raise RequestError(f"the segment's {name} has dtype {end.dtype}, expected floats")
        if not torch.isfinite(end).all():
            raise NotFinite(f"the segment's {name} is not finite")
