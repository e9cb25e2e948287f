"""The process that measures units for a supervisor; started by `nlbench.execution.supervisor`.

It reads one unit a line from standard input and writes one message a line to what was its
standard output. What plugins print goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from io import FileIO
from typing import Any

import torch

from nlbench.errors import NlbenchError

from .heartbeat import IDLE, LOADING, MEASURING, PASSING, Pulse
from .measure_subject import Host
from .work_units import Missed, Unit

__all__ = ["main"]


IDLE_SECONDS = 600.0
"""After so long without work a worker ends: nobody may be left who could give it any."""


ENDED = 87
"""Exit status of a process that has no more to do; a plugin's would be any other."""


class Overrun(NlbenchError):
    """A measure took longer than a cell may."""


class _Watch:
    """Keeps the pulse, and the time of each cell."""

    def __init__(self, pulse: Pulse, unit: Unit, timeout: float | None) -> None:
        self._pulse, self._timeout = pulse, timeout
        self._cells = {cell.wanted.name: number for number, cell in enumerate(unit.cells)}
        self._probes = {
            cell.wanted.probe: number for number, cell in reversed(list(enumerate(unit.cells)))
        }
        self._own = dict.fromkeys(self._cells, 0.0)
        self._since = time.monotonic()
        self._load = self._shared = 0.0
        self._probe, self._measure = 0, ""

    def loading(self) -> None:
        self._since = time.monotonic()
        self._pulse.write(LOADING, 0, 0.0)

    def passing(self, probe: str) -> None:
        now = time.monotonic()
        if not self._load:
            self._load = now - self._since
        self._shared, self._since, self._probe = self._load, now, self._probes[probe]
        self._pulse.write(PASSING, self._probe, self._shared)

    def enter(self, measure: str) -> None:
        now = time.monotonic()
        self._shared += now - self._since
        self._since, self._measure = now, measure
        self._pulse.write(MEASURING, self._cells[measure], self._shared + self._own[measure])

    def leave(self) -> None:
        now = time.monotonic()
        self._own[self._measure] += now - self._since
        self._since = now
        self._pulse.write(PASSING, self._probe, self._shared)
        taken = self._shared + self._own[self._measure]
        if self._timeout is not None and taken > self._timeout:
            raise Overrun(f"took longer than {self._timeout:g} s")


class _Steps:
    """Progress, told to the supervisor."""

    def __init__(self, out: FileIO) -> None:
        self._out = out

    def begin(self, steps: int) -> None:
        """Do nothing: the supervisor knows."""

    def step(self, what: str) -> None:
        """Count one step."""
        _send(self._out, {"step": what})

    def warn(self, message: str) -> None:
        """Say something that the user should know."""
        _send(self._out, {"warn": message})


def main(handle: int, threads: int) -> None:
    """Have units measured until there are no more; the handle is the pulse's file.

    On Linux each death costs a fork only: this process, which imports what is heavy and
    computes nothing, is copied for the units, and again when the copy dies.
    """
    out = FileIO(os.dup(1), "wb")
    given = FileIO(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    pulse = Pulse(handle)
    os.close(handle)
    if sys.platform != "linux":
        _serve(given, out, pulse, threads)
        return
    while True:
        child = os.fork()
        if child == 0:
            # A group of its own: what a plugin starts is ended with it.
            os.setpgid(0, 0)
            _serve(given, out, pulse, threads)
            os._exit(ENDED)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == ENDED:
            return
        beat = pulse.read()
        # Nothing of the dead one may be taken for the next one's.
        pulse.introduce(0)
        _send(out, {"gone": code, "phase": beat.phase if beat else PASSING})


def _serve(given: FileIO, out: FileIO, pulse: Pulse, threads: int) -> None:
    """Measure units until there are no more."""
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(given, lines), daemon=True).start()
    torch.set_num_threads(threads)
    pulse.introduce(os.getpid())
    host = Host()
    while True:
        try:
            order = json.loads(lines.get(timeout=IDLE_SECONDS))
        except queue.Empty:
            return
        unit = Unit.of(order["unit"])
        watch = _Watch(pulse, unit, order["timeout"])
        for result in host.measure(unit, _Steps(out), watch):
            if isinstance(result, Missed):
                missed = {
                    "missed": [cell.key for cell in result.cells],
                    "reason": result.reason,
                    "traceback": result.traceback,
                    "loading": result.loading,
                }
                _send(out, missed)
            else:
                _send(out, {"record": result.to_json()})
        pulse.write(IDLE, 0, 0.0)
        _send(out, {"done": True})


def _listen(given: FileIO, lines: queue.Queue[bytes]) -> None:
    text = b""
    while part := given.read(1 << 16):
        text += part
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            lines.put(line)
    # Nobody is left to measure for.
    os._exit(ENDED)


def _send(out: FileIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[out.write(data) or 0 :]
    except BrokenPipeError:
        os._exit(ENDED)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
