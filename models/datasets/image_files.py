"""Image files as the items of a dataset, each read when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import InterpolationMode, functional

from nlbench.errors import RequestError
from nlbench.files import check_is_file
from nlbench.subjects.data import Preprocessing

__all__ = ["ImageFiles", "read_image"]


Files = list[tuple[str, int]]

LARGEST = 2**30
"""Bytes that an image file may have."""


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

    def read_labels(self) -> list[int]:
        """All labels; no image is read."""
        return [label for _, label in self._files]

    @cached_property
    def _files(self) -> Files:
        return self._find()


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
    try:
        with Image.open(path) as file:
            image = _coloured(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"can't read the image {path}: {error}") from error
    side = preprocessing.resize
    image = functional.resize(
        image,
        [side, side] if preprocessing.squash else [side],
        interpolation=InterpolationMode(preprocessing.interpolation),
        antialias=True,
    )
    image = functional.center_crop(image, [preprocessing.crop])
    pixels: Tensor = functional.to_tensor(image)
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
