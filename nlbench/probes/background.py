"""Have work done in order by one thread beside, with a bound on what waits for it."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

__all__ = ["Background", "overlap_pays", "rng_restored", "rng_state"]


Item = TypeVar("Item")


def overlap_pays(device: torch.device) -> bool:
    """Whether measures that compute beside the network's forward pass save time.

    Not where there is a single core for both, nor on Apple's GPU, which is for one thread.

    Examples
    --------
    >>> overlap_pays(torch.device("cuda"))
    True
    """
    if device.type != "cpu":
        return device.type != "mps"
    has_affinity = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1) > 1


def rng_state(device: torch.device) -> bytes:
    """State of all global random generators; the same as long as nobody draws from them.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> before = rng_state(cpu)
    >>> _ = torch.zeros(3)
    >>> rng_state(cpu) == before
    True
    >>> _ = torch.rand(3)
    >>> rng_state(cpu) == before
    False
    """
    states: list[Any] = [random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002
    states.append(torch.get_rng_state().numpy())
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy())
    elif device.type == "mps":
        states.append(torch.mps.get_rng_state().numpy())
    return pickle.dumps(states)


@contextmanager
def rng_restored(device: torch.device) -> Iterator[None]:
    """Put the global random generators back to where they were."""
    own, arrays = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    devices = [device] if device.type == "cuda" else []
    apples = torch.mps.get_rng_state() if device.type == "mps" else None
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if apples is not None:
                torch.mps.set_rng_state(apples)
            random.setstate(own)
            np.random.set_state(arrays)  # noqa: NPY002


class _Threads:
    """How many threads PyTorch has, while others compute with one each.

    What a thread sets for itself is also the default of threads to come: the last of several
    that overlap puts back what the first one found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 1

    def begin(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = torch.get_num_threads()
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                torch.set_num_threads(self._before)


_THREADS = _Threads()


class Background(Generic[Item]):
    """Works off items in the order given, in a thread of its own.

    The thread computes by itself, without PyTorch's own threads: two sets of threads that
    wait for their own would hold up each other, and what a measure computes is mostly too
    small to be split. So its numbers don't depend on how many threads there are.

    Parameters
    ----------
    work : callable
        Done with each item.
    size : callable
        Bytes of an item.
    most : int
        Bytes that may wait; an item that is larger waits alone. With 0 the caller waits until
        each item is done. `let_wait` changes it.
    device : torch.device, optional
        Where the items are. On a GPU the work is queued behind what the caller has queued.

    Examples
    --------
    >>> done = []
    >>> with Background(done.append, lambda item: 1, most=10) as background:
    ...     for number in range(3):
    ...         background.put(number)
    >>> done
    [0, 1, 2]
    """

    def __init__(
        self,
        work: Callable[[Item], Any],
        size: Callable[[Item], int],
        most: int,
        device: torch.device | None = None,
    ) -> None:
        self._work, self._size, self._most = work, size, most
        self._waiting: deque[Item] = deque()
        self._bytes = 0
        self._is_working = self._is_closed = self._is_done = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="measures", daemon=True)
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def __enter__(self) -> Background[Item]:
        _THREADS.begin()
        try:
            self._thread.start()
        except BaseException:
            _THREADS.end()
            raise
        return self

    def let_wait(self, most: int) -> None:
        """Let that many bytes wait from now on."""
        with self._changed:
            self._most = most

    def put(self, item: Item) -> None:
        """Leave an item to the thread; waits while too much is waiting.

        Raises
        ------
        Exception
            What the work raised on an earlier item.
        """
        size = self._size(item)
        with self._changed:
            while self._waiting and self._bytes + size > self._most and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._waiting.append(item)
            self._bytes += size
            self._changed.notify_all()
            while self._most == 0 and (self._waiting or self._is_working):
                self._changed.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closed = True
            if error is not None:
                # Nobody will read what is still to come.
                self._waiting.clear()
            self._changed.notify_all()
        try:
            self._wait_until_done()
        except BaseException:
            # Interrupted while the rest is worked off.
            with self._changed:
                self._waiting.clear()
            self._wait_until_done()
            raise
        finally:
            _THREADS.end()
        if error is None and self._error is not None:
            raise self._error

    def _wait_until_done(self) -> None:
        # Not by `join` alone: interrupted once, it takes the thread for ended (Python 3.11).
        with self._changed:
            while not self._is_done:
                self._changed.wait()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work_off()
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _work_off(self) -> None:
        torch.set_num_threads(1)
        # PyTorch takes no stream at all for a question to the GPU: which takes it into use though
        # nothing is on it, and on a Mac there is no answer.
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.no_grad(), stream:
            while (item := self._take()) is not None:
                try:
                    self._work(item[0])
                except BaseException as error:
                    # Raised again in the caller's thread.
                    with self._changed:
                        self._error, self._is_working = error, False
                        self._waiting.clear()
                        self._changed.notify_all()
                    return

    def _take(self) -> tuple[Item] | None:
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            item = self._waiting.popleft()
            self._is_working = True
            self._bytes -= self._size(item)
            self._changed.notify_all()
            return (item,)
