"""Exact traces: points on segments are propagated through a program, layer by layer.

Up to the current step, all values are affine in t between neighbouring points. If the step bends
between two points, a breakpoint is inserted there, and all values that are still needed are
interpolated. After the last step, the points are the segment's breakpoints. (Sotoudeh and Thakur,
"Computing Linear Restrictions of Neural Networks", NeurIPS 2019.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nlbench.errors import NotFinite
from nlbench.introspection.memory import halve_on_oom
from nlbench.probes.lines.recording.point_memory import PointMemory, measure_point_memory, share_out
from nlbench.probes.lines.recording.program import Program, check_points
from nlbench.probes.lines.rules.rounding import peak
from nlbench.probes.lines.segments import segment_lengths
from nlbench.probes.lines.trace import SegmentTrace

from .chunks import Chunk, Values, insert_breakpoints, split
from .tasks import run_tasks

MIN_BREAKPOINT_GAP = {torch.float64: 1e-12, torch.float32: 1e-7}
"""Difference in t below which breakpoints are merged as ties up to rounding."""

# Number of points computed at a time, (min, max), and their maximum size in bytes: enough to make
# the points shared by neighbouring parts and the overhead of a call negligible, but few enough for
# their values to stay in cache (benchmarks/cost_per_region.py). A GPU needs larger batches.
POINT_RANGE_CPU = (64, 8192)
MAX_BYTES_CPU = 10 * 2**20
POINT_RANGE_GPU = (16, 8192)
MAX_BYTES_GPU = 2**30
SEGMENTS_PER_GPU_BATCH = 64
BATCHES_OF_SEGMENTS = 4
"""Number of batches of points whose segments are traced together, at a breakpoint a unit."""
MIN_POINTS_PER_THREAD = 8


def trace_exactly(
    program: Program,
    points: Tensor,
    *,
    memory: int | None = None,
    limit: int | None = None,
    needs: PointMemory | None = None,
) -> list[SegmentTrace]:
    """Trace a recorded program along segments, all together. See `trace_segment`.

    The trace is depth-first: a chunk that exceeds the limit is split at breakpoints, and each part
    is propagated through the rest of the program separately. Memory is bounded by limit times depth
    for any number of regions, and the result doesn't depend on the limit. On a CPU, PyTorch's
    number of threads determines how many parts run concurrently.

    Parameters
    ----------
    points : tensor of shape (n, 2, *input)
        The segments' ends, in the dtype in which the program was recorded.
    memory : int, optional
        Limit in bytes, in addition to the model and the traces; by default half of the free memory.
    limit : int, optional
        Maximum number of points computed at a time, at least 2; by default as many as fit in cache
        and in memory.
    needs : PointMemory, optional
        Memory needed per point, if already measured.

    Raises
    ------
    nlbench.RequestError
        If two points don't fit in memory.
    """
    needs = needs or measure_point_memory(program, points[0])
    threads, max_points = _threads_and_points(needs, points.device, memory)
    max_points = limit or max_points
    if len(points) * program.bending_units <= max_points:
        threads = 1

    def attempt(max_points: int) -> list[SegmentTrace]:
        return _trace_together(program, points, max_points, threads)

    traces, _ = halve_on_oom(attempt, max_points, points.device, min_size=2)
    return traces


def segments_per_batch(
    program: Program, needs: PointMemory, device: torch.device, memory: int | None
) -> int:
    """Return the number of segments that are best traced together.

    On a CPU, the regions of a few batches of points are expected on them.
    """
    if device.type == "cuda":
        return SEGMENTS_PER_GPU_BATCH
    _, points = _threads_and_points(needs, device, memory)
    return max(1, BATCHES_OF_SEGMENTS * points // max(2, program.bending_units))


def _threads_and_points(
    needs: PointMemory, device: torch.device, memory: int | None
) -> tuple[int, int]:
    """Return the number of threads, and the maximum number of points per thread."""
    (min_points, max_points) = POINT_RANGE_CPU
    max_bytes = MAX_BYTES_CPU
    if device.type == "cuda":
        (min_points, max_points) = POINT_RANGE_GPU
        max_bytes = MAX_BYTES_GPU
    return share_out(
        needs,
        device,
        memory,
        max(min_points, min(max_points, max_bytes // needs.width)),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        min_points=MIN_POINTS_PER_THREAD,
        needed=2,
        waiting=True,
    )


def _trace_together(
    program: Program, points: Tensor, limit: int, threads: int
) -> list[SegmentTrace]:
    count = len(points)
    with torch.inference_mode():
        x = points.flatten(0, 1)
        lengths = segment_lengths(points[:, 0], points[:, 1])
        t = torch.tensor([0.0, 1.0], dtype=torch.float64, device=x.device).repeat(count)
        segment_index = torch.arange(count, device=x.device).repeat_interleave(2)
        rows = torch.arange(len(x), device=x.device)
        values = Values({0: x}, {0: peak(x)})
        ends = torch.full_like(rows, -1)
        chunk = Chunk(-1, t, ends, segment_index, values, rows, torch.zeros_like(t))

        stopped = threading.Event()
        output_parts = _OutputParts()

        def work(chunk: Chunk) -> Sequence[Chunk]:
            with torch.inference_mode():
                result = _advance(program, chunk, limit, stopped)
                if isinstance(result, Chunk):
                    return split(result, limit)
                if result is not None:
                    output_parts.add(result)
                return []

        run_tasks(split(chunk, limit), work, threads, lambda chunk: chunk.step, stopped)
    sites = program.sites
    precision = torch.finfo(x.dtype).eps
    return [
        SegmentTrace(t, y, length, origins, sites, precision=precision)
        for (t, y, origins), length in zip(output_parts.join(count), lengths, strict=True)
    ]


class _Part(NamedTuple):
    """Points at the end of the program: `t`, `origins`, `segment_index` (P,) and outputs (P, k)."""

    t: Tensor
    values: Tensor
    origins: Tensor
    segment_index: Tensor


class _OutputParts:
    """Parts of traces, added by several threads in any order.

    They are concatenated in blocks: thousands of small tensors would keep the allocator from
    releasing the large ones between them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[_Part] = []
        self._recent: list[_Part] = []
        # Owner and t of a part's first point, its first row, and its number of rows.
        self._spans: list[tuple[int, float, int, int]] = []
        self._rows = 0

    def add(self, part: _Part) -> None:
        with self._lock:
            count = len(part.t)
            self._spans.append((int(part.segment_index[0]), float(part.t[0]), self._rows, count))
            self._rows += count
            self._recent.append(part)
            # Number of finished parts that are concatenated at a time.
            if len(self._recent) == 256:
                self._concatenate_recent()

    def join(self, segments: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Sort the parts, and return t, outputs and origins of each segment."""
        self._concatenate_recent()
        self._blocks, joined = [], _concatenate(self._blocks)
        spans = [torch.arange(first, first + rows) for _, _, first, rows in sorted(self._spans)]
        rows = torch.cat(spans).to(joined.t.device)
        t = joined.t[rows]
        segment_index = joined.segment_index[rows]
        is_first = torch.ones_like(segment_index, dtype=torch.bool)
        # Neighbouring parts share a point.
        is_first[1:] = (t.diff() != 0) | (segment_index.diff() != 0)
        counts = torch.bincount(segment_index[is_first], minlength=segments).tolist()
        rows = rows[is_first]
        values = joined.values[rows]
        if not _is_finite(values):
            raise NotFinite("the network's output is not finite on the segment")
        columns = joined.t[rows], values.double(), joined.origins[rows]
        if segments == 1:
            return [columns]
        # Copies, since a view of one trace would keep the memory of all traces alive.
        parts = []
        for column in columns:
            parts.append([part.clone() for part in torch.split(column, counts)])
        return list(zip(*parts, strict=True))

    def _concatenate_recent(self) -> None:
        if self._recent:
            self._blocks.append(_concatenate(self._recent))
            self._recent = []


def _concatenate(parts: Sequence[_Part]) -> _Part:
    return _Part(*map(torch.cat, zip(*parts, strict=True)))


def _is_finite(x: Tensor) -> bool:
    if x.is_cuda:
        return bool(torch.isfinite(x).all())
    # Two reductions are ten times as fast as `isfinite` on a CPU.
    return not x.numel() or (math.isfinite(float(x.amax())) and math.isfinite(float(x.amin())))


def _advance(
    program: Program, chunk: Chunk, limit: int, stopped: threading.Event
) -> Chunk | _Part | None:
    """Propagate a chunk through the program until it exceeds the limit or reaches the end.

    Returns a chunk to be split, a finished part, or None if it was stopped early.
    """
    t = chunk.t
    origins = chunk.origins
    segment_index = chunk.segment_index
    values = chunk.values()
    # The only references to live values, so that they are freed after their last use.
    tensors = values.tensors
    bounds = values.bounds
    for index in range(max(chunk.step, 0), len(program.steps)):
        if stopped.is_set():
            return None
        step = program.steps[index]
        # The breakpoints of a chunk's first step have already been inserted.
        if step.rule.pieces is not None and index != chunk.step:
            x = [tensors[i] for i in step.inputs]
            b = [bounds[i] for i in step.inputs]
            if not all(map(_is_finite, b)):
                raise NotFinite(f"the input of {step.site} is not finite on the segment")
            interval, fraction = step.rule.pieces.find_breakpoints(x, b)
            x = []
            b = []
            if len(interval):
                min_gap = MIN_BREAKPOINT_GAP[tensors[step.inputs[0]].dtype]
                extended = insert_breakpoints(
                    Chunk(
                        index,
                        t,
                        origins,
                        segment_index,
                        Values(tensors, bounds),
                        interval,
                        fraction,
                    ),
                    program.sites.index(step.site),
                    min_gap,
                )
                if len(extended.t) > limit:
                    return extended
                t = extended.t
                origins = extended.origins
                segment_index = extended.segment_index
                values = extended.values()
                tensors = values.tensors
                bounds = values.bounds
                del extended
        x = [tensors[i] for i in step.inputs]
        b = [bounds[i] for i in step.inputs]
        tensors[step.output] = step.rule.snap(x, b) if step.rule.snap else step.rule.apply(x)
        check_points(step, tensors[step.output], len(t))
        bounds[step.output] = step.rule.bound(x, b, tensors[step.output])
        for value in step.ends:
            del tensors[value], bounds[value]
    return _Part(t, tensors[program.output].reshape(len(t), -1), origins, segment_index)
