"""Regression as a task: the mean squared error of functions whose values are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import RequestError
from nlbench.probes.model_state import evaluation_mode

from .tasks import Task

if TYPE_CHECKING:
    from nlbench.models.datasets.synthetic import Curve

    from .recipes import Recipe

__all__ = ["TOLERANCE", "Regression", "regression_of"]


TOLERANCE = 0.1
"""How far from its target a value may be that counts as right."""

Points = tuple[Tensor, Tensor]


class Regression(Task):
    """Learn the value of each point, by the mean squared error.

    Accuracy is the share of points within `TOLERANCE` of their target.

    Parameters
    ----------
    train, test : pair of tensors
        Inputs of shape (n, ...) and targets of shape (n,).
    """

    classes = 1

    def __init__(self, train: Points, test: Points) -> None:
        self._points = {"train": train, "test": test}

    @property
    def size(self) -> int:
        """How many training points there are."""
        return len(self._points["train"][0])

    def batches(
        self, order: Tensor, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Iterator[Points]:
        """Inputs of shape (b, ...) and targets of shape (b,), in that order."""
        inputs, targets = self._points["train"]
        for chosen in torch.split(order, batch_size):
            yield inputs[chosen].to(device), targets[chosen].to(device)

    def evaluated(self, split: str, device: torch.device) -> Iterator[Points]:
        """All points of a split at once."""
        inputs, targets = self._points[split]
        yield inputs.to(device), targets.to(device)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, a scalar."""
        self._check(output, targets)
        return functional.mse_loss(output[..., 0], targets)

    def right(self, output: Tensor, targets: Tensor) -> tuple[int, int]:
        """How many values are within the tolerance, and how many there are."""
        return int(((output[..., 0] - targets).abs() <= TOLERANCE).sum()), targets.numel()

    def final_scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Share of the test targets' variance that the network explains."""
        with evaluation_mode(model):
            ((inputs, targets),) = self.evaluated("test", device)
            error = (model(inputs)[..., 0] - targets).double().square().mean()
        return {"explained": float(1 - error / targets.double().var(correction=0))}


def regression_of(curve: Curve, recipe: Recipe, label_noise: float) -> Regression:
    """Make the task of a function.

    Raises
    ------
    nlbench.RequestError
        If the recipe augments images or corrupts labels.
    """
    if recipe.shift or recipe.flip or label_noise:
        raise RequestError(f"{curve.name} has neither images to move nor labels to corrupt")
    return Regression(curve.points("train"), curve.points("test"))
