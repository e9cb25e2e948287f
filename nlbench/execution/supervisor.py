"""Measure units in a process of their own, which may hang, exit or be killed.

PyTorch is never imported here: a supervisor is light, its worker carries the weight.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import IO, Any

from nlbench.plan import Cell
from nlbench.store.record import Record

from .heartbeat import IDLE, LOADING, MEASURING, PASSING, Beat, Pulse, make_pulse
from .work_units import Missed, Unit

__all__ = [
    "Died",
    "Overran",
    "Stepped",
    "Worker",
    "deaf_processes",
    "end_workers",
    "quiet_ending",
    "quiet_loop",
    "supervised",
]


FRESH_SECONDS = 300.0
"""A worker that has been idle for longer may be about to end; it isn't given work."""

START_SECONDS = 120.0
"""What starting a process and importing plugins may take beyond the time of a cell."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from nlbench.execution.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class Stepped(str):
    """A step of a pass, in words."""


class Died(Exception):
    """A worker ended before its unit; the argument says how."""

    def __init__(self, how: str, phase: int) -> None:
        super().__init__(how)
        self.phase = phase


class Overran(Exception):
    """A cell took longer than it may; the worker was killed."""

    def __init__(self, phase: int, cell: int) -> None:
        super().__init__(f"overran in phase {phase}")
        self.phase, self.cell = phase, cell


class Worker:
    """A process that measures one unit after the other.

    Parameters
    ----------
    threads : int
        PyTorch's.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.used = time.monotonic()
        # Set before the libraries start their threads; `torch.set_num_threads` comes too late
        # for some.
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with make_pulse() as file:
            handle = file.fileno()
            self._pulse = Pulse(handle)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(handle), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **count},
                pass_fds=(handle,),
                # Ctrl-C is for the supervisor, which ends its worker itself.
                start_new_session=True,
            )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    @property
    def is_fresh(self) -> bool:
        """Whether it lives and will do so for a while."""
        idle = time.monotonic() - self.used
        return self._process.poll() is None and idle < FRESH_SECONDS

    def measure(self, unit: Unit, timeout: float | None) -> Iterator[dict[str, Any]]:
        """Yield what the worker says of a unit, message by message.

        Raises
        ------
        Died, Overran
            The worker is gone then.
        """
        order = {"unit": unit.to_dict(), "timeout": timeout}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        late: Beat | None = None
        sent = time.monotonic()
        while True:
            try:
                message = self._messages.get(timeout=0.05 if timeout else 1.0)
            except queue.Empty:
                beat = self._pulse.read()
                if timeout is None or beat is None or late:
                    continue
                if beat.phase == IDLE:
                    beat = Beat(LOADING, 0, time.monotonic() - sent - START_SECONDS)
                if beat.seconds > timeout:
                    # What it has sent by now is still read.
                    late = beat
                    self._kill()
                continue
            if message is None or "gone" in message:
                if late:
                    raise Overran(late.phase, late.cell)
                if message is None:
                    beat = self._pulse.read()
                    raise Died(_how(self._process.wait()), beat.phase if beat else PASSING)
                raise Died(_how(message["gone"]), message["phase"])
            if "done" in message:
                # One killed too late has still to say that it is gone: it gets no other unit.
                self.used = float("-inf") if late else time.monotonic()
                return
            yield message

    def end(self) -> None:
        """Kill the process, if it lives, and forget it."""
        self._kill()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream:
                    stream.close()
        with contextlib.suppress(BufferError):
            self._pulse.close()

    def _kill(self) -> None:
        """Kill what measures, with whatever a plugin started; what waits for it goes on."""
        process = self._pulse.process
        if process in (0, self._process.pid):
            self._process.kill()
            return
        with contextlib.suppress(OSError):
            os.killpg(process, signal.SIGKILL)

    def _read(self, lines: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                try:
                    self._messages.put(json.loads(line))
                except ValueError:
                    break  # cut off in the middle: the process is gone
        self._messages.put(None)


def _how(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"
    return f"the worker exited with status {status}, as a plugin that calls exit makes it"


class _Idle:
    """Workers that wait for the next unit of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[Worker] = []

    def take(self, threads: int) -> Worker:
        with self._lock:
            while self._workers:
                worker = self._workers.pop()
                if worker.is_fresh and worker.threads == threads:
                    return worker
                worker.end()
        return Worker(threads)

    def put(self, worker: Worker) -> None:
        with self._lock:
            self._workers.append(worker)

    def end(self) -> None:
        with self._lock:
            while self._workers:
                self._workers.pop().end()


_idle = _Idle()


def end_workers() -> None:
    """End the workers that this process keeps for later."""
    _idle.end()


def supervised(
    unit: Unit, *, timeout: float | None, threads: int
) -> Iterator[Record | Missed | Stepped]:
    """Measure a unit in a process of its own; each of its cells comes to something.

    A cell that takes too long is failed, and the others go on in a new process. If the
    process dies, which cell is to blame is found out by measuring those that are left one by
    one, each once more.

    Parameters
    ----------
    unit : Unit
    timeout : float or None
        Seconds for a cell.
    threads : int
        PyTorch's.

    Yields
    ------
    Record, Missed, Stepped
    """
    left = {cell.key: cell for cell in unit.cells}
    alone = False
    while left:
        cells = list(left.values())
        part = unit.only(cells[:1] if alone else cells)
        worker = _idle.take(threads)
        kept = False
        try:
            for result in _results(worker.measure(part, timeout), left):
                for key in _keys(result):
                    left.pop(key, None)
                yield result
            for cell in part.cells:
                if left.pop(cell.key, None):
                    yield Missed((cell,), "the worker said nothing of this cell")
            kept = True
        except Overran as overrun:
            kept = worker.is_fresh
            gone = _overrun(overrun, part, left)
            for cell in gone:
                del left[cell.key]
            assert timeout is not None
            yield Missed(gone, f"{_PHASES[overrun.phase]} longer than {timeout:g} s")
        except Died as death:
            kept = worker.is_fresh
            if alone:
                # Before the first pass it would be the same for each of them.
                gone = tuple(cells) if death.phase in (IDLE, LOADING) else part.cells[:1]
                for cell in gone:
                    left.pop(cell.key, None)
                yield Missed(gone, str(death))
            alone = True
        finally:
            if kept:
                _idle.put(worker)
            else:
                worker.end()


_PHASES = {
    LOADING: "loading the subject took",
    PASSING: "the pass through the network took",
    MEASURING: "took",
}


def _overrun(overrun: Overran, part: Unit, left: dict[str, Cell]) -> tuple[Cell, ...]:
    """Cells that a delay concerns."""
    if overrun.phase == LOADING:
        return tuple(cell for cell in part.cells if cell.key in left)
    at = part.cells[overrun.cell]
    if overrun.phase == MEASURING and at.key in left:
        return (at,)
    late = [c for c in part.cells if c.wanted.probe == at.wanted.probe and c.key in left]
    return tuple(late or left.values())


def _results(
    messages: Iterator[dict[str, Any]], cells: dict[str, Cell]
) -> Iterator[Record | Missed | Stepped]:
    for message in messages:
        if "record" in message:
            yield Record.from_json(message["record"], "what a worker measured")
        elif "step" in message:
            yield Stepped(message["step"])
        elif "missed" in message:
            gone = tuple(cells[key] for key in message["missed"])
            yield Missed(gone, message["reason"], message["traceback"], message["loading"])


def _keys(result: Record | Missed | Stepped) -> list[str]:
    if isinstance(result, Record):
        return [result.key]
    return [cell.key for cell in result.cells] if isinstance(result, Missed) else []


@contextmanager
def deaf_processes() -> Iterator[None]:
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


@contextmanager
def quiet_ending() -> Iterator[None]:
    """Keep from the user what joblib and loky say when tasks are called off.

    Joblib warns that they were. Loky's own thread may look for one that is gone already, and
    prints a KeyError that means nothing.
    """
    before = threading.excepthook
    held: list[threading.ExceptHookArgs] = []

    def hook(error: threading.ExceptHookArgs) -> None:
        is_managers = type(error.thread).__name__ == "_ExecutorManagerThread"
        if is_managers and error.exc_type is KeyError:
            held.append(error)
        else:
            before(error)

    def release() -> None:
        threading.excepthook = before
        for error in held:
            before(error)

    threading.excepthook = hook
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*You could benefit from adjusting the input", UserWarning
        )
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            # The thread may stumble later still, so the hook stays.
            raise
        except BaseException:
            release()
            raise
    release()


@contextmanager
def quiet_loop() -> Iterator[None]:
    """Keep from the log what Dask's loop says of tasks that it can't ask for any more."""
    loop = logging.getLogger("tornado.application")
    # No level: Dask sets that itself.
    unheard = logging.Filter("nothing")
    loop.addFilter(unheard)
    try:
        yield
    finally:
        loop.removeFilter(unheard)
