"""Check that equal observations give bitwise equal values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nlbench.measure import Measure, Result

from .check import Check, check_equal
from .trial import SAMPLES, Trial, difference, relu_network, samples


def check_repeatability(trial: Trial, first: Result) -> Iterator[Check]:
    """Check a repeated run, a second instance, and an instance after `reset`."""
    repeated = trial.value(relu_network(), samples())
    yield check_equal("repeatable", difference(first, repeated, 0.0))
    results: dict[str, Result] = {}
    measure = _with_two_more_instances(trial.measure, results)
    value = trial.value(relu_network(), samples(), measure=measure)
    second, used = results.get("second", value), results.get("used", value)
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
