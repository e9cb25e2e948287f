"""Networks that compute in a floating-point type other than their own.

Converting a network's parameters and buffers does not affect dtypes named in its forward method
(``x.float()``), constants created there (``torch.ones(3)``), or tensors from elsewhere, such as
global variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .function_calls import tensors_in, unobserved_calls
from .pytree import tree_map

Network = TypeVar("Network", bound=nn.Module)


def own_float_type(network: nn.Module) -> torch.dtype:
    """Return the float type of most of a network's weights; PyTorch's default if it has none.

    Examples
    --------
    >>> own_float_type(nn.Linear(2, 2).half()), own_float_type(nn.ReLU())
    (torch.float16, torch.float32)
    """
    sizes: Counter[torch.dtype] = Counter()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else torch.get_default_dtype()


class FloatTypeMode(TorchFunctionMode):
    """Function mode in which a network of type `own` computes in the floating-point type `dtype`.

    Where the forward method names the network's type or a wider one, `dtype` is used instead.
    Tensors that it creates or reads from elsewhere are converted when they are combined with
    tensors of type `dtype`. Constants are rounded to the network's precision. Conversions to a
    narrower type are kept, since they round.

    Examples
    --------
    >>> with FloatTypeMode(torch.float32, torch.float64):
    ...     x = torch.ones(2) @ torch.ones(2).double()
    ...     print(x.dtype, x.float().dtype, x.half().dtype)
    torch.float64 torch.float64 torch.float16
    """

    def __init__(self, own: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.own, self.dtype = own, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            return func(*args, **kwargs)
        # These checks are not part of the network.
        with unobserved_calls():
            floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
            if floats:
                args, kwargs = self._convert(name, floats, args, kwargs)
                target = _named_type(name, args)
                if target is not None and self._replaces(target):
                    func, args, kwargs = Tensor.to, (args[0], self.dtype), {}
        result = func(*args, **kwargs)
        if floats or not isinstance(result, Tensor):
            return result
        with unobserved_calls():
            return result.to(self.dtype) if self._replaces(result.dtype) else result

    def _replaces(self, dtype: torch.dtype) -> bool:
        """Return True for a floating-point type at least as wide as the network's own."""
        return dtype.is_floating_point and torch.promote_types(dtype, self.own) == dtype

    def _convert(
        self, name: str, floats: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Replace types, and convert tensors that are combined with tensors of `dtype`."""
        is_mixed = len({t.dtype for t in floats}) > 1 and any(t.dtype == self.dtype for t in floats)
        written = args[0] if args and _writes_first(name) else kwargs.get("out")

        def convert(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return self.dtype if self._replaces(value) else value
            if is_mixed and isinstance(value, Tensor) and value is not written:
                return value.to(self.dtype) if value.is_floating_point() else value
            return value

        if is_mixed:
            args, kwargs = tree_map(convert, (args, kwargs))
            return args, kwargs
        # A dtype is always an argument itself, never inside a container.
        return tuple(map(convert, args)), {k: convert(v) for k, v in kwargs.items()}


def _writes_first(name: str) -> bool:
    """Return True for the name of a method that changes its tensor in place."""
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name.endswith("_")


def _named_type(name: str, args: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that a method converts to, if its name or argument specifies one."""
    if name in ("float", "double", "half", "bfloat16"):
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if name != "type" or len(args) < 2:
        return None
    named = args[1]
    if isinstance(named, str):
        named = getattr(torch, named.rpartition(".")[2], None)
    dtype_of_type = getattr(named, "dtype", None)
    return dtype_of_type if isinstance(dtype_of_type, torch.dtype) else None


def computing_in(network: Network, mode: FloatTypeMode) -> Network:
    """Make every call of a network run in a mode, and return the network."""
    kind = getattr(type(network), "_without_mode", type(network))

    def call(self: Network, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return kind.__call__(self, *args, **kwargs)

    # Unlike a wrapper or hooks, this doesn't affect module names or copying.
    members = {"__call__": call, "_without_mode": kind, "__module__": kind.__module__}
    network.__class__ = type(kind.__name__, (kind,), members)
    return network
