"""Device names and GPU synchronisation."""

from __future__ import annotations

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
