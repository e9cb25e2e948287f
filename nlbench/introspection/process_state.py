"""Process-wide settings and functions that one model can change for the next."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_hooks


@contextmanager
def restored_process_state() -> Iterator[list[str]]:
    """Restore the settings and functions of the process on exit, and list those that changed.

    If contexts overlap in several threads, the last one to exit restores the shared state.

    Not covered: random generators (see `nlbench.introspection.random_state`), functions and
    variables of other libraries, and kernels registered with ``torch.library``.

    Examples
    --------
    >>> with restored_process_state() as changes:
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype(), changes
    (torch.float32, ['torch.get_default_dtype'])
    """
    changes: list[str] = []
    thread_values = _read(_THREAD_SETTINGS)
    _SHARED.enter()
    try:
        yield changes
    finally:
        changes += _restore(_THREAD_SETTINGS, thread_values)
        changes += _SHARED.leave()


class _SharedState:
    """State shared by all threads, saved by the first of several overlapping contexts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._snapshot: _Snapshot | None = None

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._snapshot = _Snapshot()
            self._users += 1

    def leave(self) -> list[str]:
        with self._lock:
            self._users -= 1
            if self._users or self._snapshot is None:
                return []
            snapshot, self._snapshot = self._snapshot, None
            return list(snapshot.restore())


class _Snapshot:
    def __init__(self) -> None:
        self._settings = _read(_SETTINGS)
        self._hooks = [dict(hooks) for hooks in _GLOBAL_HOOKS.values()]
        self._environment = dict(os.environ)
        self._folder = _working_directory()
        self._functions = [dict(vars(owner)) for owner in _OWNERS.values()]
        self._forwards = _forwards()

    def restore(self) -> Iterator[str]:
        """Restore everything, and yield the names of what changed."""
        yield from _restore(_SETTINGS, self._settings)
        yield from self._restore_hooks()
        yield from self._restore_environment()
        if self._folder and _working_directory() != self._folder:
            yield "the working directory"
            with contextlib.suppress(OSError):
                os.chdir(self._folder)
        for (name, owner), functions in zip(_OWNERS.items(), self._functions, strict=True):
            if vars(owner) != functions:  # Fast, since identity is compared first.
                yield from _restore_functions(name, owner, functions)
        yield from self._restore_forwards()

    def _restore_hooks(self) -> Iterator[str]:
        for (name, hooks), before in zip(_GLOBAL_HOOKS.items(), self._hooks, strict=True):
            if hooks != before:
                hooks.clear()
                hooks.update(before)
                yield f"torch.nn.modules.module.{name}"

    def _restore_environment(self) -> Iterator[str]:
        if os.environ == self._environment:
            return
        for name in sorted({*os.environ, *self._environment}):
            before = self._environment.get(name)
            if os.environ.get(name) == before or name.startswith(_IMPORT_VARIABLES):
                continue
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
            yield f"the environment variable {name}"

    def _restore_forwards(self) -> Iterator[str]:
        if _forwards() == self._forwards:
            return
        for (name, kind), before in zip(_CLASSES.items(), self._forwards, strict=True):
            if vars(kind).get("forward") is not before:
                if before is None:
                    delattr(kind, "forward")
                else:
                    setattr(kind, "forward", before)  # noqa: B010 (mypy refuses an assignment)
                yield f"{name}.forward"


_IMPORT_VARIABLES = ("KMP_", "TORCHINDUCTOR_")
"""Prefixes of variables that scikit-learn and PyTorch set when they are imported."""


def _restore_functions(name: str, owner: Any, functions: Mapping[str, object]) -> Iterator[str]:
    """Restore functions of a module or class, and yield the names of those that changed."""
    current = dict(vars(owner))
    for attribute, before in functions.items():
        now = current.get(attribute)
        if now is not before and callable(before) and not _is_wrapped_by_torch(now, before):
            setattr(owner, attribute, before)
            yield f"{name}.{attribute}"
    if isinstance(owner, type):
        for attribute in current.keys() - functions.keys():
            # Only remove functions that override those of a base class.
            if callable(current[attribute]) and hasattr(super(owner, owner), attribute):
                delattr(owner, attribute)
                yield f"{name}.{attribute}"


