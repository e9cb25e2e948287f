"""Datasets with a function of the inputs to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from nlbench.subjects.data import Dataset


@dataclass(frozen=True)
class RegressionDataset(Dataset):
    """Points with a function of them to learn; both splits are `InMemoryItems`.

    Parameters
    ----------
    target : callable
        Values of shape (n,) of inputs of shape (n, d).
    """

    target: Callable[[Tensor], Tensor] = field(kw_only=True)

    def points(self, split: str) -> tuple[Tensor, Tensor]:
        """Return inputs of shape (n, d) and values of shape (n,) of a split."""
        inputs: Tensor = getattr(self, split).rows
        return inputs, self.target(inputs)
