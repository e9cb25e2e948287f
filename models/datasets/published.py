"""CIFAR and MNIST, read from their published files."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset

from .images import FOLDER, dataset_folder

if TYPE_CHECKING:
    import numpy as np

_STATISTICS = "mean and standard deviation of the published training images"
OPTIONS = {"folder": FOLDER, "download": Option(False, "download missing files into the folder")}
MNIST_OPTIONS = {
    **OPTIONS,
    "size": Option("32", "side in pixels: 28 as published, 32 padded with zeros", ("28", "32")),
    "channels": Option("1", "1, or 3 identical channels for colour networks", ("1", "3")),
}


@dataclass(frozen=True)
class PublishedDataset:
    """A dataset's files, and the statistics of its training images in [0, 1].

    Parameters
    ----------
    torchvision_class : str
        The class of torchvision that downloads it.
    subfolder : str
        The folder that torchvision creates.
    files : mapping of str to tuple of str
        Keyed by split.
    mean, std : tuple of float
        Per channel.
    expected : str
        Description of the files, for error messages.
    labels : str
        Key of the labels in CIFAR's files; empty for the files of MNIST.
    """

    name: str
    torchvision_class: str
    subfolder: str
    files: Mapping[str, tuple[str, ...]]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: Source
    expected: str
    labels: str = ""

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of both splits."""
        return (*self.files["train"], *self.files["test"])

    def find(self, folder: str) -> Path:
        """Find the folder that holds all files, compressed as ``.gz`` or not.

        See `dataset_folder`. If NLBENCH_DATA isn't set either, it is that of Debian's package.
        """
        system = Path("/usr/share/datasets", self.name)
        if not folder and not os.environ.get("NLBENCH_DATA") and system.is_dir():
            folder = str(system)
        root = dataset_folder(self.name, folder)
        # A folder "train" alone would not identify CIFAR-100.
        identifying = self.files["test"] if self.labels else self.all_files
        parents = [root] if folder else [root, root.parent]
        for path in (root, *(parent / self.subfolder for parent in parents)):
            if any(_file(path, name).is_file() for name in identifying):
                missing = [name for name in self.all_files if not _file(path, name).is_file()]
                if not missing:
                    return path
                problem = f"{path} lacks the file {missing[0]}"
                break
        else:
            problem = f"its files are not in {root}"
        raise RequestError(f"{self.name}: {problem}; put {self.expected} there")

    def fingerprint(self, folder: str = "", download: bool = False, **_: str) -> str:
        """Return the sizes and modification times of the files, to detect changed content."""
        if download:
            return "downloaded"
        path = self.find(folder)
        parts = []
        for name in self.all_files:
            file = _file(path, name)
            state = file.stat()
            parts.append(f"{file.name}:{state.st_size}:{state.st_mtime_ns}")
        return " ".join(parts)

    def open(
        self, folder: str = "", download: bool = False, size: str = "32", channels: str = "1"
    ) -> Dataset:
        """Open the dataset, downloading missing files if `download` is set.

        MNIST is padded to `size`, and its channel repeated.
        """
        from .items import ByteImages

        try:
            path = self.find(folder)
        except RequestError:
            if not download:
                raise
            _download(self, dataset_folder(self.name, folder))
            path = self.find(folder)
        depth = max(len(self.mean), int(channels))
        padding = 0
        if self.labels:
            steps = f"; normalised per channel by {_STATISTICS}; {_authenticity(self, path)}"
        else:
            padding = (int(size) - 28) // 2
            margin = f" a margin of {padding} zeros," if padding else ""
            copies = " copied to 3 equal channels," if depth == 3 else ""
            steps = f",{margin}{copies} normalised by {_STATISTICS} without margin"
        read = _read_cifar if self.labels else _read_mnist
        train, test = (
            ByteImages(partial(read, self, path, split), padding, depth)
            for split in ("train", "test")
        )
        return Dataset(
            name=self.name,
            train=train,
            test=test,
            shape=(depth, int(size), int(size)),
            classes=self.classes,
            mean=self.mean * (depth // len(self.mean)),
            std=self.std * (depth // len(self.std)),
            preprocessing=f"bytes divided by 255{steps}",
            source=self.source,
        )

    def declared(self, documented: Callable[[], None]) -> Callable[..., Dataset]:
        """Return the function that opens the dataset, with its options and a docstring."""
        build = partial(self.open)
        build.__doc__ = documented.__doc__
        options = OPTIONS if self.labels else MNIST_OPTIONS
        return dataset(options=options, fingerprint=self.fingerprint)(build)


def _download(published: PublishedDataset, folder: Path) -> None:
    from torchvision import datasets

    try:
        getattr(datasets, published.torchvision_class)(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{published.name}: can't download to {folder}: {reason}") from error


def _authenticity(published: PublishedDataset, folder: Path) -> str:
    """Compare the files with torchvision's list of MD5 sums, and return the result as text."""
    from torchvision import datasets

    known = getattr(datasets, published.torchvision_class)
    sums = dict([*known.train_list, *known.test_list])
    for name in published.all_files:
        content = _read_bytes(published, folder / name)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums.get(name):
            return "the files' MD5 sums are not the published ones"
    return "the files' MD5 sums are the published ones"


def _read_bytes(published: PublishedDataset, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"{published.name}: can't read {file}: {reason}") from error


def _file(folder: Path, name: str) -> Path:
    """Return the path of a file, compressed or not."""
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _check(where: str, images: Any, labels: Any, shape: tuple[int, ...], classes: int) -> None:
    """Raise unless images are bytes of a shape with as many labels of the classes."""
    if images.dtype != "uint8" or images.shape[1:] != shape:
        expected = f"(n, {', '.join(map(str, shape))})"
        raise RequestError(
            f"{where}: images of {images.dtype} and shape {images.shape}, expected {expected} bytes"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise RequestError(f"{where}: {len(images)} images but labels of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise RequestError(f"{where}: labels are outside 0 to {classes - 1}")


def _read_cifar(
    published: PublishedDataset, folder: Path, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read images as bytes of shape (n, 3, 32, 32), and labels, from several files."""
    import numpy as np

    batches = []
    for name in published.files[split]:
        content = _read_bytes(published, folder / name)
        where = f"{published.name}: {folder / name} is not a batch in the published format"
        try:
            batch = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
            images = np.asarray(batch["data"])
            labels = np.asarray(batch[published.labels])
        except Exception as error:
            # A damaged pickle can raise any exception.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise RequestError(f"{where} ({reason})") from error
        _check(where, images, labels, (3072,), published.classes)
        batches.append((images.reshape(-1, 3, 32, 32), labels.astype(np.int64)))
    all_images, all_labels = zip(*batches, strict=True)
    return np.concatenate(all_images), np.concatenate(all_labels)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that loads only plain data and arrays, since a pickle can run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy._core", "numpy.core"), name) in _ALLOWED_GLOBALS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


_ALLOWED_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def _read_mnist(
    published: PublishedDataset, folder: Path, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read images as bytes of shape (n, 1, 28, 28), and labels."""
    files = (_file(folder, file) for file in published.files[split])
    images, labels = (_read_idx(published, file) for file in files)
    _check(f"{published.name}: {split}", images, labels, (28, 28), published.classes)
    return images[:, None], labels


def _read_idx(published: PublishedDataset, file: Path) -> np.ndarray:
    """Read bytes from an IDX file: two zeros, type, rank, big-endian lengths, elements."""
    import numpy as np

    name = published.name
    content = _read_bytes(published, file)
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(f"{name}: {file} is truncated or damaged ({error})") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise RequestError(f"{name}: {file} is not an IDX file of bytes")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise RequestError(f"{name}: {file} is truncated")
    lengths = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(lengths):
        raise RequestError(
            f"{name}: {file} has {len(content) - start} bytes of data, expected "
            f"{'x'.join(map(str, lengths))} by its header"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)


CIFAR10 = PublishedDataset(
    name="cifar10",
    torchvision_class="CIFAR10",
    subfolder="cifar-10-batches-py",
    files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    classes=10,
    mean=(0.49139968, 0.48215841, 0.44653091),
    std=(0.24703223, 0.24348513, 0.26158784),
    source=Source(
        "A. Krizhevsky. Learning Multiple Layers of Features from Tiny Images. "
        "Technical report, University of Toronto, 2009."
    ),
    expected="the folder cifar-10-batches-py of the Python version (it holds test_batch)",
    labels="labels",
)


@CIFAR10.declared
def cifar10() -> None:
    """CIFAR-10: 50,000 training and 10,000 test photographs of 32×32 pixels, 10 classes.

    Reads the Python version: the files ``data_batch_1`` … ``data_batch_5`` and ``test_batch`` in
    the folder or its subfolder ``cifar-10-batches-py``, by default ``$NLBENCH_DATA/cifar10`` or
    ``$NLBENCH_DATA/cifar-10-batches-py``. Each file may contain only plain data and arrays, one
    label per image, and labels of the 10 classes; it is read on the first access. The dataset's
    ``preprocessing`` records whether the MD5 sums are the published ones.
    """


CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    torchvision_class="CIFAR100",
    subfolder="cifar-100-python",
    files={"train": ("train",), "test": ("test",)},
    classes=100,
    mean=(0.50707516, 0.48654887, 0.44091784),
    std=(0.26733429, 0.25643846, 0.27615047),
    expected="the folder cifar-100-python of the Python version (it holds test)",
    labels="fine_labels",
)


@CIFAR100.declared
def cifar100() -> None:
    """CIFAR-100: 50,000 training and 10,000 test photographs of 32×32 pixels, 100 classes.

    Reads the Python version: the files ``train`` and ``test`` in the folder or its subfolder
    ``cifar-100-python``, with the fine labels. See `cifar10` for the rest.
    """


_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MNIST = PublishedDataset(
    name="mnist",
    torchvision_class="MNIST",
    subfolder="MNIST/raw",
    files=_IDX_FILES,
    classes=10,
    mean=(0.1306605,),
    std=(0.3081078,),
    source=Source(
        "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-Based Learning Applied to Document "
        "Recognition. Proceedings of the IEEE, 1998."
    ),
    expected=(
        f"the four files {', '.join(_IDX_FILES['train'])}, {' and '.join(_IDX_FILES['test'])} "
        "(compressed as .gz or not)"
    ),
)


@MNIST.declared
def mnist() -> None:
    """MNIST: 60,000 training and 10,000 test handwritten digits of 28×28 pixels.

    Reads the four IDX files ``train-images-idx3-ubyte``, …, compressed (``.gz``) or not, in the
    folder or its subfolder ``MNIST/raw``, by default ``$NLBENCH_DATA/mnist`` or
    ``$NLBENCH_DATA/MNIST/raw``, on the first access. The magic number, element type, dimensions and
    length of each file are validated, and labels must be below 10.
    """


FASHION_MNIST = replace(
    MNIST,
    name="fashion-mnist",
    torchvision_class="FashionMNIST",
    subfolder="FashionMNIST/raw",
    mean=(0.2860406,),
    std=(0.3530242,),
    source=Source(
        "H. Xiao, K. Rasul, R. Vollgraf. Fashion-MNIST: a Novel Image Dataset for Benchmarking "
        "Machine Learning Algorithms. arXiv:1708.07747, 2017."
    ),
)


@FASHION_MNIST.declared
def fashion_mnist() -> None:
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothes, 28×28 pixels.

    Its four IDX files have the same names as MNIST's and are in the folder or its subfolder
    ``FashionMNIST/raw``. See `mnist` for the rest.
    """
