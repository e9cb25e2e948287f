"""Run each probe on a subject once, and create the records of the subject's cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from nlbench.cells import Cell
from nlbench.errors import NlbenchError
from nlbench.introspection.model_state import changed_parameters, parameter_checksums
from nlbench.introspection.precision import exact_arithmetic
from nlbench.introspection.process_state import restored_process_state
from nlbench.introspection.random_state import RandomStream, preserve_numpy_state
from nlbench.measure import Measure, Result, Status
from nlbench.plugin_loading import load_measure
from nlbench.probes import Resources
from nlbench.progress import ProgressMonitor
from nlbench.settings import ResolvedSettings
from nlbench.store.manifest import now
from nlbench.store.record import (
    Record,
    RecordedMachine,
    RecordedMeasure,
    RecordedProbe,
    ensure_readable,
)
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.subject import Subject

from .cost_meter import CostMeter
from .machine import Machine
from .probe_pass import observe, with_remark


def records_of(
    subject: Subject,
    resolved: ResolvedSettings,
    machine: Machine,
    monitor: ProgressMonitor,
    key_of: Callable[[type[Measure]], str],
    *,
    resources: Resources | None = None,
    load_seconds: float = 0.0,
    pass_context: Callable[[], AbstractContextManager[None]] = exact_arithmetic,
    remark: str = "",
    reload: Callable[[], Subject] | None = None,
    errors: str = "groups",
    stream_of: Callable[[type[Measure]], str] | None = None,
) -> Iterator[Record]:
    """Observe a subject with each probe that the measures require; yield one record per measure.

    Parameters
    ----------
    key_of : callable
        Maps a measure to its cell's key.
    load_seconds : float
        Time spent loading the subject.
    pass_context : callable
        Returns the context manager for each pass, which for example sets the precision.
    remark : str
        Appended to the reason of each result.
    reload : callable, optional
        Reloads the subject after a pass that changed the model's parameters. Without it, the
        results of all later passes are also undefined.
    errors : {"groups", "none"}
        Whether results have replicates.
    stream_of : callable, optional
        Maps a measure to the name of its random stream; by default, its cell's key.
    """
    facts = subject.facts
    resources = resources or Resources(machine.device)
    checksums = parameter_checksums(subject.model)
    for probe, entries in resolved.by_probe().items():
        settings = resolved.probes[probe]
        step = f"{facts.model}: {', '.join(measure.name for measure, _ in entries)}"
        keys = [key_of(measure) for measure, _ in entries]
        monitor.observing(probe)
        stream = RandomStream(f"pass {facts.key or ''} {probe}", machine.device)
        with (
            pass_context(),
            restored_process_state() as changes,
            preserve_numpy_state(),
            stream.active(),
        ):
            # Created here, so that waiting for a measurement in another thread costs nothing.
            meter = CostMeter(machine.device)
            outcomes = observe(
                subject,
                entries,
                settings,
                resources=resources,
                step=partial(monitor.step, step),
                streams=[(stream_of or key_of)(measure) for measure, _ in entries],
                monitor=monitor,
                changes=changes,
                replicated=errors == "groups",
            )
        costs = {**meter.read(), "load_seconds": load_seconds}
        dtype = _dtype(subject.model)
        problem = _changed_weights(changed_parameters(subject.model, checksums))
        if problem and reload is not None:
            subject = reload()
        remarks = [remark, changes.restored("the pass"), changes.left()]
        for outcome, (measure, options), key in zip(outcomes, entries, keys, strict=True):
            result = outcome.result
            if problem and result.status == "ok":
                result = Result.missing("undefined", problem)
            record = Record(
                key=key,
                subject=facts,
                measure=RecordedMeasure.of(measure, options, errors),
                probe=RecordedProbe(probe, settings, outcome.facts),
                machine=RecordedMachine(str(machine.device), dtype, machine.environment),
                result=with_remark(result, *remarks),
                seconds=round(outcome.seconds, 6),
                finished=now(),
                traceback=outcome.traceback,
                costs=costs,
            )
            yield ensure_readable(record)


def _changed_weights(names: Sequence[str]) -> str:
    """Return the reason why a model has no result, or an empty string if no parameter changed."""
    if not names:
        return ""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the model changes its own weights when it is run ({names[0]}{others}), so its numbers "
        "would depend on how often it is run"
    )


def missing_record(
    cell: Cell,
    machine: RecordedMachine,
    reason: str,
    trace: str = "",
    status: Status = "failed",
) -> Record:
    """Return the record of a cell that was not measured."""
    spec, planned = cell.subject.spec, cell.measure
    try:
        measure = RecordedMeasure.of(load_measure(planned.name), planned.options, planned.errors)
    except NlbenchError:
        measure = RecordedMeasure(
            name=planned.name,
            probe=planned.probe,
            version=planned.version,
            options=planned.options,
            errors=planned.errors,
        )
    return Record(
        key=cell.key,
        subject=SubjectFacts(
            model=spec.model,
            weights=cell.subject.label,
            data=spec.data,
            seed=spec.seed,
            key=cell.subject.key,
        ),
        measure=measure,
        probe=RecordedProbe(planned.probe, planned.probe_options),
        machine=machine,
        result=Result.missing(status, reason),
        finished=now(),
        traceback=trace,
    )


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
