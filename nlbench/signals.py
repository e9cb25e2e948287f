"""Signals: Ctrl-C, and what asks a process to end, as one interruption that loses nothing.

A cluster sends SIGTERM before it takes a machine away, and a terminal SIGHUP when it is closed.
Here they are what Ctrl-C is: a `KeyboardInterrupt`, which may be put off for a moment.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ignore_interruptions", "interruptible", "uninterrupted"]

_NUMBERS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class _Interruption:
    """A handler of signals that raises, at once or as soon as nothing is in the way."""

    def __init__(self) -> None:
        self.holds = 0
        self.waits = False

    def __call__(self, number: int, frame: object) -> None:
        if self.holds:
            self.waits = True
        else:
            raise KeyboardInterrupt

    def release(self) -> None:
        self.holds -= 1
        if self.waits and not self.holds:
            self.waits = False
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Take a request to end as Ctrl-C, however often it comes.

    What somebody else has made of a signal is theirs, and is left alone. Outside of the main
    thread, which alone hears signals, nothing is done.
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _NUMBERS if _hears_signals()}
    mine = {number: handler for number, handler in before.items() if handler in usual}
    interruption = _Interruption()
    for number in mine:
        signal.signal(number, interruption)
    try:
        yield
    finally:
        # One that comes now would leave some of them in place.
        interruption.holds += 1
        for number, handler in mine.items():
            if signal.getsignal(number) is interruption:
                signal.signal(number, handler)
        interruption.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put an interruption off to the end of a block, where `interruptible` takes it."""
    handlers = [signal.getsignal(number) for number in _NUMBERS] if _hears_signals() else []
    found = {id(h): h for h in handlers if isinstance(h, _Interruption)}
    for interruption in found.values():
        interruption.holds += 1
    try:
        yield
    finally:
        for interruption in found.values():
            interruption.release()


def ignore_interruptions() -> None:
    """Ignore what `interruptible` takes, in a process that is about to end."""
    for number in _NUMBERS if _hears_signals() else ():
        if isinstance(signal.getsignal(number), _Interruption):
            signal.signal(number, signal.SIG_IGN)


def _hears_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
