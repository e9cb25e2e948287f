"""Activations that are no ReLU: what stays nonlinear in a sparsified network."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ._replacing import inputs_of, run_watched

__all__ = ["in_words", "other_activations"]


def other_activations(
    model: nn.Module, example: Tensor | tuple[Tensor, ...] | None = None
) -> dict[str, int]:
    """Count the calls of other activations than ReLU, which `sparsify` leaves as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Sparsified or not.
    example : tensor or tuple of tensor
        See `nlbench.models.sparsified.sparsify`.

    Examples
    --------
    >>> other_activations(nn.Sequential(nn.Linear(2, 3), nn.ReLU6(), nn.Linear(3, 1)))
    {'relu6': 1}
    """
    return dict(run_watched(model, inputs_of(model, example)).others)


def in_words(calls: Mapping[str, int]) -> str:
    """Say how often each activation is called.

    Examples
    --------
    >>> in_words({"hardswish": 2, "hardsigmoid": 1})
    '2 calls of hardswish and 1 call of hardsigmoid'
    """
    return " and ".join(f"{n} call{'s' * (n > 1)} of {kind}" for kind, n in calls.items())
