"""Threads: one measurement at a time, their numbers, and background workers."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from threadpoolctl import ThreadpoolController

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


def measurement_thread(target: Callable[[], Any]) -> threading.Thread:
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
    return threading.Thread(target=copy_context().run, args=(target,), daemon=True)


def _renew_lock() -> None:
    """Replace a lock that may belong to a thread which a forked process doesn't have."""
    global _LOCK
    if not _HOLDS_LOCK.get():
        _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def default_threads() -> int:
    """Return the number of PyTorch threads for a cell, independent of the number of workers."""
    # Layers of typical size gain little from more threads, and other cells can use the cores.
    return min(4, torch.get_num_threads())


@contextmanager
def torch_threads(number: int | None = None) -> Iterator[None]:
    """Set the number of PyTorch threads, if one is given, and restore it on exit.

    The last bits of a sum may depend on it. A number set in any thread becomes the default for
    threads that start later, so code whose threads set their own number also needs this context.

    Examples
    --------
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def overlap_pays(device: torch.device) -> bool:
    """Return True if computing in parallel with the network's forward pass saves time.

    It doesn't with a single core, or on Apple's GPU, which only serves one thread.

    Examples
    --------
    >>> overlap_pays(torch.device("cuda"))
    True
    """
    if device.type != "cpu":
        return device.type != "mps"
    return _available_cores() > 1


def measure_threads(device: torch.device) -> int:
    """Return the number of threads for measures that run in parallel with the forward pass.

    If the network runs on a GPU, it needs none of PyTorch's threads, so measures may use them all.
    On the CPU, the number is 1.

    Examples
    --------
    >>> measure_threads(torch.device("cpu"))
    1
    """
    return min(torch.get_num_threads(), _available_cores()) if device.type == "cuda" else 1


def _available_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit NumPy's and SciPy's BLAS libraries to one thread.

    The limit applies to the whole process. If contexts overlap, only the first one sets and
    removes the limit; code that starts threads must not exit its context while they run.
    """
    if not _BLAS_LIMIT.acquire(blocking=False):
        yield
        return
    try:
        with _blas_libraries().limit(limits=1):
            yield
    finally:
        _BLAS_LIMIT.release()


_BLAS_LIMIT = threading.Lock()


@cache
def _blas_libraries() -> ThreadpoolController:
    """Find the BLAS libraries of NumPy and SciPy. The search takes milliseconds."""
    # Only loaded libraries can be found.
    importlib.import_module("scipy.linalg")
    controller = ThreadpoolController()
    paths = [lib["filepath"] for lib in controller.info() if lib["user_api"] == "blas"]
    return controller.select(filepath=[path for path in paths if not _belongs_to_torch(path)])


def _belongs_to_torch(path: str) -> bool:
    """Return True if a library is bundled with PyTorch, which the network may be using."""
    packages = Path(torch.__file__).parent.parent
    library = Path(path)
    return library.is_relative_to(packages) and library.relative_to(packages).parts[0].startswith(
        "torch"
    )


Item = TypeVar("Item")


class BackgroundWorkers(Generic[Item]):
    """Worker threads that process the items of each lane in submission order.

    Items in the same lane are processed in one thread, in order. Items in different lanes run
    concurrently, except that the first item in a lane runs alone, after all items submitted before
    it. The state of each lane is therefore created in the same order regardless of the number of
    threads.

    Each worker runs PyTorch on one thread: two thread pools would compete for the same cores, and
    most computations of a measure are too small to split. Results don't depend on the number of
    workers. On a GPU, the work runs on the caller's CUDA stream.

    `limit` is the largest sum of the sizes in bytes of items that wait or run; a larger item does
    so on its own. If it is 0, `put` blocks until the item has been processed.

    Examples
    --------
    >>> done = []
    >>> with BackgroundWorkers(done.append, lambda item: 1, limit=10) as workers:
    ...     for number in range(3):
    ...         workers.put(number)
    >>> done
    [0, 1, 2]
    """

    def __init__(
        self,
        work: Callable[[Item], Any],
        size: Callable[[Item], int],
        limit: int,
        device: torch.device | None = None,
        *,
        lane: Callable[[Item], Hashable] = lambda item: None,
        threads: int = 1,
    ) -> None:
        self._work = work
        self._size = size
        self._limit = limit
        self._lane = lane
        self._executors = [
            ThreadPoolExecutor(1, "measures", torch.set_num_threads, (1,))
            for _ in range(max(1, threads))
        ]
        # The threads belong to the caller's measurement.
        self._contexts = [copy_context() for _ in self._executors]
        self._lanes: dict[Hashable, int] = {}
        self._sizes: dict[Future[None], int] = {}
        self._submitted = 0
        # Index and error of the first item, in submission order, that failed.
        self._error: tuple[int, BaseException] | None = None
        self._error_lock = threading.Lock()
        self._settings = ExitStack()
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def __enter__(self) -> BackgroundWorkers[Item]:
        if len(self._executors) > 1:
            self._settings.enter_context(single_blas_thread())
        self._settings.enter_context(torch_threads())
        return self

    def set_limit(self, limit: int) -> None:
        """Set the maximum number of bytes of items that wait or run."""
        self._limit = limit

    def put(self, item: Item) -> None:
        """Submit an item, or raise the error of an earlier one.

        Block while the limit is exceeded.
        """
        lane = self._lane(item)
        size = self._size(item)
        is_alone = lane not in self._lanes or self._limit == 0
        self._wait(-1 if is_alone else max(0, self._limit - size))
        self._raise_error()
        number = self._lanes.setdefault(lane, len(self._lanes) % len(self._executors))
        context = self._contexts[number]
        executor = self._executors[number]
        future = executor.submit(context.run, self._process, self._submitted, item)
        self._sizes[future] = size
        self._submitted += 1
        if is_alone:
            self._wait(-1)

    def _wait(self, limit: int) -> None:
        """Wait until the items that wait or run have at most `limit` bytes. With -1, for all."""
        while self._sizes and sum(self._sizes.values()) > limit:
            for future in wait(self._sizes, return_when=FIRST_COMPLETED).done:
                del self._sizes[future]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error[1]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._wait(-1)
        finally:
            # After an error or an interruption, the rest is dropped.
            for executor in self._executors:
                executor.shutdown(wait=False, cancel_futures=True)
            for executor in self._executors:
                executor.shutdown()
            self._settings.close()
        if error is None:
            self._raise_error()

    def _process(self, index: int, item: Item) -> None:
        if self._error is not None and self._error[0] < index:
            return
        # The stream is only set for CUDA: asking for the current one would initialise an unused
        # GPU, and fails on a Mac.
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        try:
            with torch.no_grad(), stream:
                self._work(item)
        except BaseException as error:
            # Raised again in the caller's thread.
            with self._error_lock:
                if self._error is None or index < self._error[0]:
                    self._error = index, error
