"""Numbers of samples that fit into memory, retries with fewer, and the cost of a block of code."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode

from nlbench.errors import error_message

from . import allocator
from .function_calls import DispatchMode, get_storage_ref, tensors_in
from .model_state import preserve_attributes
from .random_state import preserve_rng_state

CPU_BATCH_BYTES = 256 * 2**20
"""Memory for a batch on the CPU if no limit is given: larger batches take longer, since the system
zeroes their memory (benchmarks/batches_on_the_cpu.py)."""
MIN_LIMITED = 2**18
"""Number of elements in a batch below which it isn't worth estimating its memory by default."""
MIN_LIMITED_SAMPLES = 32
"""Number of forward passes of one sample up to which limiting a batch by default costs more than it
saves: the estimate and the check of independence take fifteen."""
MAX_UNLIMITED = 2**23
"""Number of elements, 55 images of 224 pixels, above which a batch of any number of samples is
limited, since it may need more memory than there is."""
OVERHEAD_BYTES = 32 * 2**20
"""Memory for allocator and threads, in addition to tensors (benchmarks/memory_of_a_trace.py)."""


def memory_budget(device: torch.device, memory: int | None) -> float:
    """Return `memory`, or by default half of the free memory, in bytes."""
    if memory is not None:
        return float(memory)
    return 0.5 * available_memory(device)


def usable_memory(device: torch.device, memory: int | None) -> float:
    """Return the part of a budget that is available for tensors, in bytes."""
    budget = memory_budget(device, memory)
    return budget - min(OVERHEAD_BYTES, budget / 2)


def add_overhead(size: int) -> int:
    """Return the budget that leaves `size` bytes for tensors."""
    return size + min(OVERHEAD_BYTES, size)


def available_memory(device: torch.device) -> int:
    """Return the free memory that this process may use on a device, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(int(psutil.virtual_memory().available), _container_memory())


def _container_memory(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory available in the Linux control group of a container, in bytes."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        # The kernel drops cached files when memory is needed.
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = dict(line.split() for line in statistics).get("inactive_file", "0")
        return max(0, int(limit) - max(0, used - int(cached)))
    except (OSError, ValueError):
        return torch.iinfo(torch.int64).max


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit.

    Examples
    --------
    >>> format_bytes(1536)
    '1.5 KiB'
    """
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
    # A library's workspace, allocated before its first call.
    r"|CUBLAS_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cublas\w*Create"
    r"|CUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cusolver\w*Create"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling\W+cudnnCreate"
    # cuDNN, if every algorithm for a convolution needs more memory than is available.
    r"|unable to find an engine to execute this computation",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error, on a GPU or in main memory.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(error_message(error)))


# Leaves room for kernel workspaces, and for tensors that are not freed immediately.
_SAFETY_FACTOR = 1.5


