"""Carry points of segments through a recorded program and put in where it bends.

Parts of a segment are worked off by several threads, each computing by itself. PyTorch's own
threads split every operation, and wait for each other after each one. The operations of a trace
are short: on two cores that waiting costs a quarter of the time, and many times the time where
another process holds one of the cores. One thread a task waits for nobody, and its results don't
depend on how many threads there are.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nlbench.errors import NotFinite
from nlbench.introspection.memory import PointMemory, halving, share_out
from nlbench.probes.lines.recording.program import Program, point_memory_of
from nlbench.probes.lines.rules.rule import peak
from nlbench.probes.lines.trace import SegmentTrace, distance

__all__ = [
    "COINCIDENT",
    "Chunk",
    "Values",
    "by_itself",
    "spaced",
    "split",
    "trace_exactly",
    "trace_program",
    "with_breakpoints",
    "work_off",
]


COINCIDENT = {torch.float64: 1e-12, torch.float32: 1e-7}
"""Breakpoints closer than this in t are one: what rounding leaves of a tie."""


ROW = 8192
"""Numbers a point from which a CPU interpolates points one by one faster than together."""


@dataclass(frozen=True)
class Values:
    """What is alive at P points: tensors (P, ...) and the bounds of their terms."""

    tensors: dict[int, Tensor]
    bounds: dict[int, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Consecutive points, of one segment after another, on their way through the program.

    `t` and `origins` (P',) are those of the chunk, `owner` says to which segment each point
    belongs; its values before step `step` lie on the lines between the points of `parent`:
    at row r, a share `share[r]` of the way from the parent's point `left[r]` to the next.
    """

    step: int
    t: Tensor
    origins: Tensor
    owner: Tensor
    parent: Values
    left: Tensor
    share: Tensor
    between: Tensor | None = None
    """Rows of the points that are none of the parent's; None: those with a share."""

    def rows(self, start: int, stop: int) -> Chunk:
        """Give a run of its points as a chunk; the parent is shared."""
        part = slice(start, stop)
        return Chunk(
            self.step,
            self.t[part],
            self.origins[part],
            self.owner[part],
            self.parent,
            self.left[part],
            self.share[part],
        )

    def values(self) -> Values:
        """Interpolate what is alive at its points."""
        new = self.share.nonzero().squeeze(1) if self.between is None else self.between
        left, share = self.left[new], self.share[new]
        columns = [] if share.is_cuda else [column.tolist() for column in (new, left, share)]

        def at_rows(x: Tensor) -> Tensor:
            result = x.index_select(0, self.left)
            if x[:1].numel() >= ROW and not x.is_cuda:
                # Without copies of what lies on both sides.
                rows, ends = result.unbind(), x.unbind()
                for row, before, weight in zip(*columns, strict=True):
                    rows[row].lerp_(ends[before + 1], weight)
            elif len(new):
                weight = share.to(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
                between = x.index_select(0, left)
                between.lerp_(x.index_select(0, left + 1), weight)
                result.index_copy_(0, new, between)
            return result

        return Values(
            {i: at_rows(x) for i, x in self.parent.tensors.items()},
            {i: at_rows(x) for i, x in self.parent.bounds.items()},
        )


def with_breakpoints(chunk: Chunk, site: int, coincident: float) -> Chunk:
    """Put new breakpoints into a list of P points.

    Parameters
    ----------
    chunk : Chunk
        Its `left` and `share` (m,) are those of the breakpoints to be put in.
    site : int
        Whose they are.
    coincident : float
        Those that are closer to others are left out.

    Returns
    -------
    Chunk
        Its `t`, `origins` and `owner` are those of the longer list.
    """
    t, origins, owner = chunk.t, chunk.origins, chunk.owner
    interval, share = chunk.left, chunk.share.double()
    # To ask a GPU costs more than to sort by owner where there is one.
    several = owner.is_cuda or bool(owner[0] != owner[-1])
    before, after = t[interval], t[interval + 1]
    new = before + share * (after - before)
    apart = (new - before > coincident) & (after - new > coincident)
    if several:
        # Between the end of a segment and the start of the next there is nothing.
        apart &= owner[interval] == owner[interval + 1]
    chosen = apart.nonzero().squeeze(1)
    interval, share, new = interval[chosen], share[chosen], new[chosen]
    order = _order(new, owner[interval]) if several else new.argsort()
    new, interval, share = new[order], interval[order], share[order]
    distinct = spaced(new, coincident, owner[interval])
    if distinct is not None:
        interval, share, new = interval[distinct], share[distinct], new[distinct]
    # Each lies behind the left end of its interval and those that have been put in before it.
    place = interval + torch.arange(1, len(new) + 1, device=t.device)
    is_old = torch.ones(len(t) + len(new), dtype=torch.bool, device=t.device)
    is_old.index_fill_(0, place, False)
    left = is_old.cumsum(0) - 1
    t = t[left].index_copy_(0, place, new)
    origins = origins[left].index_fill_(0, place, site)
    whole = torch.zeros_like(t).index_copy_(0, place, share)
    return Chunk(chunk.step, t, origins, owner[left], chunk.parent, left, whole, place)


def spaced(t: Tensor, gap: float, owner: Tensor) -> Tensor | None:
    """Tell which of increasing numbers, of one segment after another, to keep: (m,); None: all.

    Each is farther than `gap` from the last that is kept, not only from its neighbour: many
    in a row are thinned, however close, and not all one.

    Examples
    --------
    >>> t = torch.tensor([0.0, 0.6, 1.2, 1.8, 2.4, 9.0])
    >>> spaced(t, 1.0, torch.zeros(6)).tolist()
    [True, False, True, False, True, True]
    """
    close = (t.diff() <= gap) & (owner.diff() == 0)
    if not bool(close.any()):
        return None
    # By the host, one after another: each question to a GPU would have to wait.
    kept = [True] * len(t)
    last, places = -1, t.tolist()
    for i in (close.nonzero().squeeze(1) + 1).tolist():
        if i - 1 > last or kept[i - 1]:
            anchor = i - 1  # What it is compared with: the last one that is kept.
        if places[i] - places[anchor] <= gap:
            kept[i] = False
        else:
            anchor = i
        last = i
    return torch.tensor(kept, device=t.device)


def _order(t: Tensor, owner: Tensor) -> Tensor:
    """How to sort by segment, and by t within each."""
    by_t = t.argsort()
    return by_t[owner[by_t].argsort(stable=True)]


def split(chunk: Chunk, limit: int) -> Sequence[Chunk]:
    """Cut a chunk at breakpoints into parts of nearly equal length."""
    intervals = len(chunk.t) - 1
    parts = -(-intervals // (limit - 1))
    cuts = [intervals * i // parts for i in range(parts + 1)]
    return [chunk.rows(a, b + 1) for a, b in itertools.pairwise(cuts)]


# Points carried at once: enough that those that neighbouring parts share, and the cost of a
# call, don't count, and not so many that the numbers alive at them leave the cache
# (measured with benchmarks/cost_per_region.py). A GPU needs larger batches to be busy, of
# several segments if need be.
POINTS = (64, 128)
BYTES = 10 * 2**20
POINTS_GPU = (16, 8192)
BYTES_GPU = 2**30
TOGETHER_KEPT = 256
"""So many finished parts are put together at a time."""
TOGETHER_GPU = 64
LEAST = 8
"""Points a thread below which fewer threads are better."""

Segment = tuple[Tensor, Tensor]


def trace_exactly(
    program: Program,
    segments: Iterable[Segment],
    *,
    memory: int | None = None,
    limit: int | None = None,
    together: int | None = None,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Trace a recorded program on one segment after another; see `trace_segment`.

    Depth first: as soon as a run of points outgrows the limit it is cut at breakpoints,
    and each part goes through the rest of the program by itself. Memory is bounded by
    limit times depth, however many regions or segments there are, and the result doesn't
    depend on the limit. On a CPU as many parts are under way as PyTorch has threads.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
        Of the dtype in which the program was recorded.
    memory : int, optional
        Bytes that may be used beside the model and the traces; by default a share of what
        is free.
    limit : int, optional
        Most points carried at once, at least 2; by default as many as fit the cache and
        the memory.
    together : int, optional
        Segments that begin in one batch; by default 1 on a CPU.
    needs : PointMemory, optional
        What a point takes, where it was measured before.

    Yields
    ------
    SegmentTrace
        In the order of the segments.

    Raises
    ------
    nlbench.RequestError
        If the memory does not suffice for two points.
    """
    segments = iter(segments)
    # Fewer points than were thought to fit, once memory has run out.
    most = 0
    while group := list(itertools.islice(segments, together or 1)):
        device = group[0][0].device
        if needs is None:
            needs = point_memory_of(program, torch.stack(group[0]))
        if together is None and device.type == "cuda":
            together = TOGETHER_GPU
            group += itertools.islice(segments, together - 1)
        threads, points = _room(needs, device, memory)
        most = min(most or limit or points, limit or points)

        def attempt(points: int, group: Sequence[Segment] = group, threads: int = threads) -> Any:
            return list(_trace_group(program, group, points, threads))

        traces, most = halving(attempt, most, device, least=2)
        yield from traces


def trace_program(
    program: Program, start: Tensor, end: Tensor, *, limit: int | None = None
) -> SegmentTrace:
    """Trace a recorded program on one segment; see `trace_exactly`."""
    return next(trace_exactly(program, [(start, end)], limit=limit))


def _room(needs: PointMemory, device: torch.device, memory: int | None) -> tuple[int, int]:
    """How many threads to use, and the most points for each to carry at once."""
    on_gpu = device.type == "cuda"
    (least, most), size = (POINTS_GPU, BYTES_GPU) if on_gpu else (POINTS, BYTES)
    wanted = max(least, min(most, size // needs.width))
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return share_out(
        needs, device, memory, wanted, threads=threads, least=LEAST, needed=2, waiting=True
    )


def _trace_group(
    program: Program, group: Sequence[Segment], limit: int, threads: int
) -> Iterator[SegmentTrace]:
    with torch.inference_mode():
        x = torch.stack([end for segment in group for end in segment])
        t = torch.tensor([0.0, 1.0], dtype=torch.float64, device=x.device).repeat(len(group))
        owner = torch.arange(len(group), device=x.device).repeat_interleave(2)
        rows = torch.arange(len(x), device=x.device)
        values, ends = Values({0: x}, {0: peak(x)}), torch.full_like(rows, -1)
        whole = Chunk(-1, t, ends, owner, values, rows, torch.zeros_like(t))

        stopped = threading.Event()
        arrived = _Arrived()

        def work(chunk: Chunk) -> tuple[Sequence[Chunk], Sequence[_Part]]:
            with torch.inference_mode():
                finished = _advance(program, chunk, limit, stopped)
                if isinstance(finished, Chunk):
                    return split(finished, limit), []
                if finished is not None:
                    arrived.add(finished)
                return [], []

        work_off(split(whole, limit), work, threads, lambda chunk: chunk.step, stopped)
    lengths = [distance(start, end) for start, end in group]
    for (t, y, origins), length in zip(arrived.joined(len(group)), lengths, strict=True):
        if not torch.isfinite(y).all():
            raise NotFinite("the network's output is not finite on the segment")
        precision = torch.finfo(y.dtype).eps
        yield SegmentTrace(t, y.double(), length, origins, program.sites, precision=precision)


@dataclass(frozen=True)
class _Part:
    """Points that have arrived: `t`, `origins` and `owner` (P,), and outputs (P, k)."""

    t: Tensor
    values: Tensor
    origins: Tensor
    owner: Tensor


class _Arrived:
    """Parts as they arrive, from several threads and in any order.

    They are put together some at a time: thousands of small tensors that stay would keep the
    allocator from giving back the large ones between them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[_Part] = []
        self._recent: list[_Part] = []
        # Owner and t of a part's first point, its first row and its number of rows.
        self._spans: list[tuple[int, float, int, int]] = []
        self._rows = 0

    def add(self, part: _Part) -> None:
        with self._lock:
            count = len(part.t)
            self._spans.append((int(part.owner[0]), float(part.t[0]), self._rows, count))
            self._rows += count
            self._recent.append(part)
            if len(self._recent) == TOGETHER_KEPT:
                self._put_together()

    def joined(self, segments: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Put parts in order and give t, outputs and origins of each segment."""
        self._put_together()
        self._blocks, whole = [], _together(self._blocks)
        spans = [torch.arange(first, first + rows) for _, _, first, rows in sorted(self._spans)]
        rows = torch.cat(spans).to(whole.t.device)
        t, owner = whole.t[rows], whole.owner[rows]
        kept = torch.ones_like(owner, dtype=torch.bool)
        # Neighbouring parts share a point.
        kept[1:] = (t.diff() != 0) | (owner.diff() != 0)
        counts = torch.bincount(owner[kept], minlength=segments).tolist()
        rows = rows[kept]
        columns = [
            list(torch.split(column[rows], counts))
            for column in (whole.t, whole.values, whole.origins)
        ]
        if segments > 1:
            # So that one trace that is kept does not keep them all.
            columns = [[part.clone() for part in column] for column in columns]
        return list(zip(*columns, strict=True))

    def _put_together(self) -> None:
        if self._recent:
            self._blocks.append(_together(self._recent))
            self._recent = []


def _together(parts: Sequence[_Part]) -> _Part:
    return _Part(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("t", "values", "origins", "owner")
        )
    )


def _advance(
    program: Program, chunk: Chunk, limit: int, stopped: threading.Event
) -> Chunk | _Part | None:
    """Take a chunk through the program until it outgrows the limit, to be cut, or has arrived.

    None if it was stopped before.
    """
    t, origins, owner, values = chunk.t, chunk.origins, chunk.owner, chunk.values()
    # Nothing but these two holds what is alive: what ends is gone.
    tensors, bounds = values.tensors, values.bounds
    for index in range(max(chunk.step, 0), len(program.steps)):
        if stopped.is_set():
            return None
        step = program.steps[index]
        # The chunk begins at a step whose bends have been put in.
        if step.rule.bend is not None and index != chunk.step:
            x, b = [tensors[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            if not all(torch.isfinite(bound).all() for bound in b):
                raise NotFinite(f"the input of {step.site} is not finite on the segment")
            interval, share = step.rule.bend(x, b)
            x, b = [], []
            if len(interval):
                coincident = COINCIDENT[tensors[step.inputs[0]].dtype]
                longer = with_breakpoints(
                    Chunk(index, t, origins, owner, Values(tensors, bounds), interval, share),
                    program.sites.index(step.site),
                    coincident,
                )
                if len(longer.t) > limit:
                    return longer
                t, origins, owner, values = (
                    longer.t,
                    longer.origins,
                    longer.owner,
                    longer.values(),
                )
                tensors, bounds = values.tensors, values.bounds
                del longer
        x, b = [tensors[i] for i in step.inputs], [bounds[i] for i in step.inputs]
        tensors[step.output] = step.rule.land(x, b) if step.rule.land else step.rule.apply(x)
        bounds[step.output] = step.rule.bound(x, b, tensors[step.output])
        for value in step.ends:
            del tensors[value], bounds[value]
    return _Part(t, tensors[program.output].reshape(len(t), -1), origins, owner)


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
