"""Regularised covariances of centred samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._blas import gram, is_differentiated

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
    noise = (data.square().sum(1).square().sum() / n - norm) / n
    if dim == 1 or distance <= 0:
        return torch.zeros_like(norm)
    # The lower limit is for rounding, the upper one is the estimator's own.
    coefficient: Tensor = (noise / distance).clamp(0, 1)
    return coefficient


def regularized_covariance(
    data: Tensor, *, dim: int, shrinkage: str, ridge: float, added: float = 0.0
) -> Covariance:
    """Covariance of centred samples, shrunk, with a ridge.

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
    added : float
        What is added to the diagonal beside it, in units of the variance.
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
    matrix.diagonal().add_(level * trace / dim + added)
    return Covariance(matrix, (1 + ridge) * trace + dim * added)


def joint_coordinates(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of x and y, both (n, d) with 2 n < d, in a basis that holds all their rows.

    The basis is orthonormal. What is made of them may depend on the rows' inner products
    only, as a score that rotations leave alone does: that is what gradients are right for.

    Returns
    -------
    x, y : tensor of shape (n, 2 n)
    """
    rows = torch.cat([x, y])
    if not is_differentiated(rows):
        # What the factor R of the rows, as columns, holds: the basis itself is not needed.
        coordinates = torch.linalg.qr(rows.T, mode="r").R.T
    else:
        coordinates = _Coordinates.apply(rows)[0]
    return coordinates[: len(x)], coordinates[len(x) :]


class _Coordinates(torch.autograd.Function):
    """Coordinates C (m, r) of rows (m, d) in an orthonormal basis Q (d, r) of theirs, and Q.

    To first order a step of the rows out of their span changes no inner product of theirs,
    and the basis may stay as it is. To second order it does; see `_Gradient`.
    """

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Find a basis."""
        basis = torch.linalg.qr(rows.detach().T).Q
        return rows @ basis, basis

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Keep the basis, and both sides for further derivatives."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        """Turn back to the rows' own coordinates."""
        rows, coordinates, basis = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_rows: Tensor = _Gradient.apply(gradient, rows, coordinates, basis)
            return of_rows
        of_rows = gradient @ basis.T
        return of_rows


class _Gradient(torch.autograd.Function):
    """Gradient G Qᵀ of `_Coordinates`, as a function of G and of the rows.

    A function of inner products has the gradient 2 F C with its derivative F by them, a
    symmetric (m, m) matrix. A change D of the rows out of their span changes it by 2 F D, of
    which a fixed basis knows nothing: 2 F = G C⁺.
    """

    @staticmethod
    def forward(gradient: Tensor, rows: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
        """Turn back to the rows' own coordinates."""
        return gradient @ basis.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what 2 F is made of."""
        gradient, _, coordinates, basis = inputs
        ctx.save_for_backward(gradient, coordinates, basis)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Change by the gradient, and by the rows where they leave their span."""
        gradient, coordinates, basis = ctx.saved_tensors
        coordinates = coordinates.detach()
        rank = int(torch.linalg.matrix_rank(coordinates))
        # Both halves are centred, so that two combinations of the rows vanish and stay so.
        if rank < len(coordinates) - 2:
            raise RuntimeError(
                "the score has no second derivative here: samples of x and y depend on each "
                f"other (rank {rank} of {len(coordinates) - 2}) and are fewer than half the columns"
            )
        curvature = gradient.detach() @ torch.linalg.pinv(coordinates)
        outside = change - change @ basis @ basis.T
        return _Last.apply(change @ basis), _Last.apply(curvature.T @ outside), None, None


class _Last(torch.autograd.Function):
    """Derivatives that can't be differentiated further."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        """Give them."""
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Refuse."""
        raise RuntimeError(
            "a score has no third derivative where samples are fewer than half the columns"
        )
