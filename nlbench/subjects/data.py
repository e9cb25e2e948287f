"""Datasets, and the decorator that plugins use to declare them.

PyTorch is imported only when images are read, not when a plugin's options are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.parsers import unique

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset as TorchDataset

    from .inputs import ArgumentLayout

Items: TypeAlias = "TorchDataset[tuple[Tensor, int]]"
BuildFunction = TypeVar("BuildFunction", bound=Callable[..., Any])


class Data(Protocol):
    """The interface of a dataset.

    `Dataset` implements it for images and vectors. ``shape`` is the shape of one input, ``classes``
    is the number of logits, and ``preprocessing`` describes all processing applied to the data.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def classes(self) -> int: ...  # noqa: D102
    @property
    def preprocessing(self) -> str: ...  # noqa: D102
    @property
    def source(self) -> Source: ...  # noqa: D102

    def normalize(self, images: Tensor) -> Tensor:
        """Convert images, as in `Sample.images`, to network inputs."""

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw samples without replacement. The same seed yields the same samples."""


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, cropping and normalisation of images.

    Examples
    --------
    >>> Preprocessing(224, 256, (0.5,), (0.5,)).text
    'resized to 256 pixels on the shorter side (bilinear, antialiased), centre 224x224'
    """

    crop: int  # side length of the centre crop, in pixels
    resize: int  # length of the shorter side (or both, with `squash`) before cropping, in pixels
    # mean, std: per channel, for images in [0, 1]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"  # nearest, bilinear, bicubic or lanczos
    squash: bool = False  # if True, resize both sides, ignoring the aspect ratio
    origin: str = ""  # library or weights that use this preprocessing

    @property
    def text(self) -> str:
        """Description of the steps before normalisation."""
        side = "on both sides" if self.squash else "on the shorter side"
        origin = f", as for {self.origin}" if self.origin else ""
        return (
            f"resized to {self.resize} pixels {side} ({self.interpolation}, antialiased), "
            f"centre {self.crop}x{self.crop}{origin}"
        )


