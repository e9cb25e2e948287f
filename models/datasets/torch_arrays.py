"""CIFAR-10 and CIFAR-100, read from the files that their authors publish."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset

from .files import DOWNLOAD, FOLDER, download_if_missing, find_folder, read_bytes, stamp

if TYPE_CHECKING:
    import numpy as np

__all__ = ["cifar10", "cifar100", "fashion_mnist", "mnist"]


KRIZHEVSKY = Source(
    "A. Krizhevsky. Learning Multiple Layers of Features from Tiny Images. "
    "Technical report, University of Toronto, 2009."
)


@dataclass(frozen=True)
class _Format:
    """Where one of the two keeps what, and the statistics of its training images in [0, 1].

    `kind` is the class of torchvision that fetches it.
    """

    name: str
    kind: str
    below: str
    files: Mapping[str, tuple[str, ...]]
    labels: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.files["train"], *self.files["test"])


CIFAR10 = _Format(
    name="cifar10",
    kind="CIFAR10",
    below="cifar-10-batches-py",
    files={
        "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test": ("test_batch",),
    },
    labels="labels",
    classes=10,
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
)
CIFAR100 = _Format(
    name="cifar100",
    kind="CIFAR100",
    below="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    labels="fine_labels",
    classes=100,
    mean=(0.50707516, 0.48654887, 0.44091784),
    std=(0.26733429, 0.25643846, 0.27615047),
)


def _fingerprint10(folder: str = "", download: bool = False) -> str:
    return _fingerprint(CIFAR10, folder, download)


def _fingerprint100(folder: str = "", download: bool = False) -> str:
    return _fingerprint(CIFAR100, folder, download)


@dataset(options={"folder": FOLDER, "download": DOWNLOAD}, fingerprint=_fingerprint10)
def cifar10(folder: str = "", download: bool = False) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test photographs of 32×32 pixels, 10 classes.

    Read from the Python version, the files ``data_batch_1`` … ``data_batch_5`` and
    ``test_batch``, which lie in `folder` or in its subfolder ``cifar-10-batches-py``. Of
    each file is checked that it holds nothing but plain data and arrays, as many labels
    as images, and labels within the classes. Whether its MD5 is the published one is
    stated in the dataset's ``preprocessing``, and needn't be.

    Parameters
    ----------
    folder : str
        Where the files are; by default ``$NLBENCH_DATA/cifar10``, or the subfolder
        ``cifar-10-batches-py`` of ``$NLBENCH_DATA`` itself.
    download : bool
        Let torchvision fetch the files into the folder if they are missing.

    Returns
    -------
    Dataset
        ``shape`` (3, 32, 32); the images are read when one is asked for.

    Raises
    ------
    nlbench.RequestError
        If a file is missing or damaged.
    """
    return _open(CIFAR10, folder, download)


@dataset(options={"folder": FOLDER, "download": DOWNLOAD}, fingerprint=_fingerprint100)
def cifar100(folder: str = "", download: bool = False) -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test photographs of 32×32 pixels, 100 classes.

    Read from the Python version, the files ``train`` and ``test``, which lie in `folder`
    or in its subfolder ``cifar-100-python``; the labels are the fine ones. For the rest
    see `cifar10`.
    """
    return _open(CIFAR100, folder, download)


def _open(form: _Format, folder: str, download: bool) -> Dataset:
    from .arrays import ByteImages

    def find() -> Path:
        return _place(form, folder)

    place = download_if_missing(form.name, folder, form.kind, find) if download else find()
    splits = {
        split: ByteImages(lambda names=names: _read(form, place, names))  # type: ignore[misc]
        for split, names in form.files.items()
    }
    return Dataset(
        name=form.name,
        train=splits["train"],
        test=splits["test"],
        shape=(3, 32, 32),
        classes=form.classes,
        mean=form.mean,
        std=form.std,
        preprocessing=(
            "bytes divided by 255; normalised per channel by mean and standard deviation of the "
            f"published training images; {_authenticity(form, place)}"
        ),
        source=KRIZHEVSKY,
    )


def _place(form: _Format, folder: str) -> Path:
    expected = f"the folder {form.below} of the Python version (it holds {form.files['test'][0]})"
    # All are needed: the names train and test alone would fit many a folder.
    place = find_folder(form.name, folder, (form.below,), (form.files["test"][0],), expected)
    missing = [name for name in form.every if not (place / name).is_file()]
    if missing:
        raise RequestError(
            f"{form.name}: {place} lacks the file {missing[0]}; put {expected} there"
        )
    return place


def _fingerprint(form: _Format, folder: str, download: bool) -> str:
    if download:
        return "downloaded"
    place = _place(form, folder)
    return stamp(place / name for name in form.every)


def _authenticity(form: _Format, place: Path) -> str:
    """Say whether the files are the published ones, by torchvision's list of MD5 sums."""
    from torchvision import datasets

    published = getattr(datasets, form.kind)
    sums = dict([*published.train_list, *published.test_list])
    for name in form.every:
        content = read_bytes(form.name, place / name)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums.get(name):
            return "the files' MD5 sums are not the published ones"
    return "the files' MD5 sums are the published ones"


