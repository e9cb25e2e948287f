"""Probe `lines`: a network on straight segments of input space.

On a segment x(t) = x0 + t (x1 - x0) a piecewise-affine network is affine between finitely many
breakpoints. Where they are few they are found layer by layer (Sotoudeh and Thakur, "Computing
Linear Restrictions of Neural Networks", NeurIPS 2019): the network's values are carried at all
breakpoints found so far; where a unit passes through zero between two of them, a breakpoint is
put in, every value that is still needed is interpolated there, and the next layer goes on from
the longer list. Where they are many, or there are none, see `refined` and `quadrature`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined, UnsupportedOperation, nearest
from nlbench.introspection.memory import LiveBytes, share_out
from nlbench.introspection.model_state import precise_device, typed_copy
from nlbench.introspection.precision import each_exact
from nlbench.probes import Listener, OnStep, ProbeOptions, Resources, Samples
from nlbench.serialization.hashing import tensor_hash

from . import LINES, is_channels_last
from .estimation.estimator import (
    BUDGET,
    EVALUATIONS,
    LEAST,
    PROBES,
    TOLD,
    TOLERANCE,
    Segment,
    check_ends,
    estimate_all,
    on_device,
)
from .estimation.patterns import UnknownPieces
from .exact.trace import by_itself, trace_exactly
from .paths import closed_paths, direction_paths, noise_paths, open_paths, pair_paths
from .published import trace_adaptively, trace_by_sampling
from .quadrature import integrate_along
from .recording.program import (
    check_program,
    least_point_memory,
    point_memory_of,
    program_of,
    run_alone,
)
from .trace import SegmentEstimate, SegmentTrace, points_at, slope_changes
from .verification import check_trace

__all__ = [
    "BINS",
    "METHODS",
    "SegmentTrace",
    "TracedSegment",
    "drawing_of",
    "estimate_segment",
    "forecast",
    "observe",
    "observe_paths",
    "passes_needed",
    "paths_of",
    "slope_changes",
    "trace_segment",
    "trace_segments",
]


CHECKED_TOGETHER = 16
"""Most points of a trace to be compared with the network at once."""
CARRIED_AT_LEAST = 4
"""Points without which a trace can't be compared with the network."""
METHODS = ("exact", "adaptive", "sampling")
"""How breakpoints are found, best first."""
TOGETHER = 64
"""Segments that are estimated before the first of them is traced, where that is better."""


