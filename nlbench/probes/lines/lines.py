"""Probe `lines`: a piecewise-affine network on straight segments of input space, exactly.

On a segment x(t) = x0 + t (x1 - x0) such a network is affine between finitely many
breakpoints. They are found layer by layer (Sotoudeh and Thakur, "Computing Linear
Restrictions of Neural Networks", NeurIPS 2019): the network's values are carried at all
breakpoints found so far; where a unit passes through zero between two of them, a
breakpoint is put in, every value that is still needed is interpolated there, and the
next layer goes on from the longer list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError, Undefined, UnsupportedOperation, nearest
from nlbench.probes.budget import load_of, share_out
from nlbench.probes.model_state import tensors_of, typed_copy
from nlbench.probes.passes import Listener, ProbeSettings, Resources, Step
from nlbench.subjects.load import Subject, tensor_hash

from .baselines import trace_adaptively, trace_by_sampling
from .check import check_trace
from .exact import trace_exactly
from .paths import closed_paths, noise_paths, open_paths, pair_paths, translations
from .plot_data import Sketch
from .program import record, refusal
from .quadrature import SmoothTrace, integrate_along
from .threads import by_itself
from .trace import SegmentTrace, slope_changes

if TYPE_CHECKING:
    from .quadrature import SmoothTrace

__all__ = [
    "METHODS",
    "SegmentTrace",
    "TracedSegment",
    "check_samples",
    "is_channels_last",
    "observe_paths",
    "show",
    "slope_changes",
    "steps",
    "trace_segment",
    "trace_segments",
    "traceable",
]


CHECKED_TOGETHER = 16
"""Most points of a trace to be compared with the network at once."""
METHODS = ("exact", "adaptive", "sampling")
"""How breakpoints are found, best first."""


@dataclass(frozen=True)
class TracedSegment:
    """What the probe `lines` shows a measure: one traced segment of one path.

    Parameters
    ----------
    path : int
        Which path.
    segment : int
        Which segment of it.
    trace : SegmentTrace or SmoothTrace
        The latter of a network that is not piecewise affine.
    """

    path: int
    segment: int
    trace: SegmentTrace | SmoothTrace

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
    _check_ends(starts, ends)
    _check_options(method, dtype, memory, sensitivity, resolution)
    if not len(starts):
        return
    network = typed_copy(model, dtype)
    device = next((t.device for t in tensors_of(network)), starts.device)
    starts, ends = starts.detach(), ends.detach()
    segments = (
        (a.to(device, dtype), b.to(device, dtype)) for a, b in zip(starts, ends, strict=True)
    )
    first = torch.stack([starts[0], ends[0]]).to(device, dtype)
    program = record(network, torch.cat([first, first.mean(0, keepdim=True)]))
    if method == "exact":
        traces = trace_exactly(program, segments, memory=memory)
    elif method == "adaptive":
        traces = trace_adaptively(program, segments, sensitivity=sensitivity, memory=memory)
    else:
        traces = trace_by_sampling(program, segments, resolution=resolution, memory=memory)
    _, together = share_out(load_of(program, first), device, memory, CHECKED_TOGETHER)
    for trace, start, end in zip(traces, starts, ends, strict=True):
        points = torch.stack([start, end]).to(device, dtype)
        with by_itself():
            check_trace(program, network, points, trace, together=together)
        yield trace


def observe_paths(
    model: nn.Module,
    paths: Tensor,
    *,
    method: str = "exact",
    dtype: torch.dtype = torch.float64,
    memory: int | None = None,
    sensitivity: float = 1e-6,
    resolution: int = 1000,
) -> Iterator[TracedSegment]:
    """Trace paths: consecutive anchors of each are joined by segments.

    Parameters
    ----------
    model : torch.nn.Module
        See `trace_segment`, also for the options and for what is raised.
    paths : tensor of shape (p, a, *input)
        p paths of a anchors each.
    method, dtype, memory, sensitivity, resolution
        As in `trace_segment`.

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
    segments = paths.shape[1] - 1
    traces = trace_segments(
        model,
        paths[:, :-1].flatten(0, 1),
        paths[:, 1:].flatten(0, 1),
        method=method,
        dtype=dtype,
        memory=memory,
        sensitivity=sensitivity,
        resolution=resolution,
    )
    for index, trace in enumerate(traces):
        yield TracedSegment(index // segments, index % segments, trace)


def traceable(model: nn.Module, example: Tensor) -> str:
    """Say why a network can't be traced, from a look at its operations alone.

    Nothing is computed where the network allows it: shapes go through it in place of
    numbers, so that it costs as little for a large network as for a small one. What only
    numbers show, such as a weight that is not finite, is found when it is traced.

    Parameters
    ----------
    model : torch.nn.Module
        It is left as it was; it may be on the ``meta`` device.
    example : tensor of shape (1, *input)
        Of which only the shape counts.

    Returns
    -------
    str
        Empty if it is piecewise affine, else the first operation that isn't, its place
        and the reason.

    Examples
    --------
    >>> traceable(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()), torch.zeros(1, 2))
    'gelu at 1: not piecewise affine'
    """
    return refusal(model, example)


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
        if end.is_meta:
            raise RequestError(f"the segment's {name} is on the device meta: it has no numbers")
        if not torch.isfinite(end).all():
            raise NotFinite(f"the segment's {name} is not finite")


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


def steps(size: int, settings: ProbeSettings) -> int:
    """How many segments the paths have."""
    if settings["paths"] == "pairs":
        return int(settings["number"])
    return int(settings["number"]) * int(settings["anchors"])


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    resources: Resources,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show a network restricted to each segment of a subject's paths.

    Where it can't be traced because of what it does, its distance to the chords is
    integrated in place of that, and a remark says so.
    """
    paths = _paths(subject, settings)
    segments = paths.shape[1] - 1
    shown["segments"] = paths.shape[0] * segments
    shown["paths_hash"] = tensor_hash(paths)
    sketch = Sketch(segments)
    errors: dict[str, list[SmoothTrace]] = {}
    for observation in _observations(subject, paths.to(resources.device), settings, resources):
        for listener in listeners:
            listener.update(observation)
        if observation.path == 0:
            sketch.add(observation)
        if isinstance(observation.trace, SmoothTrace):
            errors.setdefault(observation.place, []).append(observation.trace)
        step()
    shown["drawing"] = sketch.content()
    if errors:
        shown["remarks"] = {place: _remark(traces) for place, traces in errors.items()}


def _observations(
    subject: Subject, paths: Tensor, settings: ProbeSettings, resources: Resources
) -> Iterator[TracedSegment]:
    seen = 0
    try:
        for observation in observe_paths(
            subject.model,
            paths,
            method=str(settings["method"]),
            dtype=getattr(torch, str(settings["dtype"])),
            memory=resources.memory,
            sensitivity=float(settings["sensitivity"]),
            resolution=int(settings["resolution"]),
        ):
            yield observation
            seen += 1
        return
    except UnsupportedOperation as error:
        refused = str(error)
    segments = paths.shape[1] - 1
    traces = integrate_along(
        subject.model,
        paths[:, :-1].flatten(0, 1)[seen:],
        paths[:, 1:].flatten(0, 1)[seen:],
        tolerance=float(settings["tolerance"]),
        evaluations=int(settings["evaluations"]),
        refused=refused,
        memory=resources.memory,
    )
    for index, trace in enumerate(traces, seen):
        yield TracedSegment(index // segments, index % segments, trace)


def _remark(traces: Sequence[SmoothTrace]) -> str:
    """Say how well a path was integrated."""
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


def check_samples(settings: ProbeSettings, samples: int) -> int:
    """Number of samples that the paths of a run are made of.

    Raises
    ------
    nlbench.RequestError
        If there are fewer.
    """
    number, kind = int(settings["number"]), str(settings["paths"])
    needed = {"pairs": 2 * number, "random": 2}.get(kind, number)
    if samples < needed:
        raise RequestError(
            f"lines.number: {number} paths ({kind}) need {needed} samples, there are {samples}"
        )
    return needed


def _paths(subject: Subject, settings: ProbeSettings) -> Tensor:
    number, kind = int(settings["number"]), str(settings["paths"])
    anchors, radius = int(settings["anchors"]), float(settings["radius"])
    seed = int(settings["seed"])
    needed = check_samples(settings, len(subject.inputs))
    _check_size(subject.inputs, settings)
    if kind == "pairs":
        return pair_paths(subject.inputs[:needed])
    if kind == "random":
        return noise_paths(subject.inputs, number, anchors, seed)
    images = subject.inputs if subject.images is None else subject.images
    _check_images(images, kind)
    if kind == "open":
        return subject.normalize(open_paths(images[:number], anchors, radius, seed))
    if len(set(translations(anchors, radius))) < 2:
        raise RequestError(
            f"lines.radius: at {radius:g} pixels all {anchors} anchors are the same whole-pixel "
            "translation, so the path has no length"
        )
    return subject.normalize(closed_paths(images[:number], anchors=anchors, radius=radius))


def _check_size(inputs: Tensor, settings: ProbeSettings) -> None:
    number, segments = int(settings["number"]), steps(len(inputs), settings)
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


def is_channels_last(images: Tensor) -> bool:
    """Whether 4-D inputs look like (n, height, width, channels): few of the last, many before."""
    return images.ndim == 4 and images.shape[-1] <= 4 < images.shape[1]
