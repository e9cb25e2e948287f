"""Dataset items: in memory, in image files, or generated on access."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.serialization.files import check_is_file
from nlbench.subjects.data import Preprocessing

Arrays = tuple[np.ndarray, np.ndarray]
LabelledFiles = list[tuple[str, int]]

MAX_FILE_BYTES = 2**30
_FILES_PER_CHECK = 4096


class ByteImages(TorchDataset[tuple[Tensor, int]]):
    """Images with labels, all read on the first access.

    Item ``i`` is a float32 image in [0, 1] and its label.

    Parameters
    ----------
    read : callable
        Returns bytes of shape (n, channels, height, width) and labels of shape (n,).
    padding : int
        Rows and columns of zeros on each side.
    channels : int
        Number of channels of the items; 3 repeats the channel of grayscale images.

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
        """Convert several images at once."""
        pixels, labels = (array[np.asarray(indices, dtype=np.int64)] for array in self._arrays)
        images = torch.from_numpy(pixels).to(torch.float32) / 255
        images = functional.pad(images, [self._padding] * 4)
        if images.shape[1] < self._channels:
            images = images.expand(-1, self._channels, -1, -1).contiguous()
        return list(zip(images, labels.tolist(), strict=True))

    def read_labels(self) -> list[int]:
        """Return all labels without converting images."""
        return [int(label) for label in self._arrays[1]]

    @cached_property
    def _arrays(self) -> Arrays:
        return self._read()


class ImageFiles(TorchDataset[tuple[Tensor, int]]):
    """Image files with labels, each read and cropped on access.

    Parameters
    ----------
    find : callable
        Returns paths with labels; called once, on the first access.
    preprocessing : Preprocessing
        Applied without the normalisation.
    """

    def __init__(
        self,
        find: Callable[[], LabelledFiles],
        preprocessing: Preprocessing,
        channels: int = 3,
        *,
        exif: bool = False,
    ) -> None:
        self._find = find
        self._preprocessing = preprocessing
        self._channels = channels
        self._exif = exif

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._files[index]
        return read_image(path, self._preprocessing, self._channels, exif=self._exif), label

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Read several images in parallel threads."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            return list(threads.map(self.__getitem__, indices))

    def check(self) -> None:
        """Check all files for damage before any work begins.

        PNG files are checked against their checksums. JPEG files have none, so only their first
        and last bytes are read: damage in the middle goes unnoticed or is found when the image is
        decoded. Other formats are decoded.
        """
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for start in range(0, len(self), _FILES_PER_CHECK):
                files = self._files[start : start + _FILES_PER_CHECK]
                list(threads.map(check_image, [path for path, _ in files]))

    def read_labels(self) -> list[int]:
        """Return all labels without reading images."""
        return [label for _, label in self._files]

    def left_out(self) -> str:
        """Count the files in the images' folders that are no samples, by suffix."""
        names = {path for path, _ in self._files}
        folders = sorted({os.path.dirname(path) for path in names})  # noqa: PTH120
        suffixes: Counter[str] = Counter()
        for entry in itertools.chain.from_iterable(map(os.scandir, folders)):
            is_sample = entry.path in names
            if entry.is_file() and entry.name[0] != "." and not is_sample:
                suffix = Path(entry.name).suffix.lower()
                suffixes[suffix or "without a suffix"] += 1
        if not suffixes:
            return ""
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
        files = "file" if suffixes.total() == 1 else "files"
        return f"{suffixes.total()} {files} left out ({counts})"

    @cached_property
    def _files(self) -> LabelledFiles:
        return self._find()


def check_image(path: str | os.PathLike[str]) -> None:
    """Check an image file for damage, decoding it only if its format requires it."""
    check_is_file(Path(path), MAX_FILE_BYTES)
    with image_errors(path), Image.open(path) as image:
        if image.format == "PNG":
            image.verify()
        elif image.format != "JPEG" or not _trailer_contains(path, b"\xff\xd9"):
            image.load()


def _trailer_contains(path: str | os.PathLike[str], marker: bytes) -> bool:
    """Return True if a file's last bytes contain `marker`. JPEG files may have bytes after it."""
    with Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return marker in file.read()


@contextmanager
def image_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors from reading an image to `nlbench.RequestError` with its path."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"can't read the image {path}: {error}") from error


def read_image(
    path: str | os.PathLike[str],
    preprocessing: Preprocessing,
    channels: int = 3,
    *,
    exif: bool = False,
) -> Tensor:
    """Read an image file, resize it and crop its centre.

    Grayscale images get three identical channels. 16-bit values are reduced to their upper 8 bits.
    The result has shape (channels, crop, crop), with values in [0, 1] that are not normalised.
    """
    # Reading a pipe or a device might never end.
    check_is_file(Path(path), MAX_FILE_BYTES)
    with image_errors(path), Image.open(path) as file:
        image = _to_rgb(ImageOps.exif_transpose(file) if exif else file)
    image = image.convert("L") if channels == 1 else image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as transforms

    side = preprocessing.resize
    image = transforms.resize(
        image,
        [side, side] if preprocessing.squash else [side],
        interpolation=InterpolationMode(preprocessing.interpolation),
        antialias=True,
    )
    image = transforms.center_crop(image, [preprocessing.crop])
    return transforms.to_tensor(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to three 8-bit channels."""
    # Pillow would silently clip these values to 0 … 255.
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, expected 8 or 16 bits")
    return image.convert("RGB")


class IndexedItems(TorchDataset[tuple[Tensor, int]]):
    """Items that a function returns by index."""

    def __init__(self, read: Callable[[int], tuple[Tensor, int]], size: int) -> None:
        self._read = read
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._read(index)


def generated_items(
    draw: Callable[[int, torch.Generator], tuple[Tensor, int]], size: int, *seeds: int
) -> IndexedItems:
    """Return items that are generated on access, each from its own seed.

    Examples
    --------
    >>> items = generated_items(lambda index, g: (torch.rand(2, generator=g), index), 9, 0, 0)
    >>> len(items), items[3][1], torch.equal(items[3][0], items[3][0])
    (9, 3, True)
    """
    return IndexedItems(lambda index: draw(index, item_generator(*seeds, index)), size)


def item_generator(*numbers: int) -> torch.Generator:
    """Return a generator seeded by a combination of integers from 0 to 2³¹ - 1.

    Combinations that differ only in the last integer never have the same seed. Others may, though
    rarely, since PyTorch's CPU generator has 32-bit seeds.
    """
    state = 0
    for number in numbers:
        # A linear congruential step with the constants of Steele and Vigna (2021).
        state = (state * 0xD1342543DE82EF95 + number + 1) % 2**63
    return torch.Generator().manual_seed(state)
