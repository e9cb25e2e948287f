"""Recipes that linearise units by means of a sparsity penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.measures.pathlength import NONLINEAR_ADVANTAGE
from nlbench.models.sparsified.relu_calls import call_counts_text, other_activations
from nlbench.models.sparsified.sparsification import (
    linear_share,
    parameter_groups,
    penalty,
    randomize,
    snap,
    sparsify,
    transform_metadata,
)
from nlbench.parsers import MAX_WEIGHT

from .recipes import WEIGHT_TEXT, Recipe


@dataclass(frozen=True)
class Linearisation(Recipe):
    """A recipe that linearises units.

    Every ReLU call is replaced by a PReLU with one slope α per channel, initially 0. Training
    minimises the loss plus ω Σ |1 − α|^½. Once a unit's α is within 0.01 of 1, it stays linear.

    Parameters
    ----------
    name, epochs, …
        See `Recipe`.
    omega : float
        Weight ω of the penalty, at least 0.
    slope_rate : float
        Learning rate of the slopes relative to that of the weights.
    layerwise : bool
        Use one slope per layer instead of one per channel.
    starts_trained : bool
        True if the recipe starts from trained weights.
    random_share : float
        For a control, the fraction of units, drawn at random, that are linearised before training;
        the slopes are not trained. Negative if the recipe is not a control.

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
        self._check("omega", 0 <= self.omega <= MAX_WEIGHT, WEIGHT_TEXT)
        self._check(
            "slope_rate",
            0 < self.slope_rate <= MAX_WEIGHT,
            f"more than 0 and at most {MAX_WEIGHT:g}",
        )
        self._check("random_share", self.random_share <= 1, "at most 1")

    @property
    def is_control(self) -> bool:
        """True if the linear units are drawn at random."""
        return self.random_share >= 0

    def check(self, model: nn.Module, example: Tensor) -> str:
        """Raise if a network can't be linearised. Otherwise return a warning or ``""``."""
        sparsify(model, layerwise=self.layerwise, example=example)
        others = other_activations(model, example)
        verb = "remain" if sum(others.values()) > 1 else "remains"
        return f"only ReLUs are linearised; {call_counts_text(others)} {verb}" if others else ""

    def prepare(self, model: nn.Module, example: Callable[[], Tensor], seed: int) -> nn.Module:
        """Sparsify a network. For a control, linearise a random fraction of its units."""
        model = sparsify(model, layerwise=self.layerwise, example=example())
        if self.is_control:
            randomize(model, self.random_share, seed)
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups: the weights and, except in a control, the slopes."""
        weights, slopes = parameter_groups(model, self.weight_decay)
        return (
            [weights] if self.is_control else [weights, slopes | {"rate_factor": self.slope_rate}]
        )

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Compute the sparsity penalty, ω Σ |1 − α|^½."""
        return None if self.is_control or not self.omega else self.omega * penalty(model)

    def after_step(self, model: nn.Module) -> None:
        """Set slopes that have reached or crossed 1 to 1, and freeze them."""
        if not self.is_control:
            snap(model)

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Compute the fraction of linear units."""
        return {"linear_share": linear_share(model)}

    def metadata(self) -> dict[str, str]:
        """Return the metadata from which the network is rebuilt."""
        metadata = {**transform_metadata(self.layerwise), "omega": str(self.omega)}
        return metadata | {"random": "true"} if self.is_control else metadata


post_training = Linearisation(
    name="post-training",
    epochs=20,
    batch_size=64,
    learning_rate=1e-3,
    optimizer="adam",
    schedule="cosine",
    starts_trained=True,
    source=Source(
        NONLINEAR_ADVANTAGE.citation,
        "sparsified PReLU, post-training; optimiser, rates and epochs are ours, chosen on "
        "the digits",
    ),
)
"""Linearise a trained network by means of the sparsity penalty."""

from_start = replace(
    post_training,
    name="from-start",
    epochs=60,
    starts_trained=False,
    source=Source(
        NONLINEAR_ADVANTAGE.citation,
        "sparsified PReLU, from the start of training; optimiser, rates and epochs are ours",
    ),
)
"""Train a network with the sparsity penalty from its initialisation."""
