"""Ordered background workers with a bounded queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from .exclusive import measurement_thread
from .threads import single_blas_thread, torch_threads

Item = TypeVar("Item")


@dataclass
class _QueuedItem(Generic[Item]):
    """An item in the queue.

    `index` is its position in submission order; `is_first` is true for the first item in a lane.
    """

    item: Item
    index: int
    lane: Hashable
    is_first: bool


class BackgroundWorkers(Generic[Item]):
    """Worker threads that process the items of each lane in submission order.

    Items in the same lane are processed one at a time, in order. Items in different lanes run
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
        Maximum queue size in bytes; a larger item is queued on its own. If 0, `put` blocks until
        the item has been processed.
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
        self._queue: deque[_QueuedItem[Item]] = deque()
        self._queued_bytes = self._submitted = self._live_threads = 0
        self._lanes: set[Hashable] = set()
        self._running: dict[Hashable, _QueuedItem[Item]] = {}  # By lane.
        self._is_closed = False
        # Index and error of the first item, in submission order, that failed.
        self._error: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()
        self._settings = ExitStack()
        self._threads = [
            measurement_thread(self._run, name="measures") for _ in range(max(1, threads))
        ]
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def __enter__(self) -> BackgroundWorkers[Item]:
        if len(self._threads) > 1:
            self._settings.enter_context(single_blas_thread())
        self._settings.enter_context(torch_threads())
        try:
            for thread in self._threads:
                self._start(thread)
        except BaseException:
            self._close()
            raise
        return self

    def _start(self, thread: threading.Thread) -> None:
        with self._changed:
            self._live_threads += 1
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:
                with self._changed:
                    self._live_threads -= 1
            raise

    def set_limit(self, limit: int) -> None:
        """Set the maximum number of bytes in the queue."""
        with self._changed:
            self._limit = limit

    def put(self, item: Item) -> None:
        """Submit an item; block while the queue is full.

        Raises
        ------
        Exception
            The exception raised while processing an earlier item.
        """
        size, lane = self._size(item), self._lane(item)
        with self._changed:
            while self._queue and self._queued_bytes + size > self._limit and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error[1]
            self._queue.append(_QueuedItem(item, self._submitted, lane, lane not in self._lanes))
            self._lanes.add(lane)
            self._submitted += 1
            self._queued_bytes += size
            self._changed.notify_all()
            while self._limit == 0 and (self._queue or self._running):
                self._changed.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with self._changed:
                self._queue.clear()
        self._close()
        if error is None and self._error is not None:
            raise self._error[1]

    def _close(self) -> None:
        """Process the rest of the queue and stop the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        try:
            self._wait_until_done()
        except BaseException:
            # Interrupted: drop the rest of the queue.
            with self._changed:
                self._queue.clear()
                self._changed.notify_all()
            self._wait_until_done()
            raise
        finally:
            self._settings.close()

    def _wait_until_done(self) -> None:
        # `join` is not enough: once interrupted, it treats the thread as finished (Python 3.11).
        with self._changed:
            while self._live_threads > 0:
                self._changed.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        try:
            self._process_queue()
        finally:
            with self._changed:
                self._live_threads -= 1
                self._changed.notify_all()

    def _process_queue(self) -> None:
        torch.set_num_threads(1)
        # The stream is only set for CUDA: asking for the current one would initialise an unused
        # GPU, and fails on a Mac.
        stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with torch.no_grad(), stream:
            while (queued := self._take()) is not None:
                error: BaseException | None = None
                try:
                    self._work(queued.item)
                except BaseException as raised:
                    # Raised again in the caller's thread.
                    error = raised
                self._finish(queued, error)

    def _finish(self, queued: _QueuedItem[Item], error: BaseException | None) -> None:
        with self._changed:
            del self._running[queued.lane]
            if error is not None:
                if self._error is None or queued.index < self._error[0]:
                    self._error = queued.index, error
                self._queue.clear()
            self._changed.notify_all()

    def _take(self) -> _QueuedItem[Item] | None:
        with self._changed:
            while (position := next(self._ready(), None)) is None:
                if self._is_closed and not self._queue:
                    return None
                self._changed.wait()
            queued = self._queue[position]
            del self._queue[position]
            self._running[queued.lane] = queued
            self._queued_bytes -= self._size(queued.item)
            self._changed.notify_all()
            return queued

    def _ready(self) -> Iterator[int]:
        """Yield the queue positions of the items that may run now."""
        if any(running.is_first for running in self._running.values()):
            return
        busy = set(self._running)
        for position, queued in enumerate(self._queue):
            if queued.is_first:
                if position == 0 and not busy:
                    yield position
                return
            if queued.lane not in busy:
                yield position
            busy.add(queued.lane)