@lru_cache(maxsize=64)
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached tensor, since copying numbers to a GPU requires synchronisation."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True)
class Dataset:
    """Images or vectors with labels, split into training and test sets, and their normalisation.

    Parameters
    ----------
    name : str
        The registered name.
    train, test : torch.utils.data.Dataset
        Map-style datasets. Item ``i`` is ``(image, label)``, with a float image of `shape` in
        [0, 1], not yet normalised, and an int label. Three methods are optional:
        ``__getitems__(indices)``, PyTorch's protocol for reading several items at once;
        ``read_labels()``, which returns all labels without reading images; and ``check()``,
        which raises an error before training starts if files are damaged.
    shape : tuple of int
        Shape of one item; for images, (channels, height, width).
    classes : int
        Number of classes.
    mean, std : tuple of float
        Per channel (the first axis of `shape`), used by `normalize`; empty to skip it.
    preprocessing : str
        Description of the entire preprocessing, including `normalize`.
    source : Source
    labelled : bool
        False if the labels are meaningless; samples then have no labels.
    adapt : callable, optional
        If the resolution isn't fixed, maps a `Preprocessing` to a copy of this dataset that
        uses it.
    for_model : callable, optional
        If items have several arguments, maps a model to a copy of this dataset with all of those
        that the model takes.
    arguments : ArgumentLayout, optional
        Layout of several arguments in each item.

    See Also
    --------
    dataset : Decorator that declares a dataset's options.
    """

    name: str
    train: Items
    test: Items
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    preprocessing: str = ""
    source: Source = field(default_factory=lambda: Source(""))
    labelled: bool = True
    adapt: Callable[[Preprocessing], Dataset] | None = None
    for_model: Callable[[nn.Module], Dataset] | None = None
    arguments: ArgumentLayout | None = None

    def normalize(self, images: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation, per channel.

        Parameters
        ----------
        images : tensor of shape (..., channels, height, width)
            With values in [0, 1]; for other data, of shape (..., *shape).
        """
        if not self.mean:
            return images
        shape = (-1, *[1] * (len(self.shape) - 1))
        mean = _constant(tuple(self.mean), images.dtype, images.device).reshape(shape)
        std = _constant(tuple(self.std), images.dtype, images.device).reshape(shape)
        return (images - mean) / std

    def split(self, name: str) -> Items:
        """Return the split ``train`` or ``test``."""
        if name not in ("train", "test"):
            raise RequestError(f"{self.name} has no split '{name}'; expected test or train")
        return self.train if name == "train" else self.test

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw images without replacement.

        The same seed yields the same images. Only the images that are drawn are read.

        Parameters
        ----------
        count : int or None
            Number of images, at least 1; all images if None or larger than the split.
        split : {"test", "train"}
        seed : int
            Seed for choosing and ordering the images.

        Raises
        ------
        nlbench.RequestError
            If the split is empty or can't be read, or `count` is less than 1.

        Examples
        --------
        >>> from nlbench.models.datasets.digits import digits
        >>> digits().sample(4, seed=1).images.shape
        torch.Size([4, 3, 32, 32])
        """
        items, indices = self._draw(count, split, seed)
        return self._read(items, indices)

    def stream(
        self, count: int | None, *, split: str = "test", seed: int = 0, batch: int = 128
    ) -> Iterator[Sample]:
        """Draw the same images as `sample`, but hold only one batch in memory.

        Examples
        --------
        >>> from nlbench.models.datasets.digits import digits
        >>> [len(part.inputs) for part in digits().stream(300, batch=128)]
        [128, 128, 44]
        """
        items, indices = self._draw(count, split, seed)
        for start in range(0, len(indices), batch):
            yield self._read(items, indices[start : start + batch])

    def count(self, count: int | None, split: str = "test") -> int:
        """Return the size of a sample: `count`, limited to the size of the split."""
        size = len(self.split(split))  # type: ignore[arg-type]
        return size if count is None else min(count, size)

    def bytes_of(self, count: int | None, split: str = "test") -> int:
        """Return the size in bytes of a sample's inputs in float32."""
        return 4 * math.prod(self.shape) * self.count(count, split)

    def _draw(self, count: int | None, split: str, seed: int) -> tuple[Items, Sequence[int]]:
        import torch

        if count is not None and count < 1:
            raise RequestError(f"{self.name}: a sample of {count}, expected at least 1")
        items = self.split(split)
        size = len(items)  # type: ignore[arg-type]  # PyTorch's Dataset declares no __len__.
        if size == 0:
            raise RequestError(f"{self.name}: the {split} split is empty")
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        return items, order[: size if count is None else count].tolist()

    def _read(self, items: Items, indices: Sequence[int]) -> Sample:
        import torch

        pairs = read_items(items, indices)
        images = torch.stack([image for image, _ in pairs])
        labels = None
        if self.labelled:
            labels = torch.stack([torch.as_tensor(label, dtype=torch.int64) for _, label in pairs])
        return Sample(images, self.normalize(images), labels)


def read_items(items: Items, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Read several items from a split, using ``__getitems__`` if it is defined.

    Examples
    --------
    >>> read_items(["a", "b", "c"], [2, 0])
    ['c', 'a']
    """
    read_several = getattr(items, "__getitems__", None)
    return list(read_several(indices)) if read_several else [items[i] for i in indices]


@dataclass(frozen=True)
class Sample:
    """Samples drawn from a dataset."""

    # (n, channels, height, width), with values in [0, 1]; for other data, (n, *shape).
    images: Tensor
    inputs: Tensor  # the network's inputs, which are the normalised images
    labels: Tensor | None  # (n,)


@dataclass(frozen=True)
class DatasetInfo:
    """The declaration of a dataset."""

    # The function's keyword arguments, set with --set NAME.OPTION=VALUE.
    options: Mapping[str, Option] = field(default_factory=dict)
    version: str = "1"  # must change whenever the data change
    # Takes the option values as keyword arguments, and returns a string that changes with the
    # files. It reads no data, and raises `nlbench.RequestError` if there are no files.
    fingerprint: Callable[..., str] | None = None
    owner: str = ""  # another name for the dataset in settings, such as images for a folder's path


def dataset(**declared: Any) -> Callable[[BuildFunction], BuildFunction]:
    """Declare a dataset's options by decorating the function that opens it.

    The function takes the options as keyword arguments and returns a `Dataset` or another
    object with ``name``, ``shape``, ``classes``, ``preprocessing``, ``source``, ``sample`` and
    ``normalize``. A function without arguments requires no decorator.

    Parameters
    ----------
    **declared
        See `DatasetInfo`.

    Examples
    --------
    >>> @dataset(options={"size": Option(512, "number of samples", minimum=1)})
    ... def mine(size):
    ...     ...
    >>> dataset_info(mine).options["size"].default
    512
    """
    info = DatasetInfo(**declared)

    def decorate(build: BuildFunction) -> BuildFunction:
        build.__nlbench_dataset__ = info  # type: ignore[attr-defined]
        return build

    return decorate


def dataset_info(build: Callable[..., Any]) -> DatasetInfo:
    """Return a dataset's declaration. An undecorated function has the default one."""
    return getattr(build, "__nlbench_dataset__", DatasetInfo())


def settings_owners(name: str, info: DatasetInfo) -> list[str]:
    """Return the names before the dot in a dataset's settings, the most specific one last.

    Examples
    --------
    >>> settings_owners("text/python", DatasetInfo())
    ['text', 'text/python']
    """
    family = name.partition("/")[0]
    return unique([info.owner or family, name])
