"""What a network is trained for: batches, the loss, and how good it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import RequestError

from .batches import batches
from .classification import augment, check_logits, count_right, len_of, relabelled, share_right

if TYPE_CHECKING:
    from nlbench.subjects.data import Dataset

    from .recipe import Recipe

__all__ = ["Classification", "Task", "task_of"]


class Task(Protocol):
    """What a network is trained for.

    A dataset that isn't labelled images has a method ``task(recipe, label_noise, seed)`` that
    returns one.
    """

    @property
    def size(self) -> int:
        """How many training samples there are."""

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of the training samples in that order.

        What is random in them, such as augmentation, is drawn from the generator.
        """

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over a batch, a scalar."""

    def right(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How much of a batch is predicted right, and of how much."""

    def accuracy(self, model: nn.Module, split: str, device: torch.device) -> float:
        """Share of the split ``train`` or ``test`` that is predicted right."""

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """What is measured once, at the end of training, beside the accuracies."""

    def metadata(self) -> dict[str, str]:
        """What a checkpoint has to carry for its outputs to be read."""


class Classification:
    """Images, one class each; the cross entropy.

    Parameters
    ----------
    dataset : Dataset
    recipe : Recipe
        Its augmentation.
    label_noise : float
        Share of training labels to corrupt.
    seed : int
        Decides which.

    Raises
    ------
    nlbench.RequestError
        If the images have no labels.
    """

    def __init__(self, dataset: Dataset, recipe: Recipe, label_noise: float, seed: int) -> None:
        if not getattr(dataset, "labelled", True):
            raise RequestError(f"{dataset.name} has no labels, so there is nothing to learn")
        self.dataset = dataset
        self.recipe = recipe
        self.items = dataset.train
        if label_noise:
            self.items = relabelled(self.items, label_noise, dataset.classes, seed)

    @property
    def size(self) -> int:
        """How many training images there are."""
        return len_of(self.items)

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised images of shape (b, ...) and labels of shape (b,), in that order."""
        for images, labels in batches(self.items, order, batch_size, device):
            if self.recipe.shift or self.recipe.flip:
                images = augment(images, self.recipe.shift, self.recipe.flip, generator)
            yield self.dataset.normalize(images.to(device)), labels.to(device)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of logits of shape (b, classes)."""
        check_logits(output, len(targets), self.dataset.classes)
        return functional.cross_entropy(output, targets)

    def right(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How many of a batch are classified right, and how many there are."""
        return count_right(output, targets), len(targets)

    def accuracy(self, model: nn.Module, split: str, device: torch.device) -> float:
        """Share classified right; in training by the labels trained on."""
        items = self.items if split == "train" else self.dataset.test
        return share_right(model, items, self.dataset, device)

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Nothing more than the accuracies."""
        return {}

    def metadata(self) -> dict[str, str]:
        """Nothing: the class's number is all there is to a label."""
        return {}


def task_of(dataset: Any, recipe: Recipe, label_noise: float, seed: int) -> Task:
    """What a dataset is for: its own task, else classification."""
    own = getattr(dataset, "task", None)
    if own is not None:
        task: Task = own(recipe, label_noise, seed)
        return task
    return Classification(dataset, recipe, label_noise, seed)
