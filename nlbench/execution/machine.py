"""Hardware, software versions and settings that affect the last digits of results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nlbench.errors import RequestError
from nlbench.introspection.precision import float32_precision
from nlbench.registry import find_version, installed, name_and_version
from nlbench.store.record import RecordedMachine


def describe_machine(device: torch.device, precision: str = "native") -> RecordedMachine:
    """Describe this machine as it is recorded, except for a model's dtype."""
    return RecordedMachine(str(device), "", describe_environment(device, precision))


def describe_machine_in_subprocess(device: torch.device, precision: str) -> RecordedMachine:
    """Describe this machine in a subprocess, since a GPU's name requires initialising CUDA."""
    arguments = [json.dumps(sys.path), str(device), precision, str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE_SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["unknown error"])[-1]
        raise RequestError(f"device '{device}' can't be used: {reason}")
    return RecordedMachine(str(device), "", json.loads(done.stdout.splitlines()[-1]))


_DESCRIBE_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
from nlbench.execution.machine import describe_environment
from nlbench.introspection.precision import exact_arithmetic
device, precision = torch.device(sys.argv[2]), sys.argv[3]
torch.set_num_threads(int(sys.argv[4]))
with exact_arithmetic(precision, device.type):
    print(json.dumps(describe_environment(device, precision)))
"""


def describe_environment(device: torch.device, precision: str = "native") -> dict[str, Any]:
    """Return the versions, machine, device and numerical settings for the manifest."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: _loaded_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        **_device_facts(device),
        "precision": precision,
        "tf32": "tf32" in float32_precision(torch.device("cuda")).values(),
        "float32": float32_precision(device),
        "emulation": {name: os.environ[name] for name in EMULATION_VARIABLES if name in os.environ},
        "deterministic": {
            # `exact_arithmetic` sets the first two.
            "cudnn_deterministic": True,
            "cudnn_benchmark": False,
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        },
        "plugins": _plugins(),
        "git": _git_state(),
    }


EMULATION_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_EMULATION_STRATEGY",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
"""Environment variables that make cuBLAS and oneDNN compute in a different dtype."""


def _device_facts(device: torch.device) -> dict[str, Any]:
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
    """Return the version of the NVIDIA driver, if Linux exposes it."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return None


_PACKAGES = ("nlbench", "torch", "torchvision", "numpy", "scipy", "scikit-learn", "pandas")

_loaded_version = cache(find_version)


def _plugins() -> dict[str, str]:
    """Return the versions of distributions that register plugins with nlbench."""
    distributions = (point.dist for point in installed()[0] if point.dist is not None)
    versions = dict(map(name_and_version, distributions))
    versions.pop("nlbench", None)
    return dict(sorted(versions.items()))


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


@cache
def _git_state() -> str | None:
    """Return the commit of nlbench's own checkout, with ``+changes`` if it is dirty.

    Cached, since a process runs the code that it has loaded.
    Return None if git doesn't track this file: nlbench may be installed inside the checkout of
    another project.
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
