"""Ordered background workers with a bounded queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from .threads import single_blas_thread, torch_threads

Item = TypeVar("Item")


class BackgroundWorkers(Generic[Item]):
    """Worker threads that process the items of each lane in submission order.

    Items in the same lane are processed in one thread, in order. Items in different lanes run
    concurrently, except that the first item in a lane runs alone, after all items submitted
    before it. The state of each lane is therefore created in the same order regardless of the
    number of threads.

    Each worker runs PyTorch on one thread: two thread pools would compete for the same cores, and
    most computations of a measure are too small to split. Results don't depend on the number of
    workers.

    Parameters
    ----------
    size : callable
        Returns the size of an item in bytes.
    limit : int
        Maximum size in bytes of the items that wait or run; a larger item does so on its own. If 0,
        `put` blocks until the item has been processed.
    device : torch.device, optional
        Device of the items. On a GPU, the work runs on the caller's CUDA stream.
    lane : callable, optional
        Maps an item to its lane; by default, all items are in one lane.

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
        self._work, self._size, self._limit, self._lane = work, size, limit, lane
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
        """Submit an item.

        Block while the limit is exceeded.

        Raises
        ------
        Exception
            The exception raised while processing an item.
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
        """Wait until the items that wait or run have at most `limit` bytes.

        With -1, for all.
        """
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
