"""Sparsified PReLUs: build and linearise networks, unit by unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line
from nlbench.introspection.model_copy import rebound_copy
from nlbench.introspection.model_state import refuse_unobservable

from .relu_calls import SparsePReLU, call_counts_text, find_calls, outputs_agree, replace_calls

MIN_ROOT_DISTANCE = 1e-4
"""Distance from slope 1 below which the penalty is linear, so that its gradient is finite."""


def sparsify(
    model: nn.Module, *, layerwise: bool = False, example: Tensor | tuple[Tensor, ...] | None = None
) -> nn.Module:
    """Copy a network and replace every ReLU call by a PReLU with slope 0.

    The network's function, module names and weights don't change. A `torch.nn.ReLU` that is called
    once is replaced in place. If it is called several times, it gets one PReLU per call:
    ``relu.0``, ``relu.1``, …. A module whose forward calls ReLU as a function gets a child
    ``relu``. Calls that don't occur in evaluation mode, such as those in auxiliary heads, are not
    replaced, nor are other activations, such as ReLU6 and hardswish.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    layerwise : bool
        Use one slope per call instead of one per channel.
    example : tensor or tuple of tensor
        Inputs on the model's device, batch first, used to find the channels. By default noise that
        fits the first linear or convolutional layer.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    nlbench.RequestError
        If the network calls no ReLU, is already sparsified, can't be copied or run on the example,
        or would change its output because it reads a tensor that a ReLU overwrites.

    See Also
    --------
    nlbench.models.sparsified.relu_calls.other_activations : counts other activations.

    References
    ----------
    C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks Might
    Not Be As Complex as You Think. ICML, 2023.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> network[1], nonlinear_units(network)
    (SparsePReLU(3), {'1': (3, 3)})
    """
    refuse_unobservable(model)
    if not isinstance(layerwise, bool):
        raise RequestError(f"layerwise is {layerwise!r}, expected true or false")
    if any(isinstance(module, SparsePReLU) for module in model.modules()):
        raise RequestError("the model is already sparsified; call snap or randomize on it")
    try:
        twin = rebound_copy(model)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"the model can't be copied: {first_line(error)}") from error
    before = find_calls(twin, example)
    if not before.relus:
        others = f"; {call_counts_text(before.others)} can't be linearised" if before.others else ""
        raise RequestError(f"the model calls no ReLU, so there is nothing to linearise{others}")
    replace_calls(twin, before.relus, layerwise)
    after = find_calls(twin, example)
    if after.relus:
        names = {module: name for name, module in twin.named_modules()}
        owner = names.get(after.relus[0].owner) or "the network"
        raise RequestError(f"{owner} calls a ReLU that is not a submodule; register it")
    if not outputs_agree(before.output, after.output):
        raise RequestError(
            "the model relies on a ReLU that overwrites its input, so a PReLU would change the "
            "model's output"
        )
    return twin


def penalty(model: nn.Module, power: float = 0.5) -> Tensor:
    """Compute the distance from linearity, ``Σ |1 − α|^power`` over the units that aren't frozen.

    Within 1e-4 of α = 1, where the gradient diverges, the power is replaced by a straight line. A
    layer-wise slope counts once per channel.

    Parameters
    ----------
    model : torch.nn.Module
        From `sparsify`.
    power : float
        Greater than 0.

    Returns
    -------
    scalar tensor
        Differentiable; multiply it by ω and add it to the loss.

    Raises
    ------
    nlbench.RequestError
        If the model is not sparsified, or the power is not positive.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> penalty(network).item()
    3.0
    """
    if not power > 0:
        raise RequestError(f"penalty: power is {power}, expected a positive number")
    terms = []
    for _, layer in _layers(model):
        distance = (1 - layer.weight).abs()
        # Without the clamp, the branch that `where` doesn't take would have a NaN gradient.
        root = distance.clamp(min=MIN_ROOT_DISTANCE) ** power
        line = distance * MIN_ROOT_DISTANCE ** (power - 1)
        term = torch.where(distance < MIN_ROOT_DISTANCE, line, root)
        term = term.masked_fill(layer.frozen, 0.0).sum()
        terms.append(term * layer.units if layer.layerwise else term)
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def snap(model: nn.Module, tolerance: float = 0.01) -> int:
    """Linearise the units whose slope is within `tolerance` of 1, or above 1.

    Their slope is set to 1 and frozen: it gets no gradient, and the next call undoes any update
    due to the optimiser's momentum. Slopes start at 0, so a slope above 1 has crossed 1. Call this
    after each optimiser step.

    Parameters
    ----------
    model : torch.nn.Module
        From `sparsify`.
    tolerance : float

    Returns
    -------
    int
        Number of units that became linear in this call.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> with torch.no_grad():
    ...     _ = network[1].weight.copy_(torch.tensor([0.5, 0.995, 1.2]))
    >>> snap(network), network[1].weight.tolist()
    (2, [0.5, 1.0, 1.0])
    """
    count = 0
    with torch.no_grad():
        for _, layer in _layers(model):
            is_new = ~layer.frozen & (1 - layer.weight <= tolerance)
            count += int(is_new.sum()) * (layer.units if layer.layerwise else 1)
            layer.frozen |= is_new
            layer.weight.masked_fill_(layer.frozen, 1.0)
    return count


def linear_share(model: nn.Module) -> float:
    """Compute the fraction of units (channels of ReLU calls) with slope 1.

    Examples
    --------
    >>> linear_share(sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
    0.0
    """
    counts = nonlinear_units(model).values()
    return 1 - sum(active for active, _ in counts) / sum(units for _, units in counts)


def nonlinear_units(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Count the nonlinear units and all units of each layer.

    Returns
    -------
    dict of str to (int, int)
        Keyed by the name of the PReLU, in registration order.
    """
    return {name: (layer.units - layer.linear_units, layer.units) for name, layer in _layers(model)}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups for an optimiser, without weight decay on the slopes.

    Weight decay would pull a slope towards 0, away from linearity.

    Parameters
    ----------
    model : torch.nn.Module
    weight_decay : float
        Weight decay of all other parameters.
    """
    slopes = [layer.weight for _, layer in _layers(model)]
    slope_ids = {id(slope) for slope in slopes}
    others = [parameter for parameter in model.parameters() if id(parameter) not in slope_ids]
    return [
        {"params": others, "weight_decay": weight_decay},
        {"params": slopes, "weight_decay": 0.0},
    ]


def randomize(model: nn.Module, share: float, seed: int) -> int:
    """Linearise and freeze a random fraction of all units, as a control.

    Parameters
    ----------
    model : torch.nn.Module
        From `sparsify`, with one slope per channel.
    share : float
        Fraction β of all units, from 0 to 1, rounded to whole units.
    seed : int

    Returns
    -------
    int
        Number of units drawn.

    Raises
    ------
    nlbench.RequestError
        If `share` is out of bounds or the slopes are layer-wise.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)))
    >>> randomize(network, 0.5, seed=0), linear_share(network)
    (2, 0.5)
    """
    if not 0 <= share <= 1:
        raise RequestError(f"share is {share}, expected 0 to 1")
    layers = [layer for _, layer in _layers(model)]
    if any(layer.layerwise for layer in layers):
        raise RequestError("randomize requires one slope per channel; this model's are layer-wise")
    units = sum(layer.units for layer in layers)
    count = round(share * units)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    is_drawn = torch.zeros(units, dtype=torch.bool)
    is_drawn[order[:count]] = True
    masks = torch.split(is_drawn, [layer.units for layer in layers])
    with torch.no_grad():
        for layer, mask in zip(layers, masks, strict=True):
            layer.frozen |= mask.to(layer.frozen.device)
            layer.weight.masked_fill_(layer.frozen, 1.0)
    return count


def checkpoint_metadata(model: nn.Module) -> dict[str, str]:
    """Return the checkpoint metadata needed to load a sparsified model.

    Examples
    --------
    >>> checkpoint_metadata(sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    {'transform': 'sparsify', 'transform_options': '{"layerwise": false}'}
    """
    return transform_metadata(next(layer.layerwise for _, layer in _layers(model)))


def transform_metadata(layerwise: bool) -> dict[str, str]:
    """Return the checkpoint metadata for a sparsified network."""
    options = {"layerwise": layerwise}
    return {"transform": "sparsify", "transform_options": json.dumps(options)}


def _layers(model: nn.Module) -> Iterator[tuple[str, SparsePReLU]]:
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, SparsePReLU)]
    if not layers:
        raise RequestError("the model has no sparsified PReLU; call sparsify on it first")
    return iter(layers)