def _read(form: _Format, place: Path, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images as bytes of shape (n, 3, 32, 32), and labels, of several files."""
    import numpy as np

    images, labels = zip(*(_read_file(form, place / name) for name in names), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_file(form: _Format, file: Path) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    content = read_bytes(form.name, file)
    problem = f"{form.name}: {file} is no batch of the published form"
    try:
        batch = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
        images = np.asarray(batch["data"])
        labels = np.asarray(batch[form.labels])
    except Exception as error:
        # A damaged pickle can raise almost anything.
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise RequestError(f"{problem} ({what})") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
        raise RequestError(
            f"{problem}: its data are {images.dtype} of shape {images.shape}, expected bytes of "
            "shape (n, 3072)"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise RequestError(f"{problem}: {len(images)} images, labels of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < form.classes:
        raise RequestError(f"{problem}: labels reach outside 0 to {form.classes - 1}")
    return images.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class _PlainUnpickler(pickle.Unpickler):
    """Refuses all but what an array of numbers is made of, since a pickle can run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            module = module.replace("numpy.core", "numpy._core")
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

SIZE = Option("32", "pixels a side: 28 as published, 32 with a margin of zeros", ("28", "32"))
CHANNELS = Option("1", "1, or 3 equal ones for networks that take colour", ("1", "3"))
OPTIONS = {"folder": FOLDER, "download": DOWNLOAD, "size": SIZE, "channels": CHANNELS}


@dataclass(frozen=True)
class _FormatMnist:
    """What differs: the names, and the statistics of the training images in [0, 1].

    `kind` is the class of torchvision that fetches it.
    """

    name: str
    kind: str
    below: str
    mean: float
    std: float
    source: Source


MNIST = _FormatMnist(
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
FASHION_MNIST = _FormatMnist(
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


def _fingerprint_mnist(form: _FormatMnist, folder: str, download: bool) -> str:
    if download:
        return "downloaded"
    place = _place_mnist(form, folder)
    return stamp(_file(place, name) for names in FILES.values() for name in names)


def _fingerprint_digits(folder: str = "", download: bool = False, **_: str) -> str:
    return _fingerprint_mnist(MNIST, folder, download)


def _fingerprint_fashion(folder: str = "", download: bool = False, **_: str) -> str:
    return _fingerprint_mnist(FASHION_MNIST, folder, download)


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
    return _open_mnist(MNIST, folder, download, int(size), int(channels))


@dataset(options=OPTIONS, fingerprint=_fingerprint_fashion)
def fashion_mnist(
    folder: str = "", download: bool = False, size: str = "32", channels: str = "1"
) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothes, 28×28 pixels.

    Its four IDX files bear the same names as MNIST's and lie in `folder` or its subfolder
    ``FashionMNIST/raw``. For the rest see `mnist`.
    """
    return _open_mnist(FASHION_MNIST, folder, download, int(size), int(channels))


def _open_mnist(
    form: _FormatMnist, folder: str, download: bool, size: int, channels: int
) -> Dataset:
    from .arrays import ByteImages

    def find() -> Path:
        return _place_mnist(form, folder)

    place = download_if_missing(form.name, folder, form.kind, find) if download else find()
    padding = (size - 28) // 2
    train, test = (
        ByteImages(lambda split=split: _read_mnist(form, place, split), padding, channels)  # type: ignore[misc]
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


def _place_mnist(form: _FormatMnist, folder: str) -> Path:
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


def _read_mnist(form: _FormatMnist, place: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
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
