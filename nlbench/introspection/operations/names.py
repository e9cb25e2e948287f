"""A single name for each operation, however it is called."""

from __future__ import annotations

from typing import Any

import torch


def qualified_name(func: Any) -> str:
    """Return the name of an operation, with its library if that isn't PyTorch.

    Parameters
    ----------
    func : callable
        A PyTorch function, method, overload or property, or an autograd function.

    Examples
    --------
    >>> import torch
    >>> qualified_name(torch.Tensor.mul_), qualified_name(torch.ops.aten.relu.default)
    ('mul', 'relu')
    >>> qualified_name(torch.Tensor.__rsub__), qualified_name(torch.Tensor.shape.__get__)
    ('rsub', 'shape')
    """
    registered = getattr(func, "nlbench_op", None)
    if registered is not None:
        return str(registered)
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        namespace, _, name = func._qualified_op_name.partition("::")
        if namespace != "aten":
            return f"{namespace}::{name.removesuffix('_')}"
        return _plain_name(func)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        return f"{func.__module__}::{func.__qualname__}"
    return _plain_name(func)


def _plain_name(func: Any) -> str:
    """Return the name of a PyTorch operation; for a property's getter or setter, the property's."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name.startswith("__"):
        return str(name.strip("_"))
    return str(name.removesuffix("_"))


def in_each_dimension(*names: str) -> tuple[str, ...]:
    """Return the names of operations that exist in one, two and three dimensions.

    Examples
    --------
    >>> in_each_dimension("conv")
    ('conv1d', 'conv2d', 'conv3d')
    """
    return tuple(f"{name}{axes}d" for name in names for axes in (1, 2, 3))
