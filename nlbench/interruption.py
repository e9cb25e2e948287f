"""What Ctrl-C does to joblib's processes, and what they say of it: nothing."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

__all__ = ["deaf_processes", "quiet_ending", "quiet_loop"]


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
