"""Number rows by value, so that copies of a row count once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowNumbers:
    """Numbers of rows, on the CPU."""

    # integer (n,): numbers distinct rows from 0, in order of first appearance; copies share one.
    index: Tensor
    is_copy: Tensor  # bool (n,): True for rows that equal an earlier one

    def select_rows(self, rows: Tensor) -> RowNumbers:
        """Return the numbers of the given rows (m,)."""
        rows = rows.cpu()
        return RowNumbers(self.index[rows], self.is_copy[rows])

    @property
    def distinct(self) -> int:
        """Number of rows that are not copies."""
        return int((~self.is_copy).sum())


def first_distinct(rows: Tensor, count: int) -> Tensor:
    """Return the positions of the first `count` distinct rows, or of all if there are fewer.

    Examples
    --------
    >>> first_distinct(torch.tensor([[5.0], [5.0], [7.0], [9.0]]), 2)
    tensor([0, 2])
    """
    distinct = DistinctRows()
    positions: list[int] = []
    for start in range(0, len(rows), count):
        is_copy = distinct.add(rows[start : start + count]).is_copy
        positions += (torch.nonzero(~is_copy)[:, 0] + start).tolist()
        if len(positions) >= count:
            break
    return torch.tensor(positions[:count], dtype=torch.long)


class DistinctRows:
    """Numbers rows by value over several batches.

    Examples
    --------
    >>> rows = DistinctRows()
    >>> rows.add(torch.tensor([[5.0], [7.0], [5.0]])).index
    tensor([0, 1, 0])
    >>> rows.add(torch.tensor([[9.0], [7.0]]))
    RowNumbers(index=tensor([2, 1]), is_copy=tensor([False,  True]))
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def add(self, rows: Tensor) -> RowNumbers:
        """Return the numbers of a batch's rows (n, ...)."""
        # Adding zero turns -0.0, which equals 0.0, into it.
        values = rows.detach().cpu().flatten(1) if rows.ndim > 1 else rows.detach().cpu()[:, None]
        values = values + 0 if values.dtype != torch.bool else values
        index = []
        is_copy = []
        for row in values.contiguous().view(torch.uint8).numpy():
            digest = hashlib.blake2b(row, digest_size=16).digest()
            is_copy.append(digest in self._numbers)
            index.append(self._numbers.setdefault(digest, len(self._numbers)))
        return RowNumbers(
            torch.tensor(index, dtype=torch.long), torch.tensor(is_copy, dtype=torch.bool)
        )
