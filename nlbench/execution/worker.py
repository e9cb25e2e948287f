"""The process that measures units for a supervisor, which `nlbench.execution.supervisor` starts.

It shares one socket with its supervisor: units, or calls of a function, come in, and what is going
on goes out, message by message. It ends with its supervisor, whatever it is at.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nlbench.errors import NlbenchError
from nlbench.progress import Monitor

from .work_units import Unit, message_of

__all__ = ["IDLE_SECONDS", "Messenger", "Overrun", "main"]


IDLE_SECONDS = 60.0
"""After so long without work a worker ends, and with it what it holds of memory and GPU."""


class Overrun(NlbenchError):
    """A measure took longer than a cell may."""


class Messenger(Monitor):
    """Tells the supervisor what goes on, and keeps the time of each cell.

    Parameters
    ----------
    connection : Connection
    unit : Unit
    timeout : float or None
        Seconds for a cell. Only where there is one must the supervisor know which measure is
        at work.
    """

    def __init__(self, connection: Connection, unit: Unit, timeout: float | None) -> None:
        self._connection, self._timeout = connection, timeout
        self._cells = {cell.wanted.name: number for number, cell in enumerate(unit.cells)}
        self._probes = {
            cell.wanted.probe: number for number, cell in reversed(list(enumerate(unit.cells)))
        }
        self._own = dict.fromkeys(self._cells, 0.0)
        self._since = time.monotonic()
        self._load = self._shared = 0.0
        self._probe = 0
        # Measures may be at work in several threads: which one in each.
        self._at_work: dict[int, str] = {}
        self._lock = threading.RLock()

    def send(self, **message: Any) -> None:
        """Send a message; without a supervisor this process ends."""
        with self._lock:
            _send(self._connection, message)

    def step(self, what: str) -> None:
        """Count one step of something."""
        self.send(step=what)

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line."""
        self.send(warn=message)

    def loading(self) -> None:
        """A subject is being loaded."""
        self._since = time.monotonic()
        self._phase("loading", 0, 0.0)

    def observing(self, probe: str) -> None:
        """A probe's observation begins."""
        now = time.monotonic()
        if not self._load:
            self._load = now - self._since
        self._shared, self._since, self._probe = self._load, now, self._probes[probe]
        self._phase("observing", self._probe, self._shared)

    def enter(self, measure: str) -> None:
        """A measure begins to compute, in this thread."""
        with self._lock:
            self._keep_time()
            self._at_work[threading.get_ident()] = measure
            self._say_who()

    def leave(self) -> None:
        """It has stopped; raises if it took too long."""
        with self._lock:
            self._keep_time()
            measure = self._at_work.pop(threading.get_ident())
            self._say_who()
            spent = self._shared + self._own[measure]
        if self._timeout is not None and spent > self._timeout:
            raise Overrun(f"took longer than {self._timeout:g} s")

    def _keep_time(self) -> None:
        """Charge the time since the last time: to who is at work, in however many threads."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        if not self._at_work:
            self._shared += passed
        for measure in {*self._at_work.values()}:
            self._own[measure] += passed

    def _say_who(self) -> None:
        """Say who is at work; of several the one that will take too long first."""
        if self._timeout is None:
            return
        if not self._at_work:
            self._phase("observing", self._probe, self._shared)
            return
        measure = max(self._at_work.values(), key=self._own.__getitem__)
        self._phase("measuring", self._cells[measure], self._shared + self._own[measure])

    def _phase(self, name: str, cell: int, spent: float) -> None:
        """Say what begins, and how many seconds its cell has taken before."""
        self.send(phase=name, cell=cell, spent=spent)


def main(handle: int, threads: int) -> None:
    """Measure units, or call functions, until there are no more.

    Parameters
    ----------
    handle : int
        Of the socket.
    threads : int
        PyTorch's.
    """
    # Whoever ends the supervisor with its group leaves it to the supervisor to end this one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _end_with_the_parent()
    connection = Connection(handle)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    # From here on it ends when its supervisor does, so that importing may take its time.
    from .measure_subject import UnitRunner
    from .numerics import some_threads

    unit_runner = UnitRunner(threads=threads)
    while True:
        try:
            order = json.loads(orders.get(timeout=IDLE_SECONDS))
        except queue.Empty:
            _end()
        if "call" in order:
            module, _, name = order["call"].partition(":")
            function = getattr(importlib.import_module(module), name)
            with some_threads(threads):
                function(order["given"], partial(_send, connection))
        else:
            unit = Unit.from_dict(order["unit"])
            messenger = Messenger(connection, unit, order["timeout"])
            for result in unit_runner.measure(unit, messenger):
                messenger.send(**message_of(result))
        _send(connection, {"done": True})


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send a message; without a supervisor this process ends."""
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        _end()


def _listen(connection: Connection, orders: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            orders.put(connection.recv_bytes())
    # Nobody is left to measure for.
    _end()


def _end_with_the_parent() -> None:
    """Have the system kill this process when its supervisor is gone, where the system can.

    `_listen` finds out too, but not while compiled code holds Python's lock.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def _end() -> NoReturn:
    """End this process, and whatever a plugin started in it."""
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(0)
