"""What a worker is at, written where its supervisor can read it at any time.

A worker that hangs in compiled code answers no question and runs no thread of Python's;
a page of shared memory tells nevertheless.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import IO

__all__ = ["IDLE", "LOADING", "MEASURING", "PASSING", "Beat", "Pulse", "make_pulse"]


IDLE, LOADING, PASSING, MEASURING = range(4)

_LAYOUT = struct.Struct("<qqqdd")
_PROCESS = struct.Struct("<q")
_SIZE = _LAYOUT.size + _PROCESS.size


@dataclass(frozen=True)
class Beat:
    """One look at a pulse.

    Parameters
    ----------
    phase : int
        ``IDLE``, ``LOADING``, ``PASSING`` or ``MEASURING``.
    cell : int
        Which cell of the unit: the one measured, or the first of the pass.
    seconds : float
        What that cell has taken by now, with the loading and the pass that it shares.
    """

    phase: int
    cell: int
    seconds: float


class Pulse:
    """A page shared by a worker, which writes, and its supervisor, which reads.

    Parameters
    ----------
    handle : int
        Descriptor of a file of `make_pulse`, which may be closed afterwards.

    Examples
    --------
    >>> with make_pulse() as file:
    ...     worker, supervisor = Pulse(file.fileno()), Pulse(file.fileno())
    >>> worker.write(MEASURING, 3, 10.0)
    >>> beat = supervisor.read()
    >>> beat.phase == MEASURING, beat.cell, beat.seconds >= 10
    (True, 3, True)
    >>> worker.close(), supervisor.close()
    (None, None)
    """

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, _SIZE)
        self._turn = 0

    def write(self, phase: int, cell: int, before: float) -> None:
        """Say what begins now, and how many seconds its cell has taken before."""
        # An odd number while it is written: a reader then looks again later.
        self._turn += 1
        struct.pack_into("<q", self._page, 0, self._turn)
        struct.pack_into("<qqdd", self._page, 8, phase, cell, time.monotonic(), before)
        self._turn += 1
        struct.pack_into("<q", self._page, 0, self._turn)

    def read(self) -> Beat | None:
        """What the worker is at; None if it is just being written."""
        page = self._page[: _LAYOUT.size]
        turn, phase, cell, since, before = _LAYOUT.unpack(page)
        if turn % 2 or page != self._page[: _LAYOUT.size]:
            return None
        return Beat(phase, cell, before + time.monotonic() - since)

    def introduce(self, process: int) -> None:
        """Say which process is at work, and that it has nothing to do yet."""
        _PROCESS.pack_into(self._page, _LAYOUT.size, process)
        self.write(IDLE, 0, 0.0)

    @property
    def process(self) -> int:
        """The process at work; 0 before there is one."""
        return int(_PROCESS.unpack_from(self._page, _LAYOUT.size)[0])

    def close(self) -> None:
        """Let go of the page."""
        self._page.close()


def make_pulse() -> IO[bytes]:
    """Make the file of a pulse that is idle.

    It has no name, so that none is left behind by a process that is killed.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(_LAYOUT.pack(0, IDLE, 0, time.monotonic(), 0.0) + _PROCESS.pack(0))
    file.flush()
    return file
