"""Training recipes: every setting but the network, the data and the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest
from nlbench.models.networks import vgg
from nlbench.models.networks.transformer import ATTENTION
from nlbench.parsers import MAX_COUNT, MAX_LEARNING_RATE, MAX_WEIGHT

RATE_TEXT = f"more than 0 and at most {MAX_LEARNING_RATE:g}"
WEIGHT_TEXT = f"0 to {MAX_WEIGHT:g}"
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("step", "cosine")


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run, except the network, the data and the seed.

    Change a setting with ``dataclasses.replace(recipe, learning_rate=0.1)``. A subclass may modify
    the network before training (`prepare`), add a `penalty` to the loss, and project parameters
    after each step (`after_step`). All its state must be in the network's state dict so that
    training can be resumed.

    Parameters
    ----------
    name : str
        The registered name.
    epochs : int
        Number of epochs, at least 1; an upper bound if training ends at a threshold.
    batch_size : int
        Samples per step; the last batch of an epoch may be smaller.
    learning_rate : float
        Initial learning rate.
    momentum : float
        For ``sgd``, in [0, 1).
    weight_decay : float
        As in `torch.optim`.
    decay : float
        Factor applied to the learning rate after every `decay_every` epochs (schedule ``step``).
    decay_every : int
    warmup_steps : int
        Number of steps over which the learning rate rises linearly from near 0.
    source : Source
    optimizer : {"sgd", "adam", "adamw"}
    schedule : {"step", "cosine"}
        ``cosine`` decays from `learning_rate` to 0 over `epochs`, with one update per epoch.
    shift : int
        Maximum random shift of each image along either axis, in pixels, padded with black.
    flip : bool
        Flip each image horizontally with probability 0.5.
    label_noise : float
        Fraction of training labels to corrupt; see
        `nlbench.models.training.label_noise.corrupt_labels`.
    until_train_accuracy : float
        Stop after the first epoch with at least this training accuracy; 0: no threshold.
    until_loss : float
        Stop after the first epoch with a mean loss below this value; 0: no threshold.

    Raises
    ------
    nlbench.RequestError
        If a setting is out of bounds.
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
            self._check(name, 1 <= getattr(self, name) <= MAX_COUNT, f"1 to {MAX_COUNT:,}")
        for name in ("warmup_steps", "shift"):
            self._check(name, 0 <= getattr(self, name) <= MAX_COUNT, f"0 to {MAX_COUNT:,}")
        for name in ("weight_decay", "until_loss"):
            self._check(name, 0 <= getattr(self, name) <= MAX_WEIGHT, WEIGHT_TEXT)
        self._check("learning_rate", 0 < self.learning_rate <= MAX_LEARNING_RATE, RATE_TEXT)
        self._check("decay", 0 < self.decay <= 1, "more than 0 and at most 1")
        self._check("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1")
        for name in ("label_noise", "until_train_accuracy"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a fraction from 0 to 1")
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

    def learning_rate_at(self, epoch: int, step: int) -> float:
        """Return the learning rate at a step in an epoch, both counted from 0 over the run.

        Examples
        --------
        >>> recipe = Recipe("short", epochs=4, learning_rate=1, decay=0.5, decay_every=2)
        >>> [recipe.learning_rate_at(epoch, step=10 * epoch) for epoch in range(4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.schedule == "cosine":
            return self.learning_rate * warm * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.learning_rate * warm * self.decay ** (epoch // self.decay_every)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimiser for a network's parameters."""
        groups = self.groups(model)
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, lr=self.learning_rate)

    @property
    def stops_early(self) -> bool:
        """True if training may end at a threshold."""
        return self.until_train_accuracy > 0 or self.until_loss > 0

    def thresholds_reached(self, loss: float, train_accuracy: float | None) -> bool:
        """Return True if an epoch reached every threshold."""
        is_accurate = (train_accuracy or 0.0) >= self.until_train_accuracy
        return is_accurate and self._loss_permits_end(loss)

    def needs_train_accuracy(self, epoch: int, loss: float) -> bool:
        """Return True if training may end after epoch `epoch`, counted from 1."""
        return epoch >= self.epochs or self._loss_permits_end(loss)

    def _loss_permits_end(self, loss: float) -> bool:
        return self.stops_early and (not self.until_loss or loss < self.until_loss)

    def prepare(self, model: nn.Module, example: Callable[[], Tensor], seed: int) -> nn.Module:
        """Return the network to train, which may be `model` modified in place.

        Parameters
        ----------
        example : callable
            Returns two samples from the training split.
        seed : int
            Seed for the training run.
        """
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return parameter groups for the optimiser, each with its ``weight_decay``.

        A group's ``rate_factor`` multiplies the learning rate.
        """
        return [{"params": list(model.parameters()), "weight_decay": self.weight_decay}]

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Compute a scalar to add to the loss, or return None."""
        return None

    def after_step(self, model: nn.Module) -> None:
        """Project parameters after a step."""

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Compute scores to log after an epoch."""
        return {}

    def metadata(self) -> dict[str, str]:
        """Return metadata for the checkpoint."""
        return {}

    def check(self, model: nn.Module, example: Tensor) -> str:
        """Raise if the recipe doesn't apply to a network. Otherwise return a warning or ``""``."""
        return ""


LINEAR_REGIONS = vgg.LINEAR_REGIONS.citation
ZHANG = (
    "C. Zhang, S. Bengio, M. Hardt, B. Recht, O. Vinyals. Understanding deep learning requires "
    "rethinking generalization. ICLR, 2017."
)
NAKKIRAN = (
    "P. Nakkiran, G. Kaplun, Y. Bansal, T. Yang, B. Barak, I. Sutskever. Deep Double Descent. "
    "ICLR, 2020."
)

# At the paper's learning rate of 0.1, VGG8 without batch norm doesn't learn the digits (ten steps
# per epoch): the loss stays at log(10) for seeds 0 to 2, even with a warm-up. At 0.02 with a
# warm-up of 200 steps, seeds 0 to 4 all reach 97 %.
vanilla = Recipe(
    name="vanilla",
    epochs=40,
    batch_size=128,
    learning_rate=0.02,
    momentum=0.9,
    decay=0.1,
    decay_every=30,
    warmup_steps=200,
    source=Source(
        LINEAR_REGIONS,
        "appendix A, vanilla setting; learning rate 0.02 after a warm-up of 200 steps in "
        "place of 0.1, and a fixed number of epochs in place of a threshold on the loss",
    ),
)
"""SGD with momentum and a single learning rate drop, without augmentation."""

# The narrow ResNet18s, without batch norm and with residual branches that start near zero,
# barely learn the digits in 30 epochs of the vanilla recipe (accuracy 21 % for w = 8).
adam = Recipe(
    name="adam",
    epochs=30,
    batch_size=64,
    learning_rate=3e-3,
    optimizer="adam",
    schedule="cosine",
    warmup_steps=100,
    source=Source("", "ours, for networks without batch norm on small data"),
)
"""Adam with a warm-up and a cosine schedule, for networks that SGD trains too slowly."""

augmented = replace(
    vanilla,
    name="augmented",
    epochs=80,
    decay_every=60,
    weight_decay=5e-4,
    shift=4,
    flip=True,
    source=Source(
        LINEAR_REGIONS,
        "appendix A, augmentation setting: shifts of up to 4 pixels and horizontal flips, "
        "weight decay (5e-4, the customary value); rate, warm-up and epochs as for small data",
    ),
)
"""The vanilla recipe with shifts of up to 4 pixels, flips and weight decay."""

# VGG8 fits the digits with 40 % corrupted labels at about epoch 100.
noisy_labels = replace(
    vanilla,
    name="noisy-labels",
    epochs=160,
    decay_every=90,
    label_noise=0.4,
    until_train_accuracy=1.0,
    source=Source(
        LINEAR_REGIONS,
        "appendix A, noisy labels: 40 % corrupted, until all of them are fitted; rate, "
        "warm-up and one step down as for small data in place of 0.95 per epoch",
    ),
)
"""The vanilla recipe with 40 % of the labels corrupted; trains until all labels are fitted."""

linear_regions_vanilla = Recipe(
    name="linear-regions-vanilla",
    epochs=500,
    batch_size=128,
    learning_rate=0.1,
    momentum=0.9,
    decay=0.1,
    decay_every=100,
    until_loss=1e-2,
    source=Source(
        LINEAR_REGIONS,
        "appendix A, vanilla setting: SGD, momentum 0.9, batches of 128, learning rate 0.1 "
        "with steps down, until a loss; the step, its period and the loss are illegible in "
        "the text used here: 0.1, 100 epochs and 0.01 are ours",
    ),
)
"""The linear-regions paper's plain setting, for CIFAR-10 and CIFAR-100."""

linear_regions_augmented = replace(
    linear_regions_vanilla,
    name="linear-regions-augmented",
    weight_decay=5e-4,
    shift=4,
    flip=True,
    source=Source(
        LINEAR_REGIONS,
        "appendix A, augmentation setting: the vanilla one with shifts of up to 4 pixels, "
        "horizontal flips and weight decay (its value is illegible; 5e-4 is ours)",
    ),
)
"""The linear-regions paper's setting with augmentation, for CIFAR-10 and CIFAR-100."""

linear_regions_noisy_labels = replace(
    linear_regions_vanilla,
    name="linear-regions-noisy-labels",
    decay=0.95,
    decay_every=1,
    until_loss=0.0,
    until_train_accuracy=1.0,
    label_noise=0.4,
    source=Source(
        f"{LINEAR_REGIONS} After {ZHANG}",
        "appendix A, noisy labels: until every label is fitted, learning rate 0.1 times 0.95 "
        "per epoch, no augmentation; the share of noise is one of the paper's 0.2 to 1.0",
    ),
)
"""The linear-regions paper's setting for corrupted labels, for CIFAR-10 and CIFAR-100."""

linear_regions_double_descent = Recipe(
    name="linear-regions-double-descent",
    epochs=500,
    batch_size=128,
    learning_rate=1e-4,
    optimizer="adam",
    label_noise=0.2,
    source=Source(
        f"{LINEAR_REGIONS} After {NAKKIRAN}",
        "appendix A, model-wise double descent: Adam, no regularisation, no augmentation; "
        "rate 1e-4 as Nakkiran et al.; the epochs (500) and the noise (0.2) are illegible "
        "in the text used here and are ours",
    ),
)
"""The linear-regions paper's setting for double descent over ResNet18 width, on CIFAR-10."""

translation = Recipe(
    name="translation",
    epochs=16,
    batch_size=128,
    learning_rate=2e-3,
    optimizer="adam",
    schedule="cosine",
    warmup_steps=100,
    source=Source(
        ATTENTION.citation,
        "section 5.3: Adam with a warm-up; a cosine to 0 in place of the inverse square root, "
        "no label smoothing, no dropout",
    ),
)
"""Adam with a warm-up and a cosine schedule, for small Transformers on parallel text."""
