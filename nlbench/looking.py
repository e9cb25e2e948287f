"""Show a subject to measures through their probes: one pass a probe feeds them all."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from nlbench.errors import (
    NlbenchError,
    NotFinite,
    PluginError,
    RequestError,
    Undefined,
    nearest,
)
from nlbench.measure import Measure, Reading, Status
from nlbench.options import OptionValue
from nlbench.probes.lines import look_along
from nlbench.probes.paths import closed_paths, pair_paths, translations
from nlbench.probes.sites import Site, SiteLook, look_at_sites, remark_on_channels
from nlbench.subject import Subject, tensor_hash

__all__ = ["Outcome", "Step", "check_samples", "is_channels_last", "look", "steps_of"]

ProbeSettings = Mapping[str, OptionValue]


class Step(Protocol):
    """Told after each batch or segment, for progress."""

    def __call__(self) -> None:
        """Count one more."""


@dataclass
class Outcome:
    """What one measure came to on one subject.

    Parameters
    ----------
    reading : Reading
    seconds : float
        The measure's own time.
    traceback : str
        Of a failure.
    shown : dict
        What the probe looked at, such as the number of segments.
    """

    reading: Reading
    seconds: float
    traceback: str
    shown: dict[str, Any]


class _Feed:
    """One measure while a probe's pass runs: its time, and its failure if there is one."""

    def __init__(self, measure: type[Measure], options: Mapping[str, OptionValue]) -> None:
        self.seconds = 0.0
        self.failure: Reading | None = None
        self.traceback = ""
        self._measure: Measure
        self._guard(lambda: self._begin(measure, options))

    def update(self, look: object) -> None:
        """Give the measure one look, unless it has failed."""
        if self.failure is None:
            self._guard(lambda: self._measure.update(look))

    def finish(self) -> Reading:
        """Take the measure's reading, or say why there is none."""
        reading = self.failure or self._guard(lambda: _sound(self._measure.finish()))
        return self.failure or reading

    def _begin(self, measure: type[Measure], options: Mapping[str, OptionValue]) -> None:
        self._measure = measure(**options)
        self._measure.start()

    def _guard(self, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return call()
        except (Exception, SystemExit) as error:
            # A plugin may raise anything. It is recorded, and concerns no other measure.
            self.failure, self.traceback = _reading_of(error)
            return None
        finally:
            self.seconds += time.perf_counter() - begin


def _sound(reading: object) -> Reading:
    """Give back what a measure's ``finish`` gave if it can be recorded.

    Raises
    ------
    TypeError, ValueError, nlbench.NotFinite
        If it can't.
    """
    if not isinstance(reading, Reading):
        raise PluginError(f"finish gave a {type(reading).__name__}, expected nlbench.Reading")
    if not all(math.isfinite(number) for number in reading.summary.values()):
        raise NotFinite("the summary is not finite")
    answers = [(reading.status, reading.reason), *((v.status, v.reason) for v in reading.values)]
    for status, reason in answers:
        if status not in get_args(Status):
            raise PluginError(f"unknown status '{status}'{nearest(str(status), get_args(Status))}")
        if status != "ok" and not reason:
            raise PluginError(f"status '{status}' without a reason")
    if reading.status == "ok" and "value" not in reading.summary:
        raise PluginError("the summary has no 'value'")
    places = [value.place for value in reading.values]
    if "" in places or len(set(places)) < len(places):
        raise PluginError("places must have names, each its own")
    json.dumps(asdict(reading), allow_nan=False)
    return reading


def _annotated(reading: Reading, shown: Mapping[str, Any]) -> Reading:
    """Add what the probe knows: how many samples or segments, and remarks on places."""
    n, remarks = shown.get("samples", shown.get("segments", 0)), shown.get("remarks", {})
    values = tuple(
        replace(value, n=value.n or n, reason=value.reason or remarks.get(value.place, ""))
        for value in reading.values
    )
    return replace(reading, values=values, n=reading.n or n)


def _reading_of(error: BaseException) -> tuple[Reading, str]:
    """Turn an exception into the reading that says so, with its traceback if it is a failure."""
    text = " ".join(str(error).split())
    if isinstance(error, Undefined):
        return Reading.missing("undefined", text), ""
    reason = text if isinstance(error, NlbenchError) else f"{type(error).__name__}: {text}"
    return Reading.missing("failed", reason), traceback.format_exc()


def steps_of(probe: str, subject_size: int, settings: ProbeSettings) -> int:
    """How many steps a probe's pass will count."""
    if probe == "sites":
        return -(-subject_size // int(settings["batch"]))
    if settings["paths"] == "closed":
        return int(settings["number"]) * int(settings["anchors"])
    return int(settings["number"])


def look(
    subject: Subject,
    measures: Sequence[tuple[type[Measure], Mapping[str, OptionValue]]],
    settings: ProbeSettings,
    *,
    device: torch.device,
    step: Step = lambda: None,
) -> list[Outcome]:
    """Run one probe's pass over a subject and collect the readings of its measures.

    Parameters
    ----------
    subject : Subject
    measures : sequence of (Measure class, options)
        All of one probe.
    settings : mapping
        The probe's options.
    device : torch.device
    step : callable
        Called after each batch or segment.

    Returns
    -------
    list of Outcome
        One a measure, in their order. A measure that raises is ``failed``, or
        ``undefined`` if it raises `nlbench.Undefined`; so are all of them if the probe
        itself can't look.
    """
    feeds = [_Feed(measure, options) for measure, options in measures]
    shown: dict[str, Any] = {}
    failure: tuple[Reading, str] | None = None
    try:
        _PASSES[measures[0][0].probe](subject, feeds, settings, device, step, shown)
    except (Exception, SystemExit) as error:
        # The model's own forward can raise anything; every measure of the pass is told.
        failure = _reading_of(error)
    outcomes = []
    for feed in feeds:
        if failure is None or feed.failure is not None:
            reading = _annotated(feed.finish(), shown)
            trace = feed.traceback
        else:
            reading, trace = failure
        outcomes.append(Outcome(reading, feed.seconds, trace, shown))
    return outcomes


def _look_at_sites(
    subject: Subject,
    feeds: Sequence[_Feed],
    settings: ProbeSettings,
    device: torch.device,
    step: Step,
    shown: dict[str, Any],
) -> None:
    sites: dict[str, Site] = {}

    def on_look(look: SiteLook) -> None:
        sites.setdefault(look.place, look.site)
        for feed in feeds:
            feed.update(look)

    def batches() -> Iterator[Tensor]:
        # Of nearly equal size: a last batch of a few samples would weigh as much as a full one.
        parts = steps_of("sites", len(subject.inputs), settings)
        for batch in torch.tensor_split(subject.inputs, parts):
            yield batch.to(device)
            step()

    shown["samples"] = look_at_sites(
        subject.model, batches(), on_look, reduction=str(settings["reduction"])
    )
    shown["sites"] = len(sites)
    remarks = {name: remark_on_channels([site]) for name, site in sites.items() if site.assumed}
    if remarks and settings["reduction"] == "spatial":
        shown["remarks"] = remarks
    if not sites:
        raise Undefined("the model calls no activation function that is known as one")


def _look_along_lines(
    subject: Subject,
    feeds: Sequence[_Feed],
    settings: ProbeSettings,
    device: torch.device,
    step: Step,
    shown: dict[str, Any],
) -> None:
    paths = _paths(subject, settings)
    shown["segments"] = paths.shape[0] * (paths.shape[1] - 1)
    shown["paths_hash"] = tensor_hash(paths)
    for look in look_along(subject.model, paths.to(device)):
        for feed in feeds:
            feed.update(look)
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


_PASSES: Mapping[str, Callable[..., None]] = {
    "sites": _look_at_sites,
    "lines": _look_along_lines,
}
