"""Conversion of termination signals to a `KeyboardInterrupt` that can be deferred.

The signals are SIGINT from Ctrl-C, SIGTERM, which a cluster sends before it reclaims a machine, and
SIGHUP from a closed terminal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class _Interruption:
    """A signal handler that raises at once or at the end of the outermost deferring block."""

    def __init__(self) -> None:
        self.deferrals = 0
        self.is_pending = self.was_raised = False

    def __call__(self, number: int, frame: object) -> None:
        self.is_pending = True
        self.check()

    def release(self) -> None:
        self.deferrals -= 1
        self.check()

    def check(self, *, reraise: bool = False) -> None:
        """Raise a pending interruption. With `reraise`, also raise one that was raised before."""
        if (self.is_pending or (reraise and self.was_raised)) and not self.deferrals:
            self.is_pending = False
            self.was_raised = True
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` for each termination signal.

    An interruption that other code swallows, as with ``except:``, is raised again at the end of
    the block. Custom signal handlers are kept. Nothing happens outside the main thread, which is
    the only one that receives signals.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _SIGNALS if _is_main_thread()}
    replaced = {number: handler for number, handler in before.items() if handler in defaults}
    interruption = _Interruption()
    for number in replaced:
        signal.signal(number, interruption)
    try:
        yield
        interruption.check(reraise=True)
    finally:
        # An interruption during the loop would leave some handlers in place.
        interruption.deferrals += 1
        for number, handler in replaced.items():
            if signal.getsignal(number) is interruption:
                signal.signal(number, handler)
        interruption.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer an interruption of `interruptible` to the end of a block."""
    interruptions = _active_interruptions()
    for interruption in interruptions:
        interruption.deferrals += 1
    try:
        yield
    finally:
        for interruption in interruptions:
            interruption.release()


def check_interruption() -> None:
    """Raise an interruption of `interruptible` again if other code has swallowed it."""
    for interruption in _active_interruptions():
        interruption.check(reraise=True)


@contextmanager
def interruptions_first() -> Iterator[None]:
    """Raise an interruption of `interruptible` again if other code has raised another error."""
    try:
        yield
    except (Exception, SystemExit):
        check_interruption()
        raise


def raise_interruption(error: BaseException) -> None:
    """Raise a `KeyboardInterrupt` again unless a plugin raised it, without any signal.

    Outside of `interruptible` the two can't be distinguished. Threads other than the main one
    receive no signals.
    """
    if not isinstance(error, KeyboardInterrupt) or not _is_main_thread():
        return
    interruptions = _active_interruptions()
    if not interruptions or any(i.was_raised for i in interruptions):
        raise error


def ignore_interruptions() -> None:
    """Ignore the signals of `interruptible` until the process ends."""
    for interruption in _active_interruptions():
        interruption.deferrals += 1
    for number in _SIGNALS if _is_main_thread() else ():
        if isinstance(signal.getsignal(number), _Interruption):
            signal.signal(number, signal.SIG_IGN)


def _active_interruptions() -> set[_Interruption]:
    handlers = map(signal.getsignal, _SIGNALS) if _is_main_thread() else ()
    return {handler for handler in handlers if isinstance(handler, _Interruption)}


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
