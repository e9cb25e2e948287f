"""CIFAR-10 and CIFAR-100, read from the files that their authors publish."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.data import Dataset, dataset
from nlbench.errors import RequestError
from nlbench.measure import Source

from .folders import DOWNLOAD, FOLDER, download_if_missing, find_folder, read_bytes, stamp

if TYPE_CHECKING:
    import numpy as np

__all__ = ["cifar10", "cifar100"]

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
