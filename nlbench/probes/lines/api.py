"""Python interface for tracing networks along straight segments in input space.

On a segment x(t) = x0 + t (x1 - x0), a piecewise-affine network is affine between finitely many
breakpoints. If there are few, `exact` finds them layer by layer. If there are many,
`estimation` counts them without locating any. If the network is smooth, there are none, and
`quadrature` integrates it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, RequestError, UnsupportedOperation, nearest
from nlbench.introspection.model_copy import precise_device
from nlbench.introspection.precision import each_exact
from nlbench.introspection.threads import torch_threads

from .estimation.estimator import (
    DEFAULT_BUDGET,
    DEFAULT_EVALUATIONS,
    DEFAULT_TOLERANCE,
    estimate_segments,
)
from .estimation.piecewise import UnknownPieces
from .exact.trace import segments_per_batch, trace_exactly
from .published import BATCH_SEGMENTS, trace_adaptively, trace_by_sampling
from .quadrature import integrate_along
from .recording.point_memory import share_out
from .recording.recorded_network import (
    MAX_CHECKED_POINTS,
    MIN_CHECKED_POINTS,
    kept_recording,
    record_network,
)
from .segments import check_ends
from .trace import SegmentEstimate, SegmentTrace, TracedSegment
from .verification import POINTS_PER_CHECK, check_traces

_METHODS: dict[str, Callable[..., Iterable[SegmentTrace]]] = {
    "exact": trace_exactly,
    "adaptive": trace_adaptively,
    "sampling": trace_by_sampling,
}
"""Methods that find breakpoints, best first."""
MAX_CHECKED_BYTES = 4 * 2**20
"""Size of the points above which they are compared with the network separately."""


def trace_segment(
    model: nn.Module,
    start: Tensor,
    end: Tensor,
    *,
    method: str = "exact",
    dtype: torch.dtype = torch.float64,
    memory: int | None = None,
    sensitivity: float = 1e-6,
    resolution: int = 1000,
) -> SegmentTrace:
    """Find every breakpoint of a network on a straight segment.

    Parameters
    ----------
    model : torch.nn.Module
        Piecewise affine in eval mode. It is copied, not changed, and runs on its own device.
    start, end : tensor of shape (...)
        One input each, without the batch axis.
    method : {"exact", "adaptive", "sampling"}
        ``exact`` finds all breakpoints, layer by layer. ``adaptive`` steps from one to the
        next and skips regions shorter than `sensitivity`, which it counts.
        ``sampling`` compares activation patterns at uniform steps.
    dtype : torch.dtype
        Precision of the network, float64 or float32.
    memory : int, optional
        Memory limit in bytes, in addition to the model and the traces; by default half of the free
        memory. It determines the number of points computed at a time and does not affect results.
    sensitivity : float
        For ``adaptive``: distance in t past a breakpoint at which the next search begins.
    resolution : int
        For ``sampling``: number of steps.

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network is not piecewise affine, or the traced values differ from those of the
        network.
    nlbench.NotFinite
        If an input, a weight or an output is not finite.
    nlbench.RequestError
        If the ends are incompatible with each other or with the network, an option is out of
        bounds, or two points don't fit in memory.

    References
    ----------
    ``exact``: Sotoudeh and Thakur, "Computing Linear Restrictions of Neural Networks",
    NeurIPS 2019. ``adaptive``: Gamba et al., "Are All Linear Regions Created Equal?",
    AISTATS 2022, appendix C.

    Examples
    --------
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([3.0]))
    >>> trace.t.tolist(), trace.values.flatten().tolist(), trace.regions
    ([0.0, 0.25, 1.0], [0.0, 0.0, 3.0], 2)
    """
    traces = trace_segments(
        model,
        start[None],
        end[None],
        method=method,
        dtype=dtype,
        memory=memory,
        sensitivity=sensitivity,
        resolution=resolution,
    )
    return next(traces)


@each_exact
def trace_segments(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    method: str = "exact",
    dtype: torch.dtype = torch.float64,
    memory: int | None = None,
    sensitivity: float = 1e-6,
    resolution: int = 1000,
) -> Iterator[SegmentTrace]:
    """Trace several segments with one recording of the model.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, which also describes the options and errors.
    starts, ends : tensor of shape (n, *input)
    method, dtype, memory, sensitivity, resolution
        As in `trace_segment`.

    Yields
    ------
    SegmentTrace
        In segment order. Apart from rounding, a trace does not depend on the other segments.

    Examples
    --------
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> [trace.crossings for trace in trace_segments(torch.nn.ReLU(), x, 3 * x)]
    [0, 0]
    """
    check_ends(starts, ends)
    _check_options(method, dtype, memory, sensitivity, resolution)
    if not len(starts):
        return
    device = precise_device(model, starts)
    starts = starts.detach()
    ends = ends.detach()

    def points(first: int, count: int) -> Tensor:
        """Return the ends of consecutive segments, (count, 2, *input)."""
        part = slice(first, first + count)
        # Moved to the device first: the original device may not support the dtype.
        return torch.stack([starts[part], ends[part]], 1).to(device).to(dtype)

    options = {"sensitivity": sensitivity} if method == "adaptive" else {}
    if method == "sampling":
        options = {"resolution": resolution}
    trace = partial(_METHODS[method], memory=memory, **options)
    tracer = _Tracer(model, points(0, 1)[0], dtype, memory, trace)
    size = 1
    if len(starts) > 1 and method != "sampling":
        size = tracer.segments_per_batch if method == "exact" else BATCH_SEGMENTS
    for first in range(0, len(starts), size):
        yield from tracer.trace(points(first, size))


class _Tracer:
    """Tracing of segments of a network, with a recording from an earlier call if there is one."""

    def __init__(
        self,
        model: nn.Module,
        points: Tensor,
        dtype: torch.dtype,
        memory: int | None,
        trace: Callable[..., Iterable[SegmentTrace]],
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._memory = memory
        self._trace = trace
        kept = kept_recording(model, points, dtype)
        self._is_kept = kept is not None
        self._recorded = kept or record_network(model, points, dtype, memory)
        self._device = points.device

    @property
    def segments_per_batch(self) -> int:
        """Number of segments that are best traced together."""
        recorded = self._recorded
        return segments_per_batch(recorded.program, recorded.needs, self._device, self._memory)

    def trace(self, points: Tensor) -> Iterator[SegmentTrace]:
        """Yield the traces of segments (n, 2, *input), computed together unless one fails."""
        try:
            traces = self._trace_together(points)
        except NlbenchError:
            if self._is_kept:
                # A global variable may have changed.
                self._is_kept = False
                self._recorded = record_network(self._model, points[0], self._dtype, self._memory)
            elif len(points) == 1:
                raise
            for segment in torch.split(points, 1):
                yield from self._trace_together(segment)
            return
        yield from traces

    def _trace_together(self, points: Tensor) -> list[SegmentTrace]:
        traces = list(self._trace(self._recorded.program, points, needs=self._recorded.needs))
        self._check(points, traces)
        return traces

    def _check(self, points: Tensor, traces: Sequence[SegmentTrace]) -> None:
        """Raise if the traces of segments (n, 2, *input) disagree with the network."""
        recorded = self._recorded
        limit = min(MAX_CHECKED_BYTES // recorded.needs.width, len(traces) * POINTS_PER_CHECK)
        limit = max(MAX_CHECKED_POINTS, limit)
        needed = MIN_CHECKED_POINTS
        _, size = share_out(recorded.needs, self._device, self._memory, limit, needed=needed)
        program = recorded.program
        network = recorded.network
        with torch_threads(1):
            check_traces(program, network, points, traces, batch_points=size)


def _check_options(
    method: str, dtype: torch.dtype, memory: int | None, sensitivity: float, resolution: int
) -> None:
    if method not in _METHODS:
        raise RequestError(f"unknown method '{method}'{nearest(method, _METHODS)}")
    if dtype not in (torch.float64, torch.float32):
        raise RequestError(f"lines in {dtype}, expected torch.float64 or torch.float32")
    if memory is not None and memory < 1:
        raise RequestError(f"a memory of {memory} bytes, expected at least 1")
    if not 0 < sensitivity < 1:
        raise RequestError(f"a sensitivity of {sensitivity}, expected more than 0 and less than 1")
    if resolution < 1:
        raise RequestError(f"a resolution of {resolution} steps, expected at least 1")


def estimate_segment(
    model: nn.Module,
    start: Tensor,
    end: Tensor,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    evaluations: int = DEFAULT_EVALUATIONS,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
) -> SegmentEstimate:
    """Count a network's boundaries on a straight segment, and integrate its distance to the chord.

    No breakpoints are located: about a hundred forward passes suffice, whereas an exact trace takes
    one per region. A unit that changes piece between neighbouring points of a uniform grid has
    crossed a boundary. `at_least` is therefore a lower bound on the number of boundaries, unless
    units cross at the same point because of an undetected tie (see the documentation). `crossings`
    is extrapolated to infinitely fine grids.

    Parameters
    ----------
    model : torch.nn.Module
        It is copied, not changed, and runs in eval mode on its own device.
    start, end : tensor of shape (...)
        One input each, without the batch axis.
    tolerance : float
        Grids are halved until the stated errors of the crossings and of the deviation (Euclidean
        norms over logits), relative to the values, are within it.
    evaluations : int
        Maximum number of forward passes, apart from repeated ones. ``converged`` is False if it
        is not enough, or if rounding or a pair that may be missing exceeds the tolerance.
    dtype : torch.dtype, optional
        Precision of the network; by default float32, or float64 where float32 is not enough.
    memory : int, optional
        Memory limit in bytes, in addition to the model; by default half of the free memory. Grids
        are not refined if their patterns would exceed it.

    Returns
    -------
    SegmentEstimate
        If the network is not piecewise affine, ``crossings`` is None and ``refused`` is the reason.

    Raises
    ------
    nlbench.NotFinite, nlbench.RequestError
        See `trace_segment`.

    References
    ----------
    Counting transitions of activation codes: Novak et al., "Sensitivity and Generalization in
    Neural Networks: an Empirical Study", ICLR 2018.

    Examples
    --------
    >>> estimate = estimate_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([2.0]))
    >>> estimate.at_least, estimate.crossings, estimate.error
    (1, 1.0, 0.0)
    """
    (trace,) = trace_or_integrate(
        model,
        start[None],
        end[None],
        method="refined",
        tolerance=tolerance,
        evaluations=evaluations,
        dtype=dtype,
        memory=memory,
    )
    assert isinstance(trace, SegmentEstimate)
    return trace


def observe_paths(
    model: nn.Module,
    paths: Tensor,
    *,
    method: str = "exact",
    dtype: torch.dtype | None = None,
    memory: int | None = None,
    sensitivity: float = 1e-6,
    resolution: int = 1000,
    tolerance: float = DEFAULT_TOLERANCE,
    evaluations: int = DEFAULT_EVALUATIONS,
    budget: int = DEFAULT_BUDGET,
) -> Iterator[TracedSegment]:
    """Trace the segments between consecutive anchors of paths.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, which also describes the errors.
    paths : tensor of shape (p, a, *input)
        p paths with a anchors each.
    method : {"exact", "adaptive", "sampling", "refined", "auto"}
        The first three are those of `trace_segment`, and ``refined`` is `estimate_segment`.
        ``auto`` uses ``exact`` on segments for which nine points predict at most `budget` forward
        passes, and ``refined`` on the others.
    dtype : torch.dtype, optional
        By default float64 for traces; for estimates, as in `estimate_segment`.
    memory, sensitivity, resolution
        As in `trace_segment`.
    tolerance, evaluations
        As in `estimate_segment`.
    budget : int
        For ``auto``: maximum number of forward passes for an exact trace.

    Yields
    ------
    TracedSegment
        p (a - 1) segments, path by path.

    Examples
    --------
    >>> paths = torch.tensor([[[-1.0], [1.0], [-1.0]]])
    >>> [(item.place, item.trace.crossings) for item in observe_paths(torch.nn.ReLU(), paths)]
    [('path0', 1), ('path0', 1)]
    """
    if paths.ndim < 3 or paths.shape[1] < 2:
        raise RequestError(
            f"paths of shape {tuple(paths.shape)}, expected (paths, at least 2 anchors, *input)"
        )
    traces = _trace_or_estimate(
        model,
        *segment_ends(paths),
        method=method,
        dtype=dtype,
        memory=memory,
        sensitivity=sensitivity,
        resolution=resolution,
        tolerance=tolerance,
        evaluations=evaluations,
        budget=budget,
    )
    yield from add_positions(traces, paths)


def segment_ends(paths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and end points of the segments of paths, (n, *input) each."""
    return paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1)


