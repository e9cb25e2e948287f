"""Sparsified PReLU: a network whose ReLU units can be made linear one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line
from nlbench.introspection.model_state import refuse_unobservable

from .surgery import (
    SparsePReLU,
    find_calls,
    call_counts_text,
    replace_calls,
    returns_same,
)

__all__ = [
    "checkpoint_metadata",
    "linear_share",
    "nonlinear_units",
    "parameter_groups",
    "penalty",
    "randomize",
    "snap",
    "sparsify",
    "transform_metadata",
]


CUSP = 1e-4
"""Nearer than this to slope 1 the penalty is a straight line, so that its gradient is finite."""


def sparsify(
    model: nn.Module,
    *,
    layerwise: bool = False,
    example: Tensor | tuple[Tensor, ...] | None = None,
) -> nn.Module:
    """Copy a network with a PReLU of slope 0 in place of every ReLU call.

    The network's function, its modules' names and its weights stay as they are. A
    `torch.nn.ReLU` that is called once is replaced where it stands; one that is called
    several times gets one PReLU a call, ``relu.0``, ``relu.1``, …; where a module's forward
    calls ReLU as a function, the module gets a child ``relu``. Calls that an evaluation
    pass on the example doesn't make, such as those of auxiliary heads that only train,
    stay ReLUs; other activations, as ReLU6 and hardswish, stay too.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is.
    layerwise : bool
        One slope a call in place of one a channel.
    example : tensor or tuple of tensor
        Inputs with the batch first, on the model's device: they show which channels there
        are. By default noise that fits the first linear or convolutional layer.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    nlbench.RequestError
        If the network calls no ReLU, is sparsified already, can't be copied or run on the
        example, or would not compute the same, as one that reads a tensor after ReLU has
        overwritten it.

    See Also
    --------
    nlbench.models.sparsified.surgery.other_activations : counts what stays.

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
        raise RequestError("the model is sparsified already; call snap or randomize on it")
    try:
        twin = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"the model can't be copied: {first_line(error)}") from error
    before = find_calls(twin, example)
    if not before.relus:
        others = f"; {call_counts_text(before.others)} can't be" if before.others else ""
        raise RequestError(f"the model calls no ReLU, so there is nothing to make linear{others}")
    replace_calls(twin, before.relus, layerwise)
    after = find_calls(twin, example)
    if after.relus:
        names = {module: name for name, module in twin.named_modules()}
        where = names.get(after.relus[0].owner) or "the network"
        raise RequestError(f"{where} calls a ReLU that is not among its modules; register it")
    if not returns_same(before.output, after.output):
        raise RequestError(
            "the model relies on a ReLU that overwrites its input, so that a PReLU would "
            "change what it computes"
        )
    return twin


