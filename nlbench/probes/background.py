"""Have work done by threads beside, in order where it matters, with a bound on what waits."""

from __future__ import annotations

import heapq
import itertools
import os
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

__all__ = ["Background", "overlap_pays", "rng_restored", "rng_state", "threads_beside"]


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


def threads_beside(device: torch.device) -> tuple[int, int]:
    """How many threads may measure: while the network waits for them, and while it runs.

    On a CPU the network has its threads at work, and leaves one core; a GPU leaves all.

    Examples
    --------
    >>> threads_beside(torch.device("cpu"))[1]
    1
    """
    threads = torch.get_num_threads() if overlap_pays(device) else 1
    return threads, 1 if device.type == "cpu" else threads


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


@dataclass
class _Item:
    """Work that was left in one call: it counts as waiting until the last piece is begun."""

    number: int
    size: int
    waiting: int
    unfinished: int
    is_begun: bool = False


_Chain = deque[tuple[_Item, Callable[[], Any]]]


class Background:
    """Has threads work beside the caller, pieces of one key one after the other, in order.

    Each thread computes by itself, without PyTorch's own threads: sets of threads that wait for
    their own would hold up each other, and what a measure computes is mostly too small to be
    split. So numbers depend neither on how many threads there are nor on which does what.

    Parameters
    ----------
    most : int
        Bytes that may wait, and as many may be at work; an item that is larger goes alone.
    device : torch.device, optional
        Where the items are. On a GPU the work is queued behind what the caller has queued.
    threads : int
        How many work at once.
    beside : int, optional
        How many of them while the caller computes, and doesn't wait; by default all.

    Examples
    --------
    >>> done = []
    >>> with Background(most=10, threads=2) as background:
    ...     for number in range(3):
    ...         background.put({"one": lambda number=number: done.append(number)}, size=1)
    >>> done
    [0, 1, 2]
    """

    def __init__(
        self,
        most: int,
        device: torch.device | None = None,
        *,
        threads: int = 1,
        beside: int | None = None,
    ) -> None:
        self._most = most
        self._beside = threads if beside is None else min(beside, threads)
        self._chains: dict[Hashable, _Chain] = {}
        # Keys whose next piece nothing precedes, that of the earliest item first.
        self._ready: list[tuple[int, int, Hashable]] = []
        self._numbers = itertools.count()
        self._busy: set[Hashable] = set()
        self._waiting = self._working = self._begun = 0
        self._is_closed = self._caller_waits = False
        self._running = threads
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name="measures", daemon=True) for _ in range(threads)
        ]
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def __enter__(self) -> Background:
        _THREADS.begin()
        for thread in self._threads:
            thread.start()
        return self

    def put(self, pieces: Mapping[Hashable, Callable[[], Any]], size: int) -> None:
        """Leave pieces of work, by key, to the threads; waits while too much is waiting.

        Parameters
        ----------
        pieces : mapping of hashable to callable
            Each is called after those of its key that were left before.
        size : int
            Bytes that they hold together.

        Raises
        ------
        Exception
            What an earlier piece raised.
        """
        with self._changed:
            self._wait_while(lambda: self._waiting > 0 and self._waiting + size > self._most)
            item = _Item(next(self._numbers), size, len(pieces), len(pieces))
            self._waiting += size if pieces else 0
            for key, work in pieces.items():
                chain = self._chains.setdefault(key, deque())
                chain.append((item, work))
                if len(chain) == 1 and key not in self._busy:
                    self._offer(key, item)
            self._changed.notify_all()

    def wait(self, *keys: Hashable) -> None:
        """Wait until the work of some keys, by default all, is done.

        Raises
        ------
        Exception
            What a piece raised.
        """

        def is_at_work() -> bool:
            if not keys:
                return bool(self._busy or self._chains)
            return any(key in self._busy or key in self._chains for key in keys)

        with self._changed:
            self._wait_while(is_at_work)

    def _wait_while(self, is_so: Callable[[], bool]) -> None:
        """Wait, and leave the caller's core to the threads meanwhile."""
        while is_so() and self._error is None:
            self._caller_waits = True
            self._changed.notify_all()
            try:
                self._changed.wait()
            finally:
                self._caller_waits = False
        if self._error is not None:
            raise self._error

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
                self._drop()
            self._changed.notify_all()
        try:
            self._wait_until_done()
        except BaseException:
            # Interrupted while the rest is worked off.
            with self._changed:
                self._drop()
            self._wait_until_done()
            raise
        finally:
            _THREADS.end()
        if error is None and self._error is not None:
            raise self._error

    def _drop(self) -> None:
        self._chains.clear()
        self._ready.clear()
        self._changed.notify_all()

    def _wait_until_done(self) -> None:
        # Not by `join` alone: interrupted once, it takes the thread for ended (Python 3.11).
        with self._changed:
            while self._running:
                self._changed.wait()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            # PyTorch takes no stream at all for a question to the GPU: which takes it into use
            # though nothing is on it, and on a Mac there is no answer.
            stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            with torch.no_grad(), stream:
                while self._works_off_one():
                    pass
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _works_off_one(self) -> bool:
        # Nothing of a piece is held while the next one is waited for.
        taken = self._take()
        if taken is None:
            return False
        key, item, work = taken
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            # Raised again in the caller's thread.
            error = raised
        with self._changed:
            if error is not None:
                self._error = self._error or error
                self._drop()
            self._finish(key, item)
        return True

    def _take(self) -> tuple[Hashable, _Item, Callable[[], Any]] | None:
        with self._changed:
            while not self._may_begin():
                if self._is_closed and not self._chains:
                    return None
                self._changed.wait()
            _, _, key = heapq.heappop(self._ready)
            chain = self._chains[key]
            item, work = chain.popleft()
            if not chain:
                del self._chains[key]
            self._busy.add(key)
            self._working += 1
            item.waiting -= 1
            if not item.is_begun:
                item.is_begun = True
                self._begun += item.size
            if item.waiting == 0:
                self._waiting -= item.size
            self._changed.notify_all()
            return key, item, work

    def _may_begin(self) -> bool:
        """Whether a thread may begin the next piece."""
        are_free = self._caller_waits or self._is_closed
        if not self._ready or self._working >= (len(self._threads) if are_free else self._beside):
            return False
        item = self._chains[self._ready[0][2]][0][0]
        is_room = self._begun + item.size <= self._most
        return item.is_begun or is_room or self._working == 0

    def _finish(self, key: Hashable, item: _Item) -> None:
        self._busy.discard(key)
        self._working -= 1
        item.unfinished -= 1
        if item.unfinished == 0:
            self._begun -= item.size
        if key in self._chains:
            self._offer(key, self._chains[key][0][0])
        self._changed.notify_all()

    def _offer(self, key: Hashable, item: _Item) -> None:
        # The second number keeps keys, which may be of any type, from being compared.
        heapq.heappush(self._ready, (item.number, next(self._numbers), key))
