"""Measure units in a worker process, which may hang, exit or be killed.

A supervisor doesn't import PyTorch; its worker does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from nlbench.plan import Cell
from nlbench.serialization.fields import to_plain
from nlbench.store.record import Record

from .work_units import Event, Unit, from_message
from .worker import IDLE_SECONDS

START_SECONDS = 120.0
"""Time allowed for starting a process and importing plugins, in addition to a cell's limit."""

POLL_SECONDS = 0.1
"""Interval between checks of a unit's time limit and cancellation."""

_SCRIPT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from nlbench.execution.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Phase:
    """The current phase of a worker."""

    name: str  # starting, loading, observing or measuring
    # probe, measure: names of those that are running; empty if there is none
    probe: str
    measure: str
    # Seconds charged to the cell before this phase, including loading and forward passes.
    spent: float
    since: float  # start of the phase, from `time.monotonic`

    @property
    def seconds(self) -> float:
        """Seconds that the cell has taken so far."""
        return self.spent + time.monotonic() - self.since

    @property
    def is_early(self) -> bool:
        """True until the subject is loaded."""
        return self.name in ("starting", "loading")


class WorkerCrash(Exception):
    """A worker exited before completing its unit."""

    def __init__(self, reason: str, phase: Phase) -> None:
        super().__init__(reason)
        self.phase = phase


class WorkerTimeout(WorkerCrash):
    """A cell exceeded its time limit, and its worker was killed."""


class UnitCancelled(Exception):
    """A unit was cancelled because its results are no longer needed."""


