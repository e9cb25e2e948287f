"""Calls of PyTorch functions, as seen by function modes, and of operations, by dispatch modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .operations import known, operation

unobserved_calls = torch._C.DisableTorchFunction
"""Context in which function modes and tensor subclasses don't see calls."""


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, including those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class FunctionCall:
    """A call of a PyTorch function.

    Examples
    --------
    >>> import torch
    >>> call = FunctionCall(torch.cat, ([torch.ones(1), torch.ones(2)],), {"dim": 0})
    >>> call.name, len(call.tensors), call.argument(1, "dim"), call.run()
    ('cat', 2, 0, tensor([1., 1., 1.]))
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs or {}
        self.operation = operation(function)  # the function's entry in the registry

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Tensor arguments, in order."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.operation.name

    @property
    def function_name(self) -> str:
        """Name of the function, with underscores."""
        return getattr(self.function, "__name__", "")

    @property
    def takes(self) -> str:
        """The fact ``takes`` of the operation, or of a special method such as ``__float__``."""
        name = self.function_name
        special = known(name).takes if name.startswith("__") else ""
        return special or self.operation.takes

    @property
    def input(self) -> Any:
        """Input of an activation function, given by position or by name."""
        if self.args:
            return self.args[0]
        return self.kwargs.get("input", next(iter(self.kwargs.values()), None))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, by name or by position."""
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


# Calls per layer and step. An LSTM has three gates, a candidate state and a tanh of its cell state.
_CALLS = {"lstm": 5, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def hidden_calls(call: FunctionCall) -> int:
    """Return the number of activation calls that a recurrent kernel replaces. 0 if unknown.

    Examples
    --------
    >>> import torch
    >>> cell = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    >>> flat = cell._flat_weights
    >>> states = (torch.zeros(4, 1, 4), torch.zeros(4, 1, 4))
    >>> args = (torch.zeros(7, 1, 3), states, flat, True, 2, 0.0, False, True, False)
    >>> hidden_calls(FunctionCall(torch._VF.lstm, args))
    140
    """
    name = call.name.removesuffix("_cell")
    args = call.args
    calls_per_step = _CALLS.get(name, 0)
    if call.name.endswith("_cell") or not calls_per_step:
        return calls_per_step
    try:
        if isinstance(args[1], Tensor) and args[1].ndim == 1:  # Batch sizes of a packed sequence.
            steps = len(args[1])
            layers = args[5]
            is_bidirectional = args[8]
        else:
            layers = args[4]
            is_bidirectional = args[7]
            steps = args[0].shape[bool(args[8]) and args[0].ndim == 3]
        return int(calls_per_step * steps * layers * (1 + bool(is_bidirectional)))
    except (IndexError, TypeError):
        return 0


def is_vmapped(value: object) -> bool:
    """Return True for a tensor that `torch.func.vmap` maps over.

    Examples
    --------
    >>> is_vmapped(torch.zeros(2))
    False
    """
    is_batched = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", None)
    return isinstance(value, Tensor) and is_batched is not None and bool(is_batched(value))


def is_transformed(value: object) -> bool:
    """Return True for a tensor inside a transform of `torch.func`, such as `vmap` or `jvp`.

    Examples
    --------
    >>> is_transformed(torch.zeros(2))
    False
    """
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    return isinstance(value, Tensor) and is_wrapped is not None and bool(is_wrapped(value))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that avoids importing PyTorch's compiler, which takes seconds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and excluding this class from compilation would import it.
        return False


SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


def modes_disabled() -> AbstractContextManager[object]:
    """Return a context in which no mode is active."""
    return _disable_current_modes()


def get_storage_ref(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage. None for a sparse tensor, which has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def has_memory(tensor: Tensor) -> bool:
    """Return False for a subclass of tensors that only wraps others, such as a distributed one."""
    if type(tensor) is Tensor or tensor.layout != torch.strided or is_transformed(tensor):
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def written_in(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors that a call of an operator overload changes in place."""
    return [
        tensor
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in((args[i] if i < len(args) else kwargs.get(argument.name),))
    ]


def positional(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert keyword arguments of an operator overload to positional ones, up to the first gap."""
    rest = dict(kwargs)
    for argument in func._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name not in rest:
            break
        args = (*args, rest.pop(argument.name))
    return args, rest


def out_of_place(func: Any, name: str) -> Callable[..., Any]:
    """Return the out-of-place variant of an operator overload. `name` is its name."""
    return getattr(getattr(torch.ops.aten, name), func._overloadname)
