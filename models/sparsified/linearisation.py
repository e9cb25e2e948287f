"""Linearising a network under a sparsity prior, from trained weights or from the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from nlbench.measure import Source
from nlbench.models.training.recipes import Prior, Recipe

from .prelu import (
    linear_share,
    parameter_groups,
    penalty,
    randomize,
    snap,
    sparsify,
)
from .surgery import in_words, other_activations

__all__ = ["Linearisation", "SparsityPrior", "from_start", "post_training"]


@dataclass(frozen=True)
class SparsityPrior(Prior):
    """ω Σ |1 − α|^½ over the slopes of a sparsified network.

    Parameters
    ----------
    omega : float
    slope_rate : float
        Factor of the recipe's learning rate for the slopes.
    layerwise : bool
        Whether the network's slopes are one a layer.
    frozen : bool
        Slopes don't move: units are linear or ReLU for good.
    """

    omega: float
    slope_rate: float = 1.0
    layerwise: bool = False
    frozen: bool = False

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Weights, and slopes without decay, with a rate of their own."""
        weights, slopes = parameter_groups(model, weight_decay)
        if self.frozen:
            return [weights]
        return [weights, {**slopes, "rate_factor": self.slope_rate}]

    def penalty(self, model: nn.Module) -> Tensor | None:
        """ω times the distance from linear."""
        return None if self.frozen or not self.omega else self.omega * penalty(model)

    def settle(self, model: nn.Module) -> None:
        """Set to 1 and freeze what has come near 1 or crossed it."""
        if not self.frozen:
            snap(model)

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Share of linear units."""
        return {"linear_share": linear_share(model)}

    def facts(self) -> dict[str, Any]:
        """All of it decides the training."""
        return asdict(self)

    def metadata(self) -> dict[str, str]:
        """How the network that the weights fit is made."""
        options = {"layerwise": self.layerwise}
        about = {"transform": "sparsify", "transform_options": json.dumps(options)}
        return {**about, "omega": str(self.omega), **({"random": "true"} if self.frozen else {})}


@dataclass(frozen=True)
class Linearisation(Recipe):
    """A recipe under which units become linear.

    Every ReLU call becomes a PReLU with one slope α a channel, starting at 0; training
    minimises the loss plus ω Σ |1 − α|^½; a unit within 0.01 of α = 1 is linear for good.

    Parameters
    ----------
    name, epochs, …
        As `Recipe`.
    omega : float
        Weight of the penalty, at least 0.
    slope_rate : float
        Factor of the learning rate for the slopes.
    layerwise : bool
        One slope a layer in place of one a channel.
    starts_trained : bool
        Whether the recipe means to start from trained weights.
    random_share : float
        The control: so large a share of units, drawn at random, is made linear beforehand,
        and no slope moves; below 0: no control.

    Examples
    --------
    >>> recipe = replace(post_training, omega=0.01, epochs=1)
    >>> recipe.omega, recipe.starts_trained
    (0.01, True)
    """

    omega: float = 0.003
    slope_rate: float = 30.0
    layerwise: bool = False
    starts_trained: bool = False
    random_share: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("omega", self.omega >= 0, "at least 0")
        self._check("slope_rate", self.slope_rate > 0, "more than 0")
        self._check("random_share", self.random_share <= 1, "at most 1")

    @property
    def is_control(self) -> bool:
        """Whether random units are linear, whatever the loss says."""
        return self.random_share >= 0

    def check(self, model: nn.Module, example: Tensor) -> str:
        """Refuse a network that can't be linearised; give what is to be known of one that can.

        Raises
        ------
        nlbench.RequestError
            If it calls no ReLU, or can't be sparsified for another reason.
        """
        sparsify(model, layerwise=self.layerwise, example=example)
        others = other_activations(model, example)
        stay = "stay as they are" if sum(others.values()) > 1 else "stays as it is"
        return f"only ReLUs are made linear; {in_words(others)} {stay}" if others else ""

    def prepared(self, model: nn.Module, example: Callable[[], Tensor], seed: int) -> nn.Module:
        """Sparsify a network; for the control, make a random share of its units linear.

        Raises
        ------
        nlbench.RequestError
            If it calls no ReLU, or can't be sparsified for another reason.
        """
        model = sparsify(model, layerwise=self.layerwise, example=example())
        if self.is_control:
            randomize(model, self.random_share, seed)
        return model

    def prior(self) -> SparsityPrior:
        """The penalty on the slopes."""
        return SparsityPrior(self.omega, self.slope_rate, self.layerwise, self.is_control)


NONLINEAR_ADVANTAGE = (
    "C. H. X. A. Mehmeti-Göpel, J. Disselhoff. Nonlinear Advantage: Trained Networks Might Not "
    "Be As Complex as You Think. ICML, 2023."
)

post_training = Linearisation(
    name="post-training",
    epochs=20,
    batch_size=64,
    learning_rate=1e-3,
    optimizer="adam",
    schedule="cosine",
    starts_trained=True,
    source=Source(
        citation=NONLINEAR_ADVANTAGE,
        equation=(
            "sparsified PReLU, post-training; optimiser, rates and epochs are ours, chosen on "
            "the digits"
        ),
    ),
)
"""Linearise a trained network under the sparsity prior."""

from_start = replace(
    post_training,
    name="from-start",
    epochs=60,
    starts_trained=False,
    source=Source(
        citation=NONLINEAR_ADVANTAGE,
        equation=(
            "sparsified PReLU, from the start of training; optimiser, rates and epochs are ours"
        ),
    ),
)
"""Train a network under the sparsity prior from its initialisation."""
