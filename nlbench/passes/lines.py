"""The pass of the probe `lines`: paths of a subject's samples, traced segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nlbench.errors import RequestError
from nlbench.probes.lines import look_along
from nlbench.probes.paths import closed_paths, pair_paths, translations
from nlbench.subject import Subject, tensor_hash

from . import Listener, Means, ProbeSettings, Step

__all__ = ["check_samples", "is_channels_last", "show", "steps"]


def steps(size: int, settings: ProbeSettings) -> int:
    """How many segments the paths have."""
    if settings["paths"] == "closed":
        return int(settings["number"]) * int(settings["anchors"])
    return int(settings["number"])


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    means: Means,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show a network restricted to each segment of a subject's paths."""
    paths = _paths(subject, settings)
    shown["segments"] = paths.shape[0] * (paths.shape[1] - 1)
    shown["paths_hash"] = tensor_hash(paths)
    for look in look_along(subject.model, paths.to(means.device)):
        for listener in listeners:
            listener.update(look)
        step()


def check_samples(settings: ProbeSettings, samples: int) -> int:
    """Number of samples that the paths of a run are made of.

    Raises
    ------
    nlbench.RequestError
        If there are fewer.
    """
    number, kind = int(settings["number"]), str(settings["paths"])
    needed = number if kind == "closed" else 2 * number
    if samples < needed:
        raise RequestError(
            f"lines.number: {number} paths ({kind}) need {needed} samples, there are {samples}"
        )
    return needed


def _paths(subject: Subject, settings: ProbeSettings) -> Tensor:
    number, kind = int(settings["number"]), str(settings["paths"])
    needed = check_samples(settings, len(subject.inputs))
    if kind == "pairs":
        return pair_paths(subject.inputs[:needed])
    images = subject.inputs if subject.images is None else subject.images
    if images.ndim != 4:
        raise RequestError(
            "lines.paths: closed paths translate images, but the inputs have shape "
            f"{tuple(images.shape[1:])}; set lines.paths=pairs"
        )
    if is_channels_last(images):
        raise RequestError(
            "lines.paths: closed paths translate images of shape (channels, height, width), but "
            f"the inputs have shape {tuple(images.shape[1:])}, with the channels last by the "
            "look of it; set lines.paths=pairs"
        )
    anchors, radius = int(settings["anchors"]), float(settings["radius"])
    if len(set(translations(anchors, radius))) < 2:
        raise RequestError(
            f"lines.radius: at {radius:g} pixels all {anchors} anchors are the same whole-pixel "
            "translation, so the path has no length"
        )
    return subject.normalize(closed_paths(images[:number], anchors=anchors, radius=radius))


def is_channels_last(images: Tensor) -> bool:
    """Whether 4-D inputs look like (n, height, width, channels): few of the last, many before."""
    return images.ndim == 4 and images.shape[-1] <= 4 < images.shape[1]
