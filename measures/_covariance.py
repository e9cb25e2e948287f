"""Regularised covariances and the affine optimal transport map between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nlbench.errors import Undefined

from ._samples import EPSILON

__all__ = [
    "Covariance",
    "joint_basis",
    "ledoit_wolf_coefficient",
    "regularized_covariance",
    "transport",
]


@dataclass(frozen=True)
class Covariance:
    """A covariance in d dimensions, seen in an r-dimensional subspace.

    Parameters
    ----------
    matrix : tensor of shape (r, r)
        The restriction to the subspace.
    trace : tensor, scalar
        Of the whole d × d matrix.
    """

    matrix: Tensor
    trace: Tensor


def ledoit_wolf_coefficient(data: Tensor, sample: Tensor, dim: int) -> Tensor:
    """Weight of the isotropic target in the Ledoit–Wolf covariance.

    With S = XᵀX / n, m = tr S / d and ‖·‖ the Frobenius norm, it is

        min(1, Σ_i ‖x_i x_iᵀ - S‖² / n² / ‖S - m I‖²),

    where Σ_i ‖x_i x_iᵀ - S‖² = Σ_i ‖x_i‖⁴ - n ‖S‖².

    Parameters
    ----------
    data : tensor of shape (n, r)
        Centred samples, in any orthonormal basis that holds them.
    sample : tensor of shape (r, r)
        S in that basis.
    dim : int
        d, the dimension of the space that they come from.

    Returns
    -------
    tensor, scalar
        In [0, 1]; 0 where S is isotropic already, as in one dimension.

    References
    ----------
    O. Ledoit and M. Wolf, "A well-conditioned estimator for large-dimensional covariance
    matrices", Journal of Multivariate Analysis 88 (2004), section 3.
    """
    n = len(data)
    norm = sample.square().sum()
    distance = norm - sample.trace() ** 2 / dim
    noise = (data.square().sum(1).square().sum() / n - norm) / n
    if dim == 1 or distance <= 0:
        return torch.zeros_like(norm)
    # The lower limit is for rounding, the upper one is the estimator's own.
    coefficient: Tensor = (noise / distance).clamp(0, 1)
    return coefficient


def regularized_covariance(data: Tensor, *, dim: int, shrinkage: str, ridge: float) -> Covariance:
    """Covariance of centred samples, shrunk, with a ridge relative to its mean variance.

    Parameters
    ----------
    data : tensor of shape (n, r)
        Centred samples, in an orthonormal basis that holds them.
    dim : int
        d, the dimension of the space that they come from.
    shrinkage : {"ledoit-wolf", "none"}
        Ledoit–Wolf's estimator, or the unbiased sample covariance.
    ridge : float
        Share of the mean variance tr Σ / d that is added to the diagonal.
    """
    n = len(data)
    shrunk = shrinkage == "ledoit-wolf"
    sample = data.T @ data / (n if shrunk else n - 1)
    level = torch.full_like(sample[0, 0], ridge)
    kept = torch.ones_like(level)
    if shrunk:
        coefficient = ledoit_wolf_coefficient(data, sample, dim)
        level, kept = level + coefficient, kept - coefficient
    trace = sample.trace()
    identity = torch.eye(len(sample), dtype=data.dtype, device=data.device)
    return Covariance(kept * sample + (level * trace / dim) * identity, (1 + ridge) * trace)


def joint_basis(x: Tensor, y: Tensor) -> Tensor:
    """Orthonormal basis of a space that holds all rows of x and y, both (n, d), 2 n < d.

    A score that rotations leave alone depends on the rows' inner products only, which a
    step out of their span changes at second order: the basis needs no gradient.

    Returns
    -------
    tensor of shape (d, 2 n)
    """
    basis: Tensor = torch.linalg.qr(torch.cat([x, y]).detach().T).Q
    return basis


# From this ratio of smallest to largest eigenvalue downwards, the root of the smallest
# would have fewer than eight digits.
WIDE_SPECTRUM = 1e-8


class _MiddleRoot(torch.autograd.Function):
    """M^{1/2} of M = Lᵀ Σy L, as a function of M.

    The derivative solves dS S + S dS = dM in the eigenbasis. Unlike that of a
    decomposition it has no singularity at repeated eigenvalues. At two zero eigenvalues,
    where the root has no derivative, it is taken to be zero.
    """

    @staticmethod
    def forward(ctx: Any, middle: Tensor, lower: Tensor, target: Tensor) -> Tensor:
        """Take the root of M (r, r), from L and Σy themselves where M has lost digits."""
        eigenvalues, vectors = torch.linalg.eigh(middle)
        if eigenvalues[0] > WIDE_SPECTRUM * eigenvalues[-1]:
            roots = eigenvalues.sqrt()
        else:
            roots, vectors = _singular_pairs(_factor(target).T @ lower)
        ctx.save_for_backward(roots, vectors)
        root: Tensor = (vectors * roots) @ vectors.T
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Solve the Sylvester equation for the gradient."""
        roots, vectors = ctx.saved_tensors
        sums = roots[:, None] + roots
        positive = sums > len(roots) * EPSILON * roots.max()
        inside = vectors.T @ ((gradient + gradient.T) / 2) @ vectors
        solved = torch.where(positive, inside / torch.where(positive, sums, 1.0), 0.0)
        change: Tensor = vectors @ solved @ vectors.T
        return change, None, None


def _factor(matrix: Tensor) -> Tensor:
    """Take some F with F Fᵀ = matrix, which may be singular."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        factor = vectors * eigenvalues.clamp(min=0).sqrt()
    return factor


def _singular_pairs(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values (r,) of B and their right vectors in columns (r, r).

    They are the roots of the eigenvalues of BᵀB, the small ones with all their digits.
    """
    _, roots, rows = torch.linalg.svd(factor)
    vectors: Tensor = rows.T
    return roots, vectors


def transport(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Apply the optimal transport map between two centred normal distributions.

    With Σx = L Lᵀ the map is A = L⁻ᵀ (Lᵀ Σy L)^{1/2} L⁻¹: the only positive semidefinite
    matrix with A Σx A = Σy. Σy may be singular, Σx may not.

    Parameters
    ----------
    x : tensor of shape (n, r)
    source, target : tensor of shape (r, r)
        Σx and Σy.

    Returns
    -------
    tensor of shape (n, r)
        The rows A x_i.

    Raises
    ------
    nlbench.Undefined
        If Σx is singular.
    """
    lower, failed = torch.linalg.cholesky_ex(source)
    # A pivot that is rounding of its own diagonal entry: the column depends on others. Any
    # ridge worth the name keeps pivots above ridge / d of it.
    pivots = lower.detach().diagonal().square()
    floor = 10 * len(source) * EPSILON * source.detach().diagonal()
    if failed or not (pivots > floor).all():
        raise Undefined("the covariance of x is singular: it needs a larger ridge")
    middle = lower.T @ target @ lower
    root: Tensor = _MiddleRoot.apply(middle, lower.detach(), target.detach())
    whitened = torch.linalg.solve_triangular(lower, x.T, upper=False)
    mapped: Tensor = torch.linalg.solve_triangular(lower.T, root @ whitened, upper=True).T
    return mapped
