"""Base class for measures of one or more numbers per sample."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.measure import Measure, Result
from nlbench.measure.replicates import SampleGroups, leave_groups_out


class SampleMeasure(Measure):
    """A measure that stores a few numbers per sample and computes its value from all of them.

    A subclass implements `terms`, and `statistics` unless the value is the mean of one term.
    """

    probe: ClassVar[str] = "function"

    @abstractmethod
    def terms(self, observation: Any) -> tuple[Tensor, ...]:
        """Compute the terms (n,) of one batch, on the CPU."""

    def statistics(self, *terms: Tensor) -> Mapping[str, float]:
        """Compute the statistics from the terms (n,) of all samples. By default, the mean."""
        return {"value": terms[0].numpy().mean().item()}

    def reset(self) -> None:
        """Discard all batches."""
        self._batches: list[tuple[Tensor, ...]] = []
        self._groups = SampleGroups()
        # How often each sample has occurred, for random numbers that belong to a sample.
        self._occurrences: Counter[bytes] = Counter()

    def update(self, observation: Any) -> None:
        """Compute and store the terms of one batch."""
        self._batches.append(self.terms(observation))
        if self.replicated and observation.inputs is not None:
            self._groups.add(observation.inputs, getattr(observation, "sources", None))

    def compute(self) -> Result:
        """Return the value over all samples."""
        if not self._batches:
            raise Undefined("no samples")
        terms = [torch.cat(column) for column in zip(*self._batches, strict=True)]
        groups = self._groups.array
        replicates: tuple[float, ...] = ()
        if len(groups) == len(terms[0]):
            replicates = leave_groups_out(
                groups, lambda kept: self.statistics(*(term[kept] for term in terms))["value"]
            )
        return Result(self.statistics(*terms), n=len(terms[0]), replicates=replicates)
