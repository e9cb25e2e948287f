"""Networks in which modules pass the activation calls of their own forward to a function.

Unlike a mode that is active around one forward pass, this is part of the network: it is copied and
pickled with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .function_calls import FunctionCall
from .module_stack import running_module

_WRAPPED = "_wrapped_calls"

# Number of calls of each module in the current forward pass. It is not stored in the modules, so
# that copies of a network and other threads count separately.
_COUNTS: ContextVar[Counter[nn.Module] | None] = ContextVar("calls", default=None)


def count_call(module: nn.Module) -> int:
    """Return the number of calls counted for a module in this forward pass, and add one."""
    counts = _COUNTS.get()
    if counts is None:
        return 0
    counts[module] += 1
    return counts[module] - 1


class _CountingModule(nn.Module):
    """Base class for modules with wrapped calls and for modules that contain them.

    The counts are reset around each forward pass, not in hooks, which an interrupt would skip.
    """

    original: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _COUNTS.set(Counter()) if _COUNTS.get() is None else None
        try:
            if _WRAPPED not in vars(self):
                return super().__call__(*args, **kwargs)
            with _OwnCalls(self):
                return super().__call__(*args, **kwargs)
        finally:
            if token is not None:
                _COUNTS.reset(token)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_counting, (self.original,), self.__getstate__()  # type: ignore[no-untyped-call]


@cache
def _counting_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class that counts calls and has the original's name."""
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(original, name) for name in names} | {"original": original}
    return type(original.__name__, (_CountingModule, original), attributes)


def _new_counting(original: type[nn.Module]) -> nn.Module:
    """Create an empty module for `copy` and `pickle`."""
    kind = _counting_class(original)  # type: ignore[arg-type]
    return kind.__new__(kind)


class _OwnCalls(TorchFunctionMode):
    """Mode that passes the activation calls in a module's own forward to its function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._descendants = set(module.modules())
        self._around, self._child = vars(module)[_WRAPPED]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        is_activation = bool(call.operation.kind) and isinstance(call.input, Tensor)
        # Calls inside a child are skipped, even if it has never been called before.
        if not is_activation or running_module(self._descendants) is not self._module:
            return call.run()
        return self._around(self._module.get_submodule(self._child), call)


def wrap_calls(
    module: nn.Module, around: Callable[[nn.Module, FunctionCall], Any], child: str
) -> None:
    """Pass the activation calls in a module's own forward to a function, after `track_calls`.

    The function maps the module's `child` and a call to the call's output, and can be pickled.
    """
    vars(module)[_WRAPPED] = around, child


def track_calls(
    model: nn.Module, counters: type[nn.Module] | tuple[type[nn.Module], ...] = ()
) -> None:
    """Make all wrapped calls of a model take effect, in place, after its layers are replaced.

    `counters` are the classes of modules whose forward calls `count_call`.

    Examples
    --------
    >>> import torch
    >>> class Square(nn.Module):
    ...     def forward(self, x):
    ...         return nn.functional.relu(x) ** 2
    >>> model = nn.Sequential(Square())
    >>> model[0].add_module("layer", nn.Identity())
    >>> wrap_calls(model[0], lambda layer, call: layer(call.input) + count_call(layer), "layer")
    >>> track_calls(model)
    >>> model(torch.tensor([-3.0]))
    tensor([9.])
    """
    for module in list(model.modules()):
        has_wrapped = any(_WRAPPED in vars(inner) for inner in module.modules())
        if has_wrapped or any(isinstance(inner, counters) for inner in module.modules()):
            module.__class__ = _counting_class(type(module))  # type: ignore[arg-type]
        # PyTorch's fused kernel for this layer would apply the original activation.
        if isinstance(module, nn.TransformerEncoderLayer):
            is_replaced = isinstance(module.activation, nn.Module) and not isinstance(
                module.activation, nn.ReLU | nn.GELU
            )
            if has_wrapped or is_replaced:
                module.activation_relu_or_gelu = 0
        # Nested tensors require that kernel.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def replace_module(model: nn.Module, module: nn.Module, layer: nn.Module) -> None:
    """Replace a module wherever it is a child, in place."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = layer