def penalty(model: nn.Module, power: float = 0.5) -> Tensor:
    """Distance from linear: Σ |1 − α|^power over the units that are not frozen.

    Within 1e-4 of α = 1, where the gradient diverges, the straight line through the
    root's value at that distance stands for it. A layer-wise slope counts once for each
    of its channels.

    Parameters
    ----------
    model : torch.nn.Module
        From `sparsify`.
    power : float
        Above 0.

    Returns
    -------
    scalar tensor
        Differentiable; to be multiplied by ω and added to the loss.

    Raises
    ------
    nlbench.RequestError
        If the model has no such slopes or the power is not above 0.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> penalty(network).item()
    3.0
    """
    if not power > 0:
        raise RequestError(f"penalty: power is {power}, expected above 0")
    terms = []
    for _, layer in _layers(model):
        distance = (1 - layer.weight).abs()
        # Clamped first: an infinite gradient of the branch not taken would still give NaN.
        root = distance.clamp(min=CUSP) ** power
        term = torch.where(distance < CUSP, distance * CUSP ** (power - 1), root)
        term = term.masked_fill(layer.frozen, 0.0).sum()
        terms.append(term * layer.units if layer.layerwise else term)
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def snap(model: nn.Module, tolerance: float = 0.01) -> int:
    """Make units linear whose slope has come within a tolerance of 1, or crossed it.

    Their slope is set to 1 and frozen: it gets no gradient any more, and whatever an
    optimiser's momentum still adds is taken back at the next call. Slopes start at 0, so
    one above 1 has crossed it. To be called after each step of the optimiser.

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
            arrived = ~layer.frozen & (1 - layer.weight <= tolerance)
            count += int(arrived.sum()) * (layer.units if layer.layerwise else 1)
            layer.frozen |= arrived
            layer.weight.masked_fill_(layer.frozen, 1.0)
    return count


def linear_share(model: nn.Module) -> float:
    """Share of the units, channels of ReLU calls, whose slope is 1.

    Examples
    --------
    >>> linear_share(sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
    0.0
    """
    counts = nonlinear_units(model).values()
    return 1 - sum(active for active, _ in counts) / sum(units for _, units in counts)


def nonlinear_units(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Count each layer's nonlinear units and all its units: the core network's shape.

    Returns
    -------
    dict of str to (int, int)
        By the name of the PReLU, in order of registration.
    """
    return {name: (layer.units - layer.linear_units, layer.units) for name, layer in _layers(model)}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort parameters into groups for an optimiser: no weight decay on the slopes.

    Decay would pull a slope toward 0, away from linear.

    Parameters
    ----------
    model : torch.nn.Module
    weight_decay : float
        Of all other parameters.
    """
    slopes = [layer.weight for _, layer in _layers(model)]
    own = {id(slope) for slope in slopes}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return [
        {"params": others, "weight_decay": weight_decay},
        {"params": slopes, "weight_decay": 0.0},
    ]


def randomize(model: nn.Module, share: float, seed: int) -> int:
    """Make a random share of all units linear and freeze them: the control.

    Parameters
    ----------
    model : torch.nn.Module
        From `sparsify`, with a slope a channel.
    share : float
        β, 0 to 1: of all units of the network, rounded to whole units.
    seed : int
        Decides which.

    Returns
    -------
    int
        How many units were drawn.

    Raises
    ------
    nlbench.RequestError
        If the share is out of bounds or the slopes are layer-wise.

    Examples
    --------
    >>> network = sparsify(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)))
    >>> randomize(network, 0.5, seed=0), linear_share(network)
    (2, 0.5)
    """
    if not 0 <= share <= 1:
        raise RequestError(f"random share is {share}, expected 0 to 1")
    layers = [layer for _, layer in _layers(model)]
    if any(layer.layerwise for layer in layers):
        raise RequestError("random units need a slope a channel; this model's are layer-wise")
    units = sum(layer.units for layer in layers)
    count = round(share * units)
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    drawn = torch.zeros(units, dtype=torch.bool)
    drawn[order[:count]] = True
    parts = torch.split(drawn, [layer.units for layer in layers])
    with torch.no_grad():
        for layer, part in zip(layers, parts, strict=True):
            layer.frozen |= part.to(layer.frozen.device)
            layer.weight.masked_fill_(layer.frozen, 1.0)
    return count


def checkpoint_metadata(model: nn.Module) -> dict[str, str]:
    """Give what a checkpoint of a sparsified model has to say of itself to be loaded again.

    Examples
    --------
    >>> checkpoint_metadata(sparsify(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    {'transform': 'sparsify', 'transform_options': '{"layerwise": false}'}
    """
    return transform_metadata(next(layer.layerwise for _, layer in _layers(model)))


def transform_metadata(layerwise: bool) -> dict[str, str]:
    """Say in a checkpoint's header that its network was sparsified."""
    options = {"layerwise": layerwise}
    return {"transform": "sparsify", "transform_options": json.dumps(options)}


def _layers(model: nn.Module) -> Iterator[tuple[str, SparsePReLU]]:
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, SparsePReLU)]
    if not found:
        raise RequestError("the model has no sparsified PReLU; call sparsify on it first")
    return iter(found)
