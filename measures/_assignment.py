"""Which output each transported sample is matched with at least cost.

The optimal transport between two sets of n points with equal weights is an assignment.
For a layer's input and output the identity, each sample with its own output, is nearly
always optimal; a bound from dual potentials proves it far faster than a solver does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

__all__ = ["SWEEPS", "identity_is_optimal", "optimal_matching", "squared_distances"]

SWEEPS = 8


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
    a, b = a.detach(), b.detach()
    if a.shape[1] == 1:
        # On a line the optimal transport matches ranks.
        matching = torch.empty(len(a), dtype=torch.int64, device=a.device)
        matching[a[:, 0].argsort(stable=True)] = b[:, 0].argsort(stable=True)
        return matching
    distance = (a - b).square().sum(1).mean().sqrt().item()
    step = min(precision, distance)
    # What may be taken off the squared distance, so that its root falls by `step`.
    allowed = step * (2 * distance - step)
    cost = squared_distances(a, b)
    diagonal = cost.diagonal().clone()
    excess = cost.sub_(diagonal)
    if identity_is_optimal(excess, diagonal, allowed=allowed):
        return torch.arange(len(a), device=a.device)
    _, columns = linear_sum_assignment(excess.cpu().numpy())
    return torch.as_tensor(columns, device=a.device)


def identity_is_optimal(excess: Tensor, diagonal: Tensor, *, allowed: float) -> bool:
    """Prove that matching i with i costs at most `allowed` a sample more than the least.

    Potentials u (rows) and c_jj - u_j (columns) bound every matching from below once u
    is lowered to min_j (c_ij - c_jj + u_j); the mean of what that takes off is the gap
    between the identity and the bound. The cheap guesses come first, then a few sweeps
    that lower the last one again and again.

    Parameters
    ----------
    excess : tensor of shape (n, n)
        c_ij - c_jj, of the costs c.
    diagonal : tensor of shape (n,)
        c_jj.
    allowed : float
        The gap that is good enough.

    Returns
    -------
    bool
        True is a proof; False says nothing.

    Examples
    --------
    >>> identity_is_optimal(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2), allowed=0.0)
    True
    >>> identity_is_optimal(torch.tensor([[0.0, -1.0], [-1.0, 0.0]]), torch.ones(2), allowed=0.0)
    False
    """
    scratch = torch.empty_like(excess)
    potential = lowered = diagonal
    for potential in _guesses(excess, diagonal):
        lowered = torch.add(excess, potential, out=scratch).amin(1)
        if (potential - lowered).mean() <= allowed:
            return True
    for _ in range(SWEEPS):
        if (potential - lowered > allowed).sum() > len(excess) / 2:
            return False
        potential, lowered = lowered, torch.add(excess, lowered, out=scratch).amin(1)
        if (potential - lowered).mean() <= allowed:
            return True
    return False


def _guesses(excess: Tensor, diagonal: Tensor) -> Iterator[Tensor]:
    """Row potentials (n,) that often suffice, the cheapest first.

    They belong to the column potentials zero, the column minima, and half way between
    the means of rows and columns.
    """
    yield diagonal
    yield -excess.amin(0)
    yield (excess.mean(1) - excess.mean(0)) / 2
