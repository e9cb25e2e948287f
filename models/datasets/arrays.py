"""Images that lie in memory as bytes: the items of a dataset, converted when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

__all__ = ["ByteImages"]


Arrays = tuple[np.ndarray, np.ndarray]


class ByteImages(TorchDataset[tuple[Tensor, int]]):
    """Images with labels that are read when the first of them is asked for.

    Item ``i`` is a float32 image in [0, 1] and its label.

    Parameters
    ----------
    read : callable
        Gives bytes of shape (n, channels, height, width) and labels of shape (n,).
    padding : int
        Rows and columns of zeros on each side.
    channels : int
        3 copies a grey image's one channel three times; otherwise the images' own number.

    Examples
    --------
    >>> items = ByteImages(lambda: (np.full((2, 1, 3, 3), 255, np.uint8), np.array([4, 7])))
    >>> len(items), items[1][0].max().item(), items[1][1]
    (2, 1.0, 7)
    """

    def __init__(self, read: Callable[[], Arrays], padding: int = 0, channels: int = 1) -> None:
        self._read = read
        self._padding = padding
        self._channels = channels

    def __len__(self) -> int:
        return len(self._arrays[1])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Convert several at once."""
        images, labels = (array[np.asarray(indices, dtype=np.int64)] for array in self._arrays)
        made = torch.from_numpy(images).to(torch.float32) / 255
        made = functional.pad(made, [self._padding] * 4)
        if made.shape[1] < self._channels:
            made = made.expand(-1, self._channels, -1, -1).contiguous()
        return list(zip(made, labels.tolist(), strict=True))

    def read_labels(self) -> list[int]:
        """All labels; no image is converted."""
        return [int(label) for label in self._arrays[1]]

    @cached_property
    def _arrays(self) -> Arrays:
        return self._read()
