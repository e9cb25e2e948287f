"""Training labels corrupted at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.parsers import MAX_TRAINING_SEED
from nlbench.subjects.data import Items, read_items


def check_seed(seed: int) -> None:
    """Raise `nlbench.RequestError` unless a seed is from 0 to 2³² - 1."""
    if not 0 <= seed <= MAX_TRAINING_SEED:
        raise RequestError(f"the seed is {seed}, expected 0 to {MAX_TRAINING_SEED}")


def corrupt_labels(labels: Tensor, fraction: float, classes: int, seed: int) -> Tensor:
    """Replace a fraction of the labels, each by a uniformly drawn other class.

    Exactly ``round(fraction * n)`` labels change. The seed determines which, and to which classes.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> labels = torch.zeros(10, dtype=torch.long)
    >>> int((corrupt_labels(labels, 0.3, classes=10, seed=0) != labels).sum())
    3
    """
    if not 0 <= fraction <= 1:
        raise RequestError(f"label noise is {fraction}, expected a fraction from 0 to 1")
    check_seed(seed)
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise RequestError(f"labels must be from 0 to {classes - 1} for {classes} classes")
    count = round(fraction * len(labels))
    if count and classes < 2:
        raise RequestError("label noise requires at least two classes")
    # NumPy's legacy generator is used because its stream is frozen. A list seeds a different stream
    # than an integer, so that the noise is independent of the order of the images.
    random = np.random.RandomState([seed, classes])
    indices = torch.from_numpy(random.permutation(len(labels))[:count]).to(labels.device)
    steps = torch.from_numpy(random.randint(1, max(classes, 2), count)).to(labels)
    corrupted = labels.clone()
    corrupted[indices] = (labels[indices] + steps) % classes
    return corrupted


def add_label_noise(items: Items, fraction: float, classes: int, seed: int) -> Items:
    """Return the items with a fraction of their labels changed. See `corrupt_labels`."""
    read_labels = getattr(items, "read_labels", None)
    labels = read_labels() if read_labels else [items[i][1] for i in range(len(items))]  # type: ignore[arg-type]
    original = torch.tensor([int(label) for label in labels])
    return _RelabelledItems(items, corrupt_labels(original, fraction, classes, seed))


class _RelabelledItems(TorchDataset[tuple[Tensor, int]]):
    def __init__(self, items: Items, labels: Tensor) -> None:
        self.items = items
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index][0], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        pairs = read_items(self.items, indices)
        return [(image, self.labels[i]) for i, (image, _) in zip(indices, pairs, strict=True)]
