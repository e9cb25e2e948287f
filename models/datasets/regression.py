"""Regression datasets, whose targets are a function of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from nlbench.subjects.data import Dataset


@dataclass(frozen=True)
class RegressionDataset(Dataset):
    """Points and a target function. Both splits are `InMemoryItems`.

    Parameters
    ----------
    target : callable
        Maps inputs of shape (n, d) to values of shape (n,).
    """

    target: Callable[[Tensor], Tensor] = field(kw_only=True)

    def points(self, split: str) -> tuple[Tensor, Tensor]:
        """Return inputs of shape (n, d) and values of shape (n,) of a split."""
        inputs: Tensor = getattr(self, split).rows
        return inputs, self.target(inputs)
