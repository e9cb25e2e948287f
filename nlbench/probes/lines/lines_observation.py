"""Observation of a subject on the segments of its paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined
from nlbench.introspection.distinct_rows import first_distinct
from nlbench.introspection.model_copy import typed_copy
from nlbench.probes.probe import ProbeFacts, ProbeOptions, ProbePass
from nlbench.serialization.hashing import tensor_hash

from .api import add_positions, segment_ends, trace_or_integrate
from .drawing import MAX_SEGMENTS, make_drawing
from .lines_probe import LINES, is_channels_last
from .paths import closed_paths, direction_paths, noise_paths, open_paths, pair_paths
from .segment_image import SegmentImage
from .trace import SegmentEstimate, TracedSegment

if TYPE_CHECKING:
    from nlbench.subjects.subject import Subject

MAX_PATH_BYTES = 2**32
"""Memory limit in bytes for the paths, which are all built before the first is traced."""


def observe(probe_pass: ProbePass) -> ProbeFacts:
    """Trace the segments of a subject's paths, and pass them to listeners.

    If the network can't be traced, its distance to the chords is integrated, and a remark is added.
    """
    model = probe_pass.model
    options = LINES.resolve(probe_pass.options, probe_pass.samples.inputs)
    resources = probe_pass.resources
    paths = select_paths(model, probe_pass.samples, options)
    segments = paths.shape[0] * (paths.shape[1] - 1)
    drawn: list[TracedSegment] = []
    integrated: dict[str, list[SegmentEstimate]] = {}
    traces = trace_or_integrate(
        model,
        *segment_ends(paths.to(resources.device)),
        method=str(options["method"]),
        dtype=None if options["dtype"] == "auto" else getattr(torch, str(options["dtype"])),
        memory=resources.memory,
        sensitivity=float(options["sensitivity"]),
        resolution=int(options["resolution"]),
        tolerance=float(options["tolerance"]),
        evaluations=int(options["evaluations"]),
        budget=int(options["budget"]),
        counts=any(getattr(each, "counts_crossings", True) for each in probe_pass.listeners),
    )
    network = cache(partial(typed_copy, model))
    for observation in add_positions(traces, paths):
        trace = observation.trace
        first = observation.segment
        # Traces are on a device that supports float64.
        path = paths[observation.path].to(trace.t.device)
        ends = path[first], path[first + 1]
        breakpoints = None if isinstance(trace, SegmentEstimate) else trace.t
        may_use_float32 = trace.precision > torch.finfo(torch.float64).eps
        image = SegmentImage(network, ends, breakpoints, may_use_float32, resources.memory)
        probe_pass.show(replace(observation, image=image))
        if observation.path == 0 and len(drawn) < MAX_SEGMENTS:
            drawn.append(observation)
        if isinstance(trace, SegmentEstimate) and trace.method == "quadrature":
            integrated.setdefault(observation.place, []).append(trace)
        probe_pass.step()
    facts = ProbeFacts(
        segments=segments,
        paths=str(options["paths"]),
        number=len(paths),
        paths_hash=tensor_hash(paths),
        drawing=make_drawing(drawn),
    )
    if integrated:
        facts["remarks"] = {place: _remark(traces) for place, traces in integrated.items()}
    return facts


def _remark(traces: Sequence[SegmentEstimate]) -> str:
    """Describe how accurately a path was integrated."""
    tolerance = traces[0].tolerance
    unconverged = [trace for trace in traces if not trace.converged]
    if not unconverged:
        return f"by quadrature, relative error ≤ {tolerance * 100:g} %"
    worst = max(trace.relative_error for trace in unconverged)
    max_evaluations = max(trace.evaluations for trace in unconverged)
    return (
        f"by quadrature, relative error above {tolerance:g} on {len(unconverged)} of "
        f"{len(traces)} segments: {worst:.1e} estimated after {max_evaluations:,} evaluations; "
        "raise lines.evaluations or lines.tolerance"
    )


def select_paths(model: nn.Module, samples: Subject, options: ProbeOptions) -> Tensor:
    """Return the paths selected by resolved options, (p, a, *input)."""
    if not samples.inputs.is_floating_point():
        kind = str(samples.inputs.dtype).removeprefix("torch.")
        raise Undefined(f"the inputs are {kind}: there are no lines between them")
    number = int(options["number"])
    kind = str(options["paths"])
    anchors = int(options["anchors"])
    radius = float(options["radius"])
    seed = int(options["seed"])
    if len(samples.inputs) < 2 and kind in ("pairs", "random"):
        raise Undefined(f"n = {len(samples.inputs)}: at least 2 samples are needed")
    LINES.check(len(samples.inputs), options)
    _check_size(samples.inputs, options)
    if kind == "pairs":
        # A segment between copies of a sample has no length.
        distinct = first_distinct(samples.inputs, 2 * number)
        if len(distinct) < 2 * number:
            raise Undefined(
                f"lines.number: {number} pairs need {2 * number} different samples, there are "
                f"{len(distinct)}"
            )
        return pair_paths(samples.inputs[distinct.to(samples.inputs.device)])
    if kind == "directions":
        return direction_paths(
            samples.drawn(number)[0],
            anchors,
            radius,
            kind=str(options["direction"]),
            seed=seed,
            model=model,
        )
    if kind == "random":
        return noise_paths(samples.inputs, number, anchors, seed)
    inputs, drawn_images = samples.drawn(number)
    images = inputs if drawn_images is None else drawn_images
    _check_images(images, kind)
    if kind == "open":
        return samples.normalize(open_paths(images, anchors, radius, seed))
    return samples.normalize(closed_paths(images, anchors=anchors, radius=radius))


def _check_size(inputs: Tensor, options: ProbeOptions) -> None:
    number = int(options["number"])
    segments = LINES.steps(len(inputs), options)
    points = segments + number
    size = points * inputs[0].numel() * inputs.element_size()
    if size > MAX_PATH_BYTES:
        raise RequestError(
            f"lines.number: {number:,} paths of {points // number} points each take "
            f"{size / 2**30:,.1f} GiB, expected at most {MAX_PATH_BYTES / 2**30:.0f}; use fewer "
            "paths or anchors"
        )


def _check_images(images: Tensor, kind: str) -> None:
    """Raise if inputs can't be translated."""
    shape = tuple(images.shape[1:])
    if images.ndim != 4:
        raise Undefined(
            f"lines.paths: {kind} paths translate images, but the inputs have shape {shape}; "
            "set lines.paths=pairs or random"
        )
    if is_channels_last(images):
        raise Undefined(
            f"lines.paths: {kind} paths translate images of shape (channels, height, width), but "
            f"the inputs have shape {shape}, apparently with the channels last; set "
            "lines.paths=pairs or random"
        )
