"""From a request to records: plan, measure what is missing, record each cell.

A finished run is taken up again without importing PyTorch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import NlbenchError, RequestError
from nlbench.execution.executors import WorkerPool, executed
from nlbench.execution.work_units import units_of
from nlbench.plan import Cell, Plan, kept_plan, load_probe, make_plan
from nlbench.progress import Monitor, Progress
from nlbench.request import ExecutionOptions, Request
from nlbench.store.record import Record, Run, load_run
from nlbench.store.run_folder import (
    Book,
    check_alike,
    check_free,
    difference,
    expected_facts,
    forget_failures,
    open_run,
    remove_run,
)

if TYPE_CHECKING:
    from nlbench.execution.numerics import Machine

__all__ = ["Preview", "preview", "run"]


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
        With the reason in ``cell.target.impossible``.
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
    request, out, conduct, progress
        As for `run`.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request can't be carried out as a whole.
    """
    execution, progress = execution or ExecutionOptions(), progress or Monitor()
    folder = Path(out)
    old = load_run(folder) if check_free(folder) else Run({}, [], folder)
    plan = kept_plan(folder, request)
    if plan is None or _sorted(plan, old.records, execution).new:
        plan = make_plan(request, _device(request), progress.warn)
    check_alike(old, plan)
    return _sorted(plan, old.records, execution)


def _sorted(plan: Plan, records: Iterable[Record], execution: ExecutionOptions) -> Preview:
    kept = {
        record.key
        for record in records
        if execution.rerun == "never" or (execution.rerun == "failed" and record.is_done)
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

    return str(resolve_device(request.device))


def run(
    request: Request,
    out: str | Path,
    *,
    progress: Progress | None = None,
    command: str = "",
    execution: ExecutionOptions | None = None,
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

    Returns
    -------
    Run
        All that the folder holds.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request can't be carried out as a whole. What concerns one cell only is a
        ``failed`` reading.
    """
    progress, execution, folder = progress or Monitor(), execution or ExecutionOptions(), Path(out)
    finished = _finished(request, folder, execution)
    if finished is not None:
        return finished
    began = time.perf_counter()
    plan = make_plan(request, _device(request), progress.warn)
    is_new = not os.path.lexists(folder)
    with _terminated_as_interrupted(), open_run(folder, plan) as result:
        forget_failures(result, plan.cells)
        pool = _worker_pool(execution, plan)
        book = Book(result, request, plan, _machine(plan, pool.threads), command, began)
        try:
            book.open()
            _carry_out(book, _sorted(plan, result.records, execution), pool, progress)
        except KeyboardInterrupt:
            book.write()
            raise
        except NlbenchError:
            if is_new and not book.done:
                remove_run(folder)
            raise
        book.close()
    return result


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Take a request to end, as a cluster sends before it takes the machine away, as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    mine = [
        number
        for number in signals
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _finished(request: Request, folder: Path, execution: ExecutionOptions) -> Run | None:
    """The run in a folder if it has all that is asked for and its table is up to date."""
    if execution.rerun == "all" or not check_free(folder):
        return None
    plan = kept_plan(folder, request)
    if plan is None:
        return None
    old = load_run(folder)
    todo = _sorted(plan, old.records, execution)
    is_current = not old.manifest.get("unfinished") and {r.key for r in old.records} == set(
        old.manifest.get("order", [])
    )
    is_current = is_current and (folder / "scores.csv").is_file()
    return old if is_current and not (todo.new or todo.impossible) else None


def _machine(plan: Plan, threads: int) -> Machine:
    import torch

    from nlbench.execution.numerics import Machine, some_threads

    with some_threads(threads):
        return Machine.at(torch.device(plan.device), plan.precision)


def _carry_out(book: Book, todo: Preview, pool: WorkerPool, progress: Progress) -> None:
    """Measure what is to be measured; a lone subject that can't be loaded is a wrong request."""
    from nlbench.execution.measure_subject import missing_record

    plan = book.plan
    assert book.run.path is not None
    expected = expected_facts(book.run.records)
    cells = {cell.key: cell for cell in todo.new}
    units = units_of(
        todo.new,
        plan,
        memory=pool.execution.memory,
        expected=expected,
        workers=pool.workers,
    )
    progress.begin(_steps(todo.new, book.request))
    alone = len(plan.targets) == 1
    for cell in todo.impossible:
        book.add(missing_record(cell, book.machine, cell.target.impossible))
    # Closed at once where it is interrupted: nobody writes to the folder any more then.
    with closing(executed(units, pool, progress)) as results:
        for result in results:
            if isinstance(result, Record):
                # Processes that load a subject at different times may not find the same one.
                expected = expected_facts([result]) | expected
                problem = difference(result.subject, expected.get(cells[result.key].target.key, {}))
                if problem and result.is_done:
                    result = missing_record(cells[result.key], book.machine, problem)
                book.add(result)
                continue
            if result.loading and alone:
                raise RequestError(result.reason)
            for cell in result.cells:
                book.add(missing_record(cell, book.machine, result.reason, result.traceback))


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
    if execution.executor == "dask":
        # Somebody's cluster has given each of its workers a GPU of its own, or none.
        devices = () if execution.address else devices
        return WorkerPool(execution, execution.workers or max(2, count), threads, devices)
    by_cores = max(2, (os.cpu_count() or 1) // threads)
    default = by_cores if kind == "cpu" else count
    return WorkerPool(execution, execution.workers or default, threads, devices)


def _steps(cells: Sequence[Cell], request: Request) -> int:
    passes: Mapping[tuple[str, str], Cell] = {
        (cell.target.key, cell.wanted.probe): cell for cell in cells
    }
    return sum(
        load_probe(cell.wanted.probe).steps(request.samples or 1, cell.wanted.settings)
        for cell in passes.values()
    )
