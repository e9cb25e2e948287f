"""Put PReLUs in place of the ReLU calls of a network, and check that nothing changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nlbench.errors import RequestError
from nlbench.probes.sites import evaluation_mode

from ._relu_calls import (
    CHILD,
    Calls,
    PReLUPerCall,
    ReLUCall,
    SparsePReLU,
    find_calls,
    follow_calls,
)

__all__ = ["first_line", "inputs_of", "replace_calls", "returns_same", "run_watched"]

AGREEMENT = 1e-6
"""Relative difference up to which the network counts as unchanged."""


def inputs_of(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Give the example as a tuple; by default noise that fits the first layer."""
    if isinstance(example, Tensor):
        return (example,)
    if example is not None:
        return tuple(example)
    axes = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    first = next((m for m in model.modules() if type(m) in axes), None)
    if first is None:
        raise RequestError("sparsify needs an example input to see the channels; give example=")
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    weight: Tensor = first.weight  # type: ignore[assignment]
    shape = (2, int(channels), *(32,) * axes[type(first)])  # type: ignore[arg-type]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (noise.to(weight.device, weight.dtype),)


def run_watched(model: nn.Module, inputs: tuple[Tensor, ...]) -> Calls:
    """See what an evaluation pass calls, and what the model returned."""
    try:
        with evaluation_mode(model):
            return find_calls(model, inputs)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        shapes = ", ".join(str(tuple(given.shape)) for given in inputs)
        raise RequestError(
            f"the model can't be run on an example of shape {shapes}: {first_line(error)}"
        ) from error


def replace_calls(model: nn.Module, calls: list[ReLUCall], layerwise: bool) -> None:
    """Change a model so that each of its calls has a PReLU of its own."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(call.units, layerwise=layerwise, axis=call.axis)
        layer.to(call.device, call.dtype).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    follow = False
    for owner, layers in by_owner.items():
        made = layers[0] if len(layers) == 1 else PReLUPerCall(layers).train(model.training)
        follow |= made is not layers[0] or type(owner) is not nn.ReLU
        if type(owner) is nn.ReLU and owner is not model:
            for parent in list(model.modules()):
                for name, child in parent._modules.items():
                    if child is owner:
                        parent._modules[name] = made
        else:
            name = _free_name(owner)
            owner.add_module(name, made)
            setattr(owner, CHILD, name)
    if follow or type(model) is nn.ReLU:
        follow_calls(model)
    for module in model.modules():
        # What PyTorch's fused kernel for such a layer goes by: it would apply a ReLU.
        if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu == 1:
            module.activation_relu_or_gelu = 0
        # Padding packed away is for that kernel alone.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _free_name(module: nn.Module) -> str:
    number, name = 0, "relu"
    while hasattr(module, name):
        number += 1
        name = f"relu_{number}"
    return name


def returns_same(before: Any, after: Any) -> bool:
    """Tell whether two outputs of a model hold the same numbers."""
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(
        torch.allclose(old, new, rtol=AGREEMENT, atol=AGREEMENT, equal_nan=True)
        for old, new in pairs
        if isinstance(old, Tensor)
    )


def first_line(error: Exception) -> str:
    """Shorten an error of the model's own to its first line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
