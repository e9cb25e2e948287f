"""Where units are measured: here, in processes of this machine, or on a Dask cluster.

Processes and clusters are joblib's. Their workers are light supervisors; each has a
process of its own for what is heavy or may crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError
from nlbench.files import write_atomically
from nlbench.request import ExecutionOptions
from nlbench.store.record import Record

from .supervisor import Stepped, deaf_processes, end_workers, quiet_ending, quiet_loop, supervised
from .work_units import Missed, Unit

if TYPE_CHECKING:
    from nlbench.runner import Progress

__all__ = ["WorkerPool", "executed"]


ROUNDS = 4
"""How often what dying supervisors left undone is given to others."""


@dataclass(frozen=True)
class WorkerPool:
    """Who measures.

    Parameters
    ----------
    execution : ExecutionOptions
    workers : int
        How many units at a time.
    threads : int
        PyTorch's threads of each.
    devices : tuple of str
        GPUs to share out, where there are several; else empty.
    """

    execution: ExecutionOptions
    workers: int
    threads: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Task:
    """What is sent to a supervisor."""

    unit: Unit
    timeout: float | None
    threads: int
    folder: str
    token: str
    slots: str
    devices: tuple[str, ...]
    seats: int


def executed(
    units: Sequence[Unit], pool: WorkerPool, folder: Path, progress: Progress
) -> Generator[Record | Missed]:
    """Measure units and yield what comes of their cells, as it comes.

    Closing it ends whatever measures.

    Parameters
    ----------
    units : sequence of Unit
    pool : WorkerPool
    folder : Path
        The run's; processes on this machine, and workers that reach it, write their records
        there themselves.
    progress : Progress

    Raises
    ------
    nlbench.RequestError
        If there is no cluster.
    """
    if pool.execution.executor == "serial" and pool.execution.timeout is None:
        yield from _here(units, pool, progress)
    elif pool.execution.executor == "serial":
        yield from _beside(units, pool, progress)
    else:
        yield from _elsewhere(units, pool, folder, progress)


def _here(units: Sequence[Unit], pool: WorkerPool, progress: Progress) -> Iterator[Record | Missed]:
    # Imported where it is needed: a finished run is taken up without PyTorch.
    from .measure_subject import Host
    from .numerics import some_threads

    host = Host()
    with some_threads(pool.threads):
        for unit in units:
            yield from host.measure(unit, progress)


def _beside(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Iterator[Record | Missed]:
    try:
        for unit in units:
            for result in supervised(unit, timeout=pool.execution.timeout, threads=pool.threads):
                if isinstance(result, Stepped):
                    progress.step(result)
                else:
                    yield result
    finally:
        end_workers()


def _elsewhere(
    units: Sequence[Unit], pool: WorkerPool, folder: Path, progress: Progress
) -> Iterator[Record | Missed]:
    left = {unit.cells[0].key: unit for unit in units}
    begin = time.time()
    with ExitStack() as stack:
        joblib = stack.enter_context(_backend(pool))
        slots = stack.enter_context(tempfile.TemporaryDirectory(prefix="nlbench-slots-"))
        for _ in range(ROUNDS):
            tasks = [_task(unit, pool, folder, slots) for unit in left.values()]
            try:
                with closing(joblib(tasks)) as answers:
                    for name, results, steps in answers:
                        del left[name]
                        for what in steps:
                            progress.step(what)
                        yield from results
            except _deaths() as error:
                progress.warn(f"a worker was lost ({type(error).__name__}); its cells go to others")
            if not left:
                return
            for unit in list(left.values()):
                rest = yield from _already_written(unit, folder, begin)
                del left[unit.cells[0].key]
                if rest.cells:
                    left[rest.cells[0].key] = rest
    reason = f"the workers that were to measure this were lost {ROUNDS} times"
    for unit in left.values():
        yield Missed(unit.cells, reason)


def _already_written(unit: Unit, folder: Path, begin: float) -> Generator[Record, None, Unit]:
    """Yield what a lost supervisor wrote of a unit; give back the unit of the rest."""
    rest = []
    for cell in unit.cells:
        file = folder / "cells" / f"{cell.key}.json"
        record = None
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < begin:
                rest.append(cell)  # of an earlier run
                continue
            record = Record.from_json(file.read_text(encoding="utf-8"), str(file))
        if record is not None and record.is_done:
            yield record
        else:
            rest.append(cell)
    return unit.only(rest)


def _deaths() -> tuple[type[Exception], ...]:
    """Errors that say that a supervisor is gone, not that it failed."""
    from joblib.externals.loky.process_executor import BrokenProcessPool

    try:
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError
    except ImportError:
        return (BrokenProcessPool,)
    return BrokenProcessPool, KilledWorker, CommClosedError


Answer = tuple[str, list[Record | Missed], list[str]]
Send = Callable[[Sequence[_Task]], Generator[Answer]]


@contextmanager
def _backend(pool: WorkerPool) -> Iterator[Send]:
    """Give the function that has tasks done, by loky's processes or by a cluster's workers."""
    import joblib

    with ExitStack() as stack:
        stack.enter_context(quiet_ending())
        settings: dict[str, Any] = {"n_jobs": pool.workers}
        if pool.execution.executor == "dask":
            stack.enter_context(_cluster(pool))
            stack.enter_context(joblib.parallel_config(backend="dask"))
            settings = {"n_jobs": -1}
        else:
            stack.enter_context(joblib.parallel_config(backend="loky"))

        def send(tasks: Sequence[_Task]) -> Generator[Answer]:
            parallel = joblib.Parallel(
                **settings, batch_size=1, return_as="generator_unordered", pre_dispatch="all"
            )
            with ExitStack() as ending:
                # Joblib starts its processes and hands out all tasks before it returns.
                with deaf_processes():
                    results = parallel(joblib.delayed(_work)(task) for task in tasks)
                    ending.enter_context(closing(results))
                yield from results

        yield send


@contextmanager
def _cluster(pool: WorkerPool) -> Iterator[None]:
    """Connect to a Dask cluster, or make one on this machine."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise RequestError("--executor dask needs Dask: pip install 'nlbench[dask]'") from error
    address = pool.execution.address
    with ExitStack() as stack:
        stack.enter_context(quiet_loop())
        try:
            if not address:
                with deaf_processes():
                    cluster = distributed.LocalCluster(
                        n_workers=pool.workers,
                        threads_per_worker=1,
                        dashboard_address=None,
                        # Its errors are of tasks that are called off; others are raised here.
                        silence_logs=logging.CRITICAL,
                    )
                    stack.enter_context(cluster)
                address = cluster.scheduler_address
            stack.enter_context(distributed.Client(address, timeout=10, set_as_default=True))
        except (OSError, ValueError, TimeoutError) as error:
            raise RequestError(f"--address: no Dask scheduler at {address} ({error})") from error
        yield


