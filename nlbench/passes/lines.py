"""The pass of the probe `lines`: paths of a subject's samples, traced segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.errors import RequestError, Undefined, UnsupportedOperation
from nlbench.probes.drawing import Sketch
from nlbench.probes.lines import LineLook, look_along
from nlbench.probes.paths import closed_paths, noise_paths, open_paths, pair_paths, translations
from nlbench.probes.smooth import SmoothTrace, integrate_along
from nlbench.subject import Subject, tensor_hash

from . import Listener, Means, ProbeSettings, Step

__all__ = ["check_samples", "is_channels_last", "show", "steps"]


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
    means: Means,
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
    for look in _looks(subject, paths.to(means.device), settings, means):
        for listener in listeners:
            listener.update(look)
        if look.path == 0:
            sketch.add(look)
        if isinstance(look.trace, SmoothTrace):
            errors.setdefault(look.place, []).append(look.trace)
        step()
    shown["drawing"] = sketch.content()
    if errors:
        shown["remarks"] = {place: _remark(traces) for place, traces in errors.items()}


def _looks(
    subject: Subject, paths: Tensor, settings: ProbeSettings, means: Means
) -> Iterator[LineLook]:
    seen = 0
    try:
        for look in look_along(
            subject.model,
            paths,
            method=str(settings["method"]),
            dtype=getattr(torch, str(settings["dtype"])),
            memory=means.memory,
            sensitivity=float(settings["sensitivity"]),
            resolution=int(settings["resolution"]),
        ):
            yield look
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
        memory=means.memory,
    )
    for index, trace in enumerate(traces, seen):
        yield LineLook(index // segments, index % segments, trace)


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
