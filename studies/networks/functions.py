"""Networks that consist of one activation: ``functions/relu``, ``functions/power-3``, …."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, nearest, shorten
from nlbench.registry import Family
from nlbench.subjects.model import model

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS: Mapping[str, str] = {
    "elu": "ELU",
    "gelu": "GELU",
    "hardswish": "Hardswish",
    "hardtanh": "Hardtanh",
    "leaky-relu": "LeakyReLU",
    "mish": "Mish",
    "relu": "ReLU",
    "relu6": "ReLU6",
    "selu": "SELU",
    "sigmoid": "Sigmoid",
    "silu": "SiLU",
    "softplus": "Softplus",
    "tanh": "Tanh",
}
"""PyTorch modules by activation; all have their default parameters."""

MAX_ORDER = 999


class Functions(Family):
    """Networks that consist of one activation, for inputs of any shape.

    Examples
    --------
    >>> import torch
    >>> Functions().load("power-3")()(torch.tensor([[2.0, -1.0]])).tolist()
    [[8.0, -1.0]]
    """

    description = "one activation without weights; power-K for any integer K from 1 to 999"

    def names(self) -> Sequence[str]:
        """Return the names of the activations and of some powers."""
        return (*ACTIVATIONS, *(f"power-{order}" for order in (1, 2, 3, 5, 7, 11, 41)))

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        order = re.fullmatch(r"power-([0-9]{1,3})", name)
        if name not in ACTIVATIONS and not (order and 1 <= int(order[1]) <= MAX_ORDER):
            powers = f"; expected power-1 to power-{MAX_ORDER}"
            is_power = name.startswith("power")
            hint = powers if is_power else nearest(name, self.names(), "functions/")
            raise RequestError(f"there is no model 'functions/{shorten(name)}'{hint}")

        def build() -> nn.Module:
            from torch import nn

            from .formulas import Formula

            function = (
                Formula("power", int(order[1])) if order else getattr(nn, ACTIVATIONS[name])()
            )
            network = nn.Sequential()
            network.add_module("function", function)
            network.add_module("flat", nn.Flatten())  # One row per sample, like logits.
            return network

        build.__doc__ = f"Build {self.describe(name)}."
        return model()(build)

    def describe(self, name: str) -> str:
        """Return a one-line description of a network."""
        if name in ACTIVATIONS:
            return f"{ACTIVATIONS[name]} of each element"
        return f"each element to the power of {name.rpartition('-')[2]}"
