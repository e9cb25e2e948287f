"""Measure units with a run's executor: in this process, in several, or on a Dask cluster.

Results are yielded, and written by the caller.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from nlbench.progress import Progress, ProgressMonitor
from nlbench.store.record import Record

from .dask_cluster import measure_on_cluster
from .processes import measure_in_processes
from .unit_runner import UnitRunner
from .work_units import Unit, UnmeasuredCells
from .worker_pool import WorkerPool


def execute(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | UnmeasuredCells]:
    """Measure units and yield the results of their cells as they arrive.

    Closing the generator stops all workers.

    Raises
    ------
    nlbench.RequestError
        If no cluster can be reached or no process can be started.
    """
    if pool.execution.executor == "dask":
        return measure_on_cluster(units, pool, progress)
    if pool.is_serial:
        return _measure_serially(units, pool, progress)
    return measure_in_processes(units, pool, progress)


def _measure_serially(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | UnmeasuredCells]:

    unit_runner, monitor = UnitRunner(threads=pool.threads), ProgressMonitor(progress)
    for unit in units:
        yield from unit_runner.measure(unit, monitor)
