"""Images that lie in memory as bytes: the items of a dataset, converted one at a time."""

from __future__ import annotations

from collections.abc import Callable
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
        images, labels = self._arrays
        image = torch.tensor(images[index]).to(torch.float32) / 255
        image = functional.pad(image, [self._padding] * 4)
        if len(image) < self._channels:
            image = image.expand(self._channels, -1, -1).contiguous()
        return image, int(labels[index])

    @cached_property
    def _arrays(self) -> Arrays:
        return self._read()
