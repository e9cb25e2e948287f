"""What decides a number beside the request: versions, machine, device, git state."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937

from nlbench.errors import RequestError
from nlbench.probes.model_state import Shared

__all__ = [
    "Machine",
    "Stream",
    "default_threads",
    "describe_environment",
    "exact_arithmetic",
    "float32_precision",
    "resolve_device",
    "some_threads",
    "untouched",
    "wait_for",
    "without_autocast",
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
device, precision = torch.device(sys.argv[2]), sys.argv[3]
with numerics.some_threads(int(sys.argv[4])), numerics.exact_arithmetic(precision, device.type):
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


@contextmanager
def exact_arithmetic(precision: str = "native", device: str = "cpu") -> Iterator[None]:
    """Turn off, for a while, what rounds or varies: TF32, and cuDNN's choice by the clock.

    TF32's ten bits of mantissa would show in the scores.

    Parameters
    ----------
    precision : str
        See `nlbench.Request`; ``tf32``, ``bfloat16`` and ``float16`` are asked for, never
        assumed.
    device : str
        Kind of the device that autocast is for.
    """
    halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    cast: AbstractContextManager[object] = nullcontext()
    if precision in halves:
        cast = torch.autocast(device, dtype=halves[precision])
    with _SETTINGS[precision == "tf32"](), cast:
        yield


@contextmanager
def _settings(tf32: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        with _float32(tf32) if _HAS_PRECISIONS else _float32_before_2_9(tf32):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


_SETTINGS = {tf32: Shared(partial(_settings, tf32)) for tf32 in (False, True)}

_HAS_PRECISIONS = hasattr(torch._C, "_set_fp32_precision_setter")
_OPERATIONS = ("matmul", "conv", "rnn")
_BACKENDS = ("cuda", "mkldnn")


@contextmanager
def _float32_before_2_9(tf32: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]


@contextmanager
def _float32(tf32: bool) -> Iterator[None]:
    """Have products and convolutions of float32 done in it, or on a GPU in TF32, and nowhere less.

    PyTorch has two sets of settings for it: one for each operation of each backend, which
    inherits what the backend has and that what all have; and the older ones, which it refuses to
    read where they contradict the newer. Both are set. What inherits goes on to do so: told what
    it has inherited, it would not follow when the user sets something else later.
    """
    made = _precisions_made()
    # Nobody can set convolutions back to what PyTorch begins with; the older setting would.
    is_new = _UNTOUCHED in (made["cuda", "conv"], made["cuda", "rnn"])
    matmul, cudnn = _older_settings(made, is_new)
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if not is_new:
            torch.backends.cudnn.allow_tf32 = tf32
        _set_precision("generic", "all", "ieee")
        for (backend, operation), own in made.items():
            if backend != "generic" and own != _UNTOUCHED:
                short = tf32 and backend == "cuda"
                _set_precision(backend, operation, "tf32" if short else "ieee")
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        if not is_new:
            torch.backends.cudnn.allow_tf32 = cudnn
        _set_precisions(made)


_UNTOUCHED = "as PyTorch has it"
"""An operation's setting before anybody has made one: TF32, unless its backend has another."""


# By PyTorch's own functions: what `torch.backends.mkldnn.fp32_precision` is set to is set for all.
def _precision(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set_precision(backend: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, precision)


def _set_precisions(made: Mapping[tuple[str, str], str]) -> None:
    for (backend, operation), precision in made.items():
        if precision != _UNTOUCHED:
            _set_precision(backend, operation, precision)


def _precisions_made() -> dict[tuple[str, str], str]:
    """What has been set for each operation of each backend, ``none`` where it inherits."""
    made = {("generic", "all"): _precision("generic", "all")}
    try:
        # Read while there is nothing to inherit.
        _set_precision("generic", "all", "none")
        for backend in _BACKENDS:
            made[backend, "all"] = _precision(backend, "all")
            _set_precision(backend, "all", "none")
            made |= {(backend, op): _precision(backend, op) for op in _OPERATIONS}
        _set_precision("generic", "all", "ieee")
        for key, own in made.items():
            if own == "tf32" and key[1] in _OPERATIONS and _precision(*key) == "ieee":
                made[key] = _UNTOUCHED
    finally:
        _set_precisions(made)
    return made


def _older_settings(made: Mapping[tuple[str, str], str], is_new: bool) -> tuple[str, bool]:
    """What PyTorch's older settings say; read where the newer can't contradict them."""
    try:
        _set_precision("cuda", "matmul", "ieee")
        _set_precision("mkldnn", "matmul", "ieee")
        matmul = torch.get_float32_matmul_precision()
        if is_new:
            return matmul, True
        _set_precision("cuda", "conv", "tf32")
        _set_precision("cuda", "rnn", "tf32")
        try:
            return matmul, bool(torch.backends.cudnn.allow_tf32)
        except RuntimeError:
            return matmul, False
    finally:
        _set_precisions(made)


def float32_precision(device: torch.device) -> dict[str, str]:
    """What float32 is computed in on a device just now, by operation.

    Examples
    --------
    >>> with exact_arithmetic():
    ...     sorted(set(float32_precision(torch.device("cpu")).values()) - {"none"})
    ['ieee']
    """
    backend = "cuda" if device.type == "cuda" else "mkldnn"
    if _HAS_PRECISIONS:
        return {operation: _precision(backend, operation) for operation in _OPERATIONS}
    cudnn = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    matmul = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    is_cuda = device.type == "cuda"
    return {op: matmul if op == "matmul" else cudnn if is_cuda else "ieee" for op in _OPERATIONS}


@contextmanager
def without_autocast() -> Iterator[None]:
    """Let a measure compute in full precision, whatever the model ran in."""
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    if not kinds:
        yield
        return
    with torch.autocast(kinds[0], enabled=False):
        yield


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


def default_threads(kind: str = "cpu") -> int:
    """How many threads PyTorch has for a cell, whatever the number of workers.

    Beside a network on a GPU, which has a worker to itself, the measures have its share of the
    cores.
    """
    if kind == "cuda":
        return max(1, torch.get_num_threads() // max(1, torch.cuda.device_count()))
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
        "packages": {name: _version(name) for name in _PACKAGES},
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
    points = entry_points()
    owners = {
        point.dist.name: point.dist.version
        for group in points.groups
        if group.startswith("nlbench.")
        for point in points.select(group=group)
        if point.dist is not None
    }
    return {name: owners[name] for name in sorted(owners) if name != "nlbench"}


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
        A CUDA device whose generator is set beside the CPU's.

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
        self._torch.append(torch.default_generator)
        if device is not None and device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._torch.append(torch.cuda.default_generators[index])
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
