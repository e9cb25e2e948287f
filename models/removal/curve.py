"""Remove a network's calls in the order of a criterion, and evaluate the remaining networks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nlbench
from nlbench import registry
from nlbench.errors import RequestError, Undefined, nearest
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import CallId
from nlbench.measure.contract import load_measure
from nlbench.measures.accuracy import IGNORED_LABEL
from nlbench.measures.substitution import are_probabilities, divergence, log_probabilities
from nlbench.options import OptionValue
from nlbench.probes.replacement import (
    AffineFit,
    AffineMap,
    CallInterception,
    ReplaceableCall,
    find_calls,
)
from nlbench.probes.replacement.fits import copy_to_rows
from nlbench.probes.replacement.interception import get_tensor
from nlbench.probes.replacement.prefix import replace_output, run_replaced
from nlbench.subjects.subject import Subject

from .network import network_with_maps, transform_metadata

SIMPLE_CRITERIA = ("random", "depth", "size")
"""Orders without a measure: at random, from the last call, and the fewest channels first."""


def check_criterion(criterion: str) -> None:
    """Raise `nlbench.RequestError` unless a criterion ranks activation calls."""
    measures = registry.entries("measures")
    if criterion in SIMPLE_CRITERIA:
        return
    if criterion not in measures:
        raise RequestError(
            f"--by: unknown criterion '{criterion}'"
            f"{nearest(criterion, [*SIMPLE_CRITERIA, *measures])}; expected a measure of sites, "
            f"substitution, {' or '.join(SIMPLE_CRITERIA)}"
        )
    probe = load_measure(criterion).probe
    if probe not in ("sites", "replacement"):
        raise RequestError(
            f"--by: {criterion} is a measure of {probe}, which has no values at activation calls"
        )


def removal_order(
    criterion: str,
    model: nn.Module,
    calls: Sequence[ReplaceableCall],
    inputs: Tensor,
    labels: Tensor | None,
    *,
    seed: int = 0,
    settings: Mapping[str, OptionValue | str] | None = None,
    statistic: str = "value",
    reverse: bool = False,
) -> list[str]:
    """Return the names of calls in the order in which to remove them.

    The criterion is one of `SIMPLE_CRITERIA`, of which the random one has a seed, or a measure with
    a value per site. The call with the smallest value comes first, or the one with the largest
    value if the measure is larger for calls close to affine. Calls without a value come last.

    Parameters
    ----------
    statistic : str
        Statistic of the measure to rank by, where it has this one; otherwise its value.
    """
    check_criterion(criterion)
    names = [call.name for call in calls]
    if criterion == "random":
        order = random.Random(seed).sample(names, len(names))
    elif criterion == "depth":
        order = names[::-1]
    elif criterion == "size":
        order = [call.name for call in sorted(calls, key=lambda call: call.channels)]
    else:
        run = nlbench.evaluate(model, inputs, [criterion], labels=labels, settings=settings or {})
        result = run[criterion]
        values = {
            v.place: v.statistics.get(statistic, v.statistics["value"])
            for v in result.values
            if v.status == "ok"
        }
        if not values.keys() & set(names):
            raise RequestError(
                f"--by: {criterion} has no value at any of the calls: {result.reason}"
            )
        sign = -1 if load_measure(criterion).more_means == "less nonlinear" else 1
        order = sorted(names, key=lambda n: (n not in values, sign * values.get(n, 0.0)))
    return order[::-1] if reverse else order


def removal_samples(train: Subject, test: Subject) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the samples to fit on and to evaluate on, with class labels, on the model's device."""
    device = next(train.model.parameters(), train.inputs).device
    labels = test.labels
    if labels is not None:
        labels = None if labels.is_floating_point() else labels.to(device)
    return train.inputs.to(device), test.inputs.to(device), labels


ROUNDING_TOLERANCE = 1e-9
"""Tolerance for rounding error in a fraction that is computed as a sum."""

CALL_WEIGHTS = ("calls", "units", "positions", "flops")
"""Ways to weight calls when computing the remaining fraction of a network."""


