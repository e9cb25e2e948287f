"""Measure a subject in this process: load it, run each probe once and yield the records."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, RequestError, enumerate_names, error_text
from nlbench.introspection.memory import CostMeter, FeasibleSizes, release_freed_memory
from nlbench.introspection.model_state import changed_parameters, parameter_checksums
from nlbench.introspection.precision import exact_arithmetic
from nlbench.introspection.process_state import foreign_changes, restored_process_state
from nlbench.introspection.random_state import RandomStream, preserve_rng_state
from nlbench.introspection.threads import torch_threads
from nlbench.measure import Measure, Result
from nlbench.measure.contract import load_measure
from nlbench.plan import Cell, SubjectPlan
from nlbench.probes import Resources
from nlbench.progress import ProgressMonitor
from nlbench.signals import raise_interruption
from nlbench.store.manifest import now
from nlbench.store.record import (
    Record,
    RecordedMachine,
    RecordedMeasure,
    changed_subject,
    reading_problem,
)
from nlbench.subjects.load import load_subject
from nlbench.subjects.subject import Subject

from .machine import describe_machine
from .probe_pass import Pass, append_remarks
from .work_units import Event, Unit, group_cells


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
        self._describe_machine = cache(describe_machine)
        self._feasible_sizes: FeasibleSizes = WeakKeyDictionary()
        self._imported: set[tuple[str, str]] = set()
        self._foreign_changes = foreign_changes()
        self._has_begun = False

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
            spec = plan.spec
            if (subject.facts.samples or math.inf) < (spec.samples or 0):
                monitor.warn(
                    f"{spec.samples} samples of {spec.data} were requested; its {spec.split} split "
                    f"has only {subject.facts.samples}, all of which are measured"
                )
        except BaseException as error:
            raise_interruption(error)
            # A model or dataset plugin may raise any exception, which affects only this subject.
            reason = error_text(error)
            trace = traceback.format_exc()
            if not isinstance(error, NlbenchError):
                reason = f"{plan.spec.model} on {plan.spec.data}: {reason}"
        else:
            reason = ""
        if reason:
            yield {"unloadable": reason}
            yield from replace(unit, cells=tuple(cells)).missing_records(reason, trace)
            return

        def reload() -> Subject:
            self._subject = None
            return self._load(unit, monitor)[0]

        yield from measure_subject(
            subject,
            cells,
            self._measures,
            machine,
            monitor,
            resources=Resources(torch.device(unit.device), unit.memory, self._feasible_sizes),
            load_seconds=self._load_seconds,
            is_continued=True,
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

    def _load(self, unit: Unit, monitor: ProgressMonitor) -> tuple[Subject, RecordedMachine]:
        """Load a unit's subject unless it is cached, and describe the machine."""
        remark = self._import_plugins(unit.cells[0].subject)
        with self._run_settings(unit):
            machine = self._describe_machine(torch.device(unit.device), unit.precision)
            monitor.loading()
            return self._cached_subject(unit, remark), machine

    def _cached_subject(self, unit: Unit, remark: str) -> Subject:
        plan = unit.cells[0].subject
        device = torch.device(unit.device)
        key = plan.key, unit.device, unit.precision
        subject = self._subject
        planned_at = None
        if subject is None or self._subject_key != key:
            # Release it before loading the next one, since both may not fit in memory.
            self._subject = subject = None
            if device.type == "cuda":
                gc.collect()
            release_freed_memory(device)
            start = time.perf_counter()
            stream = RandomStream(f"load {plan.key}", device)
            with (
                restored_process_state(is_continued=self._has_begun) as changes,
                preserve_rng_state(device),
                stream.active(),
            ):
                subject = load_subject(plan.spec, device)
            self._has_begun = True
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
            blank = replace(unit.cells[0].missing_record(unit.machine, "no result"), subject=facts)
            if problem := reading_problem(blank):
                names = f"{plan.spec.model} and {plan.spec.data}"
                raise PluginError(f"the facts of {names} can't be recorded: {problem}")
            self._load_seconds = round(time.perf_counter() - start, 6)
            planned_at = unit.planned_at
        problem = plan.changed_files(planned_at) if planned_at is not None else ""
        problem = problem or changed_subject(subject.facts, unit.expected)
        if problem:
            raise RequestError(problem)
        self._subject = subject
        self._subject_key = key
        return subject


def measure_subject(
    subject: Subject,
    cells: Iterable[Cell],
    measures: Mapping[str, type[Measure]],
    machine: RecordedMachine,
    monitor: ProgressMonitor,
    *,
    resources: Resources | None = None,
    load_seconds: float = 0.0,
    is_continued: bool = False,
    pass_context: Callable[[], contextlib.AbstractContextManager[None]] = exact_arithmetic,
    remark: str = "",
    reload: Callable[[], Subject] | None = None,
) -> Iterator[Record]:
    """Observe a subject with each probe that its cells require, and yield the record of each cell.

    `is_continued` is that of `restored_process_state` in the first pass. `pass_context` surrounds
    each pass, for example to set the precision. `remark` is appended to the reason of each result.
    `reload` is called after a pass that changed the model's parameters; without it, the results of
    all later passes are also undefined.
    """
    facts = subject.facts
    device = torch.device(machine.device)
    resources = resources or Resources(device)
    checksums = parameter_checksums(subject.model)
    for group in group_cells(cells, lambda cell: cell.probe.name):
        probe = group[0].probe
        step = f"{facts.model}: {', '.join(cell.measure.name for cell in group)}"
        monitor.observing(probe.name)
        stream = RandomStream(f"pass {facts.key or ''} {probe.name}", device)
        with (
            pass_context(),
            restored_process_state(is_continued=is_continued) as changes,
            preserve_rng_state(device),
            stream.active(),
        ):
            is_continued = True
            # Created here, so that waiting for a measurement in another thread costs nothing.
            meter = CostMeter(device)
            outcomes = Pass(
                subject,
                probe.name,
                probe.options,
                resources,
                partial(monitor.step, step),
                monitor,
                changes,
                group[0].measure.errors == "groups",
            ).observe([(measures[c.measure.name], c.measure.options, c.stream) for c in group])
        costs = {**meter.read(), "load_seconds": load_seconds}
        dtype = _dtype(subject.model)
        problem = _changed_weights(changed_parameters(subject.model, checksums))
        if problem and reload is not None:
            subject = reload()
        remarks = [remark, changes.restored("the pass"), changes.left()]
        for outcome, cell in zip(outcomes, group, strict=True):
            result = outcome.result
            if problem and result.status == "ok":
                result = Result.missing("undefined", problem)
            record = Record(
                key=cell.key,
                subject=facts,
                measure=cell.measure,
                probe=replace(probe, facts=outcome.facts),
                machine=replace(machine, dtype=dtype),
                result=append_remarks(result, *remarks),
                seconds=round(outcome.seconds, 6),
                finished=now(),
                traceback=outcome.traceback,
                costs=costs,
            )
            if unreadable := reading_problem(record):
                result = Result.missing("failed", f"the result can't be recorded: {unreadable}")
                record = replace(record, probe=probe, result=result)
            yield record


def _changed_weights(names: Sequence[str]) -> str:
    """Return the reason why a model has no result, or an empty string if no parameter changed."""
    if not names:
        return ""
    return (
        f"the model changes its own weights when it is run ({enumerate_names(names, 1)}), so its "
        "numbers would depend on how often it is run"
    )


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
