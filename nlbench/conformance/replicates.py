"""Check that replicates are the values on the samples without each group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nlbench.measure import Measure, Result
from nlbench.measure.replicates import GROUPS, group_index

from .check import Check
from .trial import Trial, relu_network, samples, value_of

TOLERANCE = 1e-6
"""Maximum difference, relative to the value but at least to 1. Replicates are rounded."""


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
        measure = _without_group(trial.measure, group)
        other = trial.value(relu_network(), samples(), measure=measure)
        expected = value_of(other) if other.status == "ok" else float("nan")
        if not abs(replicate - expected) <= TOLERANCE * max(1.0, abs(expected)):
            detail = f"{replicate:.9g} without group {group}, expected {expected:.9g}"
            yield Check("replicates", "broken", detail)
            return
    yield Check("replicates", "kept", f"standard error {first.error:.2g}")


def _without_group(measure: type[Measure], group: int) -> type[Measure]:
    """Return a measure that receives no sample of a group."""

    class WithoutGroup(measure):  # type: ignore[misc, valid-type]
        name = measure.name

        def update(self, observation: Any) -> None:
            kept = group_index(observation.sources.index) != group
            super().update(observation.with_rows(kept.nonzero()[:, 0]))

    return WithoutGroup
