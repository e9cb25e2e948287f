"""Replacement of ReLU calls by layers, including calls of ReLU as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from nlbench.errors import RequestError
from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.wrapped_calls import (
    count_call,
    replace_module,
    track_calls,
    wrap_calls,
)

from .layers import SparsePReLU
from .relu_calls import ReLUCall


def _apply_slopes(layers: nn.Module, call: FunctionCall) -> Any:
    """Replace a ReLU call by the only PReLU, or by the one for this call in the forward pass."""
    if call.operation.kind != "relu":
        return call.run()
    if isinstance(layers, SparsePReLU):
        return layers(call.input)
    number = count_call(layers)
    if str(number) not in layers._modules:
        raise RequestError(
            f"a ReLU is called {number + 1} times in one forward pass, but was called "
            f"{len(layers._modules)} times on the example passed to sparsify"
        )
    return getattr(layers, str(number))(call.input)


def replace_calls(model: nn.Module, calls: Sequence[ReLUCall], layerwise: bool) -> None:
    """Replace each ReLU call of a model by a PReLU, in place."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(call.units, layerwise=layerwise, axis=call.axis)
        layer.to(call.device, call.dtype).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    for owner, layers in by_owner.items():
        is_module = type(owner) is nn.ReLU and owner is not model
        if is_module and len(layers) == 1:
            replace_module(model, owner, layers[0])
        elif is_module:
            for number, layer in enumerate(layers):
                owner.add_module(str(number), layer)
            wrap_calls(owner, _apply_slopes)
        else:
            name = _free_name(owner)
            several = nn.ModuleList(layers).train(model.training)
            owner.add_module(name, layers[0] if len(layers) == 1 else several)
            wrap_calls(owner, _apply_slopes, name)
    track_calls(model)


def _free_name(module: nn.Module) -> str:
    number, name = 0, "relu"
    while hasattr(module, name):
        number += 1
        name = f"relu_{number}"
    return name
