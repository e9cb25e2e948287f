"""How many samples or points fit into memory, and fewer of them when it runs out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode

from nlbench.errors import RequestError, Undefined

from .background import rng_restored, rng_state
from .model_state import attributes_kept
from .operations import DispatchMode, storage_of, tensors_in

__all__ = [
    "Fitting",
    "Found",
    "LiveBytes",
    "PointMemory",
    "available_memory",
    "bytes_a_sample",
    "give_back",
    "halving",
    "is_out_of_memory",
    "part_sizes",
    "refuse_mixing",
    "share_out",
    "usable_memory",
]


SHARE = 0.5
"""Of the free memory, what is used by default."""
OVERHEAD = 32 * 2**20
"""Bytes that allocator and threads take beside tensors (benchmarks/memory_of_a_trace.py)."""


@dataclass(frozen=True)
class PointMemory:
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
        Bytes taken beside, however many points there are, by each thread.
    constants : int
        Bytes of what is computed once and kept, such as sums of squares of weights.
    """

    width: int
    step: int
    waiting: int
    reserve: int
    constants: int = 0

    def times(self, carried: int) -> PointMemory:
        """Give the same with so many tensors in place of each."""
        return PointMemory(
            carried * self.width,
            carried * self.step,
            carried * self.waiting,
            carried * self.reserve,
            self.constants,
        )


