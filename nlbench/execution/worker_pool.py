"""The workers of a run, and idle workers that are kept for the next unit or run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nlbench.request import ExecutionOptions

from .supervisor import Supervisor
from .work_units import Unit


@dataclass(frozen=True)
class WorkerPool:
    """Number and resources of a run's workers.

    Parameters
    ----------
    devices : tuple of str
        GPUs to assign to the workers in turn; empty unless there are several.
    """

    execution: ExecutionOptions
    workers: int
    threads: int
    devices: tuple[str, ...] = ()

    @property
    def is_serial(self) -> bool:
        """True if units are measured in this process."""
        return self.execution.executor == "serial" and self.execution.timeout is None

    def in_processes(self) -> WorkerPool:
        """Return this pool with worker processes, since this process is changed."""
        if not self.is_serial:
            return self
        return replace(self, execution=replace(self.execution, executor="processes"))

    def placed(self, unit: Unit, worker: int) -> Unit:
        """Return the unit, assigned to a worker's device."""
        if not self.devices:
            return unit
        return replace(unit, device=self.devices[worker % len(self.devices)])


MAX_WORKERS = 1024

_idle_supervisors: list[Supervisor] = []
"""Shared by threads: `list.pop` and `list.append` are atomic."""

_thread_pools: list[ThreadPoolExecutor] = []


@contextmanager
def keep_workers() -> Iterator[None]:
    """Keep worker processes alive between runs in the block, since starting one takes seconds.

    The threads that start them are also kept: Linux kills a worker when the thread that started
    it exits.
    """
    with supervising_threads() as threads:
        _thread_pools.append(threads)
        try:
            yield
        finally:
            _thread_pools.pop()
            if not _thread_pools:
                end_idle_workers()


@contextmanager
def supervising_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield the threads of `keep_workers`, or new ones for the block."""
    if _thread_pools:
        yield _thread_pools[-1]
    else:
        with ThreadPoolExecutor(MAX_WORKERS, "nlbench") as threads:
            yield threads


def take_supervisor(threads: int, timeout: float | None) -> Supervisor:
    """Return an idle supervisor, or a new one."""
    try:
        supervisor = _idle_supervisors.pop()
    except IndexError:
        return Supervisor(threads, timeout)
    supervisor.threads, supervisor.timeout = threads, timeout
    return supervisor


def keep_supervisor(supervisor: Supervisor) -> None:
    """Keep a supervisor and its worker for the next unit."""
    _idle_supervisors.append(supervisor)


def release_supervisor(supervisor: Supervisor) -> None:
    """Keep a supervisor inside `keep_workers`; otherwise stop it."""
    if _thread_pools:
        keep_supervisor(supervisor)
    else:
        supervisor.end()


def end_idle_workers() -> None:
    """Stop all idle workers."""
    while _idle_supervisors:
        _idle_supervisors.pop().end()