class LiveBytes(DispatchMode):
    """Dispatch mode that counts the bytes of tensors created while it is active in this thread.

    Kernel workspaces are not counted.

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
        self._max_now = 0

    @property
    def now(self) -> int:
        """Bytes of live tensors."""
        self._sizes = {
            storage: size
            for storage, size in self._sizes.items()
            if not storage.expired()  # type: ignore[no-untyped-call]
        }
        self._max_now = sum(self._sizes.values())
        return self._max_now

    def restart(self) -> int:
        """Reset the peak to the current bytes of live tensors, and return it."""
        self.peak = self.now
        return self.peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Most operations return views of known memory or write into it.
        unknown = {}
        for tensor in tensors_in((result,)):
            storage = None if tensor.is_meta else get_storage_ref(tensor)
            if storage is not None and storage not in self._sizes:
                unknown[storage] = tensor
        inputs = {get_storage_ref(t) for t in tensors_in((args, kwargs))} if unknown else set()
        new = {s: t.untyped_storage().nbytes() for s, t in unknown.items() if s not in inputs}
        self._sizes |= new
        self._max_now += sum(new.values())
        # Only look for freed storages if the peak may have grown.
        if self._max_now > self.peak:
            self.peak = max(self.peak, self.now)
        return result


def bytes_per_sample(model: nn.Module, samples: Tensor) -> int:
    """Estimate the memory that a forward pass requires per sample: 1.5 times the peak, in bytes.

    Two samples are enough, and safer than one: ``squeeze`` drops a batch axis of size 1. Random
    states, and attributes that the pass sets, are restored.

    Examples
    --------
    >>> import torch
    >>> bytes_per_sample(nn.Sequential(nn.Linear(4, 1000), nn.ReLU()), torch.zeros(2, 4))
    12024
    """
    # A function mode disables PyTorch's fused layers, which hide their tensors.
    unfused = BaseTorchFunctionMode()
    rng = preserve_rng_state(samples.device)
    attributes = preserve_attributes(model)
    with rng, attributes, unfused, LiveBytes() as live:
        model(samples.clone())
    return max(1, int(_SAFETY_FACTOR * live.peak / len(samples)))


FeasibleSizes = MutableMapping[nn.Module, MutableMapping[Hashable, int]]
"""Numbers of samples known to fit into memory, by model and purpose."""


class SampleLimit:
    """The number of samples in a batch that fit into memory at once, estimated from two.

    `sizes` holds the limits of earlier passes, and `times` is the memory for the computation called
    `purpose`, as a multiple of that for a forward pass. Without `memory` the limit is
    `CPU_BATCH_BYTES` for large batches on the CPU, if there are `sizes`; otherwise, there is none
    until memory runs out.

    Examples
    --------
    >>> model, batch = nn.Linear(4, 1000), torch.zeros(64, 4)
    >>> memory = 20 * bytes_per_sample(model, batch[:2])
    >>> SampleLimit({}, model, "a forward pass", batch, memory).limit
    20
    """

    def __init__(
        self,
        sizes: FeasibleSizes | None,
        model: nn.Module,
        purpose: str,
        batch: Tensor,
        memory: int | None,
        *,
        times: int = 1,
    ) -> None:
        self._sizes = ({} if sizes is None else sizes).setdefault(model, {})
        self._key = (purpose, tuple(batch.shape[1:]), batch.dtype, batch.device, memory)
        self.is_required = memory is not None  # False for the CPU's default, which only saves time
        if self._key in self._sizes or not len(batch):
            return
        # At least two samples, since a network might drop a batch axis of size 1.
        if memory is not None:
            self.remember(max(2, memory // (times * bytes_per_sample(model, batch[:2]))))
        elif sizes is not None and _is_limited_by_default(batch, times):
            # A network that only accepts whole batches isn't limited.
            with contextlib.suppress(Exception):
                size = times * bytes_per_sample(model, batch[:2])
                self.remember(max(2, CPU_BATCH_BYTES // size))

    @property
    def limit(self) -> int | None:
        """Number of samples, or None if unknown."""
        return self._sizes.get(self._key)

    def remember(self, limit: int) -> None:
        """Set the limit for later batches and passes."""
        self._sizes[self._key] = limit


def _is_limited_by_default(batch: Tensor, times: int) -> bool:
    has_few = times * len(batch) <= MIN_LIMITED_SAMPLES and batch.numel() <= MAX_UNLIMITED
    return batch.device.type == "cpu" and batch.numel() >= MIN_LIMITED and not has_few


T = TypeVar("T")


def halve_on_oom(
    attempt: Callable[[int], T], size: int, device: torch.device, *, min_size: int = 1
) -> tuple[T, int]:
    """Call a function with a size that is halved each time memory runs out.

    Return the result and the size that succeeded.

    Examples
    --------
    >>> def attempt(size):
    ...     if size > 10:
    ...         raise MemoryError
    ...     return "done"
    >>> halve_on_oom(attempt, 64, torch.device("cpu"))
    ('done', 8)
    """
    while True:
        try:
            return attempt(size), size
        except (MemoryError, RuntimeError) as error:
            if size <= min_size or not is_out_of_memory(error):
                raise
        # Outside the except clause, since its traceback holds tensors.
        size = max(min_size, -(-size // 2))
        release_freed_memory(device)


def release_freed_memory(device: torch.device) -> None:
    """Return memory that allocators keep to the system: a GPU's, and the C library's on Linux.

    Examples
    --------
    >>> release_freed_memory(torch.device("cpu"))
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    allocator.release_freed_memory()


def microbatch_sizes(samples: int, limit: int) -> list[int]:
    """Split a number of samples into microbatches of at most `limit`, not all of the same size.

    Different sizes distinguish the batch axis from another axis of the same length.

    Examples
    --------
    >>> [microbatch_sizes(8, limit) for limit in (8, 3, 4)]
    [[8], [3, 3, 2], [3, 3, 2]]
    """
    parts = -(-samples // limit)
    if parts == 1 or limit == 1:
        return [samples // parts] * parts
    # If all microbatches would be full, one more lets their sizes differ.
    parts += samples == parts * limit
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    if samples % parts == 0:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work, as timing requires. Do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class CostMeter:
    """Measure the time, the processor time and the peak memory since construction.

    Examples
    --------
    >>> costs = CostMeter(torch.device("cpu")).read()
    >>> sorted(costs)
    ['cpu_seconds', 'peak_memory', 'wall_seconds']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._start = time.perf_counter()
        self._start_cpu = time.process_time()
        with contextlib.suppress(OSError):
            # Writing 5 resets the peak (see proc(5)); other systems report the process's peak.
            Path("/proc/self/clear_refs").write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """Return the elapsed and the process's processor time, in seconds, and the peak memory."""
        synchronize(self._device)
        costs: dict[str, float] = {
            "wall_seconds": round(time.perf_counter() - self._start, 6),
            "cpu_seconds": round(time.process_time() - self._start_cpu, 6),
            "peak_memory": _peak_memory(),
        }
        if self._device.type == "cuda":
            costs["peak_device_memory"] = torch.cuda.max_memory_allocated(self._device)
        return costs


def _peak_memory() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))
