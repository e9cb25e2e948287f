"""What decides a number beside the request: machine, device, versions, threads, random streams."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937

from nlbench.errors import RequestError
from nlbench.introspection.background import torch_generators
from nlbench.introspection.precision import float32_precision
from nlbench.registry import about, installed, version_of

__all__ = [
    "Machine",
    "Stream",
    "default_threads",
    "describe_environment",
    "resolve_device",
    "some_threads",
    "untouched",
    "wait_for",
]


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
    def at(cls, device: torch.device, precision: str = "native") -> Machine:
        """Describe this machine, with one of its devices and a run's precision."""
        return cls(device, describe_environment(device, precision))

    @classmethod
    def seen_from_apart(cls, device: torch.device, precision: str = "native") -> Machine:
        """Describe it in a process of its own: asked for its name, a GPU is taken into use.

        Raises
        ------
        nlbench.RequestError
            If the device can't be used.
        """
        order = [json.dumps(sys.path), str(device), precision, str(torch.get_num_threads())]
        done = subprocess.run(
            [sys.executable, "-c", _DESCRIBE, *order], capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason is known"])[-1]
            raise RequestError(f"device '{device}' can't be used: {why}")
        return cls(device, json.loads(done.stdout.splitlines()[-1]))


_DESCRIBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
from nlbench.execution import numerics
from nlbench.introspection.precision import exact_arithmetic
device, precision = torch.device(sys.argv[2]), sys.argv[3]
with numerics.some_threads(int(sys.argv[4])), exact_arithmetic(precision, device.type):
    print(json.dumps(numerics.describe_environment(device, precision)))
"""


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


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given: before that no clock tells what that takes.

    Examples
    --------
    >>> wait_for(torch.device("cpu"))
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


MOST_THREADS = 4
"""Beyond that, layers of ordinary size gain little, and other cells could have the cores."""


def default_threads() -> int:
    """How many threads PyTorch has for a cell, whatever the number of workers."""
    return min(MOST_THREADS, torch.get_num_threads())


@contextmanager
def some_threads(number: int) -> Iterator[None]:
    """Give PyTorch that many threads for a while: the last bits of a sum may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_environment(device: torch.device, precision: str = "native") -> dict[str, Any]:
    """Versions, machine and device, for the manifest."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        **_device_facts(device),
        "precision": precision,
        # As they are now: a measurement is described where it is made.
        "tf32": "tf32" in float32_precision(torch.device("cuda")).values(),
        "float32": float32_precision(device),
        "emulation": {name: os.environ[name] for name in EMULATION if name in os.environ},
        "deterministic": {
            # What `exact_arithmetic` sets.
            "cudnn_deterministic": True,
            "cudnn_benchmark": False,
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        },
        "plugins": _plugins(),
        "git": _git_state(),
    }


EMULATION = (
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_EMULATION_STRATEGY",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
"""Variables by which the libraries below PyTorch are told to compute in other types."""


def _device_facts(device: torch.device) -> dict[str, Any]:
    """What a device is; of a GPU its name, and what else its numbers may depend on."""
    if device.type != "cuda":
        return {"device_name": "CPU" if device.type == "cpu" else device.type}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device_name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "driver": _driver(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def _driver() -> str | None:
    """Version of NVIDIA's driver, where the system tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return None


_PACKAGES = ("nlbench", "torch", "torchvision", "numpy", "scipy", "scikit-learn", "pandas")


def _plugins() -> dict[str, str]:
    """Distributions that register anything with nlbench, with their versions."""
    owners = dict(about(point.dist) for point in installed()[0] if point.dist is not None)
    owners.pop("nlbench", None)
    return dict(sorted(owners.items()))


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


class Stream:
    """The global random generators, as one user of theirs finds them.

    While the stream is drawn from, Python's, NumPy's and PyTorch's global generators (the
    device's too) are in a state that the stream's name decides; the next time they go on from
    where they were left. In between they are what they were before.

    Parameters
    ----------
    name : str
        What the numbers are for; empty: the global generators are left as they are.
    device : torch.device, optional
        A GPU whose generator is set beside the CPU's.

    Examples
    --------
    >>> first, again = Stream("cell"), Stream("cell")
    >>> with first.drawn():
    ...     a, b = torch.rand(1), torch.rand(1)
    >>> with again.drawn():
    ...     c = torch.rand(1)
    >>> with again.drawn():
    ...     d = torch.rand(1)
    >>> bool(a == c), bool(b == d)
    (True, True)
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._torch: list[torch.Generator] = []
        if not name:
            return
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        self._torch = torch_generators(device or torch.device("cpu"))
        self._states: tuple[Any, ...] = (
            [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._torch],
            MT19937(seed),
            random.Random(seed).getstate(),
        )

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let the global generators give this stream for a while, and set them back after."""
        if not self._torch:
            yield
            return
        before = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(before)

    def _exchange(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        before = (
            [generator.get_state() for generator in self._torch],
            # A pointer changes hands: copying NumPy's state at each update of each measure
            # would take longer than many a measure.
            np.random.get_bit_generator(),  # type: ignore[attr-defined]
            random.getstate(),
        )
        for generator, state in zip(self._torch, states[0], strict=True):
            generator.set_state(state)
        np.random.set_bit_generator(states[1])  # type: ignore[attr-defined]
        random.setstate(states[2])
        return before


@contextmanager
def untouched() -> Iterator[None]:
    """Set NumPy's global generator back afterwards, with what it keeps beside its state.

    It makes normal deviates in pairs; exchanging the generator loses the second one.
    """
    before = np.random.get_state()  # noqa: NPY002 (the global generator is what is kept)
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
