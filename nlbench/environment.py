"""What decides a number beside the request: versions, machine, device, git state."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nlbench.errors import RequestError

__all__ = ["Machine", "describe_environment", "exact_arithmetic", "resolve_device"]


@dataclass(frozen=True)
class Machine:
    """Where cells are measured.

    Parameters
    ----------
    device : torch.device
    environment : mapping
        See `describe_environment`.
    """

    device: torch.device
    environment: Mapping[str, Any]

    @classmethod
    def at(cls, device: torch.device) -> Machine:
        """Describe this machine, with one of its devices."""
        return cls(device, describe_environment(device))


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` into a device that is there.

    ``auto`` is the first CUDA device, else the CPU. (Not Apple's GPU, which has no double
    precision.)

    Raises
    ------
    nlbench.RequestError
        If the name is not a device's, or the device is absent.

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
        have = f"{count} of them" if count else "none"
        raise RequestError(f"device '{name}' is absent: this machine has {have}; try --device auto")
    return torch.device(name)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Turn off TF32 for a while: its ten bits of mantissa would show in the scores."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine and device, for the manifest."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "tf32": False,
        "git": _git_state(),
    }


_PACKAGES = ("nlbench", "torch", "torchvision", "numpy", "scipy", "scikit-learn", "pandas")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git_state() -> str | None:
    """Commit of nlbench's own checkout, with ``+changes`` where it has any; else nothing.

    Installed inside somebody's project, nlbench lies in that project's checkout without being
    part of it.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty=+changes", "--abbrev=12")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
