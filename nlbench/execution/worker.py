"""The worker process, started and supervised by `nlbench.execution.supervisor`.

It reads requests from a socket shared with the supervisor, and writes events and results to it. It
exits when the supervisor does.
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
from nlbench.introspection.allocator import keep_freed_memory
from nlbench.progress import ProgressMonitor
from nlbench.serialization.fields import from_plain
from nlbench.signals import interruptible

from .work_units import Unit, to_message

IDLE_SECONDS = 60.0
"""Idle time after which a worker exits, freeing its memory and GPU."""


class CellTimeout(NlbenchError):
    """A measure exceeded the time limit for a cell."""


class Messenger(ProgressMonitor):
    """A monitor that reports to the supervisor and measures the time spent on each cell.

    If there is a timeout (in seconds per cell), it also reports which measure is running.
    """

    def __init__(self, connection: Connection, unit: Unit, timeout: float | None) -> None:
        self._connection = connection
        self._timeout = timeout
        self._seconds = dict.fromkeys((cell.measure.name for cell in unit.cells), 0.0)
        self._since = time.monotonic()
        self._load_seconds = self._shared_seconds = 0.0
        self._probe = ""
        # Keyed by thread, since several threads may run measures.
        self._running: dict[int, str] = {}
        self._lock = threading.RLock()

    def send(self, **message: Any) -> None:
        """Send a message, or exit if the supervisor has exited."""
        with self._lock:
            _send(self._connection, message)

    def step(self, what: str) -> None:
        """Count one step."""
        self.send(step=what)

    def warn(self, message: str) -> None:
        """Send a warning to the user."""
        self.send(warn=message)

    def loading(self) -> None:
        """Start timing the loading of a subject."""
        self._since = time.monotonic()
        self.send(phase="loading", probe="", measure="", spent=0.0)

    def observing(self, probe: str) -> None:
        """Start timing a probe's pass."""
        now = time.monotonic()
        if not self._load_seconds:
            self._load_seconds = now - self._since
        self._shared_seconds = self._load_seconds
        self._since = now
        self._probe = probe
        self._send_running()

    def enter(self, measure: str) -> None:
        """Start timing a measure in this thread."""
        with self._lock:
            self._charge()
            self._running[threading.get_ident()] = measure
            if self._timeout is not None:
                self._send_running()

    def leave(self) -> None:
        """Stop timing this thread's measure. Raise `CellTimeout` if it took too long."""
        with self._lock:
            self._charge()
            measure = self._running.pop(threading.get_ident())
            if self._timeout is not None:
                self._send_running()
            spent = self._shared_seconds + self._seconds[measure]
        if self._timeout is not None and spent > self._timeout:
            raise CellTimeout(f"took longer than {self._timeout:g} s")

    def _charge(self) -> None:
        """Charge the time since the last call to each running measure, once for all its threads."""
        now = time.monotonic()
        elapsed = now - self._since
        self._since = now
        if not self._running:
            self._shared_seconds += elapsed
        for measure in {*self._running.values()}:
            self._seconds[measure] += elapsed

    def _send_running(self) -> None:
        """Send the running measure that is closest to its time limit."""
        running = max(self._running.values(), key=self._seconds.__getitem__, default="")
        phase = "measuring" if running else "observing"
        spent = self._shared_seconds + self._seconds.get(running, 0.0)
        self.send(phase=phase, probe=self._probe, measure=running, spent=spent)


def main(handle: int, threads: int) -> None:
    """Serve the supervisor's requests, on the socket with this handle, until it exits."""
    # A SIGTERM sent to the whole process group is left to the supervisor, which kills this process.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _end_with_parent()
    keep_freed_memory()
    connection = Connection(handle)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    # Imported last, so that the process exits with its supervisor even during the imports.
    from nlbench.introspection.threads import torch_threads

    from .unit_runner import UnitRunner

    unit_runner = UnitRunner(threads=threads)
    with interruptible():
        while True:
            try:
                request = json.loads(requests.get(timeout=IDLE_SECONDS))
            except queue.Empty:
                _end()
            if "call" in request:
                module, _, name = request["call"].partition(":")
                function = getattr(importlib.import_module(module), name)
                with torch_threads(threads):
                    function(request["argument"], partial(_send, connection))
            else:
                unit = from_plain(Unit, request["unit"], "unit")
                messenger = Messenger(connection, unit, request["timeout"])
                for result in unit_runner.measure(unit, messenger):
                    messenger.send(**to_message(result))
            _send(connection, {"done": True, "changed": unit_runner.process_is_changed})


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send a message, or exit if the supervisor has exited."""
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        _end()


def _listen(connection: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            requests.put(connection.recv_bytes())
    _end()


def _end_with_parent() -> None:
    """Make Linux kill this process when its supervisor dies.

    `_listen` also detects that, but not while compiled code holds the GIL.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def _end() -> NoReturn:
    """Kill this process and all processes that plugins started from it."""
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(0)
