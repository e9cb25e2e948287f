"""What a dataset is, and how a plugin declares one.

PyTorch is imported only when images are read, so that a plugin's options can be known
without it.
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

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.data import Dataset as TorchDataset

__all__ = [
    "Data",
    "Dataset",
    "DatasetInfo",
    "Items",
    "Preprocessing",
    "Sample",
    "dataset",
    "dataset_info",
    "read_items",
]


Items: TypeAlias = "TorchDataset[tuple[Tensor, int]]"
Builder = TypeVar("Builder", bound=Callable[..., Any])


class Data(Protocol):
    """What the core asks of a dataset; `Dataset` is the one for images and vectors.

    ``shape`` is that of one input, without the batch; ``classes`` the number of logits;
    ``preprocessing`` all that is done to the data, in words.
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
        """Turn what `Sample.images` holds into what the network is given."""

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw samples without replacement; the same ones for the same seed."""


@dataclass(frozen=True)
class Preprocessing:
    """How images are brought to a network's resolution and scale.

    Parameters
    ----------
    crop : int
        Side of the square that is cut from the centre, in pixels.
    resize : int
        Length of the shorter side before; with `squash`, of both sides.
    mean, std : tuple of float
        Per channel, of images in [0, 1].
    interpolation : {"nearest", "bilinear", "bicubic", "lanczos"}
    squash : bool
        Whether both sides are brought to `resize`, whatever the image's proportions.
    origin : str
        Whose preprocessing it is.

    Examples
    --------
    >>> Preprocessing(224, 256, (0.5,), (0.5,)).text
    'resized to 256 pixels on the shorter side (bilinear, antialiased), centre 224x224'
    """

    crop: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    squash: bool = False
    origin: str = ""

    @property
    def text(self) -> str:
        """What is done to an image before it is normalised, in words."""
        side = "on both sides" if self.squash else "on the shorter side"
        origin = f", as {self.origin} has it" if self.origin else ""
        return (
            f"resized to {self.resize} pixels {side} ({self.interpolation}, antialiased), "
            f"centre {self.crop}x{self.crop}{origin}"
        )


@lru_cache(maxsize=64)
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, kept there: to bring them makes a GPU's host wait."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True)
class Dataset:
    """Images or vectors with labels, in a training and a test split, and their normalisation.

    Parameters
    ----------
    name : str
        The registered name.
    train, test : torch.utils.data.Dataset
        Map-style: item ``i`` is ``(image, label)``, the image a float tensor of
        `shape` in [0, 1], not yet normalised; the label an int. Three methods are optional:
        ``__getitems__(indices)``, PyTorch's own protocol, gives several items where that is
        faster than one by one, ``read_labels()`` gives all labels without reading images, and
        ``check()`` refuses damaged files before a training begins.
    shape : tuple of int
        Of one item: channels, height, width for images; any other for other data.
    classes : int
        Number of classes.
    mean, std : tuple of float
        Per channel (the first axis of `shape`); `normalize` applies them. Empty: none.
    preprocessing : str
        All that was done to the images before and is done by `normalize`, in words.
        It is part of what decides a number.
    source : Source
    labelled : bool
        Whether the labels mean anything; if not, a sample has none.
    adapt : callable, optional
        From a `Preprocessing` to this dataset with that one, for data whose resolution
        isn't fixed.

    See Also
    --------
    dataset : declares a function that returns one, with its options.
    """

    name: str
    train: Items
    test: Items
    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preprocessing: str
    source: Source = field(default_factory=lambda: Source(""))
    labelled: bool = True
    adapt: Callable[[Preprocessing], Dataset] | None = None

    def normalize(self, images: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation, per channel.

        Parameters
        ----------
        images : tensor of shape (..., channels, height, width)
            In [0, 1]; in general (..., *shape).
        """
        if not self.mean:
            return images
        form = (-1, *[1] * (len(self.shape) - 1))
        mean = _constant(tuple(self.mean), images.dtype, images.device).reshape(form)
        return (images - mean) / _constant(tuple(self.std), images.dtype, images.device).reshape(
            form
        )

    def split(self, name: str) -> Items:
        """Give the split called ``train`` or ``test``."""
        if name not in ("train", "test"):
            raise RequestError(f"{self.name} has no split '{name}'; there are: test, train")
        return self.train if name == "train" else self.test

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw images without replacement; the same ones for the same seed.

        Only the images drawn are read.

        Parameters
        ----------
        count : int or None
            How many, at least 1; None or more than there are: all of them.
        split : {"test", "train"}
        seed : int
            Decides which and in which order.

        Raises
        ------
        nlbench.RequestError
            If the split is empty or can't be read, or less than one image is asked for.

        Examples
        --------
        >>> from nlbench.models.datasets.digits import digits
        >>> digits().sample(4, seed=1).images.shape
        torch.Size([4, 3, 32, 32])
        """
        items, chosen = self._drawn(count, split, seed)
        return self._read(items, chosen)

    def stream(
        self, count: int | None, *, split: str = "test", seed: int = 0, batch: int = 128
    ) -> Iterator[Sample]:
        """Draw the images of `sample`, a batch at a time; no more than one is held.

        Parameters
        ----------
        count, split, seed
            See `sample`.
        batch : int
            Images in each; the last may have fewer.

        Yields
        ------
        Sample

        Examples
        --------
        >>> from nlbench.models.datasets.digits import digits
        >>> [len(part.inputs) for part in digits().stream(300, batch=128)]
        [128, 128, 44]
        """
        items, chosen = self._drawn(count, split, seed)
        for start in range(0, len(chosen), batch):
            yield self._read(items, chosen[start : start + batch])

    def count(self, count: int | None, split: str = "test") -> int:
        """How many a sample of that many will have: at most the split's size."""
        size = len(self.split(split))  # type: ignore[arg-type]
        return size if count is None else min(count, size)

    def bytes_of(self, count: int | None, split: str = "test") -> int:
        """Memory that the inputs of a sample take, at four bytes a number."""
        return 4 * math.prod(self.shape) * self.count(count, split)

    def _drawn(self, count: int | None, split: str, seed: int) -> tuple[Items, Sequence[int]]:
        import torch

        if count is not None and count < 1:
            raise RequestError(f"{self.name}: a sample of {count}, expected at least 1")
        items = self.split(split)
        size = len(items)  # type: ignore[arg-type]  # torch's Dataset declares no __len__
        if size == 0:
            raise RequestError(f"{self.name}: the {split} split is empty")
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        return items, order[: size if count is None else count].tolist()

    def _read(self, items: Items, chosen: Sequence[int]) -> Sample:
        import torch

        pairs = read_items(items, chosen)
        images = torch.stack([image for image, _ in pairs])
        labels = torch.tensor([int(label) for _, label in pairs]) if self.labelled else None
        return Sample(images, self.normalize(images), labels)