def _exit_reason(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"
    return f"the worker exited with status {status}, perhaps because a plugin called exit"


class Supervisor:
    """Measures units with a worker process, which is replaced if it ends or has other threads."""

    def __init__(self, threads: int, timeout: float | None) -> None:
        self.threads = threads
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._process_threads = 0
        self._last_used = 0.0
        self._subject = ""
        # True if the subject has changed more than settings of the process.
        self._is_changed = False

    def measure(
        self, unit: Unit, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[Record | Event]:
        """Measure a unit. Yield events and, for each cell, a record.

        A cell that exceeds its time limit fails, and the others continue in a new process. If
        the process crashes, the remaining cells are retried one at a time, so that only the cell
        causing the crash fails. `is_wanted` is polled; if it returns False, the unit is
        cancelled and `UnitCancelled` is raised.
        """
        pending = {cell.key: cell for cell in unit.cells}
        one_by_one = False
        if self._is_changed and self._subject != unit.cells[0].subject.key:
            self.end()
        self._subject = unit.cells[0].subject.key
        while pending:
            cells = tuple(pending.values())
            part = replace(unit, cells=cells[:1] if one_by_one else cells)
            is_early = False
            try:
                request = {"unit": to_plain(part), "timeout": self.timeout}
                for message in self.ask(request, is_wanted, self.timeout):
                    result = from_message(message)
                    if isinstance(result, Record):
                        pending.pop(result.key, None)
                    yield result
                missing = tuple(cell for cell in part.cells if cell.key in pending)
                reason = "the worker returned no result"
            except WorkerTimeout as error:
                left = [cell for cell in part.cells if cell.key in pending]
                missing = _late_cells(error.phase, left)
                is_early = error.phase.is_early
                reason = f"{_PHASE_TEXTS[error.phase.name]} longer than {self.timeout:g} s"
            except WorkerCrash as error:
                is_early = one_by_one and error.phase.is_early
                reason = str(error)
                # A crash before the first forward pass would recur for every other cell.
                missing = cells if is_early else part.cells if one_by_one else ()
                one_by_one = True
            if is_early:
                yield {"unloadable": ""}
            for record in replace(unit, cells=missing).missing_records(reason):
                pending.pop(record.key, None)
                yield record

    def ask(
        self,
        request: Mapping[str, Any],
        is_wanted: Callable[[], bool],
        timeout: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Send a request and yield the worker's messages.

        The request has a ``unit`` and the ``timeout`` per cell in seconds, or the function to
        ``call`` (``module:name``) and its ``argument``. The unit is cancelled when `is_wanted`
        returns False. After WorkerCrash, WorkerTimeout or UnitCancelled the process is no longer
        running.
        """
        self._start()
        process = self._process
        assert process is not None
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(request).encode())
        phase = Phase("starting", "", "", -START_SECONDS, time.monotonic())
        is_late = False
        while True:
            try:
                message = self._receive()
            except (OSError, EOFError):
                if is_late:
                    raise WorkerTimeout("it took too long", phase) from None
                self._kill_group()
                raise WorkerCrash(_exit_reason(process.wait()), phase) from None
            if message is None:
                if process.poll() is not None:
                    # A process started by a plugin still holds the other end open.
                    self._connection.close()
                elif not is_wanted():
                    self.end()
                    raise UnitCancelled
                elif timeout is not None and not is_late and phase.seconds > timeout:
                    # Keep reading any messages that the worker sent before it was killed.
                    is_late = True
                    self._kill_group()
            elif "done" in message:
                # A worker killed just after finishing its unit must not be reused.
                self._last_used = float("-inf") if is_late else time.monotonic()
                self._is_changed = message.get("changed", False)
                return
            elif "phase" in message:
                if not is_late:
                    name = message.pop("phase")
                    phase = Phase(name=name, since=time.monotonic(), **message)
            else:
                yield message

    def _start(self) -> None:
        """Start a worker unless one is ready, and send nothing to one that may end soon."""
        is_recent = time.monotonic() - self._last_used < IDLE_SECONDS / 2
        is_running = self._process is not None and self._process.poll() is None
        if is_running and is_recent and self._process_threads == self.threads:
            return
        self.end()
        self._process_threads, self._last_used = self.threads, time.monotonic()
        supervisor_socket, worker_socket = socket.socketpair()
        # Some libraries start their threads before `torch.set_num_threads` is called.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        variables = dict.fromkeys(names, str(self.threads))
        # Threads that busy-wait take CPU time from the threads they are waiting for.
        defaults = {"OMP_WAIT_POLICY": "PASSIVE"}
        with supervisor_socket, worker_socket:
            handle = worker_socket.fileno()
            arguments = [json.dumps(sys.path), str(handle), str(self.threads)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Plugins print to standard error.
                env={**defaults, **os.environ, **variables},
                pass_fds=(handle,),
                # In a separate process group, Ctrl-C reaches only the supervisor, and processes
                # started by plugins are killed with the worker.
                start_new_session=True,
            )
            self._connection = Connection(supervisor_socket.detach())

    def end(self) -> None:
        """Kill the process, if there is one, and close the connection."""
        if self._process is not None:
            self._kill_group()
            self._process.wait()
            self._connection.close()
        self._process = None
        self._is_changed = False

    def _receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives within `POLL_SECONDS`."""
        if not self._connection.poll(POLL_SECONDS):
            return None
        return json.loads(self._connection.recv_bytes())

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


_PHASE_TEXTS = {
    "starting": "starting a worker took",
    "loading": "loading the subject took",
    "observing": "the pass through the network took",
    "measuring": "took",
}


def _late_cells(phase: Phase, pending: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the pending cells that fail if the time limit is exceeded in a phase."""
    measured = [cell for cell in pending if cell.measure.name == phase.measure]
    observed = [cell for cell in pending if cell.probe.name == phase.probe]
    return tuple(measured or observed or pending)


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
    supervisor.threads = threads
    supervisor.timeout = timeout
    return supervisor


def keep_supervisor(supervisor: Supervisor) -> None:
    """Keep a supervisor and its worker for the next unit."""
    _idle_supervisors.append(supervisor)


def release_supervisor(supervisor: Supervisor) -> None:
    """Keep a supervisor inside `keep_workers`. Otherwise stop it."""
    if _thread_pools:
        keep_supervisor(supervisor)
    else:
        supervisor.end()


def end_idle_workers() -> None:
    """Stop all idle workers."""
    while _idle_supervisors:
        _idle_supervisors.pop().end()
