"""The transform ``blend``: (1 - t) x + t φ(x) in place of every activation of a network."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import RequestError

from .formulas import Formula

BLENDED: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}
"""Formulas by activation."""
BLENDED_BY_NAME = {"GELUActivation": "gelu", "SiLUActivation": "silu"}
"""Formulas by the class name of activations of transformers, which needn't be installed."""


class BlendedPReLU(nn.PReLU):
    """(1 - t) x + t PReLU(x), a PReLU with another slope. Its state is that of the original."""

    def __init__(self, original: nn.PReLU, amount: float) -> None:
        super().__init__(original.num_parameters)
        self.weight = original.weight
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        """Return the blend, of the shape of `x`."""
        return functional.prelu(x, 1 - self.amount + self.amount * self.weight)


def blend(model: nn.Module, *, amount: float, example: Any = None) -> nn.Module:
    """Copy a network and blend its activations with the identity.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    amount : float
        With 0 all activations are the identity, with 1 the network is the original.
    example : object
        Ignored; every transform takes it.

    Raises
    ------
    nlbench.RequestError
        If no module of the network is a known activation.

    Examples
    --------
    >>> import torch
    >>> blend(nn.Sequential(nn.ReLU()), amount=0.25)(torch.tensor([-4.0, 4.0])).tolist()
    [-3.0, 4.0]
    """
    twin = copy.deepcopy(model)
    parents = [(m, n, c) for m in twin.modules() for n, c in m.named_children()]
    blends = [(parent, name, _blended(module, amount)) for parent, name, module in parents]
    if all(blended is None for *_, blended in blends):
        raise RequestError("the network has no modules ReLU, ReLU6, PReLU, SiLU or GELU to blend")
    for parent, name, blended in blends:
        if blended is not None:
            setattr(parent, name, blended)
    return twin


def _blended(module: nn.Module, amount: float) -> nn.Module | None:
    """Return the blend of an activation with the identity, or None for other modules."""
    if type(module) is nn.PReLU:
        return BlendedPReLU(module, amount)
    formula = BLENDED.get(type(module)) or BLENDED_BY_NAME.get(type(module).__name__)
    return Formula(formula, amount) if formula else None
