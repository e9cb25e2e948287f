"""Reservoir sampling from a stream of rows, independent of the batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Reservoir:
    """A uniform sample of up to `limit` of the rows added so far.

    Examples
    --------
    >>> reservoir = Reservoir(3)
    >>> reservoir.add(torch.arange(5.0)[:, None], torch.arange(5))
    >>> rows, numbers = reservoir.columns
    >>> rows.shape, bool((rows[:, 0] == numbers).all())
    (torch.Size([3, 1]), True)
    """

    def __init__(self, limit: int, seed: int = 0) -> None:
        self._limit = limit
        # Generates one number per row, so that the batch sizes don't matter.
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._priorities = np.empty(0)
        self.columns: tuple[Tensor, ...] = ()

    def add(self, *columns: Tensor, types: Sequence[torch.dtype] = ()) -> None:
        """Add rows, given as several tensors (n, ...) of equal length. `types` are their dtypes."""
        new = self._random.random(len(columns[0]))
        old = len(self._priorities)
        priorities = np.concatenate([self._priorities, new])
        selected = np.sort(np.argsort(priorities, kind="stable")[: self._limit])
        earlier = torch.from_numpy(selected[selected < old])
        later = torch.from_numpy(selected[selected >= old] - old)
        types = types or [column.dtype for column in columns]
        rows = [
            column[later.to(column.device)].to(dtype)
            for column, dtype in zip(columns, types, strict=True)
        ]
        if self.columns:
            rows = [
                torch.cat([held[earlier.to(held.device)], row])
                for held, row in zip(self.columns, rows, strict=True)
            ]
        self._priorities, self.columns = priorities[selected], tuple(rows)
