"""Measure the cells of one subject, here and now: load it, observe it, take the results."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, RequestError, Undefined, error_text
from nlbench.introspection.background import rng_restored
from nlbench.introspection.memory import Found, give_back, is_out_of_memory
from nlbench.introspection.model_state import cpu_copy
from nlbench.introspection.precision import exact_arithmetic, without_autocast
from nlbench.measure import Measure, Result, Status
from nlbench.measure.contract import sound_result
from nlbench.options import OptionValue
from nlbench.plan import (
    Cell,
    ResolvedSettings,
    Target,
    Wanted,
    load_measure,
    load_probe,
    what_changed,
)
from nlbench.probes import OnStep, Probe, ProbeOptions, Resources
from nlbench.progress import Monitor
from nlbench.serialization.fields import read, written
from nlbench.serialization.files import parse_json
from nlbench.store.manifest import now
from nlbench.store.record import (
    ProbeFacts,
    Record,
    RecordedMachine,
    RecordedMeasure,
    RecordedProbe,
    readable,
)
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.load import SubjectSpec, load_subject
from nlbench.subjects.samples import DrawnBatches
from nlbench.subjects.subject import Subject

from .numerics import (
    Machine,
    Stream,
    some_threads,
    untouched,
    wait_for,
)
from .work_units import Missed, Unit

__all__ = [
    "Meter",
    "Outcome",
    "UnitRunner",
    "failure_of",
    "missing_record",
    "observe",
    "records_of",
]


@dataclass
class Outcome:
    """What one measure came to on one subject.

    Parameters
    ----------
    result : Result
    seconds : float
        The measure's own time, with that of what others have computed for it: what it takes alone.
    traceback : str
        Of a failure.
    shown : dict
        What the probe looked at, such as the number of segments.
    is_out_of_memory : bool
        Whether it failed for want of memory.
    """

    result: Result
    seconds: float
    traceback: str
    shown: dict[str, Any]
    is_out_of_memory: bool = False


class _Feed:
    """One measure while a probe's pass runs: its time, and its failure if there is one."""

    def __init__(
        self,
        measure: type[Measure],
        options: Mapping[str, OptionValue],
        stream: Stream,
        monitor: Monitor,
        device: torch.device,
    ) -> None:
        self.seconds = 0.0
        self._name, self._stream, self._monitor = measure.name, stream, monitor
        self._device = device
        self.failure: Result | None = None
        self._failed_at: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.is_out_of_memory = False
        self.traceback = ""
        self.unreduced = measure.unreduced
        self.independent_sites = measure.independent_sites
        # Within a package measures may share what they compute alike.
        self.package = measure.__module__.partition(".")[0]
        self._measure: Measure
        self._guard(lambda: self._begin(measure, options))

    def update(self, observation: object, order: tuple[int, ...] | None = None) -> None:
        """Give the measure one observation, unless it has failed at an earlier one.

        Of several that fail in threads the first in order counts, whichever fails sooner.
        """
        if self.failure is not None and (order is None or order >= self._failed_at):
            return
        self._guard(lambda: self._measure.update(observation), order)
        with self._lock:
            self.seconds += getattr(observation, "borrowed_seconds", 0.0)

    def compute(self) -> Result:
        """Take the measure's result, or say why there is none."""
        result = self.failure or self._guard(
            lambda: sound_result(self._measure.compute(), self._bounds)
        )
        return self.failure or result

    def _begin(self, measure: type[Measure], options: Mapping[str, OptionValue]) -> None:
        self._bounds = measure.bounds_of(options)
        self._measure = measure(**options)
        self._measure.reset()

    def _guard(self, call: Callable[[], Any], order: tuple[int, ...] | None = None) -> Any:
        # What the network has still to do on a GPU is not the measure's.
        wait_for(self._device)
        # A generator is the process's: of threads that share measures none may exchange it. And
        # by a clock a thread's time holds what it waits for the others.
        is_alone = order is None
        clock = time.perf_counter if is_alone else time.thread_time
        stream = self._stream.drawn() if is_alone else contextlib.nullcontext()
        begin = clock()
        self._monitor.enter(self._name)
        try:
            try:
                with stream, without_autocast():
                    found = call()
                wait_for(self._device)
                return found
            finally:
                self._monitor.leave()
        except (Exception, SystemExit) as error:
            # A plugin may raise anything. It is recorded, and concerns no other measure.
            failure, trace = failure_of(error)
            with self._lock:
                if self.failure is None or (order is not None and order < self._failed_at):
                    self._failed_at = order or ()
                    self.failure, self.traceback = failure, trace
                    self.is_out_of_memory = is_out_of_memory(error)
            return None
        finally:
            with self._lock:
                self.seconds += clock() - begin


