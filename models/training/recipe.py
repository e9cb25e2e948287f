"""What a recipe fixes: optimiser, schedule, augmentation, noise, and when training ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nlbench.errors import RequestError, nearest
from nlbench.measure import Source

if TYPE_CHECKING:
    from nlbench.subjects.data import Dataset

    from .loop import Epoch, Keep, TrainingResult

__all__ = ["OPTIMIZERS", "SCHEDULES", "Recipe"]


OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("step", "cosine")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: all but the network, the data and the seed.

    Another setting is ``dataclasses.replace(recipe, learning_rate=0.1)``.

    Parameters
    ----------
    name : str
        The registered name.
    epochs : int
        Passes through the training split, at least 1; the most, where training ends at a
        threshold.
    batch_size : int
        Samples a step; the last batch of an epoch may be smaller.
    learning_rate : float
        Before it decays.
    momentum : float
        Of ``sgd``, in [0, 1).
    weight_decay : float
        As the optimisers of `torch.optim` have it.
    decay : float
        Factor of the learning rate after every `decay_every` epochs (schedule ``step``).
    decay_every : int
    warmup_steps : int
        Steps over which the learning rate rises linearly from near 0.
    source : Source
    optimizer : {"sgd", "adam", "adamw"}
    schedule : {"step", "cosine"}
        ``cosine`` falls from `learning_rate` to 0 over `epochs`, half a cosine, an epoch at
        a time.
    shift : int
        Images are moved by up to so many pixels along either axis, each image on its own,
        black moving in; 0: they stay.
    flip : bool
        Mirror each image left to right with probability one half.
    label_noise : float
        Share of training labels to corrupt; see `nlbench.models.training.loop.corrupt_labels`.
    until_train_accuracy : float
        End after the first epoch with so much accuracy in training; 0: don't.
    until_loss : float
        End after the first epoch with a mean loss below this; 0: don't.

    Raises
    ------
    nlbench.RequestError
        If a number is out of bounds.
    """

    name: str
    epochs: int
    batch_size: int = 128
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: float = 1.0
    decay_every: int = 1
    warmup_steps: int = 0
    source: Source = field(default_factory=lambda: Source(""))
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    schedule: Literal["step", "cosine"] = "step"
    shift: int = 0
    flip: bool = False
    label_noise: float = 0.0
    until_train_accuracy: float = 0.0
    until_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "decay_every"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("weight_decay", "warmup_steps", "shift", "until_loss"):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("learning_rate", "decay"):
            self._check(name, getattr(self, name) > 0, "more than 0")
        self._check("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        for name in ("label_noise", "until_train_accuracy"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a share from 0 to 1")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value not in known:
                raise RequestError(
                    f"recipe {self.name}: unknown {name} '{value}'{nearest(str(value), known)}"
                )

    def _check(self, name: str, holds: bool, expected: str) -> None:
        value = getattr(self, name)
        if not (holds and math.isfinite(value)):
            raise RequestError(f"recipe {self.name}: {name} is {value}, expected {expected}")

    def rate(self, epoch: int, step: int) -> float:
        """Learning rate in an epoch at a step, both counted from 0 over the whole training.

        Examples
        --------
        >>> recipe = Recipe("short", epochs=4, learning_rate=1, decay=0.5, decay_every=2)
        >>> [recipe.rate(epoch, step=10 * epoch) for epoch in range(4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.schedule == "cosine":
            return self.learning_rate * warm * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.learning_rate * warm * self.decay ** (epoch // self.decay_every)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimiser of parameter groups that state their own ``weight_decay``."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, lr=self.learning_rate)

    @property
    def stops_early(self) -> bool:
        """Whether training ends at a threshold."""
        return self.until_train_accuracy > 0 or self.until_loss > 0

    def is_reached(self, epoch: Epoch) -> bool:
        """Whether an epoch reached every threshold that is set."""
        accurate = (epoch.train_accuracy or 0.0) >= self.until_train_accuracy
        return accurate and self._may_end_early(epoch.loss)

    def wants_train_accuracy(self, epoch: int, loss: float) -> bool:
        """Whether the accuracy in training is to be measured after an epoch, counted from 1.

        It is where training may end.
        """
        return epoch >= self.epochs or self._may_end_early(loss)

    def _may_end_early(self, loss: float) -> bool:
        """Whether a loss lets training end at a threshold."""
        return self.stops_early and (not self.until_loss or loss < self.until_loss)

    def train(
        self,
        build: Callable[[], nn.Module],
        dataset: Dataset,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        label_noise: float | None = None,
        progress: Callable[[Epoch], object] | None = None,
        state: Path | None = None,
        keep: Keep | None = None,
    ) -> TrainingResult:
        """Follow the recipe; see `nlbench.models.training.loop.train`."""
        from .loop import train

        return train(
            build,
            dataset,
            self,
            seed=seed,
            device=device,
            label_noise=label_noise,
            progress=progress,
            state=state,
            keep=keep,
        )
