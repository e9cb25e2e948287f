"""Measure the cells of one subject, here and now: load it once, look at it, read."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from nlbench import registry
from nlbench.constancy import check_unchanged, difference
from nlbench.costs import Meter
from nlbench.environment import Machine, exact_arithmetic
from nlbench.errors import NlbenchError, PluginError, RequestError
from nlbench.looking import Unwatched, Watch, look
from nlbench.manifest import measure_facts, now
from nlbench.measure import Measure, Reading
from nlbench.passes import Means
from nlbench.plan import Bench, Cell, Target, Wanted, checked_measure
from nlbench.records import Record
from nlbench.streams import Stream, untouched
from nlbench.subject import Subject, load_subject
from nlbench.units import Missed, Unit

if TYPE_CHECKING:
    from nlbench.runner import Progress

__all__ = ["Host", "UnitWatch", "Unwatching", "missing_record", "records_of"]


class UnitWatch(Watch, Protocol):
    """Told what a unit is at, beside which measure is at work."""

    def loading(self) -> None:
        """The subject is being loaded."""

    def passing(self, probe: str) -> None:
        """The pass of a probe begins."""


class Unwatching(Unwatched):
    """A watch that nobody looks at."""

    def loading(self) -> None:
        """Do nothing."""

    def passing(self, probe: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Loaded:
    key: tuple[str, ...]
    subject: Subject
    seconds: float


class Host:
    """Measures one unit after the other, and keeps what the next one can use.

    That is the subject loaded last, and the batch sizes that were found to fit.

    Parameters
    ----------
    measures : mapping of str to Measure class, optional
        Those already at hand; others are loaded by name.
    """

    def __init__(self, measures: Mapping[str, type[Measure]] | None = None) -> None:
        self._measures = dict(measures or {})
        self._loaded: _Loaded | None = None
        self._machines: dict[tuple[str, str], Machine] = {}
        self._found: dict[str, dict[str, int]] = {}
        self._imported: set[tuple[str, str]] = set()

    def measure(
        self, unit: Unit, progress: Progress, watch: UnitWatch | None = None
    ) -> Iterator[Record | Missed]:
        """Yield the record of each cell, or why there is none."""
        watch = watch or Unwatching()
        machine = self._machine(unit)
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
        self._import_plugins(target)
        with exact_arithmetic(unit.precision, machine.device.type):
            watch.loading()
            try:
                loaded = self._load(target, unit, machine)
                problem = difference(loaded.subject.facts, unit.expected)
                if problem:
                    raise RequestError(problem)
            except (Exception, SystemExit) as error:
                # Whatever a model's or dataset's plugin raises concerns this subject only.
                yield Missed(tuple(cells), _why(error, target), traceback.format_exc(), True)
                return
            keys = {cell.wanted.name: cell.key for cell in cells}
            found = self._found.setdefault(unit.device, {})
            yield from records_of(
                loaded.subject,
                self._bench(cells),
                machine,
                progress,
                lambda measure: keys[measure.name],
                means=Means(machine.device, unit.memory, found),
                watch=watch,
                load_seconds=loaded.seconds,
            )

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
                measure = checked_measure(registry.load("measures", wanted.name), wanted.name)
                self._measures[wanted.name] = measure
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

    def _bench(self, cells: Sequence[Cell]) -> Bench:
        return Bench(
            tuple((self._measures[c.wanted.name], c.wanted.options) for c in cells),
            {cell.wanted.probe: cell.wanted.settings for cell in cells},
        )

    def _load(self, target: Target, unit: Unit, machine: Machine) -> _Loaded:
        key = target.key, unit.device, unit.precision
        if self._loaded is None or self._loaded.key != key:
            # The old one goes first: two may not fit.
            self._loaded = None
            begin = time.perf_counter()
            stream = Stream(f"load {target.key}", machine.device)
            with untouched(), stream.drawn():
                subject = load_subject(target.spec, machine.device)
            if unit.precision == "float64":
                subject = _double(subject)
            check_unchanged(target, unit.planned_at)
            _check(target, subject.facts)
            subject.facts["key"] = target.key
            seconds = round(time.perf_counter() - begin, 6)
            self._loaded = _Loaded(key, subject, seconds)
        return self._loaded


def _double(subject: Subject) -> Subject:
    def convert(tensor: Tensor | None) -> Tensor | None:
        return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor

    inputs = convert(subject.inputs)
    assert inputs is not None
    return replace(
        subject, model=subject.model.double(), inputs=inputs, images=convert(subject.images)
    )


def _check(target: Target, facts: Mapping[str, Any]) -> None:
    """Refuse a subject of which no record can be written."""
    try:
        json.dumps(facts, allow_nan=False, default=os.fspath)
    except (TypeError, ValueError) as error:
        spec = target.spec
        raise PluginError(
            f"what {spec.model} and {spec.data} say of themselves can't be recorded: {error}"
        ) from error


def _why(error: BaseException, target: Target) -> str:
    reason = " ".join(str(error).split())
    if isinstance(error, NlbenchError):
        return reason
    spec = target.spec
    return f"{spec.model} on {spec.data}: {type(error).__name__}: {reason}"


def records_of(
    subject: Subject,
    bench: Bench,
    machine: Machine,
    progress: Progress,
    key_of: Callable[[type[Measure]], str],
    *,
    means: Means | None = None,
    watch: UnitWatch | None = None,
    load_seconds: float = 0.0,
) -> Iterator[Record]:
    """Look at a subject through each probe that the measures need; yield a record a measure.

    Parameters
    ----------
    subject : Subject
    bench : Bench
    machine : Machine
    progress : Progress
    key_of : callable
        From a measure to its cell's key.
    means : Means, optional
    watch : UnitWatch, optional
    load_seconds : float
        What loading the subject took.
    """
    facts = subject.facts
    means = means or Means(machine.device)
    watch = watch or Unwatching()
    for probe, entries in bench.by_probe().items():
        settings = bench.probes[probe]
        what = f"{facts['model']}: {', '.join(measure.name for measure, _ in entries)}"
        keys = [key_of(measure) for measure, _ in entries]
        watch.passing(probe)
        meter = Meter(machine.device)
        stream = Stream(f"pass {facts.get('key', '')} {probe}", machine.device)
        with untouched(), stream.drawn():
            outcomes = look(
                subject,
                entries,
                settings,
                means=means,
                step=partial(progress.step, what),
                streams=keys,
                watch=watch,
            )
        costs = {**meter.read(), "load_seconds": load_seconds}
        for outcome, (measure, options), key in zip(outcomes, entries, keys, strict=True):
            yield Record(
                key=key,
                subject=facts,
                measure=measure_facts(measure, options),
                probe={"name": probe, "options": dict(settings), **outcome.shown},
                machine=_machine_facts(machine, _dtype(subject.model)),
                reading=outcome.reading,
                seconds=round(outcome.seconds, 6),
                finished=now(),
                traceback=outcome.traceback,
                costs=costs,
            )


def missing_record(cell: Cell, machine: Machine, reason: str, trace: str = "") -> Record:
    """Record of a cell that could not be measured."""
    spec, wanted = cell.target.spec, cell.wanted
    try:
        measure = checked_measure(registry.load("measures", wanted.name), wanted.name)
        facts = measure_facts(measure, wanted.options)
    except NlbenchError:
        facts = {
            "name": wanted.name,
            "probe": wanted.probe,
            "version": wanted.version,
            "options": dict(wanted.options),
        }
    return Record(
        key=cell.key,
        subject={
            "key": cell.target.key,
            "model": spec.model,
            "weights": cell.target.label,
            "data": spec.data,
            "seed": spec.seed,
        },
        measure=facts,
        probe={"name": wanted.probe, "options": dict(wanted.settings)},
        machine=_machine_facts(machine, ""),
        reading=Reading.missing("failed", reason),
        finished=now(),
        traceback=trace,
    )


def _machine_facts(machine: Machine, dtype: str) -> dict[str, Any]:
    """What a record says of where it was made."""
    return {
        "device": str(machine.device),
        "dtype": dtype,
        "environment": dict(machine.environment),
    }


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