def _annotated(result: Result, shown: Mapping[str, Any]) -> Result:
    """Add what the probe knows: how many samples or segments, and its remarks."""
    n, remarks = shown.get("samples", shown.get("segments", 0)), shown.get("remarks", {})
    values = tuple(
        replace(value, n=value.n or n, reason=_joined(value.reason, remarks.get(value.place, "")))
        for value in result.values
    )
    reason = _joined(result.reason, shown.get("remark", ""))
    return replace(result, values=values, n=result.n or n, reason=reason)


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))


def failure_of(error: BaseException) -> tuple[Result, str]:
    """Turn an exception into the result that says so, with its traceback if it is a failure."""
    if isinstance(error, Undefined):
        return Result.missing("undefined", str(error)), ""
    return Result.missing("failed", error_text(error)), traceback.format_exc()


def observe(
    subject: Subject,
    measures: Sequence[tuple[type[Measure], Mapping[str, OptionValue]]],
    settings: ProbeOptions,
    *,
    resources: Resources,
    step: OnStep = lambda: None,
    streams: Sequence[str] = (),
    monitor: Monitor | None = None,
) -> list[Outcome]:
    """Run one probe's pass over a subject and collect the results of its measures.

    Parameters
    ----------
    subject : Subject
    measures : sequence of (Measure class, options)
        All of one probe.
    settings : mapping
        The probe's options.
    resources : Resources
        Device and memory.
    step : callable
        Called after each batch or segment.
    streams : sequence of str
        Name of each measure's random stream; by default the global generators are left as
        they are.
    monitor : Monitor, optional

    Returns
    -------
    list of Outcome
        One a measure, in their order. A measure that raises is ``failed``, or
        ``undefined`` if it raises `nlbench.Undefined`; so are all of them if the probe
        itself fails. One for which memory has run out is observed once more by itself, and
        where that does not do, of a GPU, on the CPU.
    """
    named = [*zip(measures, streams or [""] * len(measures), strict=True)]
    monitor = monitor or Monitor()
    with rng_restored(resources.device):
        outcomes = _observe_once(subject, named, settings, resources, step, monitor)
    if subject.stream is not None and not isinstance(subject.stream, DrawnBatches):
        return outcomes
    for number, entry in enumerate(named):
        # In turns: beside others there may be too little room for what there is enough for alone.
        for device in dict.fromkeys([resources.device, torch.device("cpu")]):
            if not outcomes[number].is_out_of_memory:
                break
            outcomes[number] = _observed_on(device, subject, entry, settings, resources, monitor)
    return outcomes


Entry = tuple[tuple[type[Measure], Mapping[str, OptionValue]], str]
"""A measure with its options, and the name of its random stream."""


def _observed_on(
    device: torch.device,
    subject: Subject,
    entry: Entry,
    settings: ProbeOptions,
    resources: Resources,
    monitor: Monitor,
) -> Outcome:
    """Observe a subject once more, for one measure, on its device or on the CPU."""
    give_back(resources.device)
    remark = ""
    if device != resources.device:
        try:
            subject = _converted(subject, cpu_copy(subject.model), Tensor.cpu)
            remark = f"computed on the CPU: {resources.device} is full"
        except RequestError as error:
            result, trace = failure_of(error)
            return Outcome(result, 0.0, trace, {})
    # In turns: at once several sites need more than one.
    resources = replace(resources, device=device, threads=1)
    with rng_restored(device):
        (outcome,) = _observe_once(subject, [entry], settings, resources, lambda: None, monitor)
    outcome.result = _annotated(outcome.result, {"remark": remark})
    return outcome


