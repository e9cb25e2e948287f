"""Where units are measured: here, in processes of this machine, or on a Dask cluster.

Whoever asks for the results is the only one who writes them down.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import queue
import signal
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from nlbench.errors import RequestError, error_text, one_line, system_text
from nlbench.plan import Cell
from nlbench.progress import Monitor, Progress
from nlbench.request import ExecutionOptions
from nlbench.store.record import Record

from .supervisor import Died, Supervisor, Unwanted
from .work_units import Missed, Told, Unit, keys_of, message_of, result_of

__all__ = ["WorkerPool", "called", "executed", "workers_kept"]


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
        GPUs to share out, where there are several; else empty. Each worker keeps to one.
    """

    execution: ExecutionOptions
    workers: int
    threads: int
    devices: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it measures in this process."""
        return self.execution.executor == "serial" and self.execution.timeout is None

    def placed(self, unit: Unit, worker: int) -> Unit:
        """Give a unit the device of a worker."""
        if not self.devices:
            return unit
        return replace(unit, device=self.devices[worker % len(self.devices)])


def executed(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | Missed]:
    """Measure units and yield what comes of their cells, as it comes.

    Closing it ends whatever measures.

    Parameters
    ----------
    units : sequence of Unit
    pool : WorkerPool
    progress : Progress
        Told of each step when it is taken.

    Raises
    ------
    nlbench.RequestError
        If there is no cluster, or no process can be started.
    """
    if pool.execution.executor == "dask":
        return _on_cluster(units, pool, progress)
    if pool.is_here:
        return _here(units, pool, progress)
    return _in_processes(units, pool, progress)


def _here(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | Missed]:
    # Imported where it is needed: a finished run is taken up without PyTorch.
    from .measure_subject import UnitRunner

    unit_runner, monitor = UnitRunner(threads=pool.threads), Monitor(progress)
    for unit in units:
        yield from unit_runner.measure(unit, monitor)


def _in_processes(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | Missed]:
    """Have threads supervise one process each."""
    todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in units:
        todo.put(unit)

    def attend(
        supervisor: Supervisor, number: int, wanted: Callable[[], bool]
    ) -> Iterator[Record | Missed | Told]:
        with contextlib.suppress(queue.Empty):
            while True:
                unit = pool.placed(todo.get_nowait(), number)
                yield from supervisor.measure(unit, wanted)

    workers = min(pool.workers, len(units))
    with closing(_attended(attend, workers, pool.threads, pool.execution.timeout)) as answers:
        for answer in answers:
            if isinstance(answer, Told):
                answer.to(progress)
            else:
                yield answer


def called(
    function: str,
    given: Mapping[str, Mapping[str, Any]],
    *,
    after: Mapping[str, str],
    workers: int,
    threads: int,
) -> Generator[tuple[str, dict[str, Any]]]:
    """Have a function called in processes, once for each of what is given.

    Closing it ends whatever is called.

    Parameters
    ----------
    function : str
        ``module:name``; it takes one of what is given, and something to send messages with:
        dictionaries, as JSON has them.
    given : mapping of str to mapping
        By name; as JSON has it.
    after : mapping of str to str
        Of some names, after which other one they are called.
    workers, threads : int

    Yields
    ------
    tuple of str and dict
        Name and message; the last of each name is ``{"done": ""}``, or how its process died.

    Raises
    ------
    nlbench.RequestError
        If no process can be started.
    """
    ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    left, workers = set(given), min(workers, len(given))

    def attend(
        supervisor: Supervisor, number: int, wanted: Callable[[], bool]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        while (name := ready.get()) is not None:
            how = ""
            try:
                for message in supervisor.call(function, given[name], wanted):
                    yield name, message
            except Died as death:
                how = str(death)
            yield name, {"done": how}

    for name in given:
        if after.get(name) not in left:
            ready.put(name)
    answers = _attended(attend, workers, threads, None)
    try:
        for name, message in answers:
            yield name, message
            if "done" in message:
                left.remove(name)
                for other in left:
                    if after.get(other) == name:
                        ready.put(other)
                if not left:
                    break
    finally:
        for _ in range(workers):
            ready.put(None)
        answers.close()


MOST_WORKERS = 1024

_Answer = TypeVar("_Answer")


def _attended(
    attend: Callable[[Supervisor, int, Callable[[], bool]], Iterator[_Answer]],
    workers: int,
    threads: int,
    timeout: float | None,
) -> Generator[_Answer]:
    """Have threads attend to a supervisor each, and yield what they say as it comes."""
    answers: queue.SimpleQueue[tuple[_Answer] | Exception | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def work(number: int) -> None:
        supervisor = _ready_supervisor(threads, timeout)
        is_fit = False
        try:
            for answer in attend(supervisor, number, lambda: not stopped.is_set()):
                answers.put((answer,))
            is_fit = True
        except Unwanted:
            pass
        except Exception as error:
            answers.put(error)
        finally:
            if is_fit and _keepers:
                _idle.append(supervisor)
            else:
                supervisor.end()
            answers.put(None)

    with _threads() as pool:
        started: list[Future[None]] = []
        try:
            for number in range(workers):
                started.append(pool.submit(work, number))
            for _ in started:
                while (answer := answers.get()) is not None:
                    if isinstance(answer, OSError):
                        what = f"no process can be started ({system_text(answer)})"
                        raise RequestError(f"--workers: {what}")
                    if isinstance(answer, Exception):
                        raise answer
                    yield answer[0]
        finally:
            stopped.set()
            wait(started)


_keepers: list[ThreadPoolExecutor] = []


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Those that are kept, or some for this once."""
    if _keepers:
        yield _keepers[-1]
    else:
        with ThreadPoolExecutor(MOST_WORKERS, "nlbench") as pool:
            yield pool


