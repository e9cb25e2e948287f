"""Which output each transported sample is matched with at least cost.

The optimal transport between two sets of n points with equal weights is an assignment.
For a layer's input and output the identity, each sample with its own output, is nearly
always optimal; a bound from dual potentials proves it far faster than a solver does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ._blas import is_differentiated
from ._certificate import certified_in_single_precision, identity_is_optimal

__all__ = ["optimal_matching", "squared_distances"]

# From this many samples on, single precision saves time.
MANY = 256


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances (n, n) between the rows of a and b, both (n, d) and centred.

    Expanded into inner products: without an offset it loses no digits that matter.
    """
    norms = a.square().sum(1)[:, None] + b.square().sum(1)
    return norms.addmm_(a, b.T, alpha=-2)


def optimal_matching(a: Tensor, b: Tensor, *, precision: float) -> Tensor:
    """Index of the row of b that each row of a is matched with, at least total cost.

    Parameters
    ----------
    a, b : tensor of shape (n, d)
        Both centred.
    precision : float
        By how much the root mean squared distance of the matching may exceed the least.

    Returns
    -------
    tensor of shape (n,), int64
    """
    match = _Matching.apply if is_differentiated(a, b) else _Matching.forward
    matching: Tensor = match(a.detach(), b.detach(), precision)
    return matching


class _Matching(torch.autograd.Function):
    """The matching, as an operation of its own: transforms of functions don't look inside."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, precision: float) -> Tensor:
        """Match."""
        return _matched(a, b, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Indices have no derivative."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None, None]:
        """None."""
        return None, None, None


def _matched(a: Tensor, b: Tensor, precision: float) -> Tensor:
    if a.shape[1] == 1:
        # On a line the optimal transport matches ranks.
        matching = torch.empty(len(a), dtype=torch.int64, device=a.device)
        matching[a[:, 0].argsort(stable=True)] = b[:, 0].argsort(stable=True)
        return matching
    distance = torch.linalg.vector_norm(a - b).item() / math.sqrt(len(a))
    step = min(precision, distance)
    # What may be taken off the squared distance, so that its root falls by `step`.
    allowed = step * (2 * distance - step)
    identity = torch.arange(len(a), device=a.device)
    if len(a) >= MANY and certified_in_single_precision(a, b, allowed=allowed):
        return identity
    cost = squared_distances(a, b)
    diagonal = cost.diagonal().clone()
    excess = cost.sub_(diagonal)
    if identity_is_optimal(excess, diagonal, allowed=allowed):
        return identity
    _, columns = linear_sum_assignment(excess.cpu().numpy())
    return torch.as_tensor(columns, device=a.device)