@dataclass(frozen=True)
class Step:
    """A network with some calls removed.

    Parameters
    ----------
    removed : str
        Name of the call that was removed last; empty for the original network.
    remaining : mapping of str to float
        Remaining fraction, keyed by `CALL_WEIGHTS`.
    accuracy : float or None
        None without labels.
    kl : float
        KL divergence of the class probabilities from those of the original network, in nats.
    loss : float or None
        Cross-entropy in nats.
    """

    removed: str
    remaining: Mapping[str, float]
    accuracy: float | None
    kl: float
    loss: float | None


def refitted_maps(
    model: nn.Module, calls: Sequence[ReplaceableCall], inputs: Tensor, *, is_full: bool = False
) -> dict[str, AffineMap]:
    """Fit maps for some calls, each in the network whose earlier calls are already replaced.

    All inputs are one batch. The maps are keyed by name, in call order.
    """
    by_call = {call.call: call for call in calls}
    maps: dict[str, AffineMap] = {}

    def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        if identity not in by_call:
            return compute()
        call = by_call[identity]
        original = x.clone()
        rows = copy_to_rows(x, call.channel_axis)
        output = compute()
        y = get_tensor(output, call.result)
        fit = AffineFit(is_full)
        fit.add(rows, copy_to_rows(y, call.channel_axis))
        affine = fit.full() if is_full else fit.per_channel()
        if affine is None:
            raise Undefined(
                f"a full map at {call.name} requires at least {fit.min_rows:,} rows, but the "
                f"samples have {fit.rows:,}: raise --fit-samples (for text, also text.windows)"
            )
        maps[call.name] = affine
        return replace_output(
            x, lambda: output, lambda _: affine(original, call.channel_axis), call.result
        )

    CallInterception(model, calls).run(inputs.clone(), replace)
    if missing := [call.name for call in calls if call.name not in maps]:
        raise Undefined(f"the network doesn't call {missing[0]} on the fitting samples")
    return maps


def weights_of_calls(
    model: nn.Module, calls: Sequence[ReplaceableCall], example: Tensor, *, is_full: bool = False
) -> dict[str, dict[str, float]]:
    """Return the weight of each call, keyed by `CALL_WEIGHTS` and name.

    A call's weight is 1 for ``calls``, its number of channels for ``units``, and the number of
    values that it computes per sample for ``positions``. For ``flops``, it
    is the number of operations in matrix products and convolutions since the previous call; they
    can be merged with the following ones once the call is removed. For modules, which are replaced
    by full maps, it is the number of operations inside the module.
    """
    counter = FlopCounterMode(display=False)
    total = 0
    by_call = {call.call: call for call in calls}
    flops: dict[str, float] = {}

    def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        nonlocal total
        if is_full and identity in by_call:
            total = counter.get_total_flops()
        output = compute()
        if identity in by_call:
            so_far = counter.get_total_flops()
            flops[by_call[identity].name] = float(so_far - total)
            total = so_far
        return output

    with evaluation_mode(model), without_fast_path(), counter:
        CallInterception(model).run(example.clone(), replace)
    return {
        "calls": {call.name: 1.0 for call in calls},
        "units": {call.name: float(call.channels) for call in calls},
        "positions": {call.name: float(math.prod(call.shape)) for call in calls},
        "flops": flops,
    }


