"""Rows of tokens as a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.subjects.data import Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens of equal length, without padding.

    Parameters
    ----------
    rows : mapping of str to integer tensor of shape (n, length)
        Keyed by split.
    classes : int
        Size of the vocabulary.
    """

    name: str
    rows: Mapping[str, Tensor]
    classes: int
    preprocessing: str
    source: Source = field(default_factory=lambda: Source(""))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.rows["test"].shape[1:])

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return the tokens unchanged."""
        return inputs

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw rows without replacement."""
        import torch

        if split not in self.rows:
            raise RequestError(f"{self.name} has no split '{split}'; expected test or train")
        rows = self.rows[split]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
        return Sample(rows[order], rows[order], None)
