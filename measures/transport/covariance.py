"""Regularised covariances of centred samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nlbench.introspection.autodiff import is_differentiated
from nlbench.measures.linear_algebra.products import gram


@dataclass(frozen=True)
class Covariance:
    """A covariance in d dimensions, restricted to an r-dimensional subspace.

    Parameters
    ----------
    matrix : tensor of shape (r, r)
        Restriction to the subspace.
    trace : tensor, scalar
        Trace of the whole d × d matrix.
    """

    matrix: Tensor
    trace: Tensor


def ledoit_wolf_coefficient(data: Tensor, scatter: Tensor, dim: int) -> Tensor:
    """Compute the weight of the isotropic target in the Ledoit–Wolf covariance.

    With S = XᵀX / n, m = tr S / d and ‖·‖ the Frobenius norm, the weight is

        min(1, Σ_i ‖x_i x_iᵀ - S‖² / n² / ‖S - m I‖²),

    where Σ_i ‖x_i x_iᵀ - S‖² = Σ_i ‖x_i‖⁴ - n ‖S‖².

    Parameters
    ----------
    data : tensor of shape (n, r)
        Centred samples, as coordinates in an orthonormal basis of a space that contains them.
    scatter : tensor of shape (r, r)
        n S = XᵀX in that basis.
    dim : int
        d, the dimension of the samples.

    Returns
    -------
    tensor, scalar
        In [0, 1]; 0 if S is isotropic, as in one dimension.

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
    # The lower limit guards against rounding, the upper one is part of the estimator.
    return (noise / distance).clamp(0, 1)


def regularized_covariance(
    data: Tensor, *, dim: int, shrinkage: str, ridge: float, added: float = 0.0
) -> Covariance:
    """Estimate the covariance of centred samples by shrinkage, with a ridge.

    Parameters
    ----------
    data : tensor of shape (n, r)
        Centred samples, as coordinates in an orthonormal basis of a space that contains them.
    dim : int
        d, the dimension of the samples.
    shrinkage : {"ledoit-wolf", "none"}
        Ledoit–Wolf's estimator, or the unbiased sample covariance.
    ridge : float
        Ridge as a fraction of the mean variance tr Σ / d.
    added : float
        Additional ridge, as a variance.
    """
    n = len(data)
    shrunk = shrinkage == "ledoit-wolf"
    scatter = gram(data)
    size = n if shrunk else n - 1
    level = torch.full_like(scatter[0, 0], ridge)
    weight = torch.ones_like(level)
    if shrunk:
        coefficient = ledoit_wolf_coefficient(data, scatter, dim)
        level = level + coefficient
        weight = weight - coefficient
    trace = scatter.trace() / size
    matrix = weight / size * scatter
    matrix.diagonal().add_(level * trace / dim + added)
    return Covariance(matrix, (1 + ridge) * trace + dim * added)


def joint_coordinates(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the coordinates of x and y in an orthonormal basis of the span of all their rows.

    Gradients are correct only for functions of the rows' inner products, such as scores that are
    invariant to rotations.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        With 2 n < d.

    Returns
    -------
    x, y : tensor of shape (n, 2 n)
    """
    rows = torch.cat([x, y])
    if not is_differentiated(rows):
        # The factor R of the transposed rows contains the coordinates; the basis is not needed.
        coordinates = torch.linalg.qr(rows.T, mode="r").R.T
    else:
        coordinates = _Coordinates.apply(rows)[0]
    return coordinates[: len(x)], coordinates[len(x) :]


class _Coordinates(torch.autograd.Function):
    """Coordinates C (m, r) of rows (m, d) in an orthonormal basis Q (d, r) of their span, and Q.

    To first order, moving the rows out of their span changes none of their inner products, so the
    basis may be held fixed. To second order it changes them; see `_Gradient`.
    """

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        basis = torch.linalg.qr(rows.detach().T).Q
        return rows @ basis, basis

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        rows, coordinates, basis = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _Gradient.apply(gradient, rows, coordinates, basis)
        row_gradient = gradient @ basis.T
        return row_gradient


class _Gradient(torch.autograd.Function):
    """Gradient G Qᵀ of `_Coordinates`, as a function of G and of the rows.

    A function of inner products has the gradient 2 F C, where the symmetric (m, m) matrix F is its
    derivative with respect to them. A change D of the rows out of their span changes the gradient
    by 2 F D, which a fixed basis misses: 2 F = G C⁺.
    """

    @staticmethod
    def forward(gradient: Tensor, rows: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
        return gradient @ basis.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        gradient, _, coordinates, basis = inputs
        ctx.save_for_backward(gradient, coordinates, basis)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate with respect to the gradient, and to rows that leave their span."""
        gradient, coordinates, basis = ctx.saved_tensors
        coordinates = coordinates.detach()
        rank = int(torch.linalg.matrix_rank(coordinates))
        # Both halves are centred, so two combinations of the rows are always zero.
        if rank < len(coordinates) - 2:
            raise RuntimeError(
                "the score has no second derivative here: samples of x and y are linearly "
                f"dependent (rank {rank} of {len(coordinates) - 2}) and fewer than half the columns"
            )
        curvature = gradient.detach() @ torch.linalg.pinv(coordinates)
        outside = change - change @ basis @ basis.T
        return (
            _NotDifferentiable.apply(change @ basis),
            _NotDifferentiable.apply(curvature.T @ outside),
            None,
            None,
        )


class _NotDifferentiable(torch.autograd.Function):
    """Identity whose derivative raises an error."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError(
            "a score has no third derivative where samples are fewer than half the columns"
        )