def outermost_calls(
    model: nn.Module, calls: Sequence[ReplaceableCall], example: Tensor
) -> list[ReplaceableCall]:
    """Return the calls that no other of the calls makes, directly or indirectly."""
    selected = {call.call for call in calls}
    nested: set[CallId] = set()
    is_inside = False

    def visit(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
        nonlocal is_inside
        if identity not in selected:
            return compute()
        if is_inside:
            nested.add(identity)
            return compute()
        is_inside = True
        output = compute()
        is_inside = False
        return output

    with evaluation_mode(model), without_fast_path():
        CallInterception(model).run(example.clone(), visit)
    return [call for call in calls if call.call not in nested]


class Removal:
    """A network whose calls are removed one at a time.

    Parameters
    ----------
    model : torch.nn.Module
        Not modified.
    fitting, inputs : tensor
        Samples to fit the maps on, and to evaluate the networks on.
    labels : tensor or None
        -100 where there is nothing to predict.
    is_full : bool
        Replace calls by full maps, not by per-channel maps.

    Examples
    --------
    >>> model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Tanh()), torch.randn(8, 2)
    >>> removal = Removal(model, find_calls(model, inputs), inputs, inputs, None)
    >>> [step.remaining["calls"] for step in removal.curve(["2", "1"])]
    [1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[ReplaceableCall],
        fitting: Tensor,
        inputs: Tensor,
        labels: Tensor | None,
        *,
        is_full: bool = False,
    ) -> None:
        self._model = model
        self._fitting = fitting
        self._inputs = inputs
        self._labels = labels
        self._calls = {call.name: call for call in calls}
        self._is_full = is_full
        self._weights = weights_of_calls(model, calls, inputs[:2], is_full=is_full)
        self._original = outputs = self._outputs({})
        if outputs.ndim < 2 or outputs.shape[-1] < 2:
            raise RequestError(
                f"the network's outputs have shape {tuple(outputs.shape)}, expected class logits"
            )
        if labels is not None and labels.shape != outputs.shape[:-1]:
            raise RequestError(
                f"labels of shape {tuple(labels.shape)} don't match logits of shape "
                f"{tuple(outputs.shape)}"
            )

    def curve(self, order: Sequence[str]) -> list[Step]:
        """Remove calls in the given order, refit all maps after each, and evaluate each network."""
        return [self.step(order[:count]) for count in range(len(order) + 1)]

    def remaining(self, removed: Sequence[str]) -> dict[str, float]:
        """Return the fractions that remain after some calls are removed."""
        fractions = {}
        for share, weights in self._weights.items():
            left = sum(w for name, w in weights.items() if name not in removed)
            fractions[share] = left / (sum(weights.values()) or 1.0)
        return fractions

    def total(self, share: str) -> float:
        """Return the weight of all calls together, of one of `CALL_WEIGHTS`."""
        return sum(self._weights[share].values())

    def maps(self, removed: Sequence[str]) -> dict[str, AffineMap]:
        """Fit the maps for the removed calls, keyed by name."""
        if not removed:
            return {}
        with evaluation_mode(self._model), without_fast_path():
            calls = [self._calls[name] for name in removed]
            return refitted_maps(self._model, calls, self._fitting, is_full=self._is_full)

    def step(self, removed: Sequence[str]) -> Step:
        """Evaluate the network with some calls removed."""
        outputs = class_logits(self._outputs(self.maps(removed)), self._original)
        original = class_logits(self._original, self._original)
        kl, positions = divergence(original, outputs)
        mean_kl = float(kl.sum() / positions.sum())
        accuracy = loss = None
        if self._labels is not None:
            is_counted = self._labels != IGNORED_LABEL
            accuracy = float((outputs.argmax(-1) == self._labels)[is_counted].double().mean())
            sums, counts = sample_losses(outputs, self._labels)
            loss = float(sums.sum() / counts.sum())
        name = removed[-1] if removed else ""
        return Step(name, self.remaining(removed), accuracy, mean_kl, loss)

    def _outputs(self, maps: Mapping[str, AffineMap]) -> Tensor:
        replacements = {
            self._calls[name].call: partial(affine, channel_axis=self._calls[name].channel_axis)
            for name, affine in maps.items()
        }
        with evaluation_mode(self._model), without_fast_path():
            interception = CallInterception(self._model, self._calls.values())
            output = run_replaced(interception, self._inputs, replacements)
        return validated_outputs(output, len(self._inputs))


def class_logits(outputs: Tensor, original: Tensor) -> Tensor:
    """Return the logits of outputs, which are probabilities if those of the original network are.

    Examples
    --------
    >>> even = torch.full((1, 2), 0.5)
    >>> class_logits(even, even).tolist() == even.log().tolist()
    True
    """
    return log_probabilities(outputs) if are_probabilities(original) else outputs


def sample_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's cross-entropy, summed over its positions (n,), and their number (n,).

    Samples are evaluated one at a time, since vocabularies can be large.
    """
    losses = []
    for sample, targets in zip(logits, labels, strict=True):
        rows = sample.reshape(-1, sample.shape[-1]).double()
        loss = nn.functional.cross_entropy(
            rows, targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        losses.append(loss)
    return torch.stack(losses), (labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1)


def area_under(steps: Sequence[Step], statistic: str, share: str = "calls") -> float:
    """Return the mean of a statistic over the remaining fraction, from all calls to none.

    Examples
    --------
    >>> whole = Step("", {"calls": 1.0}, 0.9, 0.0, None)
    >>> nothing = Step("1", {"calls": 0.0}, 0.5, 1.0, None)
    >>> round(area_under([whole, nothing], "accuracy"), 6)
    0.7
    """
    remaining = torch.tensor([step.remaining[share] for step in steps]).double()
    values = torch.tensor([getattr(step, statistic) for step in steps]).double()
    return float(-torch.trapezoid(values, remaining))


@dataclass(frozen=True)
class RemovalResult:
    """The result of a removal: the curve and the remaining network.

    Parameters
    ----------
    order : sequence of str
        Names of all calls in order of removal.
    steps : sequence of Step
        From the original network to the one with every call removed; if no curve was requested,
        only the original and the remaining network.
    removed : sequence of str
        Names of the calls removed from `network`.
    metadata : mapping of str to str
        For the header of the network's checkpoint.
    positions : int
        Number of values per sample that all calls of the original network compute.
    nested : int
        Number of calls that were left out because they are inside others.
    """

    order: Sequence[str]
    steps: Sequence[Step]
    removed: Sequence[str]
    network: nn.Module
    metadata: Mapping[str, str]
    positions: int
    nested: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per step."""
        rows = []
        for step in self.steps:
            positions = round(step.remaining["positions"] * self.positions)
            row: dict[str, Any] = {"removed": step.removed, "positions": positions}
            row |= {f"left_{share}": round(step.remaining[share], 6) for share in CALL_WEIGHTS}
            for name in ("accuracy", "loss", "kl"):
                if (value := getattr(step, name)) is not None:
                    row[name] = round(value, 6)
            rows.append(row)
        return rows


def run_removal(
    train: Subject,
    test: Subject,
    criterion: str,
    *,
    keep: float,
    share: str,
    reverse: bool,
    seed: int,
    settings: Mapping[str, OptionValue | str],
    of: str,
    compute_curve: bool,
    keep_relus: int | None = None,
) -> RemovalResult:
    """Remove calls from a subject's network, one at a time.

    The calls are those of `find_calls` that are not inside another one, in the order of
    `removal_order`.

    Parameters
    ----------
    train, test : Subject
        The same network with samples for ranking and fitting, and with samples for evaluation.
    keep : float
        Fraction of the network to keep, of one of `CALL_WEIGHTS`, `share`.
    compute_curve : bool
        Evaluate the network after each removal, including those beyond the requested fraction.
    keep_relus : int, optional
        Maximum number of positions to keep, in place of `keep` and `share`.
    """
    if transform := (train.facts.weights_metadata or {}).get("transform"):
        raise RequestError(
            f"the network is already transformed ({transform}); remove calls from the original"
        )
    model = train.model
    fitting, inputs, labels = removal_samples(train, test)
    example = fitting[:2]
    found = find_calls(model, example, of=of)
    if not found:
        raise RequestError("the network calls no known activation function")
    calls = outermost_calls(model, found, example)
    order = removal_order(
        criterion,
        model,
        calls,
        train.inputs,
        train.labels,
        seed=seed,
        settings={"sites.of": of, **settings},
        reverse=reverse,
    )
    removal = Removal(model, calls, fitting, inputs, labels, is_full=of != "activations")
    positions = removal.total("positions")
    if keep_relus is not None:
        share = "positions"
        keep = keep_relus / (positions or 1.0)
    limit = keep + ROUNDING_TOLERANCE
    counts = range(len(order) + 1)
    count = next(n for n in counts if removal.remaining(order[:n])[share] <= limit)
    removed = order[:count]
    steps = removal.curve(order) if compute_curve else [removal.step(n) for n in ([], removed)]
    maps = removal.maps(removed)
    metadata = {**(train.facts.weights_metadata or {}), "removed_by": criterion}
    if removed:
        metadata |= transform_metadata(list(maps), of)
    network = network_with_maps(model, maps, example, of)
    nested = len(found) - len(calls)
    return RemovalResult(order, steps, removed, network, metadata, int(positions), nested)
