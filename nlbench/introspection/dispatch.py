"""Operations at the level of PyTorch's dispatcher, below the functions that a network calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .function_calls import tensors_in


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
    context: AbstractContextManager[object] = _disable_current_modes()
    return context


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage; None for a sparse tensor, which has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


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
    """Return the out-of-place variant of an operator overload; `name` is its name."""
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, name), func._overloadname)
    return function
