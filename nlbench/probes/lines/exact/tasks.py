"""Depth-first execution of tasks by several threads, each running PyTorch single-threaded.

PyTorch's own threads split every operation and wait for each other after each one. The operations
in a trace are short: on two cores, waiting takes a quarter of the time, and much more if another
process uses one of the cores. With one thread per task, no thread waits, and results don't depend
on the number of threads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from nlbench.introspection.threads import measurement_thread, torch_threads

Task = TypeVar("Task")
Work = Callable[[Task], Sequence[Task]]


def run_tasks(
    first: Sequence[Task],
    work: Work[Task],
    threads: int,
    depth: Callable[[Task], int],
    stopped: threading.Event,
) -> None:
    """Run tasks and the tasks that they return, deepest first, then latest first.

    At each depth, only children of at most `threads` tasks are waiting, so the memory that they
    share is bounded by threads times depth.

    Parameters
    ----------
    first : sequence of Task
        Initial tasks, none of which may be None.
    work : callable
        Runs a task and returns further tasks.
    threads : int
        If 1, tasks run in the caller's thread, with PyTorch's own threads.
    depth : callable
        Returns the depth of a task.
    stopped : threading.Event
        Set when a task has failed or the caller was interrupted. A long task may check it
        and return early.

    Raises
    ------
    BaseException
        The first error raised by a task, or the caller's interruption. All threads have ended.

    Examples
    --------
    >>> seen = []
    >>> def halve(n):
    ...     seen.append(n)
    ...     return [n // 2, n - n // 2] if n > 1 else []
    >>> run_tasks([3], halve, 1, lambda n: -n, threading.Event())
    >>> seen
    [3, 1, 2, 1, 1]
    """
    queue = _Queue(work, depth, stopped)
    queue.add(first)
    if threads <= 1:
        queue.drain()
    else:
        _drain_in_threads(queue, threads)
    if queue.error is not None:
        raise queue.error


class _Queue(Generic[Task]):
    """Waiting tasks, and the first error."""

    def __init__(
        self, work: Work[Task], depth: Callable[[Task], int], stopped: threading.Event
    ) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._depth = depth
        self._stopped = stopped
        # A heap: the deepest task first, then the latest.
        self._waiting: list[tuple[int, int, Task]] = []
        self._age = itertools.count(0, -1)
        self._running = 0
        self._changed = threading.Condition()

    def add(self, tasks: Sequence[Task]) -> None:
        for task in reversed(tasks):
            heapq.heappush(self._waiting, (-self._depth(task), next(self._age), task))

    def drain(self) -> None:
        """Run tasks until none is waiting or running."""
        while (task := self._take()) is not None:
            try:
                more = self._work(task)
            except BaseException as error:
                # Re-raised by `run_tasks` in the caller's thread.
                self.stop(error)
                return
            with self._changed:
                self._running -= 1
                self.add(more)
                self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Stop every thread after its current task."""
        with self._changed:
            self.error = self.error or error
            self._stopped.set()
            self._changed.notify_all()

    def _take(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running or self.error)
            if not self._waiting or self.error is not None:
                return None
            self._running += 1
            return heapq.heappop(self._waiting)[-1]


def _drain_in_threads(queue: _Queue[Task], threads: int) -> None:
    def drain_alone() -> None:
        torch.set_num_threads(1)
        queue.drain()

    workers = [measurement_thread(drain_alone) for _ in range(threads)]
    # The number of threads set by the workers is also the default for threads started later.
    with torch_threads():
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException as error:
            queue.stop(error)
            # A thread that computes while the interpreter shuts down may abort the process.
            for worker in workers:
                if worker.is_alive():
                    worker.join()
            raise
