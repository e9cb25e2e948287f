"""What a pass costs: wall time and peak memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import torch

__all__ = ["Meter"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Measures from its making on.

    Parameters
    ----------
    device : torch.device

    Examples
    --------
    >>> costs = Meter(torch.device("cpu")).read()
    >>> sorted(costs)
    ['peak_memory', 'wall_seconds']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = time.perf_counter()
        with contextlib.suppress(OSError):
            # 5 resets the peak (see proc(5)); elsewhere the peak is that of the process so far.
            _RESET.write_text("5")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """Seconds since the making, and the peaks since then, in bytes."""
        costs: dict[str, float] = {
            "wall_seconds": round(time.perf_counter() - self._begin, 6),
            "peak_memory": _peak(),
        }
        if self._device.type == "cuda":
            costs["peak_device_memory"] = torch.cuda.max_memory_allocated(self._device)
        return costs


def _peak() -> int:
    try:
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))
