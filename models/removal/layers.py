"""Affine layers that replace removed calls in a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.wrapped_calls import count_call, wrap_calls
from nlbench.probes.replacement.interception import first_tensor

REMOVED = "removed_calls"
"""Name of the child that replaces activation calls in a module's own forward."""


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


def replace_calls_of(owner: nn.Module, layers: Mapping[int, nn.Module]) -> None:
    """Replace activation calls in a module's own forward, keyed by their index in the pass."""
    owner.add_module(REMOVED, nn.ModuleDict({str(n): layer for n, layer in layers.items()}))
    wrap_calls(owner, _apply_layer, REMOVED)


def _apply_layer(layers: nn.Module, call: FunctionCall) -> Any:
    layer = layers._modules.get(str(count_call(layers)))
    return call.run() if layer is None else layer(call.input)
