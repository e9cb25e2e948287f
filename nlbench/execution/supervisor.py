"""Measure units in a process of their own, which may hang, exit or be killed.

PyTorch is never imported here: a supervisor is light, its worker carries the weight.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from nlbench.plan import Cell
from nlbench.store.record import Record

from .work_units import Missed, Told, Unit, keys_of, result_of
from .worker import IDLE_SECONDS

__all__ = ["Died", "Overran", "Phase", "Supervisor", "Unwanted", "Worker"]


START_SECONDS = 120.0
"""What starting a process and importing plugins may take beyond the time of a cell."""

TICK = 0.1
"""Seconds between two looks at whether a cell is late, or nobody wants it any more."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from nlbench.execution.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Phase:
    """What a worker is at.

    Parameters
    ----------
    name : {"starting", "loading", "observing", "measuring"}
    cell : int
        Which cell of the unit: the one measured, or the first of the probe.
    spent : float
        Seconds that this cell had taken before, with the loading and the observation that it
        shares.
    since : float
        When it began, by `time.monotonic`.
    """

    name: str
    cell: int
    spent: float
    since: float

    @property
    def seconds(self) -> float:
        """What the cell has taken by now."""
        return self.spent + time.monotonic() - self.since


class Died(Exception):
    """A worker ended before its unit; the argument says how."""

    def __init__(self, how: str, phase: Phase) -> None:
        super().__init__(how)
        self.phase = phase


class Overran(Died):
    """A cell took longer than it may; the worker was killed."""


class Unwanted(Exception):
    """Nobody wants the results any more."""


class Worker:
    """A process that measures one unit after the other.

    Parameters
    ----------
    threads : int
        PyTorch's.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.used = threads, time.monotonic()
        ours, theirs = socket.socketpair()
        # Set before the libraries start their threads; `torch.set_num_threads` comes too late
        # for some.
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with ours, theirs:
            handle = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(handle), str(threads)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what plugins print goes to standard error
                env={**os.environ, **count},
                pass_fds=(handle,),
                # Ctrl-C is for the supervisor, which ends its worker itself; and a group of its
                # own, so that what a plugin starts is ended with it.
                start_new_session=True,
            )
            self._connection = Connection(ours.detach())

    @property
    def is_fresh(self) -> bool:
        """Whether it lives and won't end for want of work just now."""
        idle = time.monotonic() - self.used
        return self._process.poll() is None and idle < IDLE_SECONDS / 2

    def ask(
        self,
        order: Mapping[str, Any],
        timeout: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[dict[str, Any]]:
        """Yield what the worker says of an order, message by message.

        Parameters
        ----------
        order : mapping
            A ``unit`` to measure, with the ``timeout`` of its cells; or a function to ``call``,
            ``module:name``, with what it is ``given`` beside something to send messages with.
        timeout : float, optional
            Seconds for a cell.
        wanted : callable
            Asked now and then whether to go on.

        Raises
        ------
        Died, Overran, Unwanted
            The worker is gone then.
        """
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(order).encode())
        phase = Phase("starting", 0, -START_SECONDS, time.monotonic())
        is_late = False
        while True:
            try:
                message = self._receive()
            except (OSError, EOFError):
                if is_late:
                    raise Overran("it took too long", phase) from None
                raise Died(_how(self._end_group()), phase) from None
            if message is None:
                if self._process.poll() is not None:
                    # Something that a plugin started still holds the other end.
                    self._connection.close()
                elif not wanted():
                    self.end()
                    raise Unwanted
                elif timeout is not None and not is_late and phase.seconds > timeout:
                    # What it has sent by now is still read.
                    is_late = True
                    self._kill_group()
            elif "done" in message:
                # One killed too late gets no other unit.
                self.used = float("-inf") if is_late else time.monotonic()
                return
            elif "phase" in message:
                if not is_late:
                    phase = Phase(
                        message["phase"], message["cell"], message["spent"], time.monotonic()
                    )
            else:
                yield message

    def end(self) -> None:
        """Kill the process, if it lives, and forget it."""
        self._end_group()
        self._connection.close()

    def _receive(self) -> dict[str, Any] | None:
        """Next message; None if there is none for a moment."""
        if not self._connection.poll(TICK):
            return None
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def _end_group(self) -> int:
        """Kill the process with whatever a plugin started, and give its exit status."""
        self._kill_group()
        return self._process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _how(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"
    return f"the worker exited with status {status}, as a plugin that calls exit makes it"


class Supervisor:
    """Has units measured by a worker; one that dies is replaced.

    Parameters
    ----------
    threads : int
        PyTorch's.
    timeout : float or None
        Seconds for a cell.
    """

    def __init__(self, threads: int, timeout: float | None) -> None:
        self.threads, self.timeout = threads, timeout
        self._worker: Worker | None = None

    def measure(
        self, unit: Unit, wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[Record | Missed | Told]:
        """Measure a unit; each of its cells comes to something.

        A cell that takes too long is failed, and the others go on in a new process. If the
        process dies, which cell is to blame is found out by measuring those that are left one
        by one, each once more.

        Parameters
        ----------
        unit : Unit
        wanted : callable
            Asked now and then whether to go on.

        Yields
        ------
        Record, Missed, Told

        Raises
        ------
        Unwanted
            If ``wanted`` said no.
        """
        left = {cell.key: cell for cell in unit.cells}
        alone = False
        while left:
            cells = list(left.values())
            part = replace(unit, cells=tuple(cells[:1] if alone else cells))
            try:
                order = {"unit": part.to_dict(), "timeout": self.timeout}
                for message in self._ready().ask(order, self.timeout, wanted):
                    result = result_of(message, left)
                    for key in keys_of(result):
                        left.pop(key, None)
                    yield result
                gone = tuple(cell for cell in part.cells if cell.key in left)
                if gone:
                    yield _missed(left, gone, "the worker said nothing of this cell")
            except Overran as overrun:
                gone = _late(overrun.phase, part, left)
                what = _PHASES[overrun.phase.name]
                yield _missed(left, gone, f"{what} longer than {self.timeout:g} s")
            except Died as death:
                if alone:
                    # Before the first observation it would be the same for each of them.
                    is_early = death.phase.name in ("starting", "loading")
                    yield _missed(left, tuple(cells) if is_early else part.cells, str(death))
                alone = True

    def call(
        self, function: str, given: Mapping[str, Any], wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[dict[str, Any]]:
        """Have a function called by the worker; see `Worker.ask`."""
        return self._ready().ask({"call": function, "given": dict(given)}, wanted=wanted)

    def end(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _ready(self) -> Worker:
        worker = self._worker
        if worker is None or worker.threads != self.threads or not worker.is_fresh:
            self.end()
            worker = self._worker = Worker(self.threads)
        return worker


_PHASES = {
    "starting": "starting a worker took",
    "loading": "loading the subject took",
    "observing": "the pass through the network took",
    "measuring": "took",
}


def _late(phase: Phase, part: Unit, left: dict[str, Cell]) -> tuple[Cell, ...]:
    """Cells that a delay concerns."""
    if phase.name in ("starting", "loading"):
        return tuple(cell for cell in part.cells if cell.key in left)
    at = part.cells[phase.cell]
    if phase.name == "measuring" and at.key in left:
        return (at,)
    late = [c for c in part.cells if c.wanted.probe == at.wanted.probe and c.key in left]
    return tuple(late or left.values())


def _missed(left: dict[str, Cell], cells: tuple[Cell, ...], reason: str) -> Missed:
    for cell in cells:
        left.pop(cell.key, None)
    return Missed(cells, reason)