@dataclass(frozen=True)
class TracedSegment:
    """What the probe `lines` shows a measure: one traced segment of one path.

    Parameters
    ----------
    path : int
        Which path.
    segment : int
        Which segment of it.
    trace : SegmentTrace or SegmentEstimate
        The latter where breakpoints were not looked for, or there are none.
    """

    path: int
    segment: int
    trace: SegmentTrace | SegmentEstimate

    @property
    def place(self) -> str:
        """Name of the path: ``path0``, ``path1``, …."""
        return f"path{self.path}"


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
        Piecewise affine in eval mode. It is copied, not changed; the work is done on the
        model's device.
    start, end : tensor of shape (*input)
        One input each, without the axis of samples.
    method : {"exact", "adaptive", "sampling"}
        ``exact`` finds all breakpoints, layer by layer. ``adaptive`` steps from one to the
        next and passes over regions shorter than `sensitivity`, which it counts.
        ``sampling`` compares activation patterns at uniform steps.
    dtype : torch.dtype
        What the network is computed in, float64 or float32.
    memory : int, optional
        Bytes that may be used beside the model and the traces; by default half of what is
        free. It decides how many points are carried at once and changes no result.
    sensitivity : float
        Of ``adaptive``: how far behind a breakpoint the next search begins, in t.
    resolution : int
        Of ``sampling``: number of steps.

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
        If the ends don't fit each other or the network, an option is out of bounds, or the
        memory does not suffice for two points.

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
    """Trace many segments; the model is recorded once, and a few are under way at a time.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, also for the options and for what is raised.
    starts, ends : tensor of shape (n, *input)
    method, dtype, memory, sensitivity, resolution
        As in `trace_segment`.

    Yields
    ------
    SegmentTrace
        In the order of the segments. A trace does not depend on which others are asked for.

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
    network = typed_copy(model, dtype)
    device = precise_device(network, starts)
    starts, ends = starts.detach(), ends.detach()
    # To the device first: where they come from there may be no such type.
    segments = (
        (a.to(device).to(dtype), b.to(device).to(dtype)) for a, b in zip(starts, ends, strict=True)
    )
    first = torch.stack([starts[0], ends[0]]).to(device).to(dtype)
    recorded = LiveBytes()
    # Of free memory what is computed once has been taken when it is asked for.
    with nullcontext() if memory is None else recorded:
        program = program_of(network, first[:1].clone())
    # Refused before more than one point is carried, if that would take more.
    least = replace(least_point_memory(program, dtype), constants=recorded.now)
    share_out(least, device, memory, CHECKED_TOGETHER, needed=CARRIED_AT_LEAST)
    needs = point_memory_of(program, first)
    needs = replace(needs, constants=needs.constants + recorded.now)
    _, together = share_out(needs, device, memory, CHECKED_TOGETHER, needed=CARRIED_AT_LEAST)
    check_program(program, network, torch.cat([first, first.mean(0, keepdim=True)]))
    how: dict[str, Any] = {"memory": memory, "needs": needs}
    if method == "exact":
        traces = trace_exactly(program, segments, **how)
    elif method == "adaptive":
        traces = trace_adaptively(program, segments, sensitivity=sensitivity, **how)
    else:
        traces = trace_by_sampling(program, segments, resolution=resolution, **how)
    for trace, start, end in zip(traces, starts, ends, strict=True):
        points = torch.stack([start, end]).to(device).to(dtype)
        with by_itself():
            check_trace(program, network, points, trace, together=together)
        yield trace


def estimate_segment(
    model: nn.Module,
    start: Tensor,
    end: Tensor,
    *,
    tolerance: float = TOLERANCE,
    evaluations: int = EVALUATIONS,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
) -> SegmentEstimate:
    """Count a network's boundaries on a straight segment, and integrate its distance to the chord.

    No breakpoint is found: a hundred forward passes tell what an exact trace tells with one a
    region. Between neighbours of a uniform grid each unit that is on another piece has crossed
    a boundary, so that `at_least` never exceeds the number of them (but where ties of a kind
    that is not recognised make several units cross at one place, see the documentation);
    `crossings` is what halving the grid again and again would come to.

    Parameters
    ----------
    model : torch.nn.Module
        It is copied, not changed, run in eval mode, on the model's device.
    start, end : tensor of shape (*input)
        One input each, without the axis of samples.
    tolerance : float
        Grids are halved until the standard error of the crossings, relative to them, and the
        error of the deviations, relative to theirs (Euclidean norms over logits), are within it.
    evaluations : int
        Most forward passes. If they don't suffice ``converged`` is false.
    dtype : torch.dtype, optional
        What the network is computed in; by default float32, and float64 where that would not do.
    memory : int, optional
        Bytes that may be used beside the model; by default half of what is free. Where patterns
        would take more, grids are not halved any further.

    Returns
    -------
    SegmentEstimate
        Of a network that is not piecewise affine without ``crossings``: ``refused`` says why.

    Raises
    ------
    nlbench.NotFinite, nlbench.RequestError
        As `trace_segment`.

    References
    ----------
    Counting transitions of activation codes: Novak et al., "Sensitivity and Generalization in
    Neural Networks: an Empirical Study", ICLR 2018.

    Examples
    --------
    >>> found = estimate_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([2.0]))
    >>> found.at_least, found.crossings, found.error
    (1, 1.0, 0.0)
    """
    (trace,) = _or_integrated(
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
    tolerance: float = TOLERANCE,
    evaluations: int = EVALUATIONS,
    budget: int = BUDGET,
) -> Iterator[TracedSegment]:
    """Trace paths: consecutive anchors of each are joined by segments.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, also for what is raised.
    paths : tensor of shape (p, a, *input)
        p paths of a anchors each.
    method : {"exact", "adaptive", "sampling", "refined", "auto"}
        One of `trace_segment`'s; ``refined`` estimates by `estimate_segment`; ``auto`` is
        ``exact`` on each segment where that takes no more than `budget` forward passes, as nine
        points tell, and ``refined`` on the others.
    dtype : torch.dtype, optional
        By default float64 where breakpoints are found, and as `estimate_segment` chooses.
    memory, sensitivity, resolution
        As in `trace_segment`.
    tolerance, evaluations
        As in `estimate_segment`.
    budget : int
        Of ``auto``.

    Yields
    ------
    TracedSegment
        p (a - 1) of them, path by path.

    Examples
    --------
    >>> paths = torch.tensor([[[-1.0], [1.0], [-1.0]]])
    >>> [(seen.place, seen.trace.crossings) for seen in observe_paths(torch.nn.ReLU(), paths)]
    [('path0', 1), ('path0', 1)]
    """
    if paths.ndim < 3 or paths.shape[1] < 2:
        raise RequestError(
            f"paths of shape {tuple(paths.shape)}, expected (paths, 2 anchors or more, *input)"
        )
    traces = _traced(
        model,
        *_ends(paths),
        method=method,
        dtype=dtype,
        memory=memory,
        sensitivity=sensitivity,
        resolution=resolution,
        tolerance=tolerance,
        evaluations=evaluations,
        budget=budget,
    )
    yield from _placed(traces, paths)


def _ends(paths: Tensor) -> tuple[Tensor, Tensor]:
    """Give where the segments of paths start and end: (n, *input) each."""
    return paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1)


def _placed(
    traces: Iterator[SegmentTrace | SegmentEstimate], paths: Tensor
) -> Iterator[TracedSegment]:
    """Say of traces where on their paths they lie."""
    for index, trace in enumerate(traces):
        yield TracedSegment(*divmod(index, paths.shape[1] - 1), trace)


def _traced(
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
    **how: Any,
) -> Iterator[SegmentTrace | SegmentEstimate]:
    """Trace or estimate segments by any of the methods of `observe_paths`."""
    traced: Callable[..., Iterator[SegmentTrace]] = partial(
        trace_segments, model, dtype=dtype or torch.float64, memory=memory, **how
    )
    if method not in ("refined", "auto"):
        yield from traced(starts, ends, method=method)
        return
    check_ends(starts, ends)
    estimates = estimate_all(
        model,
        on_device(model, starts, ends),
        tolerance=tolerance,
        evaluations=evaluations,
        dtype=dtype,
        memory=memory,
        budget=budget if method == "auto" else 0,
    )
    try:
        yield from _completed(estimates, starts, ends, traced)
    except UnknownPieces:
        # Found out before the first segment: an operation's boundaries can't be counted without
        # breakpoints.
        if method != "auto":
            raise
        yield from traced(starts, ends)


def _or_integrated(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    tolerance: float,
    evaluations: int,
    memory: int | None,
    **how: Any,
) -> Iterator[SegmentTrace | SegmentEstimate]:
    """Do what `_traced` does, but integrate what is not piecewise affine."""
    seen = 0
    both: dict[str, Any] = {"tolerance": tolerance, "evaluations": evaluations, "memory": memory}
    try:
        for trace in _traced(model, starts, ends, **both, **how):
            yield trace
            seen += 1
        return
    except UnsupportedOperation as error:
        refused = str(error)
    yield from integrate_along(model, starts[seen:], ends[seen:], refused=refused, **both)


def _completed(
    estimates: Iterator[SegmentEstimate | None],
    starts: Tensor,
    ends: Tensor,
    traced: Callable[[Tensor, Tensor], Iterator[SegmentTrace]],
) -> Iterator[SegmentTrace | SegmentEstimate]:
    """Put exact traces where there is no estimate."""
    first = 0
    while some := list(itertools.islice(estimates, TOGETHER)):
        left = [first + i for i, estimate in enumerate(some) if estimate is None]
        traces = traced(starts[left], ends[left]) if left else iter(())
        for estimate in some:
            yield next(traces) if estimate is None else estimate
        first += len(some)


def _check_options(
    method: str, dtype: torch.dtype, memory: int | None, sensitivity: float, resolution: int
) -> None:
    if method not in METHODS:
        raise RequestError(f"unknown method '{method}'{nearest(method, METHODS)}")
    if dtype not in (torch.float64, torch.float32):
        raise RequestError(f"lines in {dtype}, expected torch.float64 or torch.float32")
    if memory is not None and memory < 1:
        raise RequestError(f"a memory of {memory} bytes, expected at least 1")
    if not 0 < sensitivity < 1:
        raise RequestError(f"a sensitivity of {sensitivity}, expected more than 0 and less than 1")
    if resolution < 1:
        raise RequestError(f"a resolution of {resolution} steps, expected at least 1")


MOST_BYTES = 2**32
"""Of all paths of a pass, which are made before the first is looked at."""


def observe(
    model: nn.Module,
    samples: Samples,
    options: ProbeOptions,
    listeners: Sequence[Listener],
    resources: Resources,
    step: OnStep,
    facts: dict[str, Any],
) -> None:
    """Show a network restricted to each segment of a subject's paths.

    Where it can't be traced because of what it does, its distance to the chords is
    integrated in place of that, and a remark says so.
    """
    paths = paths_of(model, samples, options)
    facts["segments"] = paths.shape[0] * (paths.shape[1] - 1)
    facts["paths_hash"] = tensor_hash(paths)
    drawn: list[TracedSegment] = []
    errors: dict[str, list[SegmentEstimate]] = {}
    traces = _or_integrated(
        model,
        *_ends(paths.to(resources.device)),
        method=str(options["method"]),
        dtype=None if options["dtype"] == "auto" else getattr(torch, str(options["dtype"])),
        memory=resources.memory,
        sensitivity=float(options["sensitivity"]),
        resolution=int(options["resolution"]),
        tolerance=float(options["tolerance"]),
        evaluations=int(options["evaluations"]),
        budget=int(options["budget"]),
    )
    for observation in _placed(traces, paths):
        for listener in listeners:
            listener.update(observation)
        if observation.path == 0 and len(drawn) < SEGMENTS:
            drawn.append(observation)
        trace = observation.trace
        if isinstance(trace, SegmentEstimate) and trace.crossings is None:
            errors.setdefault(observation.place, []).append(trace)
        step()
    facts["drawing"] = drawing_of(drawn)
    if errors:
        facts["remarks"] = {place: _remark(traces) for place, traces in errors.items()}


def _remark(traces: Sequence[SegmentEstimate]) -> str:
    """Say how well a path was integrated, of a network that has no breakpoints."""
    tolerance = traces[0].tolerance
    late = [trace for trace in traces if not trace.converged]
    if not late:
        return f"by quadrature to {tolerance:g} of the value or to rounding"
    worst = max(trace.relative_error for trace in late)
    most = max(trace.evaluations for trace in late)
    return (
        f"by quadrature that did not reach {tolerance:g} of the value on {len(late)} of "
        f"{len(traces)} segments: {worst:.1e} by estimate after {most:,} evaluations; "
        "raise lines.evaluations or lines.tolerance"
    )


def paths_of(model: nn.Module, samples: Samples, options: ProbeOptions) -> Tensor:
    """Give the paths that options ask for, (p, a, *input).

    Raises
    ------
    nlbench.Undefined, nlbench.RequestError
        If there are none between such inputs, or the options don't make any.
    """
    if not samples.inputs.is_floating_point():
        kind = str(samples.inputs.dtype).removeprefix("torch.")
        raise Undefined(f"the inputs are {kind}: there are no lines between them")
    number, kind = int(options["number"]), str(options["paths"])
    anchors, radius = int(options["anchors"]), float(options["radius"])
    seed = int(options["seed"])
    LINES.check(len(samples.inputs), options)
    _check_size(samples.inputs, options)
    if kind == "pairs":
        return pair_paths(samples.inputs[: 2 * number])
    if kind == "directions":
        return direction_paths(
            samples.inputs[:number],
            anchors,
            radius,
            kind=str(options["direction"]),
            seed=seed,
            model=model,
        )
    if kind == "random":
        return noise_paths(samples.inputs, number, anchors, seed)
    images = samples.inputs if samples.images is None else samples.images
    _check_images(images, kind)
    if kind == "open":
        return samples.normalize(open_paths(images[:number], anchors, radius, seed))
    return samples.normalize(closed_paths(images[:number], anchors=anchors, radius=radius))


def _check_size(inputs: Tensor, options: ProbeOptions) -> None:
    number, segments = int(options["number"]), LINES.steps(len(inputs), options)
    points = segments + number
    size = points * inputs[0].numel() * inputs.element_size()
    if size > MOST_BYTES:
        raise RequestError(
            f"lines.number: {number:,} paths of {points // number} points each take "
            f"{size / 2**30:,.1f} GiB, expected at most {MOST_BYTES / 2**30:.0f}; take fewer paths "
            "or anchors"
        )


def _check_images(images: Tensor, kind: str) -> None:
    """Say that there is nothing to translate, where the inputs aren't images."""
    shape = tuple(images.shape[1:])
    if images.ndim != 4:
        raise Undefined(
            f"lines.paths: {kind} paths translate images, but the inputs have shape {shape}; "
            "set lines.paths=pairs or random"
        )
    if is_channels_last(images):
        raise Undefined(
            f"lines.paths: {kind} paths translate images of shape (channels, height, width), but "
            f"the inputs have shape {shape}, with the channels last by the look of it; set "
            "lines.paths=pairs or random"
        )


