"""Affine layers that replace removed calls in a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.module_stack import running_module
from nlbench.probes.replacement.interception import first_tensor

REMOVED = "removed_calls"
"""Name of the child that replaces activation calls in a module's own forward."""

# Number of calls of each module in the current forward pass. It is not stored in the modules, so
# that copies of a network and other threads count separately.
_CALLS: ContextVar[Counter[nn.Module] | None] = ContextVar("calls", default=None)


class AffineActivation(nn.Module):
    """Replacement for an activation, with one slope and one intercept per channel.

    Parameters
    ----------
    axis : int
        Channel axis of the input.

    Examples
    --------
    >>> AffineActivation(2)(torch.tensor([[-1.0, 2.0]])).tolist()
    [[-1.0, 2.0]]
    """

    def __init__(self, channels: int, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        """Scale and shift each channel."""
        shape = [1] * input.ndim
        shape[self.axis] = -1
        return input * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Return the number of channels and the axis."""
        return f"{len(self.weight)}, axis={self.axis}"


class AffineModule(nn.Module):
    """Replacement for a module: a full affine map of the channels, initially the identity.

    Parameters
    ----------
    original : torch.nn.Module
        The module to replace. Its plain attributes are copied, since a network may read them.
    inputs, outputs : int
        Numbers of channels.
    axis : int
        Channel axis of the input, which is the first tensor among the arguments.
    others : int or None
        Number of additional outputs, which are all None; None to return a tensor, not a tuple.

    Examples
    --------
    >>> layer = AffineModule(nn.ReLU(), 2, 3, 1, others=1)
    >>> output, attention_weights = layer(torch.tensor([[-1.0, 2.0]]))
    >>> output.tolist(), attention_weights
    ([[-1.0, 2.0, 0.0]], None)
    """

    def __init__(
        self, original: nn.Module, inputs: int, outputs: int, axis: int, others: int | None = None
    ) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        self.axis, self.others = axis, others
        self.weight = nn.Parameter(torch.eye(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the map to the channels of the first tensor."""
        x = first_tensor((*args, *kwargs.values()))
        assert x is not None
        output = (x.movedim(self.axis, -1) @ self.weight + self.bias).movedim(-1, self.axis)
        return output if self.others is None else (output, *[None] * self.others)

    def extra_repr(self) -> str:
        """Return the numbers of channels and the axis."""
        return f"{len(self.weight)}, {len(self.bias)}, axis={self.axis}"


class _CountingModule(nn.Module):
    """Base class for modules with removed calls and for modules that contain them.

    The counts are reset around each forward pass, not in hooks, which an interrupt would skip.
    """

    original: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _CALLS.set(Counter()) if _CALLS.get() is None else None
        try:
            if REMOVED not in self._modules:
                return super().__call__(*args, **kwargs)
            with _CallReplacement(self):
                return super().__call__(*args, **kwargs)
        finally:
            if token is not None:
                _CALLS.reset(token)

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


class _CallReplacement(TorchFunctionMode):
    """Mode that replaces activation calls in a module's own forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._descendants = module, set(module.modules())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        counts = _CALLS.get()
        is_activation = bool(call.operation.kind) and isinstance(call.input, Tensor)
        if counts is None or not is_activation:
            return call.run()
        # Calls inside a child are skipped.
        if running_module(self._descendants) is not self._module:
            return call.run()
        index = counts[self._module]
        counts[self._module] += 1
        removed = self._module._modules[REMOVED]
        replacement = None if removed is None else removed._modules.get(str(index))
        return call.run() if replacement is None else replacement(call.input)


def replace_calls_of(owner: nn.Module, layers: Mapping[int, nn.Module]) -> None:
    """Replace activation calls in a module's own forward, keyed by their index in the pass."""
    owner.add_module(REMOVED, nn.ModuleDict({str(n): layer for n, layer in layers.items()}))


def track_calls(model: nn.Module) -> None:
    """Make every module that contains removed calls count its calls, in place."""
    for module in list(model.modules()):
        if any(REMOVED in inner._modules for inner in module.modules()):
            module.__class__ = _counting_class(type(module))  # type: ignore[arg-type]
        # PyTorch's fused kernel for this layer would apply the original activation.
        if isinstance(module, nn.TransformerEncoderLayer) and REMOVED in module._modules:
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
