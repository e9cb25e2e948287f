"""Process-wide settings and functions that one model can change for the next."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from operator import is_not
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks
from torch.utils import _device as torch_device
from torch.utils import _python_dispatch as dispatch
from torch.utils.hooks import RemovableHandle

from nlbench.errors import enumerate_names

from .threads import one_measurement


class AttributeSnapshot:
    """The attributes of the modules and classes of PyTorch and NumPy, at one time.

    Only replaced and deleted attributes are changes. Additions aren't, since imports make them;
    but a function added to a class is one if it hides a function of a base class. Modules imported
    after the snapshot are not compared.

    Examples
    --------
    >>> before = AttributeSnapshot()
    >>> torch.relu, relu = torch.tanh, torch.relu
    >>> list(before.restore()), torch.relu is relu
    ([('torch.relu', True)], True)
    """

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}
        self._views: list[ValuesView[Any]] = []
        self._values: list[Any] = []
        self.update()

    def update(self) -> None:
        """Take the snapshot again. Cheap, since only what changed is copied."""
        if self.covers_imports() and self._is_unchanged():
            return
        self._modules = _modules()
        known = self._attributes
        self._attributes = {
            owner: before
            if _is_same(before := known.get(owner, {}), now := vars(owner))
            else dict(now)
            for owner in (*self._modules.values(), *_classes(self._modules))
        }
        # Each hook that is registered changes a counter of handles.
        compared = self._attributes.keys() - {RemovableHandle}
        self._views = [vars(owner).values() for owner in compared]
        self._values = list(chain.from_iterable(self._views))

    def covers_imports(self) -> bool:
        """Return True if no module was imported since the snapshot."""
        return _modules() == self._modules

    def _is_unchanged(self) -> bool:
        """Compare all values at once, which is three times as fast as owner by owner."""
        now = chain.from_iterable(self._views)
        is_as_long = sum(map(len, self._views)) == len(self._values)
        return is_as_long and not any(map(is_not, now, self._values))

    def restore(self) -> Iterator[tuple[str, bool]]:
        """Restore what was replaced, and yield each name with False if that was not possible."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module and not name.startswith(_NAMESPACES):
                sys.modules[name] = module
                yield f"sys.modules['{name}']", True
        changed = () if self._is_unchanged() else self._attributes.items()
        for owner, before in changed:
            if not _is_same(before, vars(owner)):
                yield from self._restore_owner(owner, before)

    def _restore_owner(self, owner: Any, before: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        now = vars(owner).copy()
        changed = []
        for attribute, value in before.items():
            if now.get(attribute, _MISSING) is value or not _is_fixed(owner, attribute, value):
                continue
            if not _is_wrapped_by_torch(now.get(attribute), value):
                changed.append(attribute)
        if isinstance(owner, type) or owner is torch._VF:
            hidden = super(owner, owner) if isinstance(owner, type) else owner.vf
            for attribute in now.keys() - before.keys():
                value = now[attribute]
                base = getattr(hidden, attribute, None)
                is_override = callable(value) or isinstance(value, property)
                if is_override and base is not None and not _is_wrapped_by_torch(value, base):
                    changed.append(attribute)
        for attribute in changed:
            try:
                if attribute in before:
                    setattr(owner, attribute, before[attribute])
                else:
                    delattr(owner, attribute)
            except (AttributeError, TypeError):
                pass
            after = vars(owner).get(attribute, _MISSING)
            is_restored = after is before.get(attribute, _MISSING)
            yield f"{self._name(owner)}.{attribute}", is_restored

    def _name(self, owner: Any) -> str:
        """Return the shortest name by which a module or class can be reached."""
        names = [name for name, module in self._modules.items() if module is owner] or [
            f"{name}.{attribute}"
            for name, module in self._modules.items()
            for attribute, value in self._attributes[module].items()
            if value is owner
        ]
        return min(names, key=len)


_MISSING = object()


def _is_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return True if two mappings hold the same objects."""
    return len(before) == len(now) and not any(map(is_not, now.values(), before.values()))


_NAMESPACES = "torch.ops."
"""Prefix of the namespaces of operators, which aren't in `sys.modules`."""

_ROOTS = frozenset({"torch", "torchvision", "numpy", "math", "random"})

_PRIVATE = frozenset({"torch._C", "torch._C._nn", "torch._VF", "torch._tensor", "torch._refs"})
"""Modules that public functions call.

Other private ones are PyTorch's own workings.
"""


def _modules() -> dict[str, ModuleType]:
    """Return the imported modules that are compared, and the namespaces of operators."""
    modules = {
        name: module
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in _ROOTS
        and ("._" not in name or name in _PRIVATE)
        and isinstance(module, ModuleType)
    }
    namespaces = {
        f"{_NAMESPACES}{name}": namespace
        for name, namespace in vars(torch.ops).copy().items()
        if isinstance(namespace, ModuleType)
    }
    return namespaces | modules


_CLASSES: dict[str, list[type]] = {}
"""The classes of each module, by the module's name."""


def _classes(modules: Mapping[str, ModuleType]) -> dict[type, None]:
    for name in modules.keys() - _CLASSES.keys():
        _CLASSES[name] = list(filter(_is_compared_class, vars(modules[name]).copy().values()))
    return dict.fromkeys(kind for name in modules for kind in _CLASSES[name])


def _is_compared_class(value: object) -> bool:
    # Not `isinstance`, for which some deprecated objects warn.
    kind = type(value)
    # Type of classes such as `torch.FloatTensor`, of which no tensor is an instance.
    if not issubclass(kind, type) or kind is type(torch.FloatTensor):
        return False
    return str(value.__module__).partition(".")[0] in _ROOTS


def _is_fixed(owner: object, attribute: str, value: object) -> bool:
    """Return True for functions, classes, modules and constants, which are never replaced."""
    if callable(value) or isinstance(value, ModuleType):
        return True
    if isinstance(owner, type):  # Classes count their instances, for example.
        return isinstance(value, property)
    return not attribute.startswith("_") and isinstance(value, (torch.dtype, float, int, str))


def _is_wrapped_by_torch(now: object, before: object) -> bool:
    """Return True if PyTorch replaced a function, as its compiler wraps `torch.manual_seed`."""
    if isinstance(now, property):
        return isinstance(before, property) and _file(now.fget).startswith(_TORCH_FOLDER)
    is_wrapper = getattr(now, "__wrapped__", None) is before
    return _file(now).startswith(_TORCH_FOLDER if is_wrapper else _COMPILER_FOLDER)


def _file(function: object) -> str:
    """Return the file of a Python function, or an empty string."""
    return getattr(getattr(function, "__code__", None), "co_filename", "")


_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_COMPILER_FOLDER = _TORCH_FOLDER + "_dynamo" + os.sep


@contextmanager
def restored_process_state(*, is_continued: bool = False) -> Iterator[Changes]:
    """Restore the settings and functions of the process on exit, and list those that changed.

    The outermost of nested contexts restores it. Contexts in other threads wait. Entering takes as
    long as leaving, unless `is_continued`: only code of nlbench has run since the last context.

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
    with (
        one_measurement(),
        _PROCESS.restored(changes, is_continued),
        restored_thread_state(changes),
    ):
        yield changes
    changes.lasting = _PROCESS.lasting()


@contextmanager
def restored_thread_state(changes: Changes) -> Iterator[None]:
    """Restore on exit what belongs to this thread, such as modes, and add what changed."""
    settings = _read(_THREAD_SETTINGS)
    modes = _read(_MODES)
    try:
        yield
    finally:
        # Modes first, since a mode may change what the settings do.
        changes.add(_restore(_MODES, modes), is_foreign=True)
        changes.add(_restore(_THREAD_SETTINGS, settings))


def foreign_changes() -> int:
    """Return how many changes of this process were not only of settings.

    Settings can be restored. After any other change, such as a patched function, numbers measured
    later in this process could differ from those of a new process, even if it was undone.
    """
    return _PROCESS.foreign_changes


class Changes(list[str]):
    """The names of what changed in a context, complete when it has been left."""

    def __init__(self) -> None:
        super().__init__()
        # What this context or an earlier one of the process has changed and could not be restored.
        self.lasting: list[str] = []

    def add(self, names: Iterable[tuple[str, bool]], *, is_foreign: bool = False) -> None:
        """Add names, each with False if it could not be restored. See `foreign_changes`."""
        for name, is_restored in names:
            if name not in self:
                self.append(name)
            if not is_restored:
                _PROCESS.unrestored[name] = None
            _PROCESS.foreign_changes += is_foreign or not is_restored

    def restored(self, doer: str) -> str:
        """Return a remark on what was restored, such as "the pass changed torch.relu"."""
        names = [name for name in self if name not in self.lasting]
        return f"{doer} changed {enumerate_names(names, 10)}; since restored" if names else ""

    def left(self) -> str:
        """Return a remark on what this process can't restore."""
        start = "changed in this process and can't be restored: "
        return start + enumerate_names(self.lasting, 10) if self.lasting else ""


class _Process:
    """State that all threads share, restored by the outermost of nested contexts."""

    def __init__(self) -> None:
        self._is_watched = False
        self._is_clean = True  # whether the last context changed nothing
        self._attributes: AttributeSnapshot | None = None
        self._kernels: set[str] = set()
        self.unrestored: dict[str, None] = {}
        self.foreign_changes = 0

    @contextmanager
    def restored(self, changes: Changes, is_continued: bool) -> Iterator[None]:
        if self._is_watched:
            yield
            return
        self._is_watched = True
        if self._attributes is None:
            self._attributes = AttributeSnapshot()
        elif not (is_continued and self._is_clean and self._attributes.covers_imports()):
            self._attributes.update()
        settings = _read(_SETTINGS)
        environment = dict(os.environ)
        hooks = _read(_HOOKS_AND_IMPORTS)
        kernels = _kernels()
        try:
            yield
        finally:
            self._is_watched = False
            # Settings first, since the default type sets `torch.Storage`.
            changes.add(_restore(_SETTINGS, settings))
            changes.add(_restore_environment(environment))
            changes.add(self._attributes.restore(), is_foreign=True)
            changes.add(_restore(_HOOKS_AND_IMPORTS, hooks), is_foreign=True)
            added = _kernels() - kernels
            self._kernels |= added
            changes.add(((name, False) for name in sorted(added)), is_foreign=True)
            self._is_clean = not changes

    def lasting(self) -> list[str]:
        """Return the names of what could not be restored."""
        # A kernel goes with the `torch.library.Library` that holds it.
        gone = self._kernels - _kernels() if self._kernels else set()
        return [name for name in self.unrestored if name not in gone]


_PROCESS = _Process()


def _kernels() -> set[str]:
    """Return the names of PyTorch's own kernels that were replaced by `torch.library`.

    Imports of PyTorch add some for other dispatch keys.
    """
    names: set[str] = getattr(torch.library, "_impls", set()).copy()
    replaced = [n.split("/") for n in names if n.endswith(_KERNEL_KEYS) and n.startswith("aten/")]
    return {f"torch.ops.aten.{operator_name} ({key})" for _, operator_name, key in replaced}


_KERNEL_KEYS = (
    *("/CPU", "/CUDA", "/Autograd", "/AutogradCPU", "/AutogradCUDA"),
    "/CompositeImplicitAutograd",
)


def _restore_environment(before: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    for name in sorted({*os.environ, *before}):
        # Prefixes of variables that scikit-learn and PyTorch set when they are imported.
        if os.environ.get(name) == before.get(name) or name.startswith(("KMP_", "TORCHINDUCTOR_")):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
        yield f"the environment variable {name}", True


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    differs: Callable[[Any, Any], bool] = operator.ne


def _read(settings: list[_Setting]) -> list[Any]:
    return [setting.read() for setting in settings]


def _restore(settings: list[_Setting], values: list[Any]) -> Iterator[tuple[str, bool]]:
    """Restore settings. Yield the names of what changed, with False if it still differs."""
    for setting, before in zip(settings, values, strict=True):
        if setting.differs(before, setting.read()):
            with contextlib.suppress(Exception):  # A model's mode may raise any.
                setting.write(before)
            yield setting.name, not setting.differs(before, setting.read())


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:
        return None


def _default_device_mode() -> Any:
    """Return the mode of `torch.set_default_device`, if any."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _function_modes() -> list[Any]:
    """Return the active modes but that of `torch.set_default_device`."""
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return [mode for mode in stack if mode is not _default_device_mode()]


def _set_function_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    default = _default_device_mode()
    stack = modes if default is None else [default, *modes]
    for mode in stack:
        torch._C._push_on_torch_function_stack(mode)
    # What `with torch.device(...)` sets besides the mode.
    devices = [mode.device for mode in stack if isinstance(mode, torch_device.DeviceContext)]
    torch_device.CURRENT_DEVICE = devices[-1] if devices else None


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


def _leave_saved_tensors_hooks(before: Any) -> None:
    while _saved_tensors_hooks() not in (before, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _leave_dual_levels(level: int) -> None:
    while forward_ad._current_level > level:
        forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


def _set_inference_mode(value: bool) -> None:
    context = torch.inference_mode(value)
    context.__enter__()
    _KEPT.append(context)


_KEPT: list[object] = []
"""Contexts that would be left if they were deleted."""


def _accessors(name: str, owner: Any, read: str, write: str) -> Iterator[_Setting]:
    """Yield a setting if this version of PyTorch has it."""
    if hasattr(owner, read) and hasattr(owner, write):
        yield _Setting(name, getattr(owner, read), getattr(owner, write))


_MODES = [
    _Setting("the active TorchFunctionModes", _function_modes, _set_function_modes),
    _Setting(
        "the active TorchDispatchModes",
        dispatch._get_current_dispatch_mode_stack,
        _set_dispatch_modes,
    ),
    _Setting("the active saved_tensors_hooks", _saved_tensors_hooks, _leave_saved_tensors_hooks),
    _Setting(
        "the level of torch.autograd.forward_ad",
        lambda: forward_ad._current_level,
        _leave_dual_levels,
    ),
    *_accessors(
        "the active transforms of torch.func",
        torch._C._functorch,
        "get_dynamic_layer_stack_depth",
        "pop_dynamic_layer_stack_and_undo_to_depth",
    ),
    *_accessors(
        "torch._C.DisableTorchFunction",
        torch._C,
        "_get_torch_function_state",
        "_set_torch_function_state",
    ),
]


def _autocast(kind: str) -> list[_Setting]:
    return [
        _Setting(
            f"torch.is_autocast_enabled('{kind}')",
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        ),
        _Setting(
            f"torch.get_autocast_dtype('{kind}')",
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        ),
    ]


_TINY = np.float64(5e-324)

_THREAD_SETTINGS = [
    _Setting(
        "torch.is_inference_mode_enabled", torch.is_inference_mode_enabled, _set_inference_mode
    ),
    _Setting(
        "torch.get_default_device",
        lambda: getattr(_default_device_mode(), "device", None),
        torch.set_default_device,
    ),
    _Setting("torch.is_grad_enabled", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting("torch.get_num_threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch.set_flush_denormal", lambda: bool(_TINY * 1.0 == 0.0), torch.set_flush_denormal
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting("numpy.geterr", np.geterr, lambda value: np.seterr(**value)),
]


def _flags() -> Iterator[_Setting]:
    """Yield the backend flags of this version of PyTorch."""
    for flag in (
        "mkldnn_enabled",
        "mkldnn_deterministic",
        "nnpack_enabled",
        "cudnn_enabled",
        "cudnn_deterministic",
        "cudnn_benchmark",
        "qengine",
        "linalg_preferred_backend",
        "blas_preferred_backend",
        "cublas_allow_fp16_accumulation",
    ):
        name = f"torch.backends.{flag.replace('_', '.', 1)}"
        yield from _accessors(name, torch._C, f"_get_{flag}", f"_set_{flag}")
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        flag = f"{kernel}_sdp_enabled"
        name = f"torch.backends.cuda.{flag}"
        yield from _accessors(name, torch._C, f"_get_{flag}", f"_set_sdp_use_{kernel}")
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        operations = product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))
        for backend, operation in (("generic", "all"), *operations):
            yield _Setting(
                f"fp32_precision of {operation} on {backend}",
                partial(torch._C._get_fp32_precision_getter, backend, operation),
                partial(torch._C._set_fp32_precision_setter, backend, operation),
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
    _Setting("the working directory", _working_directory, os.chdir),
]


def _import_list(name: str) -> _Setting:
    """Return a list of `sys` whose additions are kept: an import to come may need them."""

    def read() -> list[Any]:
        return list(getattr(sys, name, None) or ())

    def write(before: list[Any]) -> None:
        setattr(sys, name, before + [entry for entry in read() if entry not in before])

    return _Setting(
        f"sys.{name}", read, write, lambda before, now: any(entry not in now for entry in before)
    )


def _refill(hooks: dict[Any, Any], before: dict[Any, Any]) -> None:
    hooks.clear()
    hooks.update(before)


_HOOKS_AND_IMPORTS = [
    *(
        _Setting(f"torch.nn.modules.module.{name}", partial(dict, hooks), partial(_refill, hooks))
        for name, hooks in vars(module_hooks).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    ),
    *(_import_list(name) for name in ("path", "meta_path", "path_hooks")),
]
