"""Measure units of work in this process: load the subject, observe it and yield its records."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from nlbench import registry
from nlbench.cells import SubjectPlan
from nlbench.errors import NlbenchError, PluginError, RequestError, error_text
from nlbench.introspection.memory import FeasibleSizes, release_freed_memory
from nlbench.introspection.precision import exact_arithmetic
from nlbench.introspection.process_state import foreign_changes, restored_process_state
from nlbench.introspection.random_state import RandomStream, preserve_numpy_state
from nlbench.introspection.threads import torch_threads
from nlbench.measure import Measure
from nlbench.plugin_loading import load_measure
from nlbench.probes import Resources
from nlbench.progress import ProgressMonitor
from nlbench.serialization.fields import from_plain, to_plain
from nlbench.serialization.files import parse_json
from nlbench.signals import raise_interruption
from nlbench.store.consistency import changed_subject
from nlbench.store.record import Record, RecordedMeasure
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.subject import Subject

from .machine import Machine
from .subject_passes import records_of
from .work_units import Event, Unit


class UnitRunner:
    """Measures units one at a time.

    The last subject and the batch sizes known to fit in memory are kept for the next unit.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._measures: dict[str, type[Measure]] = {}
        self._subject: Subject | None = None
        self._subject_key: tuple[str, ...] = ()
        self._load_seconds = 0.0
        self._load_remark = ""
        self._machines: dict[tuple[str, str], Machine] = {}
        self._feasible_sizes: FeasibleSizes = WeakKeyDictionary()
        self._imported: set[tuple[str, str]] = set()
        self._foreign_changes = foreign_changes()

    @property
    def process_is_changed(self) -> bool:
        """True if a subject changed more than settings, so that no other should follow it here."""
        return foreign_changes() > self._foreign_changes

    def measure(self, unit: Unit, monitor: ProgressMonitor) -> Iterator[Record | Event]:
        """Yield a record for each cell, after an event if the subject can't be loaded.

        Process-wide settings are restored before each yield.
        """
        plan = unit.cells[0].subject
        cells = []
        for cell in unit.cells:
            problem = self._problem(cell.measure)
            if problem:
                yield cell.missing_record(unit.machine, problem)
            else:
                cells.append(cell)
        if not cells:
            return
        try:
            subject, machine = self._load(unit, monitor)
            _warn_of_fewer_samples(plan.spec, subject.facts.samples, monitor)
        except BaseException as error:
            raise_interruption(error)
            # A model or dataset plugin may raise any exception, which affects only this subject.
            reason, trace = _load_error(error, plan), traceback.format_exc()
        else:
            reason = ""
        if reason:
            yield {"unloadable": reason}
            yield from replace(unit, cells=tuple(cells)).missing_records(reason, trace)
            return

        def reload() -> Subject:
            self._subject = None
            return self._load(unit, monitor)[0]

        yield from records_of(
            subject,
            cells,
            self._measures,
            machine,
            monitor,
            resources=Resources(machine.device, unit.memory, self._feasible_sizes),
            load_seconds=self._load_seconds,
            pass_context=lambda: self._run_settings(unit),
            remark=self._load_remark,
            reload=reload,
        )

    @contextlib.contextmanager
    def _run_settings(self, unit: Unit) -> Iterator[None]:
        """Set the run's precision and number of threads."""
        device = torch.device(unit.device)
        threads = torch_threads(self._threads) if self._threads else contextlib.nullcontext()
        with threads, exact_arithmetic(unit.precision, device.type):
            yield

    def _machine(self, unit: Unit) -> Machine:
        key = unit.device, unit.precision
        if key not in self._machines:
            self._machines[key] = Machine.at(torch.device(unit.device), unit.precision)
        return self._machines[key]

    def _problem(self, spec: RecordedMeasure) -> str:
        """Return the reason why a planned measure is not available here, or an empty string."""
        try:
            measure = self._measures.get(spec.name)
            if measure is None:
                with restored_process_state():
                    measure = self._measures[spec.name] = load_measure(spec.name)
        except NlbenchError as error:
            return str(error)
        if measure.version != spec.version:
            return (
                f"the worker has version {measure.version} of {spec.name}, "
                f"the plan expects {spec.version}"
            )
        return ""

    def _import_plugins(self, plan: SubjectPlan) -> str:
        """Import plugins before loading, so that no cell is charged for the import time.

        Return a remark on what the imports changed.
        """
        remarks = []
        for plugin in (("models", plan.spec.model), ("datasets", plan.spec.data)):
            if plugin not in self._imported:
                self._imported.add(plugin)
                # `load_subject` will raise the same error.
                with restored_process_state() as changes, contextlib.suppress(NlbenchError):
                    registry.load(*plugin)
                remarks.append(changes.restored(f"importing {plugin[1]}"))
        return "; ".join(filter(None, remarks))

    def _load(self, unit: Unit, monitor: ProgressMonitor) -> tuple[Subject, Machine]:
        """Load a unit's subject unless it is cached, and describe the machine."""
        remark = self._import_plugins(unit.cells[0].subject)
        with self._run_settings(unit):
            machine = self._machine(unit)
            monitor.loading()
            return self._cached_subject(unit, machine, remark), machine

    def _cached_subject(self, unit: Unit, machine: Machine, remark: str) -> Subject:
        plan = unit.cells[0].subject
        key = plan.key, unit.device, unit.precision
        subject, planned_at = self._subject, None
        if subject is None or self._subject_key != key:
            # Release it before loading the next one, since both may not fit in memory.
            self._subject = subject = None
            if machine.device.type == "cuda":
                gc.collect()
            release_freed_memory(machine.device)
            start = time.perf_counter()
            stream = RandomStream(f"load {plan.key}", machine.device)
            with restored_process_state() as changes, preserve_numpy_state(), stream.active():
                subject = load_subject(plan.spec, machine.device)
            self._load_remark = "; ".join(filter(None, (remark, changes.restored("loading"))))
            if unit.precision == "float64":
                subject = subject.converted(
                    subject.model.double(),
                    lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
                )
            facts = replace(subject.facts, key=plan.key)
            if plan.sources:
                versions = dict(plan.sources)
                facts = replace(facts, sources=versions, settings_key=plan.settings_key)
            subject = replace(subject, facts=facts)
            _check_recordable(plan, subject.facts)
            self._load_seconds = round(time.perf_counter() - start, 6)
            planned_at = unit.planned_at
        problem = plan.changed_files(planned_at) if planned_at is not None else ""
        problem = problem or changed_subject(subject.facts, unit.expected)
        if problem:
            raise RequestError(problem)
        self._subject, self._subject_key = subject, key
        return subject


def _warn_of_fewer_samples(
    spec: SubjectSpec, available: int | None, monitor: ProgressMonitor
) -> None:
    if spec.samples is not None and available is not None and available < spec.samples:
        monitor.warn(
            f"{spec.samples} samples of {spec.data} were requested; its {spec.split} split has "
            f"only {available}, all of which are measured"
        )


def _check_recordable(plan: SubjectPlan, facts: SubjectFacts) -> None:
    """Raise if a subject's facts can't be written to JSON and read back."""
    try:
        text = json.dumps(to_plain(facts), allow_nan=False, default=os.fspath)
        from_plain(SubjectFacts, parse_json(text, "it"), "subject")
    except (TypeError, ValueError, RecursionError) as error:
        spec = plan.spec
        raise PluginError(
            f"the facts of {spec.model} and {spec.data} can't be recorded: {error}"
        ) from error


def _load_error(error: BaseException, plan: SubjectPlan) -> str:
    message, spec = error_text(error), plan.spec
    return message if isinstance(error, NlbenchError) else f"{spec.model} on {spec.data}: {message}"
