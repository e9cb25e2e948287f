"""Work off a growing stack of tasks with several threads, each computing by itself.

PyTorch's own threads split every operation, and wait for each other after each one. The
operations of a trace are short: on two cores that waiting costs a quarter of the time,
and many times the time where another process holds one of the cores. One thread a task
waits for nobody, and its results don't depend on how many threads there are.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

__all__ = ["by_itself", "work_off"]


Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task], tuple[Sequence[Task], Sequence[Result]]]


class _Stack(Generic[Task, Result]):
    """What is waiting, what is done, and whether anything can still come."""

    def __init__(
        self, first: Sequence[Task], depth: Callable[[Task], int], stopped: threading.Event
    ) -> None:
        self._stopped = stopped
        self.done: list[Result] = []
        self.error: BaseException | None = None
        self._depth = depth
        # The deepest come first, and of those the latest.
        self._waiting: list[tuple[int, int, Task]] = []
        self._age = itertools.count(0, -1)
        self._add(first)
        self._running = 0
        self._changed = threading.Condition()

    def drain(self, work: Work[Task, Result]) -> None:
        """Take tasks until there are none and none can come."""
        while (task := self._take()) is not None:
            try:
                more, results = work(task)
            except BaseException as error:
                # Raised again by `work_off`, in the caller's thread.
                self.stop(error)
                return
            self._put(more, results)

    def stop(self, error: BaseException) -> None:
        """Let every thread end after the task at hand, which is told to be short."""
        with self._changed:
            self.error = self.error or error
            self._stopped.set()
            self._changed.notify_all()

    def _take(self) -> Task | None:
        with self._changed:
            while not self._waiting and self._running and self.error is None:
                self._changed.wait()
            if not self._waiting or self.error is not None:
                return None
            self._running += 1
            return heapq.heappop(self._waiting)[-1]

    def _put(self, more: Sequence[Task], results: Sequence[Result]) -> None:
        with self._changed:
            self._running -= 1
            self._add(more)
            self.done.extend(results)
            self._changed.notify_all()

    def _add(self, tasks: Sequence[Task]) -> None:
        for task in reversed(tasks):
            heapq.heappush(self._waiting, (-self._depth(task), next(self._age), task))


def work_off(
    first: Sequence[Task],
    work: Work[Task, Result],
    threads: int,
    depth: Callable[[Task], int] = lambda task: 0,
    stopped: threading.Event | None = None,
) -> list[Result]:
    """Work off tasks and all that come of them, the deepest first and of those the latest.

    So of the tasks that a task at some depth gave, those of no more tasks than there are
    threads are waiting at a time: what they share is bounded by threads times depth.

    Parameters
    ----------
    first : sequence of Task
        None of them None.
    work : callable
        From a task to further tasks and finished results.
    threads : int
        With 1 all is done in the caller's thread, with PyTorch's own threads.
    depth : callable
        How far a task has come.
    stopped : threading.Event, optional
        Set when another task has failed or the caller was interrupted: what `work` returns
        or raises from then on is not looked at, so a long task may look here and end.

    Returns
    -------
    list
        The results, in the order in which they were finished.

    Raises
    ------
    BaseException
        The first that a task raised, or that interrupted the caller. No thread is left.

    Examples
    --------
    >>> def halve(n):
    ...     return ([n // 2, n - n // 2], []) if n > 1 else ([], [n])
    >>> work_off([10], halve, threads=2)
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    stack: _Stack[Task, Result] = _Stack(first, depth, stopped or threading.Event())
    if threads <= 1:
        stack.drain(work)
    else:
        _drain_together(stack, work, threads)
    if stack.error is not None:
        raise stack.error
    return stack.done


def _drain_together(stack: _Stack[Task, Result], work: Work[Task, Result], threads: int) -> None:
    def alone() -> None:
        torch.set_num_threads(1)
        stack.drain(work)

    before = torch.get_num_threads()
    workers = [threading.Thread(target=alone, daemon=True) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:
        stack.stop(error)
        # A thread that computes while the interpreter shuts down may abort the process.
        for worker in workers:
            if worker.is_alive():
                worker.join()
        raise
    finally:
        # What the workers set is also the default of threads to come.
        torch.set_num_threads(before)


@contextmanager
def by_itself() -> Iterator[None]:
    """Compute without PyTorch's own threads: what is short, between what keeps all cores busy.

    Examples
    --------
    >>> with by_itself():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