BINS = 160
"""Along the whole path, in which breakpoints are counted."""
LOGITS = 3
ROWS = 24
SEGMENTS = 64
_DRAWN_AT, _MOST_DRAWN_AT = 480, 160
_DIGITS = 5


def drawing_of(observations: Sequence[TracedSegment]) -> dict[str, Any]:
    """Give what a path is drawn from: plain values, long rows of numbers as text.

    ``place``; ``method``; ``lengths`` of the segments; ``crossings``, their sum; ``logits``, those
    that stray furthest from their chords; ``curves``, a row a segment and logit, at even steps from
    end to end; and, if there are breakpoints, ``sites`` and ``breakpoints``, a row a site of how
    many there are in each of 160 equal parts of the drawn path. Neighbouring sites share a row if
    there are more than 24.

    Parameters
    ----------
    observations : sequence of TracedSegment
        Of one path, its first segments or all.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import observe_paths
    >>> path = torch.tensor([[[-1.0], [1.0], [-1.0]]])
    >>> drawing = drawing_of(list(observe_paths(torch.nn.ReLU(), path)))
    >>> drawing["place"], drawing["lengths"], drawing["crossings"], drawing["logits"]
    ('path0', [2.0, 2.0], 2, [0])
    """
    points = min(_DRAWN_AT // len(observations), _MOST_DRAWN_AT) + 1
    curves = np.stack([_curve(observation.trace, points) for observation in observations])
    chords = np.linspace(curves[:, 0], curves[:, -1], curves.shape[1], axis=1)
    lengths = np.array([observation.trace.length for observation in observations])
    strayed = lengths @ np.abs(curves - chords).mean(1)
    # Equal ones in order of their number, so that the choice is the same everywhere.
    logits = sorted(np.argsort(-strayed, kind="stable")[:LOGITS].tolist())
    methods = dict.fromkeys(observation.trace.method for observation in observations)
    drawing = {
        "place": observations[0].place,
        "method": ", ".join(methods),
        "lengths": [float(f"{length:.6g}") for length in lengths],
        "logits": logits,
        "curves": [[_row(curve[:, j]) for j in logits] for curve in curves],
    }
    return drawing | _breakpoints([observation.trace for observation in observations], lengths)


def _breakpoints(
    traces: Sequence[SegmentTrace | SegmentEstimate], lengths: NDArray[np.float64]
) -> dict[str, Any]:
    sites: dict[str, NDArray[np.int64]] = {}
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    for trace, start, length in zip(traces, starts, lengths, strict=False):
        if isinstance(trace, SegmentEstimate):
            return {}
        at = (start + trace.t[1:-1].cpu().numpy() * length) / (starts[-1] or 1.0)
        part = np.minimum((at * BINS).astype(np.int64), BINS - 1)
        origins = trace.origins[1:-1].cpu().numpy()
        for index, name in enumerate(trace.sites):
            counts = np.bincount(part[origins == index], minlength=BINS)
            sites[name] = sites.get(name, 0) + counts
    rows = list(_grouped(list(sites.items())))
    return {
        "crossings": int(sum(counts.sum() for _, counts in rows)),
        "sites": [name for name, _ in rows],
        "breakpoints": [" ".join(map(str, counts.tolist())) for _, counts in rows],
    }


def _curve(trace: SegmentTrace | SegmentEstimate, points: int) -> NDArray[np.float64]:
    """Values (points, k) of the network at even steps along a segment."""
    t, values = trace.t.cpu().numpy(), trace.values.cpu().numpy()
    even = np.linspace(0, 1, points)
    if isinstance(trace, SegmentEstimate):
        t, first = np.unique(t, return_index=True)  # of the shortest intervals, nodes coincide
        return np.asarray(PchipInterpolator(t, values[first])(even))
    left = np.clip(np.searchsorted(t, even, side="right") - 1, 0, len(t) - 2)
    share = ((even - t[left]) / (t[left + 1] - t[left]))[:, None]
    return np.asarray((1 - share) * values[left] + share * values[left + 1])


def _grouped(
    sites: Sequence[tuple[str, NDArray[np.int64]]],
) -> Iterable[tuple[str, NDArray[np.int64]]]:
    """Put neighbouring sites together until they fit."""
    cuts = np.linspace(0, len(sites), min(len(sites), ROWS) + 1).round().astype(int)
    for first, last in itertools.pairwise(cuts.tolist()):
        names = [name for name, _ in sites[first:last]]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield name, np.sum([counts for _, counts in sites[first:last]], axis=0)


def _row(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.{_DIGITS}g}" for number in numbers)


LOOKED_AT = 4
"""Segments of a subject by which all are told, evenly spread."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_PASSES_A_REGION = {"exact": 1, "adaptive": 2}
_TIMED_AT = 16
"""At which a forward pass in double precision is timed."""


def passes_needed(found: SegmentEstimate, tolerance: float, evaluations: int) -> int:
    """Tell from a coarse grid how many forward passes refining it will take.

    What halving will yet add to the crossings falls in proportion to the step, the error of the
    deviation with its square.

    Parameters
    ----------
    found : SegmentEstimate
        On a uniform grid.
    tolerance : float
    evaluations : int
        Most of them.

    Examples
    --------
    >>> kinks = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> ends = iter([(torch.tensor([-1.0]), torch.tensor([1.0]))])
    >>> found = next(estimate_all(kinks, ends, tolerance=1e-3, evaluations=25))
    >>> passes_needed(found, 1e-3, 4096) <= 4096
    True
    """
    assert found.crossings is not None
    told = len(found.t) - 1
    steps = LEAST
    if found.crossings:
        # Where so many are to come, twice the standard deviation of their sum is tolerated.
        allowed = 3 / 5 * (tolerance * found.crossings) ** 2 / 2
        rest = found.crossings - found.at_least
        steps = max(steps, math.ceil(told * rest / allowed))
    error = float(torch.linalg.vector_norm(found.deviation_error))
    total = float(torch.linalg.vector_norm(found.above + found.below))
    if error and total:
        steps = max(steps, math.ceil(told * math.sqrt(error / (tolerance * total))))
    halved: int = 2 ** math.ceil(math.log2(steps))
    return min(halved + 1 + PROBES, evaluations)


def forecast(
    model: nn.Module, samples: Samples, options: ProbeOptions, resources: Resources
) -> str:
    """Predict what tracing a subject's paths takes: method, boundaries, forward passes, time.

    Parameters
    ----------
    model, samples, options, resources
        As for `nlbench.probes.Probe.observe`.

    Raises
    ------
    nlbench.Undefined
        If there are no paths.
    """
    starts, ends = _ends(paths_of(model, samples, options))
    count, method = len(starts), str(options["method"])
    if method == "sampling":
        passes = count * (int(options["resolution"]) + 1)
        return f"{count:,} segments: sampling takes {passes:,} forward passes"
    few = min(LOOKED_AT, count)
    # One in each quarter; not all at the same place of their paths.
    which = [int((i + (0.5 + i * _GOLDEN) % 1) * count / few) for i in range(few)]
    chosen = list(on_device(model, starts[which], ends[which]))
    try:
        found, seconds = _looked_at(model, chosen, options, resources)
    except UnknownPieces as error:
        chosen_method = "exact" if method == "auto" else method
        if chosen_method != "refined":
            return f"{count:,} segments: {chosen_method}, at a cost that can't be told ({error})"
        refused = str(error)
    except UnsupportedOperation as error:
        refused = str(error)
    else:
        predicted = _predicted(model, chosen, found, seconds, count, options)
        return f"{count:,} segments; predicted from nine points on {few} of them: {predicted}"
    most = count * int(options["evaluations"])
    return f"{count:,} segments: by quadrature, at most {most:,} forward passes ({refused})"


def _looked_at(
    model: nn.Module, chosen: Sequence[Segment], options: ProbeOptions, resources: Resources
) -> tuple[list[SegmentEstimate], float]:
    """Give the nine points' estimates, and seconds a forward pass."""
    wanted = str(options["dtype"])
    estimates = estimate_all(
        model,
        iter(chosen),
        tolerance=float(options["tolerance"]),
        evaluations=TOLD + 1 + PROBES,
        dtype=torch.float32 if wanted == "auto" else getattr(torch, wanted),
        memory=resources.memory,
    )
    begin = time.perf_counter()
    found = [estimate for estimate in estimates if estimate is not None]
    passes = sum(estimate.evaluations for estimate in found)
    return found, (time.perf_counter() - begin) / passes


def _predicted(
    model: nn.Module,
    chosen: Sequence[Segment],
    found: Sequence[SegmentEstimate],
    seconds: float,
    count: int,
    options: ProbeOptions,
) -> str:
    method = str(options["method"])
    regions = [(estimate.crossings or 0.0) + 1 for estimate in found]
    limit = int(options["budget"])
    is_refined = [method == "refined" or (method == "auto" and n > limit) for n in regions]
    refined = exact = 0.0
    for estimate, n, by_grids in zip(found, regions, is_refined, strict=True):
        if by_grids:
            evaluations = int(options["evaluations"])
            refined += passes_needed(estimate, float(options["tolerance"]), evaluations)
        else:
            exact += n * _PASSES_A_REGION.get(method, 1)
    scale = count / len(found)
    time_needed = scale * refined * seconds
    if exact:
        time_needed += scale * exact * _seconds_in_double(model, chosen[0])
    taken = method
    if method == "auto":
        share = sum(is_refined)
        taken = "auto takes " + ("refined" if share == len(found) else "exact")
        if 0 < share < len(found):
            taken = f"auto takes refined on {share} of {len(found)}, else exact"
    least, most = min(regions) - 1, max(regions) - 1
    boundaries = _about(sum(regions) / len(regions) - 1)
    if most > 1.5 * least:
        boundaries = f"{_about(least)} to {_about(most)}"
    return (
        f"about {boundaries} boundaries a segment; {taken}, about "
        f"{_about(scale * (refined + exact))} forward passes, {_duration(time_needed)}"
    )


@torch.inference_mode()
def _seconds_in_double(model: nn.Module, segment: Segment) -> float:
    network = typed_copy(model, torch.float64)
    device = precise_device(network, segment[0])
    start, end = (x.to(device).double() for x in segment)
    shares = torch.linspace(0, 1, _TIMED_AT, dtype=torch.float64, device=start.device)
    points = points_at(start, end, shares)
    run_alone(network, points[:1])
    begin = time.perf_counter()
    values: Tensor = run_alone(network, points)
    float(values.sum())  # Of a GPU it is waited for.
    return (time.perf_counter() - begin) / _TIMED_AT


def _about(number: float) -> str:
    """Two digits of a number: more are not known."""
    if number < 100:
        return f"{number:.0f}"
    digits = math.floor(math.log10(number)) - 1
    return f"{round(number / 10**digits) * 10**digits:,}"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"about {_about(seconds / size)} {unit}"
    return f"about {max(1.0, seconds):.0f} s"
