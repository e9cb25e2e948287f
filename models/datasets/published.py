"""CIFAR and MNIST, read from the files that their authors publish."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset

from .images import FOLDER, wanted_folder

if TYPE_CHECKING:
    import numpy as np

    Read = Callable[["Published", Path, str], tuple[np.ndarray, np.ndarray]]

__all__ = ["cifar10", "cifar100", "fashion_mnist", "mnist"]


@dataclass(frozen=True)
class Published:
    """A dataset's files, and the statistics of its training images in [0, 1].

    Parameters
    ----------
    name : str
    kind : str
        The class of torchvision that fetches it.
    below : str
        Where that puts them.
    files : mapping of str to tuple of str
        By split.
    read : callable
        From it, the folder and a split to bytes of shape (n, channels, height, width), and labels.
    classes : int
    mean, std : tuple of float
        By channel.
    source : Source
    expected : str
        What to put where they are missing.
    labels : str
        Of CIFAR: what its labels are called.
    """

    name: str
    kind: str
    below: str
    files: Mapping[str, tuple[str, ...]]
    read: Read
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: Source
    expected: str
    labels: str = ""

    @property
    def every(self) -> tuple[str, ...]:
        """All files."""
        return (*self.files["train"], *self.files["test"])

    def place(self, folder: str) -> Path:
        """Find the folder that holds all files, packed as ``.gz`` or not.

        Parameters
        ----------
        folder : str
            See `wanted_folder`.

        Raises
        ------
        nlbench.RequestError
            If they aren't there; the message says what to put where.
        """
        wanted = wanted_folder(self.name, folder)
        # The names train and test alone would fit many a folder.
        telling = self.files["test"] if self.labels else self.every
        roots = [wanted] if folder else [wanted, wanted.parent]
        for place in (wanted, *(root / self.below for root in roots)):
            if any(file_of(place, name).is_file() for name in telling):
                break
        else:
            raise RequestError(
                f"{self.name}: its files are not in {wanted}; put {self.expected} there"
            )
        for name in self.every:
            if not file_of(place, name).is_file():
                raise RequestError(
                    f"{self.name}: {place} lacks the file {name}; put {self.expected} there"
                )
        return place

    def fingerprint(self, folder: str = "", download: bool = False, **_: str) -> str:
        """Sizes and times of the files: changes when they do, without reading them."""
        if download:
            return "downloaded"
        place = self.place(folder)
        states = [(file, file.stat()) for file in (file_of(place, name) for name in self.every)]
        return " ".join(f"{file.name}:{s.st_size}:{s.st_mtime_ns}" for file, s in states)

    def dataset(self, folder: str, download: bool, size: int = 32, channels: int = 3) -> Dataset:
        """Open the dataset; what is missing torchvision fetches first, if it may.

        Parameters
        ----------
        folder : str
            See `wanted_folder`.
        download : bool
        size, channels : int
            Of the images that are given; those of MNIST get a margin, and equal channels.
        """
        from .items import ByteImages

        try:
            place = self.place(folder)
        except RequestError:
            if not download:
                raise
            _download(self, wanted_folder(self.name, folder))
            place = self.place(folder)
        if len(self.mean) > 1:
            padding, times = 0, 1
            done = f"; normalised per channel by {_STATISTICS}; {_authenticity(self, place)}"
        else:
            padding, times = (size - 28) // 2, channels
            margin = f" a margin of {padding} zeros," if padding else ""
            copies = " copied to 3 equal channels," if channels == 3 else ""
            done = f",{margin}{copies} normalised by {_STATISTICS} without margin"
        train, test = (
            ByteImages(lambda split=split: self.read(self, place, split), padding, channels)  # type: ignore[misc]
            for split in ("train", "test")
        )
        return Dataset(
            name=self.name,
            train=train,
            test=test,
            shape=(channels, size, size),
            classes=self.classes,
            mean=self.mean * times,
            std=self.std * times,
            preprocessing=f"bytes divided by 255{done}",
            source=self.source,
        )


_STATISTICS = "mean and standard deviation of the published training images"


def _download(form: Published, folder: Path) -> None:
    from torchvision import datasets

    try:
        getattr(datasets, form.kind)(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{form.name}: can't download to {folder}: {reason}") from error


def _read_bytes(form: Published, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"{form.name}: can't read {file}: {error.strerror or error}") from error


def file_of(place: Path, name: str) -> Path:
    """Where a file is, packed or not."""
    plain = place / name
    return plain if plain.is_file() else place / f"{name}.gz"


def _read_photographs(form: Published, place: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as bytes of shape (n, 3, 32, 32), and labels, of several files."""
    import numpy as np

    images, labels = zip(*(_read_file(form, place / n) for n in form.files[split]), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_file(form: Published, file: Path) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    content = _read_bytes(form, file)
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


def _read_digits(form: Published, place: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as bytes of shape (n, 1, 28, 28), and labels."""
    pixels, names = (_read_idx(form, file_of(place, name)) for name in form.files[split])
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


def _read_idx(form: Published, file: Path) -> np.ndarray:
    """Array of bytes from an IDX file: two zeros, type, rank, big-endian lengths, elements."""
    import numpy as np

    content = _read_bytes(form, file)
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(f"{form.name}: {file} is cut short or damaged ({error})") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise RequestError(f"{form.name}: {file} is no IDX file of bytes")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise RequestError(f"{form.name}: {file} is cut short")
    lengths = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(lengths):
        raise RequestError(
            f"{form.name}: {file} has {len(content) - start} bytes of data, its header says "
            f"{'x'.join(map(str, lengths))}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)


KRIZHEVSKY = Source(
    "A. Krizhevsky. Learning Multiple Layers of Features from Tiny Images. "
    "Technical report, University of Toronto, 2009."
)
CIFAR10 = Published(
    name="cifar10",
    kind="CIFAR10",
    below="cifar-10-batches-py",
    files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    read=_read_photographs,
    classes=10,
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
    source=KRIZHEVSKY,
    expected="the folder cifar-10-batches-py of the Python version (it holds test_batch)",
    labels="labels",
)
CIFAR100 = Published(
    name="cifar100",
    kind="CIFAR100",
    below="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    read=_read_photographs,
    classes=100,
    mean=(0.50707516, 0.48654887, 0.44091784),
    std=(0.26733429, 0.25643846, 0.27615047),
    source=KRIZHEVSKY,
    expected="the folder cifar-100-python of the Python version (it holds test)",
    labels="fine_labels",
)
IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FOUR = (
    f"the four files {IDX['train'][0]}, {IDX['train'][1]}, {IDX['test'][0]} and {IDX['test'][1]} "
    "(packed as .gz or not)"
)
MNIST = Published(
    name="mnist",
    kind="MNIST",
    below="MNIST/raw",
    files=IDX,
    read=_read_digits,
    classes=10,
    mean=(0.1306605,),
    std=(0.3081078,),
    source=Source(
        "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-Based Learning Applied to Document "
        "Recognition. Proceedings of the IEEE, 1998."
    ),
    expected=FOUR,
)
FASHION_MNIST = Published(
    name="fashion-mnist",
    kind="FashionMNIST",
    below="FashionMNIST/raw",
    files=IDX,
    read=_read_digits,
    classes=10,
    mean=(0.2860406,),
    std=(0.3530242,),
    source=Source(
        "H. Xiao, K. Rasul, R. Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking "
        "Machine Learning Algorithms. arXiv:1708.07747, 2017."
    ),
    expected=FOUR,
)

PLACE = {
    "folder": FOLDER,
    "download": Option(False, "fetch the files into the folder if they are missing"),
}
SIZE = Option("32", "pixels a side: 28 as published, 32 with a margin of zeros", ("28", "32"))
CHANNELS = Option("1", "1, or 3 equal ones for networks that take colour", ("1", "3"))
OPTIONS = {**PLACE, "size": SIZE, "channels": CHANNELS}


@dataset(options=PLACE, fingerprint=CIFAR10.fingerprint)
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
    return CIFAR10.dataset(folder, download)


@dataset(options=PLACE, fingerprint=CIFAR100.fingerprint)
def cifar100(folder: str = "", download: bool = False) -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test photographs of 32×32 pixels, 100 classes.

    Read from the Python version, the files ``train`` and ``test``, which lie in `folder`
    or in its subfolder ``cifar-100-python``; the labels are the fine ones. For the rest
    see `cifar10`.
    """
    return CIFAR100.dataset(folder, download)


def _authenticity(form: Published, place: Path) -> str:
    """Say whether the files are the published ones, by torchvision's list of MD5 sums."""
    from torchvision import datasets

    published = getattr(datasets, form.kind)
    sums = dict([*published.train_list, *published.test_list])
    for name in form.every:
        content = _read_bytes(form, place / name)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums.get(name):
            return "the files' MD5 sums are not the published ones"
    return "the files' MD5 sums are the published ones"


@dataset(options=OPTIONS, fingerprint=MNIST.fingerprint)
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
    return MNIST.dataset(folder, download, int(size), int(channels))


@dataset(options=OPTIONS, fingerprint=FASHION_MNIST.fingerprint)
def fashion_mnist(
    folder: str = "", download: bool = False, size: str = "32", channels: str = "1"
) -> Dataset:
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothes, 28×28 pixels.

    Its four IDX files bear the same names as MNIST's and lie in `folder` or its subfolder
    ``FashionMNIST/raw``. For the rest see `mnist`.
    """
    return FASHION_MNIST.dataset(folder, download, int(size), int(channels))
