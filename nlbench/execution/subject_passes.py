"""Run each probe on a subject once, and create the records of the subject's cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nlbench.cells import Cell
from nlbench.introspection.model_state import changed_parameters, parameter_checksums
from nlbench.introspection.precision import exact_arithmetic
from nlbench.introspection.process_state import restored_process_state
from nlbench.introspection.random_state import RandomStream, preserve_numpy_state
from nlbench.measure import Measure, Result
from nlbench.probes import Resources
from nlbench.progress import ProgressMonitor
from nlbench.store.manifest import now
from nlbench.store.record import Record, RecordedMachine, ensure_readable
from nlbench.subjects.subject import Subject

from .cost_meter import CostMeter
from .machine import Machine
from .probe_pass import Pass, with_remark
from .work_units import group_cells


def records_of(
    subject: Subject,
    cells: Iterable[Cell],
    measures: Mapping[str, type[Measure]],
    machine: Machine,
    monitor: ProgressMonitor,
    *,
    resources: Resources | None = None,
    load_seconds: float = 0.0,
    pass_context: Callable[[], AbstractContextManager[None]] = exact_arithmetic,
    remark: str = "",
    reload: Callable[[], Subject] | None = None,
) -> Iterator[Record]:
    """Observe a subject with each probe that its cells require; yield the record of each cell.

    Parameters
    ----------
    measures : mapping of str to Measure class
        The cells' measures, by name.
    load_seconds : float
        Time spent loading the subject.
    pass_context : callable
        Returns the context manager for each pass, which for example sets the precision.
    remark : str
        Appended to the reason of each result.
    reload : callable, optional
        Reloads the subject after a pass that changed the model's parameters. Without it, the
        results of all later passes are also undefined.
    """
    facts = subject.facts
    resources = resources or Resources(machine.device)
    checksums = parameter_checksums(subject.model)
    for group in group_cells(cells, lambda cell: cell.probe.name):
        probe = group[0].probe
        step = f"{facts.model}: {', '.join(cell.measure.name for cell in group)}"
        monitor.observing(probe.name)
        stream = RandomStream(f"pass {facts.key or ''} {probe.name}", machine.device)
        with (
            pass_context(),
            restored_process_state() as changes,
            preserve_numpy_state(),
            stream.active(),
        ):
            # Created here, so that waiting for a measurement in another thread costs nothing.
            meter = CostMeter(machine.device)
            outcomes = Pass(
                subject,
                probe.name,
                probe.options,
                resources,
                partial(monitor.step, step),
                monitor,
                changes,
                group[0].measure.errors == "groups",
            ).observe(
                [(measures[c.measure.name], c.measure.options, c.stream) for c in group],
            )
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


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
