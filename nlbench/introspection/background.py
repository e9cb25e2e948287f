"""Have work done in order by threads beside, with a bound on what waits for them."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from .model_state import SharedSetting

__all__ = [
    "Background",
    "one_thread",
    "overlap_pays",
    "rng_restored",
    "rng_state",
    "threads_beside",
    "torch_generators",
]


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
    return _cores() > 1


def _cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def threads_beside(device: torch.device) -> int:
    """How many threads measures share beside the network's forward pass, where they can.

    Beside a GPU as many as PyTorch has, which the network does not need there; beside a network
    that itself computes on the CPU one.

    Examples
    --------
    >>> threads_beside(torch.device("cpu"))
    1
    """
    return min(torch.get_num_threads(), _cores()) if device.type == "cuda" else 1


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
    own = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    return pickle.dumps((*own, *(g.get_state().numpy() for g in torch_generators(device))))


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """Give the global generators that PyTorch draws from: the CPU's, and a GPU's beside it."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


@contextmanager
def rng_restored(device: torch.device) -> Iterator[None]:
    """Put the global random generators back to where they were."""
    own, arrays = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    states = [(generator, generator.get_state()) for generator in torch_generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(own)
        np.random.set_state(arrays)  # noqa: NPY002


@contextmanager
def _threads_restored() -> Iterator[None]:
    """Put back how many threads PyTorch has: what one sets is the default of those to come."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


_THREADS = SharedSetting(_threads_restored)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep NumPy and SciPy from starting threads where PyTorch was told to use one.

    Their setting is the process's, but undone only where it was made: of threads that are inside
    at once the first makes and undoes it. Who has several threads work stays inside for as long
    as they do.
    """
    if not _LIMITED.acquire(blocking=False):
        yield
        return
    try:
        with _libraries().limit(limits=1):
            yield
    finally:
        _LIMITED.release()


_LIMITED = threading.Lock()


@cache
def _libraries() -> ThreadpoolController:
    """Those of NumPy and SciPy; looking for them takes milliseconds."""
    # Only what is loaded is found, and is looked for once.
    importlib.import_module("scipy.linalg")
    found = ThreadpoolController()
    paths = [library["filepath"] for library in found.info() if library["user_api"] == "blas"]
    return found.select(filepath=[path for path in paths if not _is_torchs(path)])


def _is_torchs(path: str) -> bool:
    """Whether a library came with PyTorch: the network may be using it meanwhile."""
    packages = Path(torch.__file__).parent.parent
    library = Path(path)
    return library.is_relative_to(packages) and library.relative_to(packages).parts[0].startswith(
        "torch"
    )


@dataclass
class _Waiting(Generic[Item]):
    """An item that nobody works on yet.

    Parameters
    ----------
    item : object
    number : int
        Its place in the order in which items were given.
    lane : object
    is_first : bool
        Whether no item of its lane was given before it.
    """

    item: Item
    number: int
    lane: Hashable
    is_first: bool


class Background(Generic[Item]):
    """Works off items in threads of its own: in one in the order given, or lane by lane in several.

    Of one lane items are worked off one after the other, in the order given. Of several lanes they
    are worked off at once, but for the first one of a lane: it has to itself what there is, after
    all that was given before it. So whoever keeps something for each lane finds the lanes in the
    same order, however many threads there are.

    Each thread computes by itself, without PyTorch's own threads: two sets of threads that
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
    lane : callable, optional
        Which lane an item is of; by default there is one.
    threads : int, optional

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
        *,
        lane: Callable[[Item], Hashable] = lambda item: None,
        threads: int = 1,
    ) -> None:
        self._work, self._size, self._most, self._lane = work, size, most, lane
        self._waiting: deque[_Waiting[Item]] = deque()
        self._bytes = self._given = self._running = 0
        self._lanes: set[Hashable] = set()
        # What is worked on, by lane.
        self._at_work: dict[Hashable, _Waiting[Item]] = {}
        self._is_closed = False
        # The error of the first item, in the order given, that raised one.
        self._error: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()
        self._held = ExitStack()
        self._threads = [
            threading.Thread(target=self._run, name="measures", daemon=True)
            for _ in range(max(1, threads))
        ]
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def __enter__(self) -> Background[Item]:
        if len(self._threads) > 1:
            self._held.enter_context(one_thread())
        self._held.enter_context(_THREADS())
        try:
            for thread in self._threads:
                self._start(thread)
        except BaseException:
            self._close()
            raise
        return self

    def _start(self, thread: threading.Thread) -> None:
        with self._changed:
            self._running += 1
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:
                with self._changed:
                    self._running -= 1
            raise

    def let_wait(self, most: int) -> None:
        """Let that many bytes wait from now on."""
        with self._changed:
            self._most = most

    def put(self, item: Item) -> None:
        """Leave an item to the threads; waits while too much is waiting.

        Raises
        ------
        Exception
            What the work raised on an earlier item.
        """
        size, lane = self._size(item), self._lane(item)
        with self._changed:
            while self._waiting and self._bytes + size > self._most and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error[1]
            self._waiting.append(_Waiting(item, self._given, lane, lane not in self._lanes))
            self._lanes.add(lane)
            self._given += 1
            self._bytes += size
            self._changed.notify_all()
            while self._most == 0 and (self._waiting or self._at_work):
                self._changed.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with self._changed:
                # Nobody will read what is still to come.
                self._waiting.clear()
        self._close()
        if error is None and self._error is not None:
            raise self._error[1]

    def _close(self) -> None:
        """Have what waits worked off, and the threads ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        try:
            self._wait_until_done()
        except BaseException:
            # Interrupted while the rest is worked off.
            with self._changed:
                self._waiting.clear()
                self._changed.notify_all()
            self._wait_until_done()
            raise
        finally:
            self._held.close()

    def _wait_until_done(self) -> None:
        # Not by `join` alone: interrupted once, it takes the thread for ended (Python 3.11).
        with self._changed:
            while self._running > 0:
                self._changed.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        try:
            self._work_off()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _work_off(self) -> None:
        torch.set_num_threads(1)
        # PyTorch takes no stream at all for a question to the GPU: which takes it into use though
        # nothing is on it, and on a Mac there is no answer.
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.no_grad(), stream:
            while (taken := self._take()) is not None:
                error: BaseException | None = None
                try:
                    self._work(taken.item)
                except BaseException as raised:
                    # Raised again in the caller's thread.
                    error = raised
                self._done(taken, error)

    def _done(self, taken: _Waiting[Item], error: BaseException | None) -> None:
        with self._changed:
            del self._at_work[taken.lane]
            if error is not None:
                if self._error is None or taken.number < self._error[0]:
                    self._error = taken.number, error
                self._waiting.clear()
            self._changed.notify_all()

    def _take(self) -> _Waiting[Item] | None:
        with self._changed:
            while (place := next(self._ready(), None)) is None:
                if self._is_closed and not self._waiting:
                    return None
                self._changed.wait()
            taken = self._waiting[place]
            del self._waiting[place]
            self._at_work[taken.lane] = taken
            self._bytes -= self._size(taken.item)
            self._changed.notify_all()
            return taken

    def _ready(self) -> Iterator[int]:
        """Places, in what waits, of the items that may be worked on now."""
        if any(other.is_first for other in self._at_work.values()):
            return
        held = set(self._at_work)
        for place, waiting in enumerate(self._waiting):
            if waiting.is_first:
                if place == 0 and not held:
                    yield place
                return
            if waiting.lane not in held:
                yield place
            held.add(waiting.lane)
