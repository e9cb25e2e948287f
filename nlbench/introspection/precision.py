"""Devices, the precision of their float32 arithmetic, and autocast.

By default, PyTorch computes convolutions on a GPU in TF32, whose ten-bit mantissa would affect
every result. Functions that run a network, such as a probe's `observe` and those of the Python
interface, disable it while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from nlbench.errors import RequestError, shorten
from nlbench.parsers import parse_index

from .threads import one_measurement

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def exact_arithmetic(precision: str = "native", device: str = "cpu") -> Iterator[None]:
    """Disable TF32 and cuDNN's benchmark mode, which selects algorithms by their speed.

    ``tf32``, ``bfloat16`` and ``float16`` are only used on request. Measurements in other threads
    wait (`nlbench.introspection.threads`).
    """
    halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    cast: AbstractContextManager[object] = nullcontext()
    if precision in halves:
        cast = torch.autocast(device, dtype=halves[precision])
    with one_measurement(), _requested(precision == "tf32"), cast:
        yield


@contextmanager
def exact_by_default() -> Iterator[None]:
    """Enter `exact_arithmetic`, unless an outer context has requested a precision.

    It is used by functions that are called both in a run, which sets the precision, and directly.

    Examples
    --------
    >>> with exact_by_default():
    ...     set(float32_precision(torch.device("cuda")).values())
    {'ieee'}
    """
    with one_measurement(), nullcontext() if _REQUESTS else exact_arithmetic():
        yield


def each_exact(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Compute each item of a generator in `exact_by_default`.

    Between items, the caller's settings apply.

    Examples
    --------
    >>> @each_exact
    ... def precisions():
    ...     yield float32_precision(torch.device("cuda"))["matmul"]
    >>> next(precisions())
    'ieee'
    """

    @wraps(function)
    def items(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        generator = function(*args, **kwargs)
        while True:
            with exact_by_default():
                try:
                    item = next(generator)
                except StopIteration:
                    return
            yield item

    return items


_REQUESTS: list[tuple[bool, _OldSettings | _NewSettings]] = []
"""Nested requests, each with True for TF32 and the user's settings before the first one."""


@contextmanager
def _requested(tf32: bool) -> Iterator[None]:
    """Set the process-wide precision of float32. The innermost of nested requests applies.

    The user's settings are saved at the first request and restored after the last one, so that no
    request is mistaken for a user's setting.
    """
    cudnn = torch.backends.cudnn
    if _REQUESTS:
        outer, settings = _REQUESTS[-1]
    else:
        outer = None
        settings = (_NewSettings if _HAS_PRECISIONS else _OldSettings)()
    flags = cudnn.deterministic, cudnn.benchmark
    if tf32 != outer:
        cudnn.deterministic = True
        cudnn.benchmark = False
        settings.set(tf32)
    _REQUESTS.append((tf32, settings))
    try:
        yield
    finally:
        _REQUESTS.pop()
        if outer is None:
            cudnn.deterministic, cudnn.benchmark = flags
            settings.restore()
        elif tf32 != outer:
            settings.set(outer)


class _OldSettings:
    """PyTorch's settings before version 2.9."""

    def __init__(self) -> None:
        matmul = torch.backends.cuda.matmul
        cudnn = torch.backends.cudnn
        self._before = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32

    def set(self, tf32: bool) -> None:
        self._set("high" if tf32 else "highest", tf32, tf32)

    def restore(self) -> None:
        self._set(*self._before)

    def _set(self, precision: str, matmul: bool, cudnn: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn


class _NewSettings:
    """PyTorch's settings since version 2.9, per operation and backend, and the older ones.

    An operation inherits from its backend, and a backend from the generic setting. PyTorch refuses
    to read the older settings if they contradict the newer ones, so both are set. Inherited
    settings are not overwritten, since they would no longer follow a later change by the user.
    """

    def __init__(self) -> None:
        self._explicit = _explicit_precisions()
        # Convolutions can't be reset to PyTorch's default; restoring the older setting would
        # change them.
        defaults = self._explicit["cuda", "conv"], self._explicit["cuda", "rnn"]
        self._is_default = _DEFAULT in defaults
        self._older = _older_settings(self._explicit, self._is_default)

    def set(self, tf32: bool) -> None:
        self._set_older("high" if tf32 else "highest", tf32)
        _set_precision("generic", "all", "ieee")
        for (backend, operation), precision in self._explicit.items():
            if backend != "generic" and precision != _DEFAULT:
                is_tf32 = tf32 and backend == "cuda"
                _set_precision(backend, operation, "tf32" if is_tf32 else "ieee")

    def restore(self) -> None:
        self._set_older(*self._older)
        _set_precisions(self._explicit)

    def _set_older(self, matmul: str, cudnn: bool) -> None:
        torch.set_float32_matmul_precision(matmul)
        if not self._is_default:
            torch.backends.cudnn.allow_tf32 = cudnn


_HAS_PRECISIONS = hasattr(torch._C, "_set_fp32_precision_setter")
_OPERATIONS = ("matmul", "conv", "rnn")

_DEFAULT = "PyTorch's default"
"""Initial setting of an operation: TF32, unless its backend has a different setting."""


# Not through `torch.backends.mkldnn.fp32_precision`, which sets all backends.
def _precision(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set_precision(backend: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, precision)


def _set_precisions(explicit: Mapping[tuple[str, str], str]) -> None:
    for (backend, operation), precision in explicit.items():
        if precision != _DEFAULT:
            _set_precision(backend, operation, precision)


def _explicit_precisions() -> dict[tuple[str, str], str]:
    """Return the setting for each operation and backend. It is ``none`` if inherited."""
    explicit = {("generic", "all"): _precision("generic", "all")}
    try:
        # Read each setting while there is nothing to inherit.
        _set_precision("generic", "all", "none")
        for backend in ("cuda", "mkldnn"):
            explicit[backend, "all"] = _precision(backend, "all")
            _set_precision(backend, "all", "none")
            explicit |= {(backend, op): _precision(backend, op) for op in _OPERATIONS}
        _set_precision("generic", "all", "ieee")
        for key, precision in explicit.items():
            if precision == "tf32" and key[1] in _OPERATIONS and _precision(*key) == "ieee":
                explicit[key] = _DEFAULT
    finally:
        _set_precisions(explicit)
    return explicit


def _older_settings(explicit: Mapping[tuple[str, str], str], is_default: bool) -> tuple[str, bool]:
    """Read PyTorch's older settings, with the newer ones temporarily set to consistent values."""
    try:
        _set_precision("cuda", "matmul", "ieee")
        _set_precision("mkldnn", "matmul", "ieee")
        matmul = torch.get_float32_matmul_precision()
        if is_default:
            return matmul, True
        _set_precision("cuda", "conv", "tf32")
        _set_precision("cuda", "rnn", "tf32")
        try:
            return matmul, bool(torch.backends.cudnn.allow_tf32)
        except RuntimeError:
            return matmul, False
    finally:
        _set_precisions(explicit)


def float32_precision(device: torch.device) -> dict[str, str]:
    """Return the current precision of float32 arithmetic on a device, by operation.

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


_DEVICE_TYPES = ("cpu", "cuda", "mps")


def without_autocast() -> AbstractContextManager[None]:
    """Disable autocast, so that a measure computes in full precision with any model."""
    return _autocast(dict.fromkeys(_DEVICE_TYPES))


def autocast_now() -> Callable[[], AbstractContextManager[None]]:
    """Save the autocast settings, and return a function whose context restores them.

    A measure computes without autocast, but runs the model with it.

    Examples
    --------
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     autocast = autocast_now()
    >>> with autocast():
    ...     torch.is_autocast_enabled("cpu")
    True
    """
    enabled = torch.is_autocast_enabled
    dtypes = {
        kind: torch.get_autocast_dtype(kind) if enabled(kind) else None for kind in _DEVICE_TYPES
    }
    return lambda: _autocast(dtypes)


@contextmanager
def _autocast(dtypes: Mapping[str, torch.dtype | None]) -> Iterator[None]:
    """Set autocast's dtype for each device type. None disables autocast."""
    with ExitStack() as stack:
        for kind, dtype in dtypes.items():
            if dtype is not None or torch.is_autocast_enabled(kind):
                cast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
                stack.enter_context(cast)
        yield


def resolve_device(name: str) -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` to an available device.

    ``auto`` is the first CUDA device or, if there is none, the CPU. It is never an Apple GPU, which
    lacks double precision.

    Examples
    --------
    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    index = parse_index(number or "0")
    if kind not in ("cpu", "cuda", "mps") or index is None:
        raise RequestError(
            f"unknown device '{shorten(name)}'; expected auto, cpu, cuda, cuda:N or mps"
        )
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }[kind]
    if index >= count:
        available = f"{count} of them" if count else "none"
        raise RequestError(
            f"device '{name}' is not available: this machine has {available}; try --device auto"
        )
    return torch.device(name)
