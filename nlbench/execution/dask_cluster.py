"""Measure units on a Dask cluster, each of whose workers supervises one process."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import queue
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, error_text, one_line
from nlbench.serialization.fields import from_plain, to_plain
from nlbench.signals import uninterrupted
from nlbench.store.record import Record

from .supervisor import START_SECONDS, end_idle_workers, keep_supervisor, take_supervisor
from .work_units import Event, Unit, from_message, split_by_probe, to_message

if TYPE_CHECKING:
    from .executors import WorkerPool


def measure_on_cluster(units: Sequence[Unit], pool: WorkerPool) -> Generator[Record | Event]:
    """Measure units on a cluster.

    Results arrive as Dask events. Units are split by probe if there are fewer units than workers.
    """
    if len(units) < pool.workers:
        units = [part for unit in units for part in split_by_probe(unit)]
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    topic = f"nlbench-{uuid.uuid4().hex}"
    with _cluster(pool) as client:
        client.subscribe_topic(topic, lambda event: arrivals.put(json.loads(event[1])))
        pending = {f"{topic}-{index}": unit for index, unit in enumerate(units)}
        missing = {cell.key for unit in units for cell in unit.cells}
        futures = [
            client.submit(_supervise, json.dumps(to_plain(unit)), topic, pool, key=key)
            for key, unit in pending.items()
        ]
        try:
            for future in futures:
                future.add_done_callback(arrivals.put)
            while pending:
                arrival = arrivals.get()
                if isinstance(arrival, dict):
                    yield from _new_results(arrival, missing)
                    continue
                # Events arrive before the task ends, unless they were lost with a connection.
                unit = pending.pop(arrival.key)
                problem = _problem(arrival)
                for event in [] if problem else arrival.result():
                    yield from _new_results(json.loads(event), missing)
                lost = replace(unit, cells=tuple(c for c in unit.cells if c.key in missing))
                yield from lost.missing_records(problem or "the worker returned no result")
        finally:
            _call_within(CLOSE_SECONDS, lambda: _stop(client, futures))


def _stop(client: Any, futures: Sequence[Any]) -> None:
    """Cancel a run's tasks and stop its idle workers."""
    _ignore_errors(client.loop)
    client.cancel(futures)
    client.run(end_idle_workers)


def _ignore_errors(loop: Any) -> None:
    """Print no errors of coroutines that Dask leaves behind to write to closed connections."""
    loop.asyncio_loop.set_exception_handler(lambda loop, context: None)


WORKER_PRELOAD = "import logging; logging.disable()"
"""Code that the workers of a local cluster run first. Only Dask logs in them."""

CONNECT_SECONDS = 10.0
"""Time limit for connecting to the scheduler of a user's cluster."""

CLOSE_SECONDS = 10.0
"""Time limit for stopping a cluster, which may hang or no longer exist."""


def _call_within(seconds: float, function: Callable[[], None]) -> None:
    """Call a function uninterrupted, and return when it does or the time limit is reached.

    A Dask client that is interrupted while closing would wait for its timeouts.
    """

    def call() -> None:
        # Closing a cluster that no longer exists may raise errors of any type. By now, all results
        # have arrived or an error is being raised.
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, name="nlbench stops Dask", daemon=True)
    with uninterrupted():
        thread.start()
        thread.join(seconds)


def _new_results(message: dict[str, str], missing: set[str]) -> Iterator[Record | Event]:
    """Yield the event or the record of a message, unless the record has already arrived."""
    result = from_message(message)
    if isinstance(result, Record):
        if result.key not in missing:
            return
        missing.remove(result.key)
    yield result


def _problem(future: Any) -> str:
    """Return why a task failed, or an empty string."""
    if future.status == "finished":
        return ""
    if future.status == "cancelled":
        return "the cluster cancelled the task"
    error = future.exception()
    if type(error).__name__ == "KilledWorker":
        return "the workers that had this task were lost"
    return f"a worker could not measure this: {error_text(error)}"


