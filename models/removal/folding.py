"""Affine maps of removed activations, folded into the layers whose outputs they read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import tensors_in
from nlbench.introspection.model_state import evaluation_mode

from .layers import AffineActivation

FOLDING_TOLERANCE = 1e-9
"""Tolerance for outputs in float64 after a fold, relative to the largest one."""


def fold_activations(network: nn.Module, inputs: Tensor) -> tuple[nn.Module, int, int]:
    """Copy a network, with maps of activations folded into the layers before them.

    A map folds into a convolution, a linear layer or a batch norm if nothing else reads that
    layer's output. Each fold is checked in float64, and undone if it changes the outputs. A folded
    map becomes an `torch.nn.Identity`.

    Parameters
    ----------
    network : torch.nn.Module
        From `nlbench.models.removal.network.network_with_maps`. Not modified.
    inputs : tensor of shape (n, ...)

    Returns
    -------
    network : torch.nn.Module
        In evaluation mode.
    folded, maps : int
        Number of folded maps, and of all.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), AffineActivation(3), nn.Linear(3, 1))
    >>> fold_activations(model, torch.zeros(2, 2))[0][1]
    Identity()
    """
    twin = copy.deepcopy(network).eval().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    layers = [module for module in twin.modules() if isinstance(module, AffineActivation)]
    folded = 0
    with torch.no_grad(), evaluation_mode(twin), without_fast_path():
        expected = _outputs(twin, inputs)
        for layer, producer in _find_producers(twin, inputs).items():
            before = [copy.deepcopy(module.state_dict()) for module in (layer, producer)]
            had_bias = producer.bias is not None
            _absorb(producer, layer)
            if _are_equal(_outputs(twin, inputs), expected):
                _replace_everywhere(twin, layer, nn.Identity())
                folded += 1
                continue
            if not had_bias:
                producer.bias = None
            for module, state in zip((layer, producer), before, strict=True):
                module.load_state_dict(state)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return twin.to(dtype), folded, len(layers)


def _find_producers(network: nn.Module, inputs: Tensor) -> dict[AffineActivation, Any]:
    """Return the layer whose output each map reads, for layers and maps that are called once."""
    outputs: list[tuple[Tensor, nn.Module]] = []
    reads: list[tuple[AffineActivation, Tensor]] = []

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output, module))

    def note_input(module: nn.Module, args: Any) -> None:
        assert isinstance(module, AffineActivation)
        reads.append((module, args[0]))

    handles = []
    for module in network.modules():
        if isinstance(module, AffineActivation):
            handles.append(module.register_forward_pre_hook(note_input))
        elif _can_absorb(module):
            handles.append(module.register_forward_hook(note_output))
    try:
        network(inputs.clone())
    finally:
        for handle in handles:
            handle.remove()
    producers: dict[AffineActivation, Any] = {}
    callers = [module for _, module in outputs]
    for layer, x in reads:
        source = next((module for output, module in outputs if output is x), None)
        is_single = source is not None and callers.count(source) == 1
        if is_single and sum(other is layer for other, _ in reads) == 1:
            axis = x.ndim - 1 if isinstance(source, nn.Linear) else 1
            if layer.axis % x.ndim == axis and x.shape[axis] == len(layer.weight):
                producers[layer] = source
    return producers


def _can_absorb(module: nn.Module) -> bool:
    """Return True for layers whose output channels are rows of a weight."""
    if parametrize.is_parametrized(module) or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return module.affine and module.track_running_stats
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _absorb(producer: Any, layer: AffineActivation) -> None:
    """Fold a map into the layer before it, in place, and make the map an identity."""
    slope = layer.weight.clone()
    intercept = layer.bias.clone()
    producer.weight.mul_(slope.view(-1, *[1] * (producer.weight.ndim - 1)))
    if producer.bias is None:
        producer.bias = nn.Parameter(torch.zeros_like(intercept))
    producer.bias.mul_(slope).add_(intercept)
    layer.weight.fill_(1)
    layer.bias.zero_()


def _replace_everywhere(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in network.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _outputs(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    return list(tensors_in((network(inputs.clone()),)))


def _are_equal(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        float((a - b).abs().max()) <= FOLDING_TOLERANCE * max(1e-300, float(b.abs().max()))
        for a, b in zip(outputs, expected, strict=True)
    )