def read_items(items: Items, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Read several items of a split, together where it knows how.

    Examples
    --------
    >>> read_items(["a", "b", "c"], [2, 0])
    ['c', 'a']
    """
    together = getattr(items, "__getitems__", None)
    return list(together(indices)) if together else [items[i] for i in indices]


@dataclass(frozen=True)
class Sample:
    """The images that a subject is looked at with.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
        In [0, 1]; in general (n, *shape).
    inputs : tensor of the same shape
        What the network is given: normalised.
    labels : tensor of shape (n,) or None
        None where there are none.
    """

    images: Tensor
    inputs: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset before it is opened.

    Parameters
    ----------
    options : mapping of str to Option
        What ``--set NAME.OPTION=VALUE`` can set; the function's keyword arguments.
    version : str
        Changes whenever the data change.
    fingerprint : callable, optional
        From the options' values, as keyword arguments, to a text that tells whether the
        files behind them have changed. It reads no data, and raises
        `nlbench.RequestError` where there are none.
    """

    options: Mapping[str, Option] = field(default_factory=dict)
    version: str = "1"
    fingerprint: Callable[..., str] | None = None


def dataset(
    *,
    options: Mapping[str, Option] | None = None,
    version: str = "1",
    fingerprint: Callable[..., str] | None = None,
) -> Callable[[Builder], Builder]:
    """Declare a dataset's options, beside the function that opens it.

    The function takes them as keyword arguments and returns a `Dataset`, or another
    object with its ``name``, ``shape``, ``classes``, ``preprocessing``, ``source``,
    ``sample`` and ``normalize``. A plain function without arguments is a dataset plugin
    without this decorator too.

    Parameters
    ----------
    options, version, fingerprint
        See `DatasetInfo`.

    Examples
    --------
    >>> @dataset(options={"size": Option(512, "how many", minimum=1)})
    ... def mine(size):
    ...     ...
    >>> dataset_info(mine).options["size"].default
    512
    """
    info = DatasetInfo(dict(options or {}), version, fingerprint)

    def decorate(build: Builder) -> Builder:
        build.__nlbench_dataset__ = info  # type: ignore[attr-defined]
        return build

    return decorate


def dataset_info(build: Callable[..., Any]) -> DatasetInfo:
    """What is known of a dataset; nothing for a plain function."""
    info: DatasetInfo = getattr(build, "__nlbench_dataset__", DatasetInfo())
    return info
