"""What a training tells: of each epoch as it ends, and of the network in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Epoch", "Keep", "TrainingResult"]


@dataclass(frozen=True)
class Epoch:
    """Where one pass through the training split led.

    Parameters
    ----------
    number : int
        From 1.
    learning_rate : float
        At the epoch's last step.
    loss : float
        Mean loss over the epoch, of each sample before the step that used it; without the
        penalty of a prior.
    train_accuracy : float or None
    test_accuracy : float
        Share of what the network predicts right at the epoch's end, in [0, 1]: images, or
        tokens of a translation; in training by the labels trained on, corrupted ones
        included. In training it takes a pass of its own, which is made where training may
        end: see `nlbench.models.recipe.Recipe.wants_train_accuracy`; None after other epochs.
    scores : mapping of str to float
        What a prior counts, such as ``linear_share``.
    running_accuracy : float or None
        The same share of the training samples as they came in the epoch: each augmented, in
        training mode, before the step that used it, as the loss is.
    """

    number: int
    learning_rate: float
    loss: float
    train_accuracy: float | None
    test_accuracy: float
    scores: Mapping[str, float] = field(default_factory=dict)
    running_accuracy: float | None = None


Keep = Callable[[Epoch, nn.Module, Mapping[str, str]], object]
"""Told of an epoch, the network, and what a checkpoint of it has to carry."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained network and how it got there.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode, on the device that it was trained on.
    history : tuple of Epoch
        At least one.
    is_reached : bool
        Whether the thresholds of the recipe were reached; True where it has none.
    scores : mapping of str to float
        What was measured once at the end, such as ``bleu``.
    metadata : mapping of str to str
        What a checkpoint of this network has to carry beside its weights.
    """

    model: nn.Module
    history: tuple[Epoch, ...]
    is_reached: bool = True
    scores: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def train_accuracy(self) -> float:
        """Share of training samples predicted right, by the labels trained on."""
        accuracy = self.history[-1].train_accuracy
        assert accuracy is not None
        return accuracy

    @property
    def test_accuracy(self) -> float:
        """Share of test samples predicted right."""
        return self.history[-1].test_accuracy
