"""Mean over samples of the change in a statistic from input to output."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Accumulator


class ChangeAccumulator(Accumulator):
    """Accumulator of the mean of (after - before) over all samples, in O(1) memory."""

    def __init__(self) -> None:
        self._n = 0
        self._before = 0.0
        self._after = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add one batch, with one number per sample, both (n,)."""
        sums = [numbers.double().sum().item() for numbers in (before, after)]
        if not all(math.isfinite(total) for total in sums):
            bad = sum(int((~torch.isfinite(numbers)).sum()) for numbers in (before, after))
            raise NotFinite(f"{bad} of {2 * len(before)} samples have entries that are not finite")
        self._n += len(before)
        self._before += sums[0]
        self._after += sums[1]

    def merged(self, other: ChangeAccumulator) -> ChangeAccumulator:
        """Return the accumulator of the batches of both."""
        merged = ChangeAccumulator()
        merged._n = self._n + other._n
        merged._before = self._before + other._before
        merged._after = self._after + other._after
        return merged

    def statistics(self) -> dict[str, float]:
        """Return the mean change, and the means before and after."""
        if self._n == 0:
            raise Undefined("no samples")
        before = self._before / self._n
        after = self._after / self._n
        return {"value": after - before, "before": before, "after": after}
