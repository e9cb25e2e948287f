"""Criteria for the order in which a network's activation calls are removed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

import nlbench
from nlbench import registry
from nlbench.errors import RequestError, nearest
from nlbench.options import OptionValue
from nlbench.plugin_loading import load_measure
from nlbench.probes.replacement import ReplaceableCall
from nlbench.subjects.subject import Subject

SIMPLE_CRITERIA: Mapping[str, str] = {
    "random": "in random order",
    "depth": "from the last call to the first",
    "size": "the fewest channels first",
}


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

    The call with the smallest value comes first, or the one with the largest value if the measure
    is larger for calls close to affine. Calls without a value come last.

    Parameters
    ----------
    criterion : str
        A measure with a value per site, or one of `SIMPLE_CRITERIA`.
    seed : int
        Seed for the random order.
    settings : mapping of str to value, optional
        Options of the measure.
    statistic : str
        Statistic of the measure to rank by, where it has this one; otherwise its value.
    reverse : bool
        Return the opposite order.

    Raises
    ------
    nlbench.RequestError
        If the criterion is unknown, or has no value at any call.
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
