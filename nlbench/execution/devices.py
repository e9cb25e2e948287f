"""Device names, GPU synchronisation, and the time and memory of a block of code."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import torch

from nlbench.errors import RequestError


def resolve_device(name: str) -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` to an available device.

    ``auto`` is the first CUDA device or, if there is none, the CPU. It is never an Apple GPU, which
    lacks double precision.

    Raises
    ------
    nlbench.RequestError
        If the name is unknown, or the device is not available on this machine.

    Examples
    --------
    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    is_index = not number or (number.isascii() and number.isdecimal())
    if kind not in ("cpu", "cuda", "mps") or not is_index:
        raise RequestError(f"unknown device '{name}'; expected auto, cpu, cuda, cuda:N or mps")
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }[kind]
    if int(number or 0) >= count:
        available = f"{count} of them" if count else "none"
        raise RequestError(
            f"device '{name}' is not available: this machine has {available}; try --device auto"
        )
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work, as timing requires; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
            _CLEAR_REFS.write_text("5")
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
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))
