"""Regularised covariances of centred samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._blas import gram

__all__ = [
    "Covariance",
    "joint_coordinates",
    "ledoit_wolf_coefficient",
    "regularized_covariance",
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


def ledoit_wolf_coefficient(data: Tensor, scatter: Tensor, dim: int) -> Tensor:
    """Weight of the isotropic target in the Ledoit–Wolf covariance.

    With S = XᵀX / n, m = tr S / d and ‖·‖ the Frobenius norm, it is

        min(1, Σ_i ‖x_i x_iᵀ - S‖² / n² / ‖S - m I‖²),

    where Σ_i ‖x_i x_iᵀ - S‖² = Σ_i ‖x_i‖⁴ - n ‖S‖².

    Parameters
    ----------
    data : tensor of shape (n, r)
        Centred samples, in any orthonormal basis that holds them.
    scatter : tensor of shape (r, r)
        n S = XᵀX in that basis.
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
    norm = (torch.linalg.vector_norm(scatter) / n).square()
    distance = norm - (scatter.trace() / n) ** 2 / dim
    noise = (torch.linalg.vector_norm(data, dim=1).pow(4).sum() / n - norm) / n
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
    scatter = gram(data)
    size = n if shrunk else n - 1
    level = torch.full_like(scatter[0, 0], ridge)
    kept = torch.ones_like(level)
    if shrunk:
        coefficient = ledoit_wolf_coefficient(data, scatter, dim)
        level, kept = level + coefficient, kept - coefficient
    trace = scatter.trace() / size
    matrix = kept / size * scatter
    matrix.diagonal().add_(level * trace / dim)
    return Covariance(matrix, (1 + ridge) * trace)


def joint_coordinates(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of x and y, both (n, d) with 2 n < d, in a basis that holds all their rows.

    The basis is orthonormal. A score that rotations leave alone depends on the rows' inner
    products only, which a step out of their span changes at second order: the basis needs
    no gradient.

    Returns
    -------
    x, y : tensor of shape (n, 2 n)
    """
    rows = torch.cat([x, y])
    if not (torch.is_grad_enabled() and rows.requires_grad):
        # What the factor R of the rows, as columns, holds: the basis itself is not needed.
        coordinates = torch.linalg.qr(rows.T, mode="r").R.T
    else:
        coordinates = rows @ torch.linalg.qr(rows.detach().T).Q
    return coordinates[: len(x)], coordinates[len(x) :]
