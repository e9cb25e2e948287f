"""Measure units with a run's executor: in this process, in several, or on a Dask cluster.

Records are yielded, and written by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing

from nlbench.errors import RequestError
from nlbench.progress import Progress, ProgressMonitor
from nlbench.store.record import Record, RecordedMachine

from .dask_cluster import measure_on_cluster
from .processes import measure_in_processes
from .subject_passes import missing_record
from .unit_runner import UnitRunner
from .work_units import Unit, UnmeasuredCells
from .worker_pool import WorkerPool


def execute(
    units: Sequence[Unit],
    pool: WorkerPool,
    progress: Progress,
    machine: RecordedMachine,
    *,
    is_only_subject: bool = False,
) -> Generator[Record]:
    """Measure units and yield the records of their cells as they arrive.

    Closing the generator stops all workers.

    Parameters
    ----------
    machine : RecordedMachine
        Recorded for cells that could not be measured.
    is_only_subject : bool
        True to raise if the subject can't be loaded, instead of recording failures.

    Raises
    ------
    nlbench.RequestError
        If no cluster can be reached, no process can be started, or the only subject can't be
        loaded.
    """
    with closing(_measure(units, pool, progress)) as results:
        for result in results:
            if isinstance(result, Record):
                yield result
                continue
            if result.load_failed and is_only_subject:
                raise RequestError(result.reason)
            for cell in result.cells:
                yield missing_record(cell, machine, result.reason, result.traceback)


def _measure(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | UnmeasuredCells]:
    if pool.execution.executor == "dask":
        return measure_on_cluster(units, pool, progress)
    if pool.is_serial:
        return _measure_serially(units, pool, progress)
    return measure_in_processes(units, pool, progress)


def _measure_serially(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | UnmeasuredCells]:
    """Measure units in this process.

    After a subject that changes it, measure the rest in new processes.
    """
    unit_runner = UnitRunner(threads=pool.threads)
    monitor = ProgressMonitor(progress)
    remaining = deque(units)
    while remaining and not unit_runner.process_is_changed:
        yield from unit_runner.measure(remaining.popleft(), monitor)
    del unit_runner  # Its subject takes memory.
    if remaining:
        yield from measure_in_processes(remaining, pool, progress)
