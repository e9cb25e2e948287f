"""Measure units or call functions in processes on this machine."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from nlbench.errors import RequestError, system_text
from nlbench.store.record import Record

from .supervisor import (
    Supervisor,
    UnitCancelled,
    WorkerCrash,
    release_supervisor,
    supervising_threads,
    take_supervisor,
)
from .work_units import Event, Unit, split_by_probe

if TYPE_CHECKING:
    from .executors import WorkerPool


def measure_in_processes(units: Sequence[Unit], pool: WorkerPool) -> Generator[Record | Event]:
    """Measure units in worker processes, each supervised by a thread.

    A worker measures a unit's probes one after another; once all units are started, workers that
    are free take probes from others.
    """
    unit_parts = deque(deque(split_by_probe(unit)) for unit in units)
    started: list[deque[Unit]] = []
    lock = threading.Lock()

    def parts_left(parts: deque[Unit]) -> deque[Unit]:
        """Return these parts or, if none are left, those of another unit."""
        if not parts and unit_parts:
            parts = unit_parts.popleft()
            started.append(parts)
        return parts or max(started, key=len)

    def supervise(
        supervisor: Supervisor, index: int, is_wanted: Callable[[], bool]
    ) -> Iterator[Record | Event]:
        parts: deque[Unit] = deque()
        while True:
            with lock:
                parts = parts_left(parts)
                if not parts:
                    return
                part = parts.popleft()
            others: list[Unit] = []
            for result in supervisor.measure(pool.placed(part, index), is_wanted):
                yield result
                if isinstance(result, Record):
                    last = result
                elif "unloadable" in result:
                    with lock:
                        others = [*parts]
                        parts.clear()
            for other in others:
                yield from other.missing_records(last.result.reason, last.traceback)

    workers = min(pool.workers, sum(map(len, unit_parts)))
    return _run_supervisors(supervise, workers, pool.threads, pool.execution.timeout)


def call_in_processes(
    function: str,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    after: Mapping[str, str],
    workers: int,
    threads: int,
) -> Generator[tuple[str, dict[str, Any]]]:
    """Call a function in worker processes, once for each argument, and yield its messages.

    The function ``module:name`` takes an argument and a callable that sends messages; both are JSON
    objects. `after` maps a call to the one that it waits for. The last message of each call is
    ``{"done": reason}``, where the reason is empty unless its process crashed. Closing the
    generator stops the processes.
    """
    ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    pending = set(arguments)
    workers = min(workers, len(arguments))

    def supervise(
        supervisor: Supervisor, index: int, is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        while (name := ready.get()) is not None:
            crash = ""
            try:
                request = {"call": function, "argument": dict(arguments[name])}
                for message in supervisor.ask(request, is_wanted):
                    yield name, message
            except WorkerCrash as error:
                crash = str(error)
            yield name, {"done": crash}

    for name in arguments:
        if after.get(name) not in pending:
            ready.put(name)
    messages = _run_supervisors(supervise, workers, threads, None)
    try:
        for name, message in messages:
            yield name, message
            if "done" in message:
                pending.remove(name)
                for other in pending:
                    if after.get(other) == name:
                        ready.put(other)
                if not pending:
                    break
    finally:
        for _ in range(workers):
            ready.put(None)
        messages.close()


_Item = TypeVar("_Item")


def _run_supervisors(
    supervise: Callable[[Supervisor, int, Callable[[], bool]], Iterator[_Item]],
    workers: int,
    threads: int,
    timeout: float | None,
) -> Generator[_Item]:
    """Run each supervisor in its own thread, and yield the items of all as they arrive."""
    items: queue.SimpleQueue[tuple[_Item] | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def work(index: int) -> None:
        supervisor = take_supervisor(threads, timeout)
        is_reusable = False
        try:
            for item in supervise(supervisor, index, lambda: not stopped.is_set()):
                items.put((item,))
            is_reusable = True
        except UnitCancelled:
            # The caller has closed the generator.
            pass
        except BaseException as error:
            # Re-raised in the caller's thread.
            items.put(error)
        finally:
            if is_reusable:
                release_supervisor(supervisor)
            else:
                supervisor.end()
            items.put(None)

    with supervising_threads() as pool:
        started: list[Future[None]] = []
        try:
            for index in range(workers):
                started.append(pool.submit(work, index))
            for _ in started:
                while (item := items.get()) is not None:
                    if isinstance(item, OSError):
                        raise RequestError(
                            f"--workers: no process can be started ({system_text(item)})"
                        )
                    if isinstance(item, BaseException):
                        raise item
                    yield item[0]
        finally:
            stopped.set()
            wait(started)
