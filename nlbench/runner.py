"""Runs: plan a request, measure the missing cells and record the results.

`Preview` compares a plan with the records of a folder, for ``nlbench run --dry-run`` and to
resume a run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from nlbench.errors import NlbenchError, RequestError
from nlbench.execution.executors import WorkerPool, execute
from nlbench.execution.machine import describe_machine, describe_machine_in_subprocess
from nlbench.execution.work_units import group_by_subject
from nlbench.introspection.precision import exact_arithmetic, resolve_device
from nlbench.introspection.process_state import foreign_changes, restored_process_state
from nlbench.introspection.threads import default_threads, torch_threads
from nlbench.parsers import unique
from nlbench.plan import Cell, Plan, make_plan
from nlbench.probes.probe import load_probe
from nlbench.progress import Progress, ProgressMonitor
from nlbench.request import ExecutionOptions, Request, write_request
from nlbench.serialization.versions import changed_files
from nlbench.signals import check_interruption, interruptible
from nlbench.store.manifest import make_manifest
from nlbench.store.record import (
    Record,
    RecordedMachine,
    changed_sources,
    changed_subject,
    recorded_facts,
)
from nlbench.store.run import Run
from nlbench.store.run_folder import RunFolder


@dataclass(frozen=True)
class Preview:
    """The cells of a plan, grouped by what a run would do with them."""

    plan: Plan
    new: tuple[Cell, ...]  # cells to measure, including failed cells to repeat
    recorded: tuple[Cell, ...]
    # Cells to record as skipped, with the reason in cell.subject.impossible.
    impossible: tuple[Cell, ...]
    # Names of models and data whose files have changed since cells were recorded.
    superseded: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, records: Iterable[Record], execution: ExecutionOptions) -> Preview:
        """Compare a plan with the records of a run."""
        records = list(records)
        decisions = plan.decisions
        changed = changed_sources(records, decisions)
        superseded = itertools.chain.from_iterable(changed.values())
        done = {
            record.key
            for record in records
            if not changed[record.key]
            and (
                execution.rerun == "never"
                or (execution.rerun == "failed" and record.result.status != "failed")
            )
        }
        missing = [cell for cell in plan.cells if cell.key not in done]
        return cls(
            plan,
            tuple(cell for cell in missing if not cell.subject.impossible),
            tuple(cell for cell in plan.cells if cell.key in done),
            tuple(cell for cell in missing if cell.subject.impossible),
            tuple(unique(superseded)),
        )


def preview(
    request: Request,
    out: str | Path,
    *,
    execution: ExecutionOptions | None = None,
    progress: Progress | None = None,
) -> Preview:
    """Plan a run without measuring or writing anything."""
    folder = RunFolder(out)
    records = folder.read()[1] if folder.holds_a_run() else []
    plan = _plan(request, ProgressMonitor(progress))
    folder.check(records, plan.decisions)
    return Preview.of(plan, records, execution or ExecutionOptions())


def run(
    request: Request,
    out: str | Path,
    *,
    progress: Progress | None = None,
    command: str = "",
    execution: ExecutionOptions | None = None,
    known: Iterable[str | Path] = (),
) -> Run:
    """Measure the cells of a request and record them in a run's folder.

    Recorded cells are not measured again, unless they failed. Each record is written as soon as
    it is complete.

    Parameters
    ----------
    request : Request
    out : path
        Folder for the run; it is created, or extended if it already contains a run.
    progress : Progress, optional
    command : str
        Command line to record in the manifest.
    execution : ExecutionOptions, optional
    known : iterable of path
        Folders of other runs, whose finished records with the same keys are copied.

    Returns
    -------
    Run
        All records in the folder.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request is invalid as a whole. A problem with one cell is a ``failed`` result.
    KeyboardInterrupt
        On Ctrl-C or a termination signal; finished cells are kept.
    """
    monitor = ProgressMonitor(progress)
    folder = RunFolder(out)
    execution = execution or ExecutionOptions()
    is_new = not folder.holds_a_run() and not os.path.lexists(folder.path)
    with interruptible():
        changes_before = foreign_changes()
        plan = _plan(request, monitor)
        if not is_new and (finished := _finished_run(plan, folder, execution)):
            return finished
        pool = _worker_pool(execution, plan)
        if foreign_changes() > changes_before:
            pool = pool.use_processes()
        with folder.open(plan.decisions):
            if superseded := folder.set_aside(plan.decisions):
                monitor.warn(superseded)
            folder.forget_failures(
                {cell.key for cell in plan.cells}, {cell.identity for cell in plan.cells}
            )
            todo = Preview.of(plan, folder.records.values(), execution)
            try:
                _begin(folder, request, plan, pool, command)
                if execution.rerun != "all" and _copy_known(folder, todo.new, known):
                    todo = Preview.of(plan, folder.records.values(), execution)
                _measure(folder, todo, pool, monitor, request)
            except KeyboardInterrupt:
                folder.write_table()
                raise
            except NlbenchError:
                if is_new and not folder.records:
                    folder.remove()
                raise
            folder.write_table(unfinished=False)
    return Run(folder.manifest, list(folder.records.values()), folder.path)


def _plan(request: Request, monitor: ProgressMonitor) -> Plan:
    """Plan a request, and restore any process state that importing plugins has changed."""
    with restored_process_state() as changes:
        plan = make_plan(request, _device(request), monitor.warn)
    for remark in filter(None, (changes.restored("importing plugins"), changes.left())):
        monitor.warn(remark)
    return plan


def _finished_run(plan: Plan, folder: RunFolder, execution: ExecutionOptions) -> Run | None:
    """Return the run in a folder if it has all cells and its table is up to date."""
    if execution.rerun == "all" or not folder.holds_a_run():
        return None
    manifest, records = folder.read()
    todo = Preview.of(plan, records, execution)
    if todo.new or todo.impossible or manifest.unfinished or not folder.table_file.is_file():
        return None
    is_listed = {record.key for record in records} == set(manifest.order)
    return Run(manifest, records, folder.path) if is_listed else None


def _device(request: Request) -> str:
    device = resolve_device(request.device)
    if device.type == "mps" and request.precision == "float64":
        raise RequestError("--precision float64: not supported by Apple's GPU; use --device cpu")
    return str(device)


def _worker_pool(execution: ExecutionOptions, plan: Plan) -> WorkerPool:
    threads = execution.threads or default_threads()
    if execution.executor == "serial":
        return WorkerPool(execution, 1, threads)
    kind, _, number = plan.device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" and not number else 1
    devices = tuple(f"cuda:{index}" for index in range(count)) if count > 1 else ()
    default = max(2, (os.cpu_count() or 1) // threads) if kind == "cpu" else count
    if execution.executor == "dask":
        # The user's cluster assigns GPUs to its workers.
        devices = () if execution.address else devices
        default = 2 if kind == "cpu" else count
    return WorkerPool(execution, execution.workers or default, threads, devices)


def _begin(folder: RunFolder, request: Request, plan: Plan, pool: WorkerPool, command: str) -> None:
    """Write the manifest, then the request."""
    device = torch.device(plan.device)
    with torch_threads(pool.threads):
        if pool.is_serial or device.type != "cuda":
            with exact_arithmetic(plan.precision, device.type):
                machine = describe_machine(device, plan.precision)
        else:
            # Even querying autocast's dtypes would initialise the GPU in this process.
            machine = describe_machine_in_subprocess(device, plan.precision)
    folder.begin(
        make_manifest(asdict(request), machine, command=command), [cell.key for cell in plan.cells]
    )
    write_request(folder.path / "request.toml", request)


def _copy_known(folder: RunFolder, cells: Sequence[Cell], known: Iterable[str | Path]) -> bool:
    """Copy finished records from other runs. Return True if any were copied.

    The same weights may have another name there.
    """
    others = [RunFolder(path) for path in known]
    labels = {cell.key: cell.subject.label for cell in cells}
    candidates = (other.find_record(key) for key in labels for other in others)
    copied = {
        r.key: r
        for r in candidates
        if r is not None and r.is_done and not changed_files(r.subject.files or {})
    }
    for key, record in copied.items():
        folder.add(replace(record, subject=replace(record.subject, weights=labels[key])))
    return bool(copied)


def _measure(
    folder: RunFolder, todo: Preview, pool: WorkerPool, monitor: ProgressMonitor, request: Request
) -> None:
    """Measure and record cells. Raise if the only subject can't be loaded."""
    machine = RecordedMachine(folder.manifest.device, "", folder.manifest.environment)
    expected = recorded_facts(folder.records.values())
    cells = {cell.key: cell for cell in todo.new}
    units = group_by_subject(
        todo.new, todo.plan, machine, memory=pool.execution.memory, expected=expected
    )
    monitor.begin(_count_steps(todo.new, request))
    for cell in todo.impossible:
        folder.add(cell.missing_record(machine, cell.subject.impossible, "skipped"))
    monitor.has_single_subject = len(todo.plan.subjects) == 1
    # Closing the generator on an interruption stops the workers.
    with closing(execute(units, pool, monitor)) as records:
        for record in records:
            # Workers that load a subject at different times may find different content.
            expected = recorded_facts([record]) | expected
            cell = cells[record.key]
            problem = changed_subject(record.subject, expected.get(cell.subject.key, {}))
            if problem and record.is_done:
                record = cell.missing_record(machine, problem)
            folder.add(record)
            check_interruption()


def _count_steps(cells: Sequence[Cell], request: Request) -> int:
    passes = {(cell.subject.key, cell.probe.name): cell for cell in cells}
    return sum(
        load_probe(cell.probe.name).steps(request.samples or 1, cell.probe.options)
        for cell in passes.values()
    )
