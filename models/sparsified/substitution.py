"""Replacement of ReLU calls by layers, including calls of ReLU as a function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

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


class PReLUPerCall(nn.Module):
    """Replacement for a ReLU that is called several times, with one PReLU per call.

    Parameters
    ----------
    calls : iterable of SparsePReLU
        In call order.
    """

    def __init__(self, calls: Iterable[SparsePReLU]) -> None:
        super().__init__()
        for index, call in enumerate(calls):
            self.add_module(str(index), call)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the PReLU for this call."""
        index = count_call(self)
        if str(index) not in self._modules:
            raise RequestError(
                f"a ReLU is called {index + 1} times in one forward pass, but was called "
                f"{len(self._modules)} times on the example passed to sparsify"
            )
        output: Tensor = getattr(self, str(index))(input)
        return output


def _apply_slopes(layer: nn.Module, call: FunctionCall) -> Any:
    return layer(call.input) if call.operation.kind == "relu" else call.run()


def replace_calls(model: nn.Module, calls: Sequence[ReLUCall], layerwise: bool) -> None:
    """Replace each ReLU call of a model by a PReLU, in place."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(call.units, layerwise=layerwise, axis=call.axis)
        layer.to(call.device, call.dtype).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    for owner, layers in by_owner.items():
        substitute = layers[0] if len(layers) == 1 else PReLUPerCall(layers).train(model.training)
        if type(owner) is nn.ReLU and owner is not model:
            replace_module(model, owner, substitute)
        else:
            name = _free_name(owner)
            owner.add_module(name, substitute)
            wrap_calls(owner, _apply_slopes, name)
    track_calls(model, counters=PReLUPerCall)


def _free_name(module: nn.Module) -> str:
    number, name = 0, "relu"
    while hasattr(module, name):
        number += 1
        name = f"relu_{number}"
    return name