def _task(unit: Unit, pool: WorkerPool, folder: Path, slots: str) -> _Task:
    plan = folder / "plan.json"
    return _Task(
        unit,
        pool.execution.timeout,
        pool.threads,
        str(folder.absolute()),
        _token(plan),
        slots if pool.devices else "",
        pool.devices,
        pool.workers,
    )


def _token(plan: Path) -> str:
    """By which a worker knows that it sees the same folder as whoever sent it."""
    try:
        return hashlib.sha256(plan.read_bytes()).hexdigest()
    except OSError:
        return ""


def _work(task: _Task) -> Answer:
    """Supervise a unit; the cells' records are on the disk before the last one is done."""
    folder = Path(task.folder)
    reachable = bool(task.token) and _token(folder / "plan.json") == task.token
    results: list[Record | Missed] = []
    steps: list[str] = []
    with _seat(task) as device:
        unit = task.unit.on(device)
        for result in supervised(unit, timeout=task.timeout, threads=task.threads):
            if isinstance(result, Stepped):
                steps.append(str(result))
                continue
            results.append(result)
            if isinstance(result, Record) and reachable:
                write_atomically(folder / "cells" / f"{result.key}.json", result.to_json())
    return task.unit.cells[0].key, results, steps


@contextmanager
def _seat(task: _Task) -> Iterator[str]:
    """Take one of the GPUs that nobody else has, of those that are shared out."""
    if not task.slots:
        yield task.unit.device
        return
    import fcntl

    while True:
        for seat in range(task.seats):
            handle = os.open(Path(task.slots, str(seat)), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                continue
            try:
                yield task.devices[seat % len(task.devices)]
            finally:
                os.close(handle)
            return
        time.sleep(0.05)
