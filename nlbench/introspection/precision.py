"""What float32 is computed in: in itself, whatever short cuts PyTorch is allowed.

On a GPU PyTorch computes convolutions in TF32 unless it is told otherwise, whose ten bits of
mantissa would show in every number. Every door that runs a network (a probe's `observe`, and the
functions behind it that are called from Python) turns that off for as long as it is at work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = [
    "autocast_now",
    "each_exact",
    "exact_arithmetic",
    "exact_by_default",
    "float32_precision",
    "without_autocast",
]

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def exact_arithmetic(precision: str = "native", device: str = "cpu") -> Iterator[None]:
    """Turn off, for a while, what rounds or varies: TF32, and cuDNN's choice by the clock.

    TF32's ten bits of mantissa would show in the scores. While one thread asks for it and another
    one does not, it is off.

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
    asked = _ASKED.set(True)
    try:
        with _FLOAT32.asked(precision == "tf32"), cast:
            yield
    finally:
        _ASKED.reset(asked)


_ASKED: ContextVar[bool] = ContextVar("whether somebody has asked for a precision", default=False)


@contextmanager
def exact_by_default() -> Iterator[None]:
    """Have what `exact_arithmetic` gives, unless somebody further out has asked for a precision.

    For functions that may be called in a run, whose precision it is then, or by themselves.

    Examples
    --------
    >>> with exact_by_default():
    ...     set(float32_precision(torch.device("cuda")).values())
    {'ieee'}
    """
    if _ASKED.get():
        yield
        return
    with exact_arithmetic():
        yield


def each_exact(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Have a generator compute each of its items in `exact_by_default`.

    In between, while its user is at work, everything is as the user has set it.

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
        given = function(*args, **kwargs)
        while True:
            with exact_by_default():
                try:
                    item = next(given)
                except StopIteration:
                    return
            yield item

    return items


class _Float32:
    """What float32 is computed in, one setting of the process for all that ask at the same time.

    The user's settings are read when the first comes in and put back when the last goes out, so
    that nobody takes what another has asked for as the user's. Of those inside at once in
    several threads the strictest is met: TF32 asked for in one must not show in another's
    numbers. Within a thread the innermost counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each that asks, its thread and whether it asks for TF32.
        self._askers: dict[object, tuple[int, bool]] = {}
        self._users: _Settings
        self._is_tf32: bool | None = None

    @contextmanager
    def asked(self, tf32: bool) -> Iterator[None]:
        """Ask for TF32, or for float32 itself."""
        asker = object()
        with self._lock:
            if not self._askers:
                self._users = (_NewSettings if _HAS_PRECISIONS else _OldSettings)()
                self._is_tf32 = None
            self._askers[asker] = threading.get_ident(), tf32
            self._meet()
        try:
            yield
        finally:
            with self._lock:
                del self._askers[asker]
                if self._askers:
                    self._meet()
                else:
                    self._users.put_back()

    def _meet(self) -> None:
        innermost = dict(self._askers.values())
        tf32 = all(innermost.values())
        if tf32 != self._is_tf32:
            self._users.set(tf32)
            self._is_tf32 = tf32


class _Settings:
    """The user's settings, as they were when this was made."""

    def __init__(self) -> None:
        cudnn = torch.backends.cudnn
        self._cudnn = cudnn.deterministic, cudnn.benchmark

    def set(self, tf32: bool) -> None:
        """Have float32 computed in itself, or on a GPU in TF32."""
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

    def put_back(self) -> None:
        """Give the user's settings back."""
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn


class _OldSettings(_Settings):
    """Of PyTorch before 2.9."""

    def __init__(self) -> None:
        super().__init__()
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        self._before = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32

    def set(self, tf32: bool) -> None:
        super().set(tf32)
        self._set("high" if tf32 else "highest", tf32, tf32)

    def put_back(self) -> None:
        super().put_back()
        self._set(*self._before)

    def _set(self, precision: str, matmul: bool, cudnn: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn


class _NewSettings(_Settings):
    """Of PyTorch from 2.9 on, for each operation of each backend, and the older ones.

    An operation inherits what its backend has, and that what all have; and PyTorch refuses to
    read the older settings where they contradict the newer. Both are set. What inherits goes on
    to do so: told what it has inherited, it would not follow when the user sets something else
    later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made = _precisions_made()
        # Nobody can set convolutions back to what PyTorch begins with; the older setting would.
        self._is_new = _UNTOUCHED in (self._made["cuda", "conv"], self._made["cuda", "rnn"])
        self._older = _older_settings(self._made, self._is_new)

    def set(self, tf32: bool) -> None:
        super().set(tf32)
        self._set_older("high" if tf32 else "highest", tf32)
        _set_precision("generic", "all", "ieee")
        for (backend, operation), own in self._made.items():
            if backend != "generic" and own != _UNTOUCHED:
                short = tf32 and backend == "cuda"
                _set_precision(backend, operation, "tf32" if short else "ieee")

    def put_back(self) -> None:
        super().put_back()
        self._set_older(*self._older)
        _set_precisions(self._made)

    def _set_older(self, matmul: str, cudnn: bool) -> None:
        torch.set_float32_matmul_precision(matmul)
        if not self._is_new:
            torch.backends.cudnn.allow_tf32 = cudnn


_FLOAT32 = _Float32()

_HAS_PRECISIONS = hasattr(torch._C, "_set_fp32_precision_setter")
_OPERATIONS = ("matmul", "conv", "rnn")
_BACKENDS = ("cuda", "mkldnn")

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


_KINDS = ("cpu", "cuda", "mps")


def without_autocast() -> AbstractContextManager[None]:
    """Let a measure compute in full precision, whatever the model ran in."""
    return _autocast(dict.fromkeys(_KINDS))


def autocast_now() -> Callable[[], AbstractContextManager[None]]:
    """Remember whether autocast is on, to have a model run so again later.

    A measure computes without it, also while it runs the model.

    Examples
    --------
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     as_now = autocast_now()
    >>> with as_now():
    ...     torch.is_autocast_enabled("cpu")
    True
    """
    enabled = torch.is_autocast_enabled
    asked = {kind: torch.get_autocast_dtype(kind) if enabled(kind) else None for kind in _KINDS}
    return lambda: _autocast(asked)


@contextmanager
def _autocast(asked: Mapping[str, torch.dtype | None]) -> Iterator[None]:
    """Have autocast to a type on each kind of device, or none."""
    with ExitStack() as stack:
        for kind, dtype in asked.items():
            if dtype is not None or torch.is_autocast_enabled(kind):
                cast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
                stack.enter_context(cast)
        yield