@contextmanager
def workers_kept() -> Iterator[None]:
    """Keep the processes of a run for the next one within a block: to start one takes seconds.

    The threads that start them are kept too, since the system ends a process with the thread that
    has started it.
    """
    with _threads() as pool:
        _keepers.append(pool)
        try:
            yield
        finally:
            _keepers.pop()
            if not _keepers:
                _end_idle()


def _on_cluster(
    units: Sequence[Unit], pool: WorkerPool, progress: Progress
) -> Generator[Record | Missed]:
    """Have Dask's workers supervise a process each; what they say comes as events."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    topic = f"nlbench-{uuid.uuid4().hex}"
    with _cluster(pool) as client:
        client.subscribe_topic(topic, lambda event: answers.put(json.loads(event[1])))
        left = {f"{topic}-{number}": unit for number, unit in enumerate(units)}
        missing = {cell.key: cell for unit in units for cell in unit.cells}
        futures = [
            client.submit(_supervise, json.dumps(unit.to_dict()), topic, pool, key=key)
            for key, unit in left.items()
        ]
        try:
            for future in futures:
                future.add_done_callback(answers.put)
            while left:
                answer = answers.get()
                if isinstance(answer, dict):
                    yield from _new(answer, missing, progress)
                    continue
                # Its events came before, but for those that were lost with a connection.
                unit = left.pop(answer.key)
                problem = _problem(answer)
                for event in [] if problem else answer.result():
                    yield from _new(json.loads(event), missing, progress)
                gone = tuple(c for c in unit.cells if missing.pop(c.key, None) is not None)
                if gone:
                    yield Missed(gone, problem or "the worker said nothing of this cell")
        finally:
            with contextlib.suppress(Exception):  # of a cluster that is gone
                client.cancel(futures)
                client.run(_end_idle)


def _new(
    message: dict[str, Any], missing: dict[str, Cell], progress: Progress
) -> Iterator[Record | Missed]:
    """Read what a worker says; nothing is yielded twice."""
    result = result_of(message, missing)
    if isinstance(result, Told):
        result.to(progress)
        return
    new = [missing.pop(key) for key in keys_of(result) if key in missing]
    if new:
        yield result


def _problem(future: Any) -> str:
    """Why a task came to nothing; else nothing."""
    if future.status == "finished":
        return ""
    if future.status == "cancelled":
        return "the cluster called the work off"
    error = future.exception()
    if type(error).__name__ == "KilledWorker":
        return "the workers that were to measure this were lost"
    return f"a worker could not measure this: {error_text(error)}"


_idle: list[Supervisor] = []
"""Those that wait for the next unit; `list` is safe among threads."""


def _ready_supervisor(threads: int, timeout: float | None) -> Supervisor:
    """One that waits, or a new one."""
    try:
        supervisor = _idle.pop()
    except IndexError:
        return Supervisor(threads, timeout)
    supervisor.threads, supervisor.timeout = threads, timeout
    return supervisor


def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


def _supervise(unit: str, topic: str, pool: WorkerPool) -> list[str]:
    """Supervise a unit in a Dask worker, and say at once what comes of it."""
    distributed: Any = importlib.import_module("distributed")
    worker = distributed.get_worker()
    task = worker.get_current_task()

    def wanted() -> bool:
        # A task whose client is gone, or has called it off, is cancelled or forgotten.
        state = worker.state.tasks.get(task)
        return state is not None and state.state != "cancelled"

    said = []
    supervisor = _ready_supervisor(pool.threads, pool.execution.timeout)
    given = Unit.from_dict(json.loads(unit))
    name = worker.name if isinstance(worker.name, int) else 0
    try:
        for result in supervisor.measure(pool.placed(given, name), wanted):
            event = json.dumps(message_of(result))
            worker.log_event(topic, event)
            if not isinstance(result, Told):
                said.append(event)
    except BaseException:
        supervisor.end()
        raise
    _idle.append(supervisor)
    return said


@contextmanager
def _cluster(pool: WorkerPool) -> Iterator[Any]:
    """Connect to a Dask cluster, or make one on this machine."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise RequestError("--executor dask needs Dask: pip install 'nlbench[dask]'") from error
    address = pool.execution.address
    with ExitStack() as stack:
        try:
            if not address:
                with _deaf_processes():
                    cluster = distributed.LocalCluster(
                        n_workers=pool.workers,
                        threads_per_worker=1,
                        # Any port that is free, for this machine only.
                        dashboard_address="127.0.0.1:0",
                        # Its errors are of tasks that are called off; others are raised here.
                        silence_logs=logging.CRITICAL,
                    )
                stack.enter_context(cluster)
                address = cluster.scheduler_address
            client = distributed.Client(address, timeout=10, set_as_default=False)
            stack.enter_context(client)
        except (OSError, ValueError, TimeoutError, RuntimeError) as error:
            what = f"--address: no Dask scheduler at {address}" if address else "no Dask cluster"
            raise RequestError(f"{what} ({one_line(error)})") from error
        yield client


@contextmanager
def _deaf_processes() -> Iterator[None]:
    """Have the processes that are started meanwhile not hear Ctrl-C: this one ends them.

    A blocked signal stays so in whatever is started, from its first instruction on; here it
    waits until afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # no such thing on Windows
        yield
        return
    # Started with the first of those processes, it would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
