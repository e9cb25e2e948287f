"""What a dataset is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.measure import Source

__all__ = ["Dataset", "Sample"]


@dataclass(frozen=True)
class Dataset:
    """Images with labels, split into training and test, and how they are normalised.

    Parameters
    ----------
    name : str
        The registered name.
    train, test : torch.utils.data.Dataset
        Map-style: item ``i`` is ``(image, label)``, the image a float tensor of
        `shape` in [0, 1], not yet normalised; the label an int.
    shape : tuple of int
        Channels, height, width.
    classes : int
        Number of classes.
    mean, std : tuple of float
        Per channel; `normalize` applies them.
    preprocessing : str
        All that was done to the images before and is done by `normalize`, in words.
        It is part of what decides a number.
    source : Source
    """

    name: str
    train: TorchDataset[tuple[Tensor, int]]
    test: TorchDataset[tuple[Tensor, int]]
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preprocessing: str
    source: Source = field(default_factory=lambda: Source(""))

    def normalize(self, images: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation, per channel.

        Parameters
        ----------
        images : tensor of shape (..., channels, height, width)
            In [0, 1].
        """
        mean = torch.tensor(self.mean, dtype=images.dtype, device=images.device)
        std = torch.tensor(self.std, dtype=images.dtype, device=images.device)
        return (images - mean[:, None, None]) / std[:, None, None]

    def split(self, name: str) -> TorchDataset[tuple[Tensor, int]]:
        """Give the split called ``train`` or ``test``."""
        if name not in ("train", "test"):
            raise RequestError(f"{self.name} has no split '{name}'; there are: test, train")
        return self.train if name == "train" else self.test

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw images without replacement; the same ones for the same seed.

        Parameters
        ----------
        count : int or None
            How many; None or more than there are: all of them.
        split : {"test", "train"}
        seed : int
            Decides which and in which order.

        Examples
        --------
        >>> from nlbench.models.digits import digits
        >>> digits().sample(4, seed=1).images.shape
        torch.Size([4, 3, 32, 32])
        """
        items = self.split(split)
        size = len(items)  # type: ignore[arg-type]  # torch's Dataset declares no __len__
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        chosen = order[: size if count is None else count].tolist()
        pairs = [items[i] for i in chosen]
        images = torch.stack([image for image, _ in pairs])
        labels = torch.tensor([int(label) for _, label in pairs])
        return Sample(images, self.normalize(images), labels)


@dataclass(frozen=True)
class Sample:
    """The images that a subject is looked at with.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
        In [0, 1].
    inputs : tensor of the same shape
        What the network is given: normalised.
    labels : tensor of shape (n,)
    """

    images: Tensor
    inputs: Tensor
    labels: Tensor
