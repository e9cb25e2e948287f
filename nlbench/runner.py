"""From a request to records: plan, measure what is missing, record each cell.

A finished run is taken up again without importing PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from nlbench.errors import NlbenchError, RequestError
from nlbench.execution.executors import WorkerPool, executed
from nlbench.execution.work_units import units_of
from nlbench.measure import Status
from nlbench.plan import (
    Cell,
    Plan,
    keep_plan,
    kept_plan,
    load_probe,
    make_plan,
    what_changed,
)
from nlbench.progress import Monitor, Progress
from nlbench.request import ExecutionOptions, Request, write_request
from nlbench.signals import interruptible
from nlbench.store.manifest import make_manifest
from nlbench.store.record import Record, recorded_facts
from nlbench.store.run_folder import Run, RunFolder

__all__ = ["Preview", "forecast", "preview", "run"]


@dataclass(frozen=True)
class Preview:
    """What a run would do.

    Parameters
    ----------
    plan : Plan
    new : tuple of Cell
        To be measured, failed ones that are tried again included.
    recorded : tuple of Cell
        Already there.
    impossible : tuple of Cell
        With the reason in ``cell.target.impossible``; they are recorded as skipped.
    """

    plan: Plan
    new: tuple[Cell, ...]
    recorded: tuple[Cell, ...]
    impossible: tuple[Cell, ...]


def preview(
    request: Request,
    out: str | Path,
    *,
    execution: ExecutionOptions | None = None,
    progress: Progress | None = None,
) -> Preview:
    """Say what a run would do; nothing is measured or written.

    Parameters
    ----------
    request, out, execution, progress
        As for `run`.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request can't be carried out as a whole.
    """
    execution, folder = execution or ExecutionOptions(), RunFolder(out)
    records = folder.read()[1] if folder.holds_a_run() else []
    plan = kept_plan(folder.path, request)
    if plan is None or _sorted(plan, records, execution).new:
        plan = make_plan(request, _device(request), Monitor(progress).warn)
    folder.check(records, plan.decided)
    return _sorted(plan, records, execution)


def forecast(
    foreseen: Preview,
    *,
    execution: ExecutionOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, str]]:
    """Predict what the new cells of a preview will cost, as far as their probes can tell.

    Each subject is loaded and looked at by a few forward passes; nothing is measured or written.

    Parameters
    ----------
    foreseen : Preview
    execution, progress
        As for `run`.

    Returns
    -------
    dict
        By subject's key, then by probe: a line. Subjects of which nothing is known are left out.
    """
    from nlbench.execution.measure_subject import UnitRunner
    from nlbench.execution.numerics import default_threads

    execution, monitor = execution or ExecutionOptions(), Monitor(progress)
    unit_runner = UnitRunner(threads=execution.threads or default_threads())
    units = units_of(foreseen.new, foreseen.plan, memory=execution.memory, expected={})
    found = {unit.cells[0].target.key: unit_runner.forecast(unit, monitor) for unit in units}
    return {key: said for key, said in found.items() if said}


def run(
    request: Request,
    out: str | Path,
    *,
    progress: Progress | None = None,
    command: str = "",
    execution: ExecutionOptions | None = None,
    known: Iterable[str | Path] = (),
) -> Run:
    """Measure subjects, one record a cell, in a run's folder.

    Cells that the folder already holds are not measured again, failed ones excepted. Each
    record is on the disk as soon as it exists.

    Parameters
    ----------
    request : Request
    out : path
        The run's folder; it is made, or extended if it is one already.
    progress : Progress, optional
    command : str
        The command line, for the manifest.
    execution : ExecutionOptions, optional
        How it is carried out: what is measured again, where, how many at a time.
    known : iterable of path
        Folders of other runs: what they have recorded under the key of a cell is taken over.

    Returns
    -------
    Run
        All that the folder holds.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request can't be carried out as a whole. What concerns one cell only is a
        ``failed`` result.
    KeyboardInterrupt
        At Ctrl-C, or where the process is asked to end; all that was finished is kept.
    """
    monitor, execution, folder = Monitor(progress), execution or ExecutionOptions(), RunFolder(out)
    finished = _finished(request, folder, execution)
    if finished is not None:
        return finished
    is_new = not os.path.lexists(folder.path)
    with interruptible():
        plan = make_plan(request, _device(request), monitor.warn)
        pool = _worker_pool(execution, plan)
        with folder.open(plan.decided):
            folder.forget_failures(
                {cell.key for cell in plan.cells}, {cell.identity for cell in plan.cells}
            )
            todo = _sorted(plan, folder.records.values(), execution)
            try:
                _begin(folder, request, plan, pool, command)
                if execution.rerun != "all" and _take_over(folder, todo.new, known):
                    todo = _sorted(plan, folder.records.values(), execution)
                _carry_out(folder, todo, pool, monitor, request)
            except KeyboardInterrupt:
                folder.write()
                raise
            except NlbenchError:
                if is_new and not folder.records:
                    folder.remove()
                raise
            folder.write(unfinished=False)
    return folder.run


def _finished(request: Request, folder: RunFolder, execution: ExecutionOptions) -> Run | None:
    """The run in a folder if it has all that is asked for and its table is up to date."""
    if execution.rerun == "all" or not folder.holds_a_run():
        return None
    plan = kept_plan(folder.path, request)
    if plan is None:
        return None
    manifest, records = folder.read()
    todo = _sorted(plan, records, execution)
    is_current = not manifest.unfinished and {r.key for r in records} == set(manifest.order)
    is_current = is_current and folder.table_file.is_file()
    is_done = is_current and not (todo.new or todo.impossible)
    return Run(manifest, records, folder.path) if is_done else None


def _sorted(plan: Plan, records: Iterable[Record], execution: ExecutionOptions) -> Preview:
    """Which cells are to be measured, which are there."""
    kept = {
        record.key
        for record in records
        if execution.rerun == "never"
        or (execution.rerun == "failed" and record.result.status != "failed")
    }
    recorded = tuple(cell for cell in plan.cells if cell.key in kept)
    rest = [cell for cell in plan.cells if cell.key not in kept]
    return Preview(
        plan,
        tuple(cell for cell in rest if not cell.target.impossible),
        recorded,
        tuple(cell for cell in rest if cell.target.impossible),
    )


def _device(request: Request) -> str:
    from nlbench.execution.numerics import resolve_device

    device = resolve_device(request.device)
    if device.type == "mps" and request.precision == "float64":
        raise RequestError("--precision float64: Apple's GPU has none; take --device cpu")
    return str(device)


def _worker_pool(execution: ExecutionOptions, plan: Plan) -> WorkerPool:
    """How many measure at a time, and with what."""
    import torch

    from nlbench.execution.numerics import default_threads

    threads = execution.threads or default_threads()
    if execution.executor == "serial":
        return WorkerPool(execution, 1, threads)
    kind, _, number = plan.device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" and not number else 1
    devices = tuple(f"cuda:{index}" for index in range(count)) if count > 1 else ()
    default = max(2, (os.cpu_count() or 1) // threads) if kind == "cpu" else count
    if execution.executor == "dask":
        # Somebody's cluster has given each of its workers a GPU of its own, or none.
        devices = () if execution.address else devices
        default = 2 if kind == "cpu" else count
    return WorkerPool(execution, execution.workers or default, threads, devices)


def _begin(folder: RunFolder, request: Request, plan: Plan, pool: WorkerPool, command: str) -> None:
    """Write what is known before a cell is measured; the manifest comes first."""
    import torch

    from nlbench.execution.numerics import Machine, some_threads
    from nlbench.introspection.precision import exact_arithmetic

    device = torch.device(plan.device)
    with some_threads(pool.threads):
        if pool.is_here or device.type != "cuda":
            with exact_arithmetic(plan.precision, device.type):
                machine = Machine.at(device, plan.precision)
        else:
            # Who measures in other processes leaves the GPU to them: even to ask whether it has
            # autocast's types takes it into use.
            machine = Machine.seen_from_apart(device, plan.precision)
    folder.begin(
        make_manifest(asdict(request), machine, command=command),
        [cell.key for cell in plan.cells],
    )
    keep_plan(folder.path, request, plan)
    write_request(folder.path / "request.toml", request)


def _take_over(folder: RunFolder, cells: Sequence[Cell], known: Iterable[str | Path]) -> bool:
    """Record what other runs have measured of cells; whether there was any."""
    folders = [RunFolder(path) for path in known]
    found = (other.recorded(cell.key) for cell in cells for other in folders)
    taken = {record.key: record for record in found if record is not None and record.is_done}
    for record in taken.values():
        folder.add(record)
    return bool(taken)


def _carry_out(
    folder: RunFolder, todo: Preview, pool: WorkerPool, monitor: Monitor, request: Request
) -> None:
    """Measure what is to be measured; a lone subject that can't be loaded is a wrong request."""
    from nlbench.execution.measure_subject import missing_record

    environment, device = folder.manifest.environment, folder.manifest.device
    recorded = recorded_facts(folder.records.values())
    cells = {cell.key: cell for cell in todo.new}
    units = units_of(
        todo.new,
        todo.plan,
        memory=pool.execution.memory,
        expected=recorded,
        workers=pool.workers,
    )
    monitor.begin(_steps(todo.new, request))
    alone = len(todo.plan.targets) == 1

    def missing(cell: Cell, reason: str, trace: str = "", status: Status = "failed") -> Record:
        return missing_record(cell, device, environment, reason, trace, status)

    for cell in todo.impossible:
        folder.add(missing(cell, cell.target.impossible, status="skipped"))
    # Closed at once where it is interrupted: nothing measures for nobody.
    with closing(executed(units, pool, monitor)) as results:
        for result in results:
            if isinstance(result, Record):
                # Processes that load a subject at different times may not find the same one.
                recorded = recorded_facts([result]) | recorded
                cell = cells[result.key]
                found = recorded.get(cell.target.key, {})
                problem = what_changed(cell.target, result.subject, found)
                folder.add(missing(cell, problem) if problem and result.is_done else result)
            elif result.loading and alone:
                raise RequestError(result.reason)
            else:
                for cell in result.cells:
                    folder.add(missing(cell, result.reason, result.traceback))


def _steps(cells: Sequence[Cell], request: Request) -> int:
    passes = {(cell.target.key, cell.wanted.probe): cell for cell in cells}
    return sum(
        load_probe(cell.wanted.probe).steps(request.samples or 1, cell.wanted.settings)
        for cell in passes.values()
    )
