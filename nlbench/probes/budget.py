"""How much memory a point of a program needs, and how many points fit."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.errors import RequestError
from nlbench.probes.lines.ops.rule import peak
from nlbench.probes.lines.program import Program
from nlbench.probes.sites.axis_tracking import tensors_in

__all__ = ["Load", "available_memory", "bytes_a_sample", "load_of", "share_out"]


SHARE = 0.5
"""Of the free memory, what is used by default."""
OVERHEAD = 32 * 2**20
"""Bytes that allocator and threads take beside tensors (benchmarks/memory_of_a_trace.py)."""


@dataclass(frozen=True)
class Load:
    """Bytes that a point takes on its way through a program.

    Parameters
    ----------
    width : int
        Most that is alive at once.
    step : int
        Most while a step is computed: what was there before, what is made of it with new
        points among the old ones, and what the step needs for itself.
    waiting : int
        Of points that wait, while others go ahead, at each step that bends: their sum.
    reserve : int
        Bytes taken beside, however many points there are.
    """

    width: int
    step: int
    waiting: int
    reserve: int


def load_of(program: Program, inputs: Tensor, *, carried: int = 1) -> Load:
    """Measure what a point takes on its way through a program.

    Parameters
    ----------
    program : Program
    inputs : tensor of shape (m, *input)
    carried : int
        How many tensors are carried for each one of the program's.

    Examples
    --------
    >>> from nlbench.probes.lines.program import record
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> inputs = torch.zeros(2, 4, dtype=torch.float64)
    >>> load_of(record(network, inputs), inputs).width
    320
    """
    size = inputs.element_size()
    with torch.inference_mode():
        values, bounds = {0: inputs}, {0: peak(inputs)}
        width = step_bytes = _bytes(values) + _bytes(bounds)
        waiting = reserve = 0
        for step in program.steps:
            x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            before = _bytes(values) + _bytes(bounds)
            output = step.rule.apply(x)
            values[step.output], bounds[step.output] = output, step.rule.bound(x, b, output)
            after = _bytes(values) + _bytes(bounds)
            own = len(inputs) * size * step.rule.workspace
            reserve = max(reserve, size * step.rule.reserve)
            if step.rule.bend is not None:
                waiting += before
                # Signs, and copies of what bends.
                own += 2 * _bytes({0: output})
            width, step_bytes = max(width, after), max(step_bytes, before + after + own)
            for value in step.ends:
                del values[value], bounds[value]
    points = len(inputs)
    width, step_bytes, waiting = (-(-size // points) for size in (width, step_bytes, waiting))
    return Load(carried * width, carried * step_bytes, carried * waiting, carried * reserve)


def _bytes(tensors: dict[int, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def share_out(
    load: Load,
    device: torch.device,
    memory: int | None,
    wanted: int,
    *,
    threads: int = 1,
    least: int = 1,
    needed: int = 1,
    waiting: bool = False,
) -> tuple[int, int]:
    """Decide how many threads carry how many points each.

    Parameters
    ----------
    load : Load
    device : torch.device
    memory : int or None
        Bytes that may be used; None: half of what is free.
    wanted : int
        Most points for a thread.
    threads : int
        Most threads.
    least : int
        Points a thread below which fewer threads are better.
    needed : int
        Points without which nothing can be done.
    waiting : bool
        Whether points wait while others go ahead.

    Returns
    -------
    threads, points : int
        The latter is `wanted` or, where that does not fit, the largest power of two that does
        or what is needed.

    Raises
    ------
    nlbench.RequestError
        If what is needed does not fit.

    Examples
    --------
    >>> load = Load(width=100, step=300, waiting=700, reserve=0)
    >>> share_out(load, torch.device("cpu"), 200_000, 128, threads=2, waiting=True)
    (2, 32)
    """
    budget = SHARE * available_memory(device) if memory is None else memory
    usable = budget - min(OVERHEAD, budget / 2)
    each = load.step + load.waiting if waiting else load.step
    fitting = int((usable - load.reserve) // each)
    if fitting < needed:
        given = "half of the free memory" if memory is None else "memory"
        raise RequestError(
            f"{given}: {_readable(budget)} are too few to trace this network on a segment, "
            f"which takes {_readable(_least(load.reserve + needed * each))} or more"
        )
    while threads > 1 and usable < threads * (load.reserve + least * each):
        threads -= 1
    points = int((usable / threads - load.reserve) // each)
    return threads, wanted if points >= wanted else max(needed, 2 ** int(math.log2(points)))


def _least(size: int) -> int:
    """Budget of which `size` is left beside the overhead."""
    return size + min(OVERHEAD, size)


def available_memory(device: torch.device) -> int:
    """Bytes that are free on a device, as far as this process may use them."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(int(psutil.virtual_memory().available), _left_to_the_container())


def _left_to_the_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes up to the limit of the control group, as Linux tells a container's."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        # Files read once and kept in case they are read again are given up when room is needed.
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        kept = dict(line.split() for line in statistics).get("inactive_file", "0")
        return max(0, int(limit) - max(0, used - int(kept)))
    except (OSError, ValueError):
        return torch.iinfo(torch.int64).max


def _readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


# Kernels need room of their own, and a batch's tensors are not freed at once.
_MARGIN = 1.5


class _Tally(TorchFunctionMode):
    """Adds up the tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = list(tensors_in((output,)))
        if made:
            self._live += [weakref.ref(tensor) for tensor in made]
            sizes: dict[int, int] = {}
            for reference in list(self._live):
                if (tensor := reference()) is None:
                    self._live.remove(reference)
                else:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, sum(sizes.values()))
        return output


def bytes_a_sample(model: nn.Module, samples: Tensor) -> int:
    """Estimate what a forward pass takes for each of its samples.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    samples : tensor of shape (n, ...)
        The model is run on them; two are enough, and safer than one, whose axis a network may
        drop by ``squeeze``.

    Returns
    -------
    int
        Bytes: one and a half times the most that live together, never 0.

    Examples
    --------
    >>> import torch
    >>> bytes_a_sample(nn.Sequential(nn.Linear(4, 1000), nn.ReLU()), torch.zeros(2, 4))
    12024
    """
    tally = _Tally()
    with tally:
        model(samples.clone())
    return max(1, int(_MARGIN * tally.peak / len(samples)))