def add_positions(
    traces: Iterator[SegmentTrace | SegmentEstimate], paths: Tensor
) -> Iterator[TracedSegment]:
    """Yield traces with the indices of their path and segment."""
    for index, trace in enumerate(traces):
        yield TracedSegment(*divmod(index, paths.shape[1] - 1), trace)


def trace_or_integrate(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    tolerance: float,
    evaluations: int,
    memory: int | None,
    **options: Any,
) -> Iterator[SegmentTrace | SegmentEstimate]:
    """Trace or estimate segments as in `observe_paths`, or integrate a smooth network.

    With the option `counts=False`, estimates have the same integrals and no crossings.
    """
    count = 0
    limits: dict[str, Any] = {"tolerance": tolerance, "evaluations": evaluations, "memory": memory}
    try:
        for trace in _trace_or_estimate(model, starts, ends, **limits, **options):
            yield trace
            count += 1
        return
    except UnsupportedOperation as error:
        refused = str(error)
    yield from integrate_along(model, starts[count:], ends[count:], refused=refused, **limits)


def _trace_or_estimate(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    method: str,
    dtype: torch.dtype | None,
    memory: int | None,
    tolerance: float,
    evaluations: int,
    budget: int = 0,
    counts: bool = True,
    **options: Any,
) -> Iterator[SegmentTrace | SegmentEstimate]:
    trace: Callable[..., Iterator[SegmentTrace]] = partial(
        trace_segments, model, dtype=dtype or torch.float64, memory=memory, **options
    )
    if method not in ("refined", "auto"):
        yield from trace(starts, ends, method=method)
        return
    check_ends(starts, ends)
    device = precise_device(model, starts)
    segments = zip(starts.detach(), ends.detach(), strict=True)
    estimates = estimate_segments(
        model,
        ((start.to(device), end.to(device)) for start, end in segments),
        tolerance=tolerance,
        evaluations=evaluations,
        dtype=dtype,
        memory=memory,
        budget=budget if method == "auto" else 0,
        counts=counts,
    )
    first = 0
    try:
        # Number of segments estimated at a time, before those that need an exact trace are traced.
        while batch := list(itertools.islice(estimates, 64)):
            # Where the estimate is None, an exact trace is cheap.
            untraced = [first + i for i, estimate in enumerate(batch) if estimate is None]
            traces = trace(starts[untraced], ends[untraced]) if untraced else iter(())
            for estimate in batch:
                yield next(traces) if estimate is None else estimate
            first += len(batch)
    except UnknownPieces:
        # Raised before the first segment.
        if method != "auto":
            raise
        yield from trace(starts, ends)
