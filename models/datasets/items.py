"""What the datasets consist of: items in memory, of files, and drawn when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.serialization.files import check_is_file
from nlbench.subjects.data import Preprocessing

__all__ = [
    "ByteImages",
    "Drawn",
    "Held",
    "ImageFiles",
    "check_image",
    "read_image",
    "stream",
]


Arrays = tuple[np.ndarray, np.ndarray]
Files = list[tuple[str, int]]

LARGEST = 2**30
"""Bytes that an image file may have."""


class Held(TorchDataset[tuple[Tensor, int]]):
    """Rows of a tensor beside their labels, in memory; without labels 0 stands for each."""

    def __init__(self, rows: Tensor, labels: Sequence[int] | None = None) -> None:
        self.rows = rows
        self.labels = [0] * len(rows) if labels is None else list(labels)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], self.labels[index]


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


class ImageFiles(TorchDataset[tuple[Tensor, int]]):
    """Image files with labels; each is read and cropped when it is asked for.

    Parameters
    ----------
    find : callable
        Gives paths with labels; called once, when the first item or the length is wanted.
    preprocessing : Preprocessing
        All but the normalisation is applied.
    """

    def __init__(self, find: Callable[[], Files], preprocessing: Preprocessing) -> None:
        self._find = find
        self._preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._files[index]
        return read_image(path, self._preprocessing), label

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Read several at once; decoding and resizing run beside each other."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            return list(threads.map(self.__getitem__, indices))

    def check(self) -> None:
        """Find a file that is damaged or cut short, before the work that leads up to it.

        Of a PNG every checksum is compared, of a JPEG, which has none, both ends are read: what
        damage in its middle leaves is an image, and if not found when it is read. Other formats
        are decoded.

        Raises
        ------
        nlbench.RequestError
            Naming the file.
        """
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for start in range(0, len(self), 4096):
                some = self._files[start : start + 4096]
                list(threads.map(check_image, [path for path, _ in some]))

    def read_labels(self) -> list[int]:
        """All labels; no image is read."""
        return [label for _, label in self._files]

    @cached_property
    def _files(self) -> Files:
        return self._find()


def check_image(path: str | os.PathLike[str]) -> None:
    """Refuse an image file that is damaged where its format tells it without decoding.

    Raises
    ------
    nlbench.RequestError
        As `read_image` would.
    """
    check_is_file(Path(path), LARGEST)
    with _refusing(path), Image.open(path) as image:
        if image.format == "PNG":
            image.verify()
        elif image.format != "JPEG" or not _ends(path, b"\xff\xd9"):
            image.load()  # Some have something after their end.


def _ends(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Whether a file has a mark in its last bytes."""
    with Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return mark in file.read()


@contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say of which image it is that reading it fails."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"can't read the image {path}: {error}") from error


def read_image(path: str | os.PathLike[str], preprocessing: Preprocessing) -> Tensor:
    """Read an image file, resize it and cut out its centre.

    Parameters
    ----------
    path : path
        Any format that Pillow reads; grey images get three equal channels. Of 16 bits a
        number the upper 8 are used.
    preprocessing : Preprocessing
        Applied but for the normalisation.

    Returns
    -------
    tensor of shape (3, crop, crop)
        In [0, 1].

    Raises
    ------
    nlbench.RequestError
        If it can't be read, or its numbers have no largest value that would be white.
    """
    # A pipe would be waited for, and a device read, for ever.
    check_is_file(Path(path), LARGEST)
    with _refusing(path), Image.open(path) as file:
        image = _coloured(file)
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as pictures

    side = preprocessing.resize
    image = pictures.resize(
        image,
        [side, side] if preprocessing.squash else [side],
        interpolation=InterpolationMode(preprocessing.interpolation),
        antialias=True,
    )
    image = pictures.center_crop(image, [preprocessing.crop])
    pixels: Tensor = pictures.to_tensor(image)
    return pixels


def _coloured(image: Image.Image) -> Image.Image:
    """Give 8 bits in each of three channels."""
    # Pillow would clip these numbers to 0 … 255 without a word.
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "whole numbers of 32 bits" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, expected 8 or 16 bits")
    return image.convert("RGB")


class Drawn(TorchDataset[tuple[Tensor, int]]):
    """Items that are drawn when they are asked for, each from a seed of its own.

    Parameters
    ----------
    draw : callable
        From an index and a generator to the item.
    size : int
        How many there are.
    *seeds : int
        Decide the generators.

    Examples
    --------
    >>> items = Drawn(lambda index, generator: (torch.rand(2, generator=generator), index), 9, 0, 0)
    >>> len(items), items[3][1], torch.equal(items[3][0], items[3][0])
    (9, 3, True)
    """

    def __init__(
        self, draw: Callable[[int, torch.Generator], tuple[Tensor, int]], size: int, *seeds: int
    ) -> None:
        self._draw, self._size, self._seeds = draw, size, seeds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._draw(index, stream(*self._seeds, index))


def stream(*parts: int) -> torch.Generator:
    """Give a generator to each combination of numbers from 0 to 2³¹ - 1.

    Combinations that differ in the last number alone never share one. Others may, far apart:
    PyTorch seeds its generator on the CPU with 32 bits.
    """
    state = 0
    for part in parts:
        # A linear congruential step with the constants of Steele and Vigna (2021).
        state = (state * 0xD1342543DE82EF95 + part + 1) % 2**63
    return torch.Generator().manual_seed(state)
