"""A prior on weights: what is added to the loss, and what is done after each step."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["NoPrior", "Prior"]


class Prior(Protocol):
    """A penalty on a network's parameters and the care that they need.

    What it remembers of a network has to be in the network's state, since a training that is
    taken up again starts with a prior of its own.
    """

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, each with its ``weight_decay``.

        ``rate_factor`` of a group multiplies the recipe's learning rate.
        """

    def penalty(self, model: nn.Module) -> Tensor | None:
        """What is added to the loss of a step, a scalar; None: nothing."""

    def settle(self, model: nn.Module) -> None:
        """Put parameters in order after a step."""

    def scores(self, model: nn.Module) -> dict[str, float]:
        """What the log of an epoch says."""

    def facts(self) -> dict[str, Any]:
        """What decides its effect, as plain values."""

    def metadata(self) -> dict[str, str]:
        """What a checkpoint has to carry."""


class NoPrior:
    """No penalty."""

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """All parameters alike."""
        return [{"params": list(model.parameters()), "weight_decay": weight_decay}]

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Nothing."""
        return None

    def settle(self, model: nn.Module) -> None:
        """Do nothing."""

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Nothing to say."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Nothing decides it."""
        return {}

    def metadata(self) -> dict[str, str]:
        """Nothing to carry."""
        return {}
