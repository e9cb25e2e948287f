"""Memory required per point in a program, and the number of points that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import RequestError
from nlbench.introspection.function_calls import get_storage_ref
from nlbench.introspection.memory import (
    OVERHEAD_BYTES,
    LiveBytes,
    add_overhead,
    format_bytes,
    memory_budget,
    usable_memory,
)
from nlbench.probes.lines.rules.rounding import peak

from .program import Program, apply_step


@dataclass(frozen=True)
class PointMemory:
    """Memory required per point in a program, in bytes."""

    width: int  # maximum size of the live values
    # Maximum during a step: the live values before and after new points are inserted, and the
    # step's workspace.
    step: int
    waiting: int  # memory of a point that waits for others, summed over the steps that bend
    reserve: int  # bytes per thread, independent of the number of points
    constants: int = 0  # size of cached constants in bytes, such as sums of squared weights

    def times(self, count: int) -> PointMemory:
        """Return the memory required with `count` tensors in place of each."""
        width = count * self.width
        step = count * self.step
        return PointMemory(width, step, count * self.waiting, count * self.reserve, self.constants)


def share_out(
    needs: PointMemory,
    device: torch.device,
    memory: int | None,
    limit: int,
    *,
    threads: int = 1,
    min_points: int = 1,
    needed: int = 1,
    waiting: bool = False,
) -> tuple[int, int]:
    """Choose the number of threads and the number of points per thread.

    There are `limit` points or, if that many don't fit, the largest power of two that does, but at
    least `needed`. Below `min_points` per thread fewer threads are better. `waiting` is True if
    points wait while others proceed.

    Examples
    --------
    >>> needs = PointMemory(width=100, step=300, waiting=700, reserve=0)
    >>> share_out(needs, torch.device("cpu"), 200_000, 128, threads=2, waiting=True)
    (2, 32)
    """
    point_bytes = needs.step + needs.waiting if waiting else needs.step
    if memory is None and threads * (needs.reserve + limit * point_bytes) <= OVERHEAD_BYTES:
        return threads, limit  # So little that the free memory need not be read.
    # Free memory already excludes the constants.
    constants = 0 if memory is None else needs.constants
    usable = usable_memory(device, memory) - constants
    max_points = int((usable - needs.reserve) // point_bytes)
    if max_points < needed:
        name = "half of the free memory" if memory is None else "memory"
        budget = memory_budget(device, memory)
        required = add_overhead(constants + needs.reserve + needed * point_bytes)
        raise RequestError(
            f"{name}: {format_bytes(budget)} is too little to trace this network on a segment, "
            f"which takes at least {format_bytes(required)}"
        )
    while threads > 1 and usable < threads * (needs.reserve + min_points * point_bytes):
        threads -= 1
    points = int((usable / threads - needs.reserve) // point_bytes)
    return threads, limit if points >= limit else max(needed, 2 ** int(math.log2(points)))


def min_point_memory(program: Program, dtype: torch.dtype) -> PointMemory:
    """Compute a lower bound on the memory per point from shapes alone.

    Examples
    --------
    >>> from nlbench.probes.lines.recording.recorder import record_program
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> program = record_program(network, torch.zeros(1, 4, dtype=torch.float64))
    >>> min_point_memory(program, torch.float64).width
    160
    """
    return _total(program, dtype.itemsize, {}, {})


def measure_point_memory(program: Program, inputs: Tensor) -> PointMemory:
    """Measure the memory required per point.

    Cached constants are counted only if they have not been computed before. With fewer than two
    inputs the search for breakpoints is not measured.

    Examples
    --------
    >>> from nlbench.probes.lines.recording.recorder import record_program
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> inputs = torch.zeros(2, 4, dtype=torch.float64)
    >>> measure_point_memory(record_program(network, inputs[:1].clone()), inputs).width
    320
    """
    bound_bytes = {}
    step_bytes = {}
    constants = 0
    points = len(inputs)
    with torch.inference_mode(), LiveBytes() as live:
        values = {0: inputs}
        bounds = {0: peak(inputs)}
        bound_bytes[0] = -(-bounds[0].nbytes // points)
        for step in program.steps:
            x = [values[i] for i in step.inputs]
            b = [bounds[i] for i in step.inputs]
            before = live.restart()
            output = apply_step(step, x)
            bound = step.rule.bound(x, b, output)
            # Memory that remains, other than output and bound, holds constants.
            storages = {get_storage_ref(t): t.untyped_storage() for t in (output, bound)}
            old = {get_storage_ref(t) for t in (*x, *b)}
            new = sum(storage.nbytes() for key, storage in storages.items() if key not in old)
            constants += max(0, live.now - before - new)
            peak_bytes = live.peak - before
            if step.rule.pieces is not None and points > 1 and all(n.isfinite().all() for n in b):
                live.restart()
                step.rule.pieces.find_breakpoints(x, b)
                peak_bytes = max(peak_bytes, live.peak - before)
            step_bytes[step.output] = -(-max(0, peak_bytes - new) // points)
            bound_bytes[step.output] = -(-bound.nbytes // points)
            values[step.output] = output
            bounds[step.output] = bound
            for value in step.ends:
                del values[value], bounds[value]
    return _total(program, inputs.element_size(), bound_bytes, step_bytes, constants)


def _total(
    program: Program,
    itemsize: int,
    bound_bytes: Mapping[int, int],
    step_bytes: Mapping[int, int],
    constants: int = 0,
) -> PointMemory:
    """Compute the memory per point, given the bytes for each value's bound and for each step."""
    alive = {0: itemsize * torch.Size(program.shape).numel()}
    width = peak_bytes = alive[0] + bound_bytes.get(0, 0)
    alive[0] = width
    waiting = reserve = 0
    for step in program.steps:
        before = sum(alive.values())
        largest = max(alive.values())
        output = itemsize * torch.Size(step.shape).numel()
        alive[step.output] = output + bound_bytes.get(step.output, 0)
        after = sum(alive.values())
        workspace = itemsize * step.rule.workspace
        if step.rule.pieces is not None:
            waiting += before
            # Signs and copies of the output, or the values that new points are interpolated from.
            workspace += max(2 * output, 2 * largest)
        width = max(width, after)
        reserve = max(reserve, itemsize * step.rule.reserve)
        own_bytes = max(workspace, step_bytes.get(step.output, 0))
        peak_bytes = max(peak_bytes, before + after + own_bytes)
        for value in step.ends:
            del alive[value]
    return PointMemory(width, peak_bytes, waiting, reserve, constants)
