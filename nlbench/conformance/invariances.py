"""Check the invariances of a measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError
from nlbench.measure import INVARIANCES, Result
from nlbench.plugin_loading import load_probe

from .check import Check
from .trial import ROUNDING_TOLERANCE, SAMPLES, Trial, difference, relu_network, samples


def check_invariances(trial: Trial, first: Result) -> Iterator[Check]:
    """Check each known invariance, whether or not the measure declares it."""
    model, inputs = relu_network().double(), samples().double()
    for name, description in INVARIANCES.items():
        is_claimed = name in trial.measure.invariant_to and not trial.settings
        label = f"invariant to {name}"
        try:
            pair = _VARIATIONS[name](trial, model, inputs)
        except NlbenchError as error:
            yield Check(label, "broken" if is_claimed else "not checked", str(error))
            continue
        if pair is None:
            reason = f"the observations of {trial.measure.probe} can't be varied in this way"
            yield Check(label, "not checked", reason)
            continue
        change = difference(*pair, ROUNDING_TOLERANCE)
        if change:
            yield Check(label, "broken" if is_claimed else "not claimed", change)
        else:
            yield Check(label, "kept", "" if is_claimed else f"could be declared: {description}")


ResultPair = tuple[Result, Result] | None
"""Results without and with a variation; None if it doesn't apply."""


def _vary_batches(trial: Trial, model: nn.Module, inputs: Tensor) -> ResultPair:
    if "batch" not in load_probe(trial.measure.probe).options:
        return None
    size = SAMPLES // 3
    return trial.value(model, inputs, batch=SAMPLES), trial.value(model, inputs, batch=size)


def _vary_order(trial: Trial, model: nn.Module, inputs: Tensor) -> ResultPair:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(2))
    return trial.value(model, inputs), trial.value(model, inputs[order])


def _vary_channels(
    change: Callable[[Tensor], Tensor],
) -> Callable[[Trial, nn.Module, Tensor], ResultPair]:
    """Return a variation that changes x and y of each observation that has both."""

    def vary(trial: Trial, model: nn.Module, inputs: Tensor) -> ResultPair:
        measure, changed = trial.measure, []
        if measure.unreduced:
            return None

        class VariedMeasure(measure):  # type: ignore[misc, valid-type]
            name = measure.name

            def update(self, observation: Any) -> None:
                x, y = getattr(observation, "x", None), getattr(observation, "y", None)
                if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 2:
                    changed.append(observation)
                    # Shared intermediate results belong to the original samples.
                    unshared = {"borrowed": None} if hasattr(observation, "borrowed") else {}
                    observation = replace(observation, x=change(x), y=change(y), **unshared)
                super().update(observation)

        result = trial.value(model, inputs, measure=VariedMeasure)
        return (trial.value(model, inputs), result) if changed else None

    return vary


def _rotate(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(values.shape[1])
    square = torch.randn(values.shape[1], values.shape[1], generator=generator, dtype=torch.float64)
    rotated: Tensor = values @ torch.linalg.qr(square).Q.to(values)
    return rotated


def _shift(values: Tensor) -> Tensor:
    return values + torch.linspace(-2, 3, values.shape[1], dtype=values.dtype)


_VARIATIONS: Mapping[str, Callable[[Trial, nn.Module, Tensor], ResultPair]] = {
    "batches": _vary_batches,
    "order": _vary_order,
    "units": _vary_channels(lambda values: 3.7 * values),
    "offsets": _vary_channels(_shift),
    "rotations": _vary_channels(_rotate),
}
