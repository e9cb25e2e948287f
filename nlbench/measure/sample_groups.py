"""Groups of samples by value, for measures that receive samples rather than sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .replicates import group_index

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.introspection.distinct_rows import RowNumbers


class SampleGroups:
    """Groups of the samples of several batches, with copies of a sample in one group.

    Examples
    --------
    >>> import torch
    >>> groups = SampleGroups()
    >>> groups.add(torch.tensor([[5.0], [7.0], [5.0]]))
    array([0, 1, 0])
    >>> groups.add(torch.tensor([[9.0]]))
    array([2])
    >>> groups.array
    array([0, 1, 0, 2])
    """

    def __init__(self) -> None:
        from nlbench.introspection.distinct_rows import DistinctRows

        self._distinct = DistinctRows()
        self._groups: list[NDArray[np.integer[Any]]] = []

    def add(self, samples: Tensor, sources: RowNumbers | None = None) -> NDArray[np.integer[Any]]:
        """Add a batch of samples (n, ...), and return their groups (n,).

        `sources` are the samples' numbers, if they are known.
        """
        numbers = sources or self._distinct.add(samples)
        self._groups.append(group_index(numbers.index.numpy()))
        return self._groups[-1]

    @property
    def array(self) -> NDArray[np.integer[Any]]:
        """Group of each sample (n,) so far."""
        return np.concatenate(self._groups) if self._groups else np.empty(0, dtype=np.int64)
