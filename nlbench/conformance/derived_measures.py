"""Check a measure by measures derived from it, which see or repeat its observations differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError
from nlbench.measure import INVARIANCES, Measure, Result
from nlbench.measure.replicates import GROUPS, group_index
from nlbench.plugin_loading import load_probe

from .trial import (
    ROUNDING_TOLERANCE,
    SAMPLES,
    Check,
    Trial,
    check_equal,
    difference,
    relu_network,
    samples,
    value_of,
)

REPLICATE_TOLERANCE = 1e-6
"""Maximum difference, relative to the value but at least to 1. Replicates are rounded."""


def _changing(measure: type[Measure], change: Callable[[Any], Any]) -> type[Measure]:
    """Return a measure that receives changed observations."""

    class Changing(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def update(self, observation: Any) -> None:
            super().update(change(observation))

    return Changing


def check_repeatability(trial: Trial, first: Result) -> Iterator[Check]:
    """Check a repeated run, a second instance, and an instance after `reset`."""
    repeated = trial.value(relu_network(), samples())
    yield check_equal("repeatable", difference(first, repeated, 0.0))
    results: dict[str, Result] = {}
    measure = _with_two_more_instances(trial.measure, results)
    value = trial.value(relu_network(), samples(), measure=measure)
    second = results.get("second", value)
    used = results.get("used", value)
    yield check_equal(
        "two instances",
        difference(value, second, 0.0),
        "; both instances get the same observations: use a separate generator for random numbers",
    )
    yield check_equal(
        "after reset",
        difference(value, used, 0.0),
        "; the instance was used before: reset() keeps some of its state",
    )
    changed = "update() changes its observation, which is only copied in a run"
    yield check_equal("observations unchanged", changed if "changed" in results else "")


def _with_two_more_instances(measure: type[Measure], results: dict[str, Result]) -> type[Measure]:
    """Return a measure that also updates a second instance, and one that was used and reset."""

    class InstanceTrio(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def reset(self) -> None:
            super().reset()
            self._others = {"second": measure(**self.settings), "used": measure(**self.settings)}
            self._first: Any = None
            for other in self._others.values():
                other.reset()

        def update(self, observation: Any) -> None:
            if self._first is None:
                self._first = observation
                self._others["used"].update(observation)
                self._others["used"].compute()
                self._others["used"].reset()
            before = _copies(observation)
            super().update(observation)
            if any(not torch.equal(copy, tensor) for copy, tensor in before):
                results["changed"] = Result({})
            for other in self._others.values():
                other.update(observation)

        def compute(self) -> Result:
            for name, other in self._others.items():
                results[name] = other.compute()
            result: Result = super().compute()
            return result

    return InstanceTrio


def _copies(observation: Any) -> list[tuple[Tensor, Tensor]]:
    """Return a pair of copy and original for each tensor in an observation."""
    values = getattr(observation, "__dict__", {}).values()
    return [(value.clone(), value) for value in values if isinstance(value, Tensor)]


def check_site_order(trial: Trial, first: Result) -> Iterator[Check]:
    """Check that sites are independent if the measure declares it, since threads rely on it."""
    if not trial.measure.independent_sites:
        return
    size = SAMPLES // 4
    by_batch = trial.value(relu_network(), samples(), batch=size)
    derived = _site_by_site(trial.measure)
    by_site = trial.value(relu_network(), samples(), measure=derived, batch=size)
    yield check_equal(
        "independent sites",
        difference(by_batch, by_site, 0.0),
        " if later batches arrive site by site, from the last site to the first",
    )


def _site_by_site(measure: type[Measure]) -> type[Measure]:
    """Return a measure that receives the first batch in order and later ones site by site."""

    class SiteBySite(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def reset(self) -> None:
            super().reset()
            self._later: list[Any] = []

        def update(self, observation: Any) -> None:
            if observation.batch == 0:
                super().update(observation)
            else:
                self._later.append(observation)

        def compute(self) -> Result:
            for observation in sorted(self._later, key=lambda later: -later.site.index):
                super().update(observation)
            result: Result = super().compute()
            return result

    return SiteBySite


def check_replicates(trial: Trial, first: Result) -> Iterator[Check]:
    """Check each replicate of a site measure against its value on the other samples."""
    if not first.replicates:
        yield Check("replicates", "not checked", "the value has no standard error")
        return
    if trial.measure.probe != "sites":
        reason = f"the observations of {trial.measure.probe} can't be divided into groups"
        yield Check("replicates", "not checked", reason)
        return
    for group, replicate in zip(range(GROUPS), first.replicates, strict=True):

        def without_group(observation: Any, group: int = group) -> Any:
            kept = group_index(observation.sources.index) != group
            return observation.with_rows(kept.nonzero()[:, 0])

        measure = _changing(trial.measure, without_group)
        other = trial.value(relu_network(), samples(), measure=measure)
        expected = value_of(other) if other.status == "ok" else float("nan")
        if not abs(replicate - expected) <= REPLICATE_TOLERANCE * max(1.0, abs(expected)):
            detail = f"{replicate:.9g} without group {group}, expected {expected:.9g}"
            yield Check("replicates", "broken", detail)
            return
    yield Check("replicates", "kept", f"standard error {first.error:.2g}")


def check_invariances(trial: Trial, first: Result) -> Iterator[Check]:
    """Check each known invariance, whether or not the measure declares it."""
    model = relu_network().double()
    inputs = samples().double()
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
"""Results without and with a variation.

None if it doesn't apply.
"""


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
        changed = []
        if trial.measure.unreduced:
            return None

        def changed_channels(observation: Any) -> Any:
            x = getattr(observation, "x", None)
            y = getattr(observation, "y", None)
            if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == y.ndim == 2):
                return observation
            changed.append(observation)
            # Shared intermediate results belong to the original samples.
            unshared = {"borrowed": None} if hasattr(observation, "borrowed") else {}
            return replace(observation, x=change(x), y=change(y), **unshared)

        result = trial.value(model, inputs, measure=_changing(trial.measure, changed_channels))
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
