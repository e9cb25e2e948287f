"""Process-wide settings and functions that one model can change for the next."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks
from torch.utils import _device as torch_device
from torch.utils import _python_dispatch as dispatch

from .exclusive import one_measurement
from .replaced_attributes import AttributeSnapshot


@contextmanager
def restored_process_state() -> Iterator[Changes]:
    """Restore the settings and functions of the process on exit, and list those that changed.

    The outermost of nested contexts restores it. Contexts in other threads wait.

    Not covered: random generators (see `nlbench.introspection.random_state`), and functions and
    variables of other libraries.

    Examples
    --------
    >>> with restored_process_state() as changes:
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype(), changes
    (torch.float32, ['torch.get_default_dtype'])
    """
    changes = Changes()
    with one_measurement():
        _SHARED.enter()
        try:
            with restored_thread_state(changes):
                yield changes
        finally:
            _SHARED.leave(changes)
            changes.lasting = _SHARED.lasting()


@contextmanager
def restored_thread_state(changes: Changes) -> Iterator[None]:
    """Restore on exit what belongs to this thread, such as modes, and add what changed."""
    values = _read(_THREAD_SETTINGS)
    modes = _read(_MODES)
    try:
        yield
    finally:
        # Modes first, since a mode may change what the settings do.
        changes.add_foreign(_restore(_MODES, modes))
        changes.add(_restore(_THREAD_SETTINGS, values))


def foreign_changes() -> int:
    """Return how many changes of this process were not only of settings.

    Settings can be restored. After any other change, such as a patched function, numbers measured
    later in this process could differ from those of a new process, even if it was undone.
    """
    return _SHARED.foreign_changes


class Changes(list[str]):
    """The names of what changed in a context, complete when it has been left.

    Attributes
    ----------
    lasting : list of str
        What this context or an earlier one of the process has changed and could not be restored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lasting: list[str] = []

    def add(self, names: Iterable[tuple[str, bool]]) -> None:
        """Add names, each with False if it could not be restored."""
        for name, is_restored in names:
            if name not in self:
                self.append(name)
            if not is_restored:
                _SHARED.note(name)
                _SHARED.foreign_changes += 1

    def add_foreign(self, names: Iterable[tuple[str, bool]]) -> None:
        """Add names of what is no setting.

        See `foreign_changes`.
        """
        for name, is_restored in names:
            _SHARED.foreign_changes += 1
            self.add([(name, is_restored)])

    def restored(self, doer: str) -> str:
        """Return a remark on what was restored, such as "the pass changed torch.relu"."""
        names = [name for name in self if name not in self.lasting]
        return f"{doer} changed {_listed(names)}; since restored" if names else ""

    def left(self) -> str:
        """Return a remark on what this process can't restore."""
        start = "changed in this process and can't be restored: "
        return start + _listed(self.lasting) if self.lasting else ""


def _listed(names: list[str], most: int = 10) -> str:
    rest = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *rest])


class _SharedState:
    """State shared by all threads, saved by the outermost of nested contexts."""

    def __init__(self) -> None:
        self._depth = 0
        self._snapshot: _Snapshot | None = None
        self._attributes: AttributeSnapshot | None = None
        self._lasting: dict[str, None] = {}
        self._kernels: set[str] = set()
        self.foreign_changes = 0

    def enter(self) -> None:
        if not self._depth:
            if self._attributes is None:
                self._attributes = AttributeSnapshot()
            else:
                self._attributes.update()
            self._snapshot = _Snapshot(self._attributes)
        self._depth += 1

    def leave(self, changes: Changes) -> None:
        self._depth -= 1
        if self._depth or self._snapshot is None:
            return
        snapshot = self._snapshot
        self._snapshot = None
        # Settings first, since the default type sets `torch.Storage`.
        changes.add(snapshot.restore_settings())
        changes.add_foreign(snapshot.restore_functions())
        kernels = _kernels() - snapshot.kernels
        self._kernels |= kernels
        changes.add_foreign((_kernel_name(kernel), False) for kernel in sorted(kernels))

    def note(self, name: str) -> None:
        """Note what could not be restored."""
        self._lasting[name] = None

    def lasting(self) -> list[str]:
        """Return the names of what could not be restored."""
        # A kernel goes with the `torch.library.Library` that holds it.
        gone = {_kernel_name(kernel) for kernel in self._kernels - _kernels()}
        return [name for name in self._lasting if name not in gone]