def _is_wrapped_by_torch(now: object, before: object) -> bool:
    """Return True if PyTorch wrapped a function, as it does `torch.manual_seed` for compilers."""
    code = getattr(now, "__code__", None)
    is_from_torch = code is not None and code.co_filename.startswith(_TORCH_FOLDER)
    return is_from_torch and getattr(now, "__wrapped__", None) is before


_TORCH_FOLDER = os.path.dirname(torch.__file__)  # noqa: PTH120 - compared with a file name


_OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": nn.Module,
}

_CLASSES: dict[str, type] = {
    f"torch.nn.{name}": kind
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module)
}


def _forwards() -> list[object]:
    return [vars(kind).get("forward") for kind in _CLASSES.values()]


_GLOBAL_HOOKS: dict[str, Any] = {
    name: hooks
    for name, hooks in vars(module_hooks).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
}


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:
        return None


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _read(settings: list[_Setting]) -> list[Any]:
    return [setting.read() for setting in settings]


def _restore(settings: list[_Setting], values: list[Any]) -> Iterator[str]:
    for setting, before in zip(settings, values, strict=True):
        if setting.read() != before:
            setting.write(before)
            yield setting.name


def _default_device() -> torch.device | None:
    """Return the device set by `torch.set_default_device`; None if it was never called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_TINY = np.float64(5e-324)


def _autocast(kind: str) -> list[_Setting]:
    return [
        _Setting(
            f"torch.is_autocast_enabled('{kind}')",
            lambda: torch.is_autocast_enabled(kind),
            lambda value: torch.set_autocast_enabled(kind, value),
        ),
        _Setting(
            f"torch.get_autocast_dtype('{kind}')",
            lambda: torch.get_autocast_dtype(kind),
            lambda value: torch.set_autocast_dtype(kind, value),
        ),
    ]


_THREAD_SETTINGS = [
    _Setting("torch.get_default_device", _default_device, torch.set_default_device),
    _Setting("torch.is_grad_enabled", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting("torch.get_num_threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch.set_flush_denormal",
        lambda: bool(_TINY * 1.0 == 0.0),
        torch.set_flush_denormal,
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting("numpy.geterr", np.geterr, lambda value: np.seterr(**value)),
]


def _flags() -> Iterator[_Setting]:
    """Yield the backend flags of this version of PyTorch."""
    names = {
        "mkldnn.enabled": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        "mkldnn.deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        "nnpack.enabled": ("_get_nnpack_enabled", "_set_nnpack_enabled"),
        "cudnn.enabled": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
        "cudnn.deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        "cudnn.benchmark": ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        "quantized.engine": ("_get_qengine", "_set_qengine"),
        "cuda.preferred_linalg_library": (
            "_get_linalg_preferred_backend",
            "_set_linalg_preferred_backend",
        ),
        "cuda.preferred_blas_library": (
            "_get_blas_preferred_backend",
            "_set_blas_preferred_backend",
        ),
        "cuda.matmul.allow_fp16_accumulation": (
            "_get_cublas_allow_fp16_accumulation",
            "_set_cublas_allow_fp16_accumulation",
        ),
        "cuda.flash_sdp_enabled": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        "cuda.mem_efficient_sdp_enabled": (
            "_get_mem_efficient_sdp_enabled",
            "_set_sdp_use_mem_efficient",
        ),
        "cuda.math_sdp_enabled": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
        "cuda.cudnn_sdp_enabled": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    }
    for name, (read, write) in names.items():
        if hasattr(torch._C, read) and hasattr(torch._C, write):
            accessors = getattr(torch._C, read), getattr(torch._C, write)
            yield _Setting(f"torch.backends.{name}", *accessors)
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        yield _precision("generic", "all")
        for backend, operation in product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")):
            yield _precision(backend, operation)


def _precision(backend: str, operation: str) -> _Setting:
    return _Setting(
        f"fp32_precision of {operation} on {backend}",
        lambda: torch._C._get_fp32_precision_getter(backend, operation),
        lambda value: torch._C._set_fp32_precision_setter(backend, operation, value),
    )


def _deterministic_mode() -> tuple[bool, bool]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


_SETTINGS = [
    _Setting("torch.get_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting(
        "torch.use_deterministic_algorithms",
        _deterministic_mode,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _Setting("torch.is_anomaly_enabled", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    _Setting(
        "torch.backends.mha.get_fastpath_enabled",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    *_flags(),
]

_SHARED = _SharedState()