def share_out(
    needs: PointMemory,
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
    needs : PointMemory
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
    >>> needs = PointMemory(width=100, step=300, waiting=700, reserve=0)
    >>> share_out(needs, torch.device("cpu"), 200_000, 128, threads=2, waiting=True)
    (2, 32)
    """
    # Of free memory it has been taken already.
    constants = 0 if memory is None else needs.constants
    usable = usable_memory(device, memory) - constants
    each = needs.step + needs.waiting if waiting else needs.step
    fitting = int((usable - needs.reserve) // each)
    if fitting < needed:
        given = "half of the free memory" if memory is None else "memory"
        budget = _budget(device, memory)
        raise RequestError(
            f"{given}: {_readable(budget)} are too few to trace this network on a segment, "
            f"which takes {_readable(_least(constants + needs.reserve + needed * each))} or more"
        )
    while threads > 1 and usable < threads * (needs.reserve + least * each):
        threads -= 1
    points = int((usable / threads - needs.reserve) // each)
    return threads, wanted if points >= wanted else max(needed, 2 ** int(math.log2(points)))


def usable_memory(device: torch.device, memory: int | None) -> float:
    """Bytes for tensors: of a budget, or by default half of what is free, less the overhead."""
    budget = _budget(device, memory)
    return budget - min(OVERHEAD, budget / 2)


def _budget(device: torch.device, memory: int | None) -> float:
    return SHARE * available_memory(device) if memory is None else float(memory)


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


_OUT_OF_MEMORY = re.compile(
    r"out of memory|can'?t allocate memory|not enough memory|failed to allocate"
    # cuBLAS, cuSOLVER, cuSPARSE, cuFFT, and cuDNN before and after its version 9.
    r"|CU[A-Z]+_(STATUS_)?ALLOC_FAILED|CUDNN_STATUS_\w*ALLOCATION_FAILED"
    r"|cudaErrorMemoryAllocation"
    # Where there is no room for what a library needs before it is first called.
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cublas\w*Create"
    r"|CUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cusolver\w*Create"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cudnnCreate"
    # What cuDNN says where each way to compute a convolution needs more room than there is.
    r"|unable to find an engine to execute this computation",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, of a GPU or of the machine.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


# Kernels need room of their own, and a batch's tensors are not freed at once.
_MARGIN = 1.5


class LiveBytes(DispatchMode):
    """Counts the memory of tensors that are made while it is entered, in this thread.

    What a kernel allocates for itself is not seen.

    Attributes
    ----------
    now, peak : int
        Bytes that live now, and the most that did together after an operation.

    Examples
    --------
    >>> with LiveBytes() as live:
    ...     x = torch.zeros(2, dtype=torch.float64)
    ...     x = (x + 1).view(1, 2)
    >>> live.now, live.peak
    (16, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}
        self._most = 0  # What `now` is at most.

    @property
    def now(self) -> int:
        """Bytes that live now."""
        self._sizes = {
            storage: size
            for storage, size in self._sizes.items()
            if not storage.expired()  # type: ignore[no-untyped-call]
        }
        self._most = sum(self._sizes.values())
        return self._most

    def restart(self) -> int:
        """Begin another peak, with what lives now."""
        self.peak = self.now
        return self.peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Most operations look at memory that is known, or write into it.
        made = {
            storage: tensor
            for tensor in tensors_in((result,))
            if not tensor.is_meta
            and (storage := storage_of(tensor)) is not None
            and storage not in self._sizes
        }
        given = {storage_of(t) for t in tensors_in((args, kwargs))} if made else set()
        new = {s: t.untyped_storage().nbytes() for s, t in made.items() if s not in given}
        self._sizes |= new
        self._most += sum(new.values())
        # What has ended since is looked for only where the peak may have grown.
        if self._most > self.peak:
            self.peak = max(self.peak, self.now)
        return result


def bytes_a_sample(model: nn.Module, samples: Tensor) -> int:
    """Estimate what a forward pass takes for each of its samples.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode. What the run sets on its modules, and what it draws, is undone.
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
    # While functions are watched PyTorch's fused layers, which hide what they take, are not used.
    watched = BaseTorchFunctionMode()
    with rng_restored(samples.device), attributes_kept(model), watched, LiveBytes() as live:
        model(samples.clone())
    return max(1, int(_MARGIN * live.peak / len(samples)))


Found = MutableMapping[nn.Module, MutableMapping[Hashable, int]]
"""Sizes that were found to fit, by model and by what they are of."""


class Fitting:
    """How many samples of a batch fit into a memory at once, found by running two of them.

    What was found for another model, shape, type or memory says nothing about it.

    Parameters
    ----------
    found : mutable mapping
        Of earlier passes.
    model : torch.nn.Module
    what : str
        What is done with the samples.
    batch : tensor of shape (n, ...)
    memory : int or None
        Bytes; None: as many as there are.
    times : int
        How many times as much it takes as a forward pass.

    Examples
    --------
    >>> model, batch = nn.Linear(4, 1000), torch.zeros(64, 4)
    >>> memory = 20 * bytes_a_sample(model, batch[:2])
    >>> Fitting({}, model, "a forward pass", batch, memory).most
    20
    """

    def __init__(
        self,
        found: Found,
        model: nn.Module,
        what: str,
        batch: Tensor,
        memory: int | None,
        *,
        times: int = 1,
    ) -> None:
        self._sizes = found.setdefault(model, {})
        self._key = (what, tuple(batch.shape[1:]), batch.dtype, batch.device, memory)
        if memory is not None and self._key not in self._sizes and len(batch):
            # Two have just been run; of one a network might drop the axis.
            self.remember(max(2, memory // (times * bytes_a_sample(model, batch[:2]))))

    @property
    def most(self) -> int | None:
        """So many; None where nothing is known."""
        return self._sizes.get(self._key)

    def remember(self, most: int) -> None:
        """Try that many first from now on."""
        self._sizes[self._key] = most


T = TypeVar("T")


def halving(
    attempt: Callable[[int], T], size: int, device: torch.device, *, least: int = 1
) -> tuple[T, int]:
    """Do something with so many at a time, half as many each time that memory runs out.

    Parameters
    ----------
    attempt : callable
        Given how many.
    size : int
        How many at first.
    device : torch.device
    least : int
        With so many an error is passed on.

    Returns
    -------
    result
        Of the attempt that succeeded.
    size : int
        How many that was with.

    Examples
    --------
    >>> def attempt(size):
    ...     if size > 10:
    ...         raise MemoryError
    ...     return "done"
    >>> halving(attempt, 64, torch.device("cpu"))
    ('done', 8)
    """
    while True:
        try:
            return attempt(size), size
        except (MemoryError, RuntimeError) as error:
            if size <= least or not is_out_of_memory(error):
                raise
        # Only here is the error gone, and with it the tensors that its traceback held.
        size = max(least, -(-size // 2))
        give_back(device)


def give_back(device: torch.device) -> None:
    """Have a GPU's allocator return what it keeps for later, once the work on it is done.

    Examples
    --------
    >>> give_back(torch.device("cpu"))
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def part_sizes(samples: int, most: int) -> list[int]:
    """Split a number of samples into parts of at most `most`, nearly but not all of one size.

    Two sizes tell an axis that holds the samples from one that happens to be as long.

    Examples
    --------
    >>> part_sizes(8, 8), part_sizes(8, 3), part_sizes(8, 4), part_sizes(12, 6)
    ([8], [3, 3, 2], [3, 3, 2], [5, 4, 3])
    """
    parts = -(-samples // most)
    if parts == 1 or most == 1:
        return [samples // parts] * parts
    # Where all would be full, one more leaves them room to differ.
    parts += samples == parts * most
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    if samples % parts == 0:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


# Two runs on as many samples give a sample the same numbers but for what the machine adds up
# in another order; what samples have of each other is more. Among more samples other kernels
# are at work, and deep networks make more of it.
_SAME = 2**10
_NEARLY = 2**16
_SEVERAL = 5


def refuse_mixing(
    rows: Callable[[Tensor], Mapping[str, Tensor]],
    batch: Tensor,
    most: int,
    *,
    because: str = "the batch does not fit into memory as a whole",
    draws: bool = False,
) -> None:
    """Refuse to take a batch apart if what becomes of a sample depends on the others.

    A sample is run beside one sample and beside another, first and last of a pair, and beside
    four where so many fit: what is computed of it may not differ. So it does not matter which
    operation mixes the samples, or counts them. What does not show among so few, as of a network
    that routes the rarest of many samples elsewhere, is not found.

    Parameters
    ----------
    rows : callable
        From samples (m, ...) to what is computed of them, by name: rows of shape (m k, d), the
        k rows of a sample next to each other or alternating.
    batch : tensor of shape (n, ...)
    most : int
        Samples that are run at once.
    because : str
        Why it has to be taken apart, as it is said to people.
    draws : bool
        Whether the network may draw random numbers. Of one that does nothing is told.

    Raises
    ------
    nlbench.Undefined
        Naming what differs.

    Examples
    --------
    >>> refuse_mixing(lambda pair: {"square": pair**2}, torch.randn(8, 3), 4)
    """
    one, others = batch[:1], _others(batch)
    before = rng_state(batch.device)
    pairs = [torch.cat(pair) for other in others for pair in ((one, other), (other, one))]
    try:
        found = [dict(rows(pair)) for pair in pairs]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = []
    if not found:
        rows(one)  # Or not even that fits.
        raise Undefined(
            "only one sample at a time fits into memory, so that it can't be seen whether the "
            "samples of a batch are computed apart"
        )
    if rng_state(batch.device) != before:
        if draws:
            return
        raise Undefined(
            f"the network draws random numbers, which would be others in parts, and {because}"
        )
    _refuse_others(found[0], found[2], 0, 2, _SAME, because)
    _refuse_others(found[1], found[3], 1, 2, _SAME, because)
    if most > 2:
        several = torch.cat([one, *[others[0]] * (min(most, _SEVERAL) - 1)])
        _refuse_others(found[0], dict(rows(several)), 0, len(several), _NEARLY, because)


def _refuse_others(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    place: int,
    company: int,
    times: int,
    because: str,
) -> None:
    """Refuse a network in which the sample at a place of a pair is another among so many."""
    if list(first) != list(second):
        raise Undefined(
            "what the network computes of a sample depends on the other samples of its batch, "
            f"and {because}"
        )
    for name, values in first.items():
        if not _are_same(values, second[name], place, company, times):
            raise Undefined(
                f"{name}: a sample's numbers depend on the other samples of its batch, or "
                f"which axis holds the samples is not known, and {because}"
            )


def _others(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Give two samples that differ from each other, to stand beside the first one."""
    one = batch[:1]
    for index in range(1, len(batch)):
        if not torch.equal(batch[index : index + 1], one):
            return batch[index : index + 1], one
    return one, one


def _are_same(first: Tensor, second: Tensor, place: int, company: int, times: int) -> bool:
    """Whether the rows of the sample at a place of a pair are the same among so many."""
    if len(first) == 1 or len(second) == 1:
        return first.shape == second.shape  # A table that does not come from the input.
    each = len(first) // 2
    if first.shape[1:] != second.shape[1:] or len(second) != company * each or len(first) % 2:
        return False
    own = slice(place * each, (place + 1) * each)
    return any(
        _close(first[one], second[other], times)
        for one, other in ((own, own), (slice(place, None, 2), slice(place, None, company)))
    )


def _close(first: Tensor, second: Tensor, times: int) -> bool:
    if first.device.type == "mps":  # It has no double precision.
        first, second = first.cpu(), second.cpu()
    same = (first == second) | (first.isnan() & second.isnan())
    apart = torch.where(same, 0.0, (first - second).abs().double())
    scale = torch.where(first.isfinite(), first.abs(), 0.0).amax(-1, keepdim=True).double()
    return bool((apart <= times * torch.finfo(first.dtype).eps * scale).all())