def _kernels() -> set[str]:
    """Return PyTorch's own kernels that were replaced by `torch.library`.

    Imports of PyTorch add some for other dispatch keys.
    """
    keys = ("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    names: set[str] = getattr(torch.library, "_impls", set())
    return {name for name in names.copy() if name.startswith("aten/") and name.endswith(keys)}


def _kernel_name(kernel: str) -> str:
    _, operator, key = kernel.split("/")
    return f"torch.ops.aten.{operator} ({key})"


class _Snapshot:
    def __init__(self, attributes: AttributeSnapshot) -> None:
        self._settings = _read(_SETTINGS)
        self._hooks = [dict(hooks) for hooks in _GLOBAL_HOOKS.values()]
        self._environment = dict(os.environ)
        self._folder = _working_directory()
        lists = ((name, getattr(sys, name)) for name in _IMPORT_LISTS)
        self._lists = [(name, entries, entries.copy()) for name, entries in lists]
        self._attributes = attributes
        self.kernels = _kernels()

    def restore_settings(self) -> Iterator[tuple[str, bool]]:
        """Restore settings.

        Yield the names of what changed, with False if it still differs.
        """
        yield from _restore(_SETTINGS, self._settings)
        yield from ((name, True) for name in self._restore_environment())
        if self._folder and _working_directory() != self._folder:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)
            yield "the working directory", _working_directory() == self._folder

    def restore_functions(self) -> Iterator[tuple[str, bool]]:
        """Restore functions, hooks and import lists like `restore_settings`."""
        yield from self._attributes.restore()
        yield from ((name, True) for name in self._restore_hooks())
        yield from ((name, True) for name in self._restore_lists())

    def _restore_lists(self) -> Iterator[str]:
        for name, entries, before in self._lists:
            now = list(getattr(sys, name, None) or ())
            if any(entry not in now for entry in before):
                # What was added may be needed by an import to come.
                entries[:] = before + [entry for entry in now if entry not in before]
                setattr(sys, name, entries)
                yield f"sys.{name}"

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


_IMPORT_LISTS = ("path", "meta_path", "path_hooks")

_IMPORT_VARIABLES = ("KMP_", "TORCHINDUCTOR_")
"""Prefixes of variables that scikit-learn and PyTorch set when they are imported."""


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


def _restore(settings: list[_Setting], values: list[Any]) -> Iterator[tuple[str, bool]]:
    for setting, before in zip(settings, values, strict=True):
        if setting.read() != before:
            with contextlib.suppress(Exception):  # A model's mode may raise any.
                setting.write(before)
            yield setting.name, setting.read() == before


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


def _function_modes() -> list[Any]:
    """Return the active modes but that of `torch.set_default_device`."""
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return [mode for mode in stack if mode is not default]


def _set_function_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    for mode in ([] if default is None else [default]) + modes:
        torch._C._push_on_torch_function_stack(mode)
    # What `with torch.device(...)` sets besides the mode.
    devices = (getattr(mode, "device", None) for mode in (default, *modes))
    named = [device for device in devices if isinstance(device, torch.device)]
    torch_device.CURRENT_DEVICE = named[-1] if named else None


def _dispatch_modes() -> list[Any]:
    return dispatch._get_current_dispatch_mode_stack()


def _set_dispatch_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
    # Entering a mode sets flags besides.
    flags = vars(dispatch)
    not_ignored = any(not mode.ignore_compile_internals() for mode in modes)
    flags["_is_in_torch_dispatch_mode"] = bool(modes)
    flags["_is_in_non_infra_torch_dispatch_mode"] = any(not m.is_infra_mode() for m in modes)
    flags["_is_in_any_mode_without_ignore_compile_internals"] = not_ignored
    flags["set_is_in_mode_without_ignore_compile_internals"](not_ignored)


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _set_saved_tensors_hooks(hooks: Any) -> None:
    while _saved_tensors_hooks() not in (hooks, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if _saved_tensors_hooks() != hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _dual_level() -> int:
    return forward_ad._current_level


def _leave_dual_levels(level: int) -> None:
    while forward_ad._current_level > level:
        forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


def _set_inference_mode(value: bool) -> None:
    context = torch.inference_mode(value)
    context.__enter__()
    _KEPT.append(context)


_KEPT: list[object] = []
"""Contexts that would be left if they were deleted."""


def _transforms() -> Iterator[_Setting]:
    """Yield what this version of PyTorch can tell of `torch.func` and of disabled overrides."""
    accessors = {
        "the active transforms of torch.func": (
            torch._C._functorch,
            "get_dynamic_layer_stack_depth",
            "pop_dynamic_layer_stack_and_undo_to_depth",
        ),
        "torch._C.DisableTorchFunction": (
            torch._C,
            "_get_torch_function_state",
            "_set_torch_function_state",
        ),
    }
    for name, (owner, read, write) in accessors.items():
        if hasattr(owner, read) and hasattr(owner, write):
            yield _Setting(name, getattr(owner, read), getattr(owner, write))


_MODES = [
    _Setting("the active TorchFunctionModes", _function_modes, _set_function_modes),
    _Setting("the active TorchDispatchModes", _dispatch_modes, _set_dispatch_modes),
    _Setting("the active saved_tensors_hooks", _saved_tensors_hooks, _set_saved_tensors_hooks),
    _Setting("the level of torch.autograd.forward_ad", _dual_level, _leave_dual_levels),
    *_transforms(),
]

_THREAD_SETTINGS = [
    _Setting(
        "torch.is_inference_mode_enabled", torch.is_inference_mode_enabled, _set_inference_mode
    ),
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
