"""Measure units with a run's executor: in this process, in several, or on a Dask cluster.

Records are yielded, and written by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from nlbench.progress import ProgressMonitor
from nlbench.request import ExecutionOptions
from nlbench.store.record import Record

from .dask_cluster import measure_on_cluster
from .processes import measure_in_processes
from .unit_runner import UnitRunner
from .work_units import Event, Unit


@dataclass(frozen=True)
class WorkerPool:
    """Number and resources of a run's workers."""

    execution: ExecutionOptions
    workers: int
    threads: int
    # GPUs to assign to the workers in turn; empty unless there are several.
    devices: tuple[str, ...] = ()

    @property
    def is_serial(self) -> bool:
        """True if units are measured in this process."""
        return self.execution.executor == "serial" and self.execution.timeout is None

    def use_processes(self) -> WorkerPool:
        """Return this pool with worker processes, since this process is changed."""
        if not self.is_serial:
            return self
        return replace(self, execution=replace(self.execution, executor="processes"))

    def placed(self, unit: Unit, worker: int) -> Unit:
        """Return the unit, assigned to a worker's device."""
        if not self.devices:
            return unit
        return replace(unit, device=self.devices[worker % len(self.devices)])


def execute(units: Sequence[Unit], pool: WorkerPool, monitor: ProgressMonitor) -> Generator[Record]:
    """Measure units and yield the records of their cells as they arrive.

    Events are forwarded to the monitor. Closing the generator stops all workers.
    """
    if pool.execution.executor == "dask":
        measured = measure_on_cluster(units, pool)
    elif pool.is_serial:
        measured = _measure_serially(units, pool, monitor)
    else:
        measured = measure_in_processes(units, pool)
    with closing(measured) as results:
        for result in results:
            if isinstance(result, Record):
                yield result
                continue
            for name, text in result.items():
                getattr(monitor, name)(text)


def _measure_serially(
    units: Sequence[Unit], pool: WorkerPool, monitor: ProgressMonitor
) -> Generator[Record | Event]:
    """Measure units in this process.

    After a subject that changes it, measure the rest in new processes.
    """
    unit_runner = UnitRunner(threads=pool.threads)
    remaining = deque(units)
    while remaining and not unit_runner.process_is_changed:
        yield from unit_runner.measure(remaining.popleft(), monitor)
    del unit_runner  # Its subject takes memory.
    if remaining:
        yield from measure_in_processes(remaining, pool)
