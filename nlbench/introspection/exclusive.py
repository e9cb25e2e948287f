"""One measurement at a time in a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

_LOCK = threading.Lock()
_HOLDS_LOCK: ContextVar[bool] = ContextVar("its measurement holds the lock", default=False)


@contextmanager
def one_measurement() -> Iterator[None]:
    """Wait until no other thread measures, and make other threads wait on it.

    A measurement changes settings of the process and modes of the model, which every thread shares.
    Contexts of one thread may be nested. The threads of `measurement_thread` belong to the
    measurement of the thread that creates them.

    Examples
    --------
    >>> with one_measurement(), one_measurement():
    ...     pass
    """
    if _HOLDS_LOCK.get():
        yield
        return
    with _LOCK:
        token = _HOLDS_LOCK.set(True)
        try:
            yield
        finally:
            _HOLDS_LOCK.reset(token)


def measurement_thread(target: Callable[[], Any], name: str | None = None) -> threading.Thread:
    """Return a daemon thread that belongs to the caller's measurement, if there is one.

    Examples
    --------
    >>> def nested():
    ...     with one_measurement():
    ...         print("measured")
    >>> with one_measurement():
    ...     thread = measurement_thread(nested)
    ...     thread.start()
    ...     thread.join()
    measured
    """
    return threading.Thread(target=copy_context().run, args=(target,), name=name, daemon=True)


def _renew_lock() -> None:
    """Replace a lock that may belong to a thread which a forked process doesn't have."""
    global _LOCK
    if not _HOLDS_LOCK.get():
        _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