def _converted(subject: Subject, model: nn.Module, convert: Callable[[Tensor], Tensor]) -> Subject:
    """Give a subject with another model and its tensors converted."""
    names = ("inputs", "labels", "images")
    tensors = {name: getattr(subject, name) for name in names}
    found: dict[str, Any] = {n: t if t is None else convert(t) for n, t in tensors.items()}
    return replace(subject, model=model, **found)


def _observe_once(
    subject: Subject,
    measures: Sequence[Entry],
    settings: ProbeOptions,
    resources: Resources,
    step: OnStep,
    monitor: Monitor,
) -> list[Outcome]:
    probe = load_probe(measures[0][0][0].probe)
    device = torch.device("cpu") if probe.shows_on_cpu else resources.device
    feeds = [
        _Feed(measure, options, Stream(stream, resources.device), monitor, device)
        for (measure, options), stream in measures
    ]
    shown: dict[str, Any] = {}
    failure: tuple[Result, str] | None = None
    is_short = False
    try:
        probe.observe(
            subject.model,
            subject,
            settings,
            feeds,
            resources=resources,
            step=step,
            facts=shown,
        )
    except (Exception, SystemExit) as error:
        # The model's own forward can raise anything; every measure of the pass is told.
        failure, is_short = failure_of(error), is_out_of_memory(error)
    outcomes = []
    for feed in feeds:
        if failure is None or feed.failure is not None:
            result = _annotated(feed.compute(), shown)
            trace, lacked = feed.traceback, feed.is_out_of_memory
        else:
            (result, trace), lacked = failure, is_short
        outcomes.append(Outcome(result, feed.seconds, trace, shown, lacked))
    return outcomes


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Measures from its making on.

    Parameters
    ----------
    device : torch.device

    Examples
    --------
    >>> costs = Meter(torch.device("cpu")).read()
    >>> sorted(costs)
    ['peak_memory', 'wall_seconds']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        wait_for(device)
        self._begin = time.perf_counter()
        with contextlib.suppress(OSError):
            # 5 resets the peak (see proc(5)); elsewhere the peak is that of the process so far.
            _RESET.write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """Seconds since the making, and the peaks since then, in bytes."""
        wait_for(self._device)
        costs: dict[str, float] = {
            "wall_seconds": round(time.perf_counter() - self._begin, 6),
            "peak_memory": _peak(),
        }
        if self._device.type == "cuda":
            costs["peak_device_memory"] = torch.cuda.max_memory_allocated(self._device)
        return costs


def _peak() -> int:
    try:
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


@dataclass(frozen=True)
class _Loaded:
    key: tuple[str, ...]
    subject: Subject
    seconds: float


