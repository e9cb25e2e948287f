"""Show a subject to measures through their probes: one pass a probe feeds them all."""

from __future__ import annotations

import importlib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any, Protocol, get_args

from nlbench.environment import without_autocast
from nlbench.errors import NlbenchError, NotFinite, PluginError, Undefined, nearest
from nlbench.measure import Measure, Reading, Status
from nlbench.options import OptionValue
from nlbench.passes import Means, ProbeSettings, Step
from nlbench.streams import Stream
from nlbench.subject import Subject

__all__ = ["Outcome", "Unwatched", "Watch", "failure_of", "look", "steps_of"]


class Watch(Protocol):
    """Told which measure is at work."""

    def enter(self, measure: str) -> None:
        """A measure begins to compute."""

    def leave(self) -> None:
        """It has stopped; raises if it took too long."""


class Unwatched:
    """A watch that nobody looks at."""

    def enter(self, measure: str) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


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

    def __init__(
        self,
        measure: type[Measure],
        options: Mapping[str, OptionValue],
        stream: Stream,
        watch: Watch,
    ) -> None:
        self.seconds = 0.0
        self._name, self._stream, self._watch = measure.name, stream, watch
        self.failure: Reading | None = None
        self.traceback = ""
        self.unreduced = measure.unreduced
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
        self._watch.enter(self._name)
        try:
            try:
                with self._stream.drawn(), without_autocast():
                    return call()
            finally:
                self._watch.leave()
        except (Exception, SystemExit) as error:
            # A plugin may raise anything. It is recorded, and concerns no other measure.
            self.failure, self.traceback = failure_of(error)
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


def failure_of(error: BaseException) -> tuple[Reading, str]:
    """Turn an exception into the reading that says so, with its traceback if it is a failure."""
    text = " ".join(str(error).split())
    if isinstance(error, Undefined):
        return Reading.missing("undefined", text), ""
    reason = text if isinstance(error, NlbenchError) else f"{type(error).__name__}: {text}"
    return Reading.missing("failed", reason), traceback.format_exc()


def look(
    subject: Subject,
    measures: Sequence[tuple[type[Measure], Mapping[str, OptionValue]]],
    settings: ProbeSettings,
    *,
    means: Means,
    step: Step = lambda: None,
    streams: Sequence[str] = (),
    watch: Watch | None = None,
) -> list[Outcome]:
    """Run one probe's pass over a subject and collect the readings of its measures.

    Parameters
    ----------
    subject : Subject
    measures : sequence of (Measure class, options)
        All of one probe.
    settings : mapping
        The probe's options.
    means : Means
        Device and memory.
    step : callable
        Called after each batch or segment.
    streams : sequence of str
        Name of each measure's random stream; by default the global generators are left as
        they are.
    watch : Watch, optional

    Returns
    -------
    list of Outcome
        One a measure, in their order. A measure that raises is ``failed``, or
        ``undefined`` if it raises `nlbench.Undefined`; so are all of them if the probe
        itself can't look.
    """
    watch = watch or Unwatched()
    feeds = [
        _Feed(measure, options, Stream(stream, means.device), watch)
        for (measure, options), stream in zip(
            measures, streams or [""] * len(measures), strict=True
        )
    ]
    shown: dict[str, Any] = {}
    failure: tuple[Reading, str] | None = None
    try:
        _pass_of(measures[0][0].probe).show(subject, feeds, settings, means, step, shown)
    except (Exception, SystemExit) as error:
        # The model's own forward can raise anything; every measure of the pass is told.
        failure = failure_of(error)
    outcomes = []
    for feed in feeds:
        if failure is None or feed.failure is not None:
            reading = _annotated(feed.finish(), shown)
            trace = feed.traceback
        else:
            reading, trace = failure
        outcomes.append(Outcome(reading, feed.seconds, trace, shown))
    return outcomes


def steps_of(probe: str, size: int, settings: ProbeSettings) -> int:
    """How many steps a probe's pass over that many samples will count."""
    steps: int = _pass_of(probe).steps(size, settings)
    return steps


def _pass_of(probe: str) -> ModuleType:
    return importlib.import_module(f"nlbench.passes.{probe}")