def _supervise(unit_text: str, topic: str, pool: WorkerPool) -> list[str]:
    """Supervise a unit in a Dask worker and return its results.

    Each result is also logged as an event.
    """
    distributed: Any = importlib.import_module("distributed")
    worker = distributed.get_worker()
    task = worker.get_current_task()

    def is_wanted() -> bool:
        # The scheduler cancels or forgets the task when its client cancels it or disconnects.
        state = worker.state.tasks.get(task)
        return state is not None and state.state != "cancelled"

    events = []
    supervisor = take_supervisor(pool.threads, pool.execution.timeout)
    index = worker.name if isinstance(worker.name, int) else 0
    unit = pool.placed(from_plain(Unit, json.loads(unit_text), "unit"), index)
    try:
        for result in supervisor.measure(unit, is_wanted):
            event = json.dumps(to_message(result))
            worker.log_event(topic, event)
            if isinstance(result, Record) or "unloadable" in result:
                events.append(event)
    except BaseException:
        supervisor.end()
        raise
    keep_supervisor(supervisor)
    return events


@contextmanager
def _cluster(pool: WorkerPool) -> Iterator[Any]:
    """Connect to a Dask cluster, or start one on this machine."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise RequestError("--executor dask requires Dask: pip install 'nlbench[dask]'") from error
    address = pool.execution.address
    stack = ExitStack()
    security = None
    try:
        try:
            if address:
                # Given an invalid address, the client would block until it is closed.
                importlib.import_module("distributed.comm").resolve_address(address)
            else:
                security = _temporary_security(distributed)
                config: Any = importlib.import_module("dask.config")
                place = config.get("temporary-directory") or tempfile.gettempdir()
                scratch = Path(place, "dask-scratch-space")
                if not scratch.exists():
                    stack.callback(_remove_scratch_folder, scratch)
                with _interrupts_blocked():
                    cluster = distributed.LocalCluster(
                        n_workers=pool.workers,
                        threads_per_worker=1,
                        security=security,
                        # Any free port, accessible only from this machine.
                        dashboard_address="127.0.0.1:0",
                        # Dask would log cancelled tasks; other errors are raised here.
                        silence_logs=logging.CRITICAL,
                        # A worker that is stopped in the middle of a task logs closed connections,
                        # also after Dask has ended its own silence.
                        preload=[WORKER_PRELOAD, *config.get("distributed.worker.preload")],
                    )
                # The loop of its scheduler and nannies, which is not the client's.
                _ignore_errors(cluster.loop)
                # If it stops too late, Dask would wait again at exit, and print an error.
                cluster.shutdown_on_close = False
                stack.enter_context(cluster)
                address = cluster.scheduler_address
            # A local scheduler is running, but on a busy machine it may respond late.
            timeout = CONNECT_SECONDS if pool.execution.address else START_SECONDS
            client = distributed.Client(
                address, timeout=timeout, set_as_default=False, security=security
            )
            stack.enter_context(client)
        except (OSError, ValueError, OverflowError, RuntimeError, ImportError, Warning) as error:
            what = f"--address: no Dask scheduler at {address}" if address else "no Dask cluster"
            raise RequestError(f"{what} ({one_line(error)})") from error
        yield client
    finally:
        _call_within(CLOSE_SECONDS, stack.close)


def _remove_scratch_folder(folder: Path) -> None:
    """Remove the folder of temporary files that Dask leaves behind, unless it is in use.

    What a killed run leaves there is removed by the next Dask cluster on the machine.
    """
    with contextlib.suppress(OSError):
        for name in ("global.lock", "purge.lock"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _temporary_security(distributed: Any) -> Any:
    """Create keys for a cluster on this machine, whose other users could otherwise run code in it.

    They exist only in the memory of the run and its workers.
    """
    try:
        return distributed.Security.temporary()
    except ImportError as error:
        raise RequestError(
            "--executor dask without --address requires cryptography: pip install 'nlbench[dask]'"
        ) from error


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Make processes started in the block ignore Ctrl-C, since this process stops them.

    They inherit the blocked signal. In this process, it is delivered after the block.
    """
    # If started on demand, with the first of those processes, the tracker would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
