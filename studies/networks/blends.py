"""The transform ``blend``: (1 - t) x + t φ(x) in place of every activation of a network."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from nlbench.errors import RequestError

from .formulas import Formula

BLENDED: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}
"""Formulas by activation."""


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
    activations = [entry for entry in parents if type(entry[2]) in BLENDED]
    if not activations:
        raise RequestError("the network has no modules ReLU, ReLU6, SiLU or GELU to blend")
    for parent, name, module in activations:
        setattr(parent, name, Formula(BLENDED[type(module)], amount))
    return twin