class UnitRunner:
    """Measures one unit after the other, and keeps what the next one can use.

    That is the subject loaded last, and the batch sizes that were found to fit.

    Parameters
    ----------
    threads : int, optional
        PyTorch's; by default those that it has.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._measures: dict[str, type[Measure]] = {}
        self._loaded: _Loaded | None = None
        self._machines: dict[tuple[str, str], Machine] = {}
        self._found: Found = WeakKeyDictionary()
        self._imported: set[tuple[str, str]] = set()

    def measure(self, unit: Unit, monitor: Monitor) -> Iterator[Record | Missed]:
        """Yield the record of each cell, or why there is none.

        Nothing of this process is left changed while the caller has the word.
        """
        target = unit.cells[0].target
        cells = []
        for cell in unit.cells:
            problem = self._problem(cell.wanted)
            if problem:
                yield Missed((cell,), problem)
            else:
                cells.append(cell)
        if not cells:
            return
        missed: Missed | None = None
        try:
            loaded, machine = self._load(unit, monitor)
            _say_how_many(target.spec, loaded.subject.facts.samples, monitor)
        except (Exception, SystemExit) as error:
            # Whatever a model's or dataset's plugin raises concerns this subject only.
            trace = traceback.format_exc()
            missed = Missed(tuple(cells), _why(error, target), trace, loading=True)
        if missed is not None:
            yield missed
            return
        keys = {cell.wanted.name: cell.key for cell in cells}
        records = records_of(
            loaded.subject,
            self._resolved(cells),
            machine,
            monitor,
            lambda measure: keys[measure.name],
            resources=Resources(machine.device, unit.memory, self._found),
            load_seconds=loaded.seconds,
            conditions=lambda: self._as_asked(unit),
        )
        yield from records

    def forecast(self, unit: Unit, monitor: Monitor) -> dict[str, str]:
        """What observing a unit's subject will cost, by probe, where it can tell beforehand."""
        asked = {cell.wanted.probe: cell.wanted.settings for cell in unit.cells}
        probes = [load_probe(name) for name in asked]
        able = [probe for probe in probes if type(probe).forecast is not Probe.forecast]
        if not able:
            return {}
        target, found = unit.cells[0].target, {}
        try:
            loaded, machine = self._load(unit, monitor)
        except (Exception, SystemExit) as error:
            return {probe.name: f"can't be loaded: {_why(error, target)}" for probe in able}
        subject, resources = loaded.subject, Resources(machine.device, unit.memory, self._found)
        for probe in able:
            monitor.observing(probe.name)
            stream = Stream(f"pass {target.key} {probe.name}", machine.device)
            try:
                with self._as_asked(unit), untouched(), stream.drawn():
                    settings = asked[probe.name]
                    said = probe.forecast(subject.model, subject, settings, resources=resources)
            except (Exception, SystemExit) as error:
                # The model's own forward can raise anything.
                result, _ = failure_of(error)
                said = f"{result.status}: {result.reason}"
            if said:
                found[probe.name] = said
        return found

    @contextlib.contextmanager
    def _as_asked(self, unit: Unit) -> Iterator[None]:
        """Have a run's precision and threads, for one load or one observation."""
        device = torch.device(unit.device)
        threads = some_threads(self._threads) if self._threads else contextlib.nullcontext()
        with threads, exact_arithmetic(unit.precision, device.type):
            yield

    def _machine(self, unit: Unit) -> Machine:
        key = unit.device, unit.precision
        if key not in self._machines:
            self._machines[key] = Machine.at(torch.device(unit.device), unit.precision)
        return self._machines[key]

    def _problem(self, wanted: Wanted) -> str:
        """Why a measure of the plan can't be had here; else nothing."""
        try:
            measure = self._measures.get(wanted.name)
            if measure is None:
                measure = self._measures[wanted.name] = load_measure(wanted.name)
        except NlbenchError as error:
            return str(error)
        if measure.version != wanted.version:
            return (
                f"{wanted.name} is of version {measure.version} where it was to be measured, "
                f"expected {wanted.version}"
            )
        return ""

    def _import_plugins(self, target: Target) -> None:
        """Import what loading will need: a process's first import is no cell's own time."""
        for plugin in (("models", target.spec.model), ("datasets", target.spec.data)):
            if plugin not in self._imported:
                self._imported.add(plugin)
                with contextlib.suppress(NlbenchError):  # loading will say so again
                    registry.load(*plugin)

    def _resolved(self, cells: Sequence[Cell]) -> ResolvedSettings:
        return ResolvedSettings(
            tuple((self._measures[c.wanted.name], c.wanted.options) for c in cells),
            {cell.wanted.probe: cell.wanted.settings for cell in cells},
        )

    def _load(self, unit: Unit, monitor: Monitor) -> tuple[_Loaded, Machine]:
        """Load a unit's subject as it is asked for, unless it is there."""
        target = unit.cells[0].target
        self._import_plugins(target)
        with self._as_asked(unit):
            machine = self._machine(unit)
            monitor.loading()
            return self._loaded_for(target, unit, machine), machine

    def _loaded_for(self, target: Target, unit: Unit, machine: Machine) -> _Loaded:
        key = target.key, unit.device, unit.precision
        loaded, planned_at = self._loaded, None
        if loaded is None or loaded.key != key:
            # The old one goes first: two may not fit, and its room is others' too.
            self._loaded = loaded = None
            if machine.device.type == "cuda":
                gc.collect()
                give_back(machine.device)
            begin = time.perf_counter()
            stream = Stream(f"load {target.key}", machine.device)
            with untouched(), stream.drawn():
                subject = load_subject(target.spec, machine.device)
            if unit.precision == "float64":
                subject = _converted(
                    subject,
                    subject.model.double(),
                    lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
                )
            subject = replace(subject, facts=replace(subject.facts, key=target.key))
            _check(target, subject.facts)
            seconds = round(time.perf_counter() - begin, 6)
            loaded, planned_at = _Loaded(key, subject, seconds), unit.planned_at
        problem = what_changed(target, loaded.subject.facts, unit.expected, planned_at)
        if problem:
            raise RequestError(problem)
        self._loaded = loaded
        return loaded


