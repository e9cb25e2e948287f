"""MNIST and Fashion-MNIST, read from the IDX files that their authors publish."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.data import Dataset, dataset
from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option

from .folders import DOWNLOAD, FOLDER, download_if_missing, find_folder, read_bytes, stamp

if TYPE_CHECKING:
    import numpy as np

__all__ = ["fashion_mnist", "mnist"]

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

SIZE = Option("32", "pixels a side: 28 as published, 32 with a margin of zeros", ("28", "32"))
CHANNELS = Option("1", "1, or 3 equal ones for networks that take colour", ("1", "3"))
OPTIONS = {"folder": FOLDER, "download": DOWNLOAD, "size": SIZE, "channels": CHANNELS}


@dataclass(frozen=True)
class _Format:
    """What differs: the names, and the statistics of the training images in [0, 1].

    `kind` is the class of torchvision that fetches it.
    """

    name: str
    kind: str
    below: str
    mean: float
    std: float
    source: Source


MNIST = _Format(
    "mnist",
    "MNIST",
    "MNIST/raw",
    0.1306605,
    0.3081078,
    Source(
        "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-Based Learning Applied to Document "
        "Recognition. Proceedings of the IEEE, 1998."
    ),
)
FASHION_MNIST = _Format(
    "fashion-mnist",
    "FashionMNIST",
    "FashionMNIST/raw",
    0.2860406,
    0.3530242,
    Source(
        "H. Xiao, K. Rasul, R. Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking "
        "Machine Learning Algorithms. arXiv:1708.07747, 2017."
    ),
)


def _fingerprint(form: _Format, folder: str, download: bool) -> str:
    if download:
        return "downloaded"
    place = _place(form, folder)
    return stamp(_file(place, name) for names in FILES.values() for name in names)


def _fingerprint_digits(folder: str = "", download: bool = False, **_: str) -> str:
    return _fingerprint(MNIST, folder, download)


def _fingerprint_fashion(folder: str = "", download: bool = False, **_: str) -> str:
    return _fingerprint(FASHION_MNIST, folder, download)


@dataset(options=OPTIONS, fingerprint=_fingerprint_digits)
def mnist(
    folder: str = "", download: bool = False, size: str = "32", channels: str = "1"
) -> Dataset:
    """MNIST: 60,000 training and 10,000 test handwritten digits of 28×28 pixels.

    Read from the four IDX files ``train-images-idx3-ubyte``, …, packed (``.gz``) or not,
    in `folder` or its subfolder ``MNIST/raw``. Checked are each file's magic number,
    element type, dimensions and length, and that the labels are below 10.

    Parameters
    ----------
    folder : str
        Where the files are; by default ``$NLBENCH_DATA/mnist``, or the subfolder
        ``MNIST/raw`` of ``$NLBENCH_DATA`` itself.
    download : bool
        Let torchvision fetch the files into the folder if they are missing.
    size : {"32", "28"}
        32: with a margin of two black pixels, for networks made for 32×32.
    channels : {"1", "3"}
        3: the grey channel three times.

    Returns
    -------
    Dataset
        ``shape`` (channels, size, size), 10 classes; read when an image is asked for.

    Raises
    ------
    nlbench.RequestError
        If a file is missing or damaged.
    """
    return _open(MNIST, folder, download, int(size), int(channels))


@dataset(options=OPTIONS, fingerprint=_fingerprint_fashion)
def fashion_mnist(
    folder: str = "", download: bool = False, size: str = "32", channels: str = "1"
) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothes, 28×28 pixels.

    Its four IDX files bear the same names as MNIST's and lie in `folder` or its subfolder
    ``FashionMNIST/raw``. For the rest see `mnist`.
    """
    return _open(FASHION_MNIST, folder, download, int(size), int(channels))


def _open(form: _Format, folder: str, download: bool, size: int, channels: int) -> Dataset:
    from .arrays import ByteImages

    def find() -> Path:
        return _place(form, folder)

    place = download_if_missing(form.name, folder, form.kind, find) if download else find()
    padding = (size - 28) // 2
    train, test = (
        ByteImages(lambda split=split: _read(form, place, split), padding, channels)  # type: ignore[misc]
        for split in ("train", "test")
    )
    margin = f"a margin of {padding} zeros, " if padding else ""
    copies = "copied to 3 equal channels, " if channels == 3 else ""
    return Dataset(
        name=form.name,
        train=train,
        test=test,
        shape=(channels, size, size),
        classes=10,
        mean=(form.mean,) * channels,
        std=(form.std,) * channels,
        preprocessing=(
            f"bytes divided by 255, {margin}{copies}normalised by mean and standard deviation of "
            "the published training images without margin"
        ),
        source=form.source,
    )


def _place(form: _Format, folder: str) -> Path:
    every = [name for names in FILES.values() for name in names]
    expected = (
        f"the four files {every[0]}, {every[1]}, {every[2]} and {every[3]} (packed as .gz or not)"
    )
    needed = [name + end for name in every for end in ("", ".gz")]
    place = find_folder(form.name, folder, (form.below,), needed, expected)
    missing = [name for name in every if not _file(place, name).is_file()]
    if missing:
        raise RequestError(
            f"{form.name}: {place} lacks the file {missing[0]}; put {expected} there"
        )
    return place


def _file(place: Path, name: str) -> Path:
    plain = place / name
    return plain if plain.is_file() else place / f"{name}.gz"


def _read(form: _Format, place: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as bytes of shape (n, 1, 28, 28), and labels."""
    pixels, names = (_read_idx(form.name, _file(place, name)) for name in FILES[split])
    if pixels.ndim != 3 or pixels.shape[1:] != (28, 28):
        raise RequestError(
            f"{form.name}: the images of {split} have shape {pixels.shape}, expected (n, 28, 28)"
        )
    if names.shape != (len(pixels),):
        raise RequestError(
            f"{form.name}: {len(pixels)} images of {split} and labels of shape {names.shape}"
        )
    if len(names) and names.max() > 9:
        raise RequestError(f"{form.name}: labels of {split} reach {names.max()}, expected 0 to 9")
    return pixels[:, None], names


def _read_idx(name: str, file: Path) -> np.ndarray:
    """Array of bytes from an IDX file: two zeros, type, rank, big-endian lengths, elements."""
    import numpy as np

    content = read_bytes(name, file)
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(f"{name}: {file} is cut short or damaged ({error})") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise RequestError(f"{name}: {file} is no IDX file of bytes")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise RequestError(f"{name}: {file} is cut short")
    lengths = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(lengths):
        raise RequestError(
            f"{name}: {file} has {len(content) - start} bytes of data, its header says "
            f"{'x'.join(map(str, lengths))}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)
