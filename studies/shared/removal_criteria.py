"""Removal criteria from gradients and weights, and a network's removal curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.introspection.module_stack import CallId
from nlbench.measure import Measure, Result, Value
from nlbench.models.removal.curve import Removal, area_under
from nlbench.probes.replacement import AffineFit, CallInterception, ReplaceableCall, find_calls
from nlbench.probes.replacement.fits import copy_to_rows
from nlbench.studies.framework.network_measure import network_measure
from nlbench.subjects.subject import Subject

LARGE_WEIGHT_FRACTION = 0.1
"""Fraction of a network's weights that SENet's criterion counts as large."""


def call_criteria(
    model: nn.Module,
    calls: Sequence[ReplaceableCall],
    inputs: Tensor,
    labels: Tensor,
    *,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Score the importance of calls. A higher score predicts a higher cost of removal.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    inputs : tensor of shape (n, ...)
    labels : tensor of shape (n,)
    seed : int
        Seed for the random criterion.

    Returns
    -------
    dict of str to dict of str to float
        Keyed by call and criterion. ŷ is the best affine map per channel of the input x, and g the
        gradient of a sample's cross-entropy with respect to the output y. ``residual``: mean
        square of y − ŷ. ``change``: mean of ‖y − x‖ / ‖x‖. ``taylor``: |E g·(ŷ − y)|, the
        first-order change in loss. ``fisher``: E (g·(ŷ − y))². ``senet``: 1 − the fraction of
        large weights in the preceding layer, SENet's sensitivity with magnitude pruning.
        ``depth``: number of later calls. ``size``: number of channels. ``random``: random number.
    """
    recorded = gradients_at_calls(model, calls, inputs, labels)
    draws = random.Random(seed)
    density = _weight_density(model)
    table = {}
    for index, call in enumerate(calls):
        x, y, gradient = recorded[call.name]
        fit = AffineFit()
        fit.add(copy_to_rows(x, call.channel_axis), copy_to_rows(y, call.channel_axis))
        error = fit.per_channel()(x, call.channel_axis) - y
        terms = (gradient * error).flatten(1).sum(1).double()
        norms = (y - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        table[call.name] = {
            "residual": float(error.square().mean()),
            "change": float(norms.mean()),
            "taylor": float(terms.mean().abs()),
            "fisher": float(terms.square().mean()),
            "senet": 1 - density[call.call.path],
            "depth": float(len(calls) - 1 - index),
            "size": float(call.channels),
            "random": draws.random(),
        }
    return table


def gradients_at_calls(
    model: nn.Module, calls: Sequence[ReplaceableCall], inputs: Tensor, labels: Tensor
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return inputs, outputs and gradients of the cross-entropy with respect to the outputs.

    Returns
    -------
    dict of str to tuple of three tensors
        Keyed by call.
    """
    recorded: dict[str, tuple[Tensor, Tensor]] = {}
    by_call = {call.call: call for call in calls}

    def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        if identity not in by_call:
            return compute()
        before = x.detach().clone()
        # The network may overwrite the output later.
        y = compute().clone()
        y.retain_grad()
        recorded[by_call[identity].name] = before, y
        return y.clone()

    with torch.enable_grad():
        copied = inputs.clone().requires_grad_()
        logits = CallInterception(model).run(copied * 1, replace)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    gradients = {}
    for name, (x, y) in recorded.items():
        assert y.grad is not None
        gradients[name] = x, y.detach(), y.grad
    return gradients


def _weight_density(model: nn.Module) -> dict[str, float]:
    """Return the fraction of large weights in the layer before each module."""
    layers = {
        path: module.weight.detach().abs().flatten()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    }
    magnitudes = torch.cat(list(layers.values()))
    threshold = torch.quantile(magnitudes, 1 - LARGE_WEIGHT_FRACTION)
    density = {}
    latest = 0.0
    for path, _ in model.named_modules():
        if path in layers:
            latest = float((layers[path] >= threshold).double().mean())
        density[path] = latest
    return density


def criteria_measure(train: Subject, seed: int) -> type[Measure]:
    """Return a measure of a network's `call_criteria`. ``value`` is the residual."""

    def removal_criteria(_: Any) -> Result:
        """Criteria of the activation calls of one network."""
        assert train.labels is not None
        calls = find_calls(train.model, train.inputs[:2])
        table = call_criteria(train.model, calls, train.inputs, train.labels, seed=seed)
        return Result.of(
            [Value(name, {"value": row["residual"], **row}) for name, row in table.items()]
        )

    return network_measure("removal-criteria", removal_criteria)


def curves_measure(
    train: Subject, test: Subject, criteria: Mapping[str, Mapping[str, float]]
) -> type[Measure]:
    """Return a measure of a network's removal curves.

    Parameters
    ----------
    train, test : Subject
        Samples used for fitting and for evaluation, respectively.
    criteria : mapping of str to mapping of str to float
        Keyed by criterion and call; the call with the smallest value is removed first.
    """

    def removal_curves(_: Any) -> Result:
        """Areas under the removal curves: ``value`` for accuracy, ``kl`` for the divergence."""
        calls = find_calls(train.model, train.inputs[:2])
        removal = Removal(train.model, calls, train.inputs, test.inputs, test.labels)
        cached: dict[frozenset[str], Any] = {}

        def step(removed: Sequence[str]) -> Any:
            key = frozenset(removed)
            if key not in cached:
                cached[key] = removal.step(removed)
            return cached[key]

        values = []
        for criterion, scores in criteria.items():
            order = sorted((call.name for call in calls), key=lambda n: scores[n])
            steps = [step(order[:count]) for count in range(len(order) + 1)]
            areas = {
                "value": area_under(steps, "accuracy"),
                "kl": area_under(steps, "kl"),
                "value_flops": area_under(steps, "accuracy", "flops"),
            }
            values.append(Value(criterion, areas))
        return Result.of(values)

    return network_measure("removal-curves", removal_curves)