def _say_how_many(spec: SubjectSpec, there: int | None, monitor: Monitor) -> None:
    """Say that there are fewer samples than were asked for."""
    if spec.samples is not None and there is not None and there < spec.samples:
        monitor.warn(
            f"{spec.samples} samples of {spec.data} were asked for; its {spec.split} split has "
            f"{there}, which are all measured"
        )


def _check(target: Target, facts: SubjectFacts) -> None:
    """Refuse a subject of which no record can be written and read again."""
    try:
        text = json.dumps(written(facts), allow_nan=False, default=os.fspath)
        read(SubjectFacts, parse_json(text, "it"), "subject")
    except (TypeError, ValueError, RecursionError) as error:
        spec = target.spec
        raise PluginError(
            f"what {spec.model} and {spec.data} say of themselves can't be recorded: {error}"
        ) from error


def _why(error: BaseException, target: Target) -> str:
    said, spec = error_text(error), target.spec
    return said if isinstance(error, NlbenchError) else f"{spec.model} on {spec.data}: {said}"


def records_of(
    subject: Subject,
    resolved: ResolvedSettings,
    machine: Machine,
    monitor: Monitor,
    key_of: Callable[[type[Measure]], str],
    *,
    resources: Resources | None = None,
    load_seconds: float = 0.0,
    conditions: Callable[[], AbstractContextManager[None]] = exact_arithmetic,
) -> Iterator[Record]:
    """Observe a subject by each probe that the measures need; yield a record a measure.

    Parameters
    ----------
    subject : Subject
    resolved : ResolvedSettings
    machine : Machine
    monitor : Monitor
    key_of : callable
        From a measure to its cell's key.
    resources : Resources, optional
    load_seconds : float
        What loading the subject took.
    conditions : callable
        Gives what each observation is made in, such as a precision.
    """
    facts = subject.facts
    resources = resources or Resources(machine.device)
    for probe, entries in resolved.by_probe().items():
        settings = resolved.probes[probe]
        what = f"{facts.model}: {', '.join(measure.name for measure, _ in entries)}"
        keys = [key_of(measure) for measure, _ in entries]
        monitor.observing(probe)
        meter = Meter(machine.device)
        stream = Stream(f"pass {facts.key or ''} {probe}", machine.device)
        with conditions(), untouched(), stream.drawn():
            outcomes = observe(
                subject,
                entries,
                settings,
                resources=resources,
                step=partial(monitor.step, what),
                streams=keys,
                monitor=monitor,
            )
        costs = {**meter.read(), "load_seconds": load_seconds}
        for outcome, (measure, options), key in zip(outcomes, entries, keys, strict=True):
            record = Record(
                key=key,
                subject=facts,
                measure=RecordedMeasure.of(measure, options),
                probe=RecordedProbe(probe, settings, cast(ProbeFacts, outcome.shown)),
                machine=RecordedMachine(
                    str(machine.device), _dtype(subject.model), machine.environment
                ),
                result=outcome.result,
                seconds=round(outcome.seconds, 6),
                finished=now(),
                traceback=outcome.traceback,
                costs=costs,
            )
            yield readable(record)


def missing_record(
    cell: Cell,
    device: str,
    environment: Mapping[str, Any],
    reason: str,
    trace: str = "",
    status: Status = "failed",
) -> Record:
    """Record of a cell that was not measured."""
    spec, wanted = cell.target.spec, cell.wanted
    try:
        about = RecordedMeasure.of(load_measure(wanted.name), wanted.options)
    except NlbenchError:
        about = RecordedMeasure(
            name=wanted.name, probe=wanted.probe, version=wanted.version, options=wanted.options
        )
    return Record(
        key=cell.key,
        subject=SubjectFacts(
            model=spec.model,
            weights=cell.target.label,
            data=spec.data,
            seed=spec.seed,
            key=cell.target.key,
        ),
        measure=about,
        probe=RecordedProbe(wanted.probe, wanted.settings),
        machine=RecordedMachine(device, "", environment),
        result=Result.missing(status, reason),
        finished=now(),
        traceback=trace,
    )


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
