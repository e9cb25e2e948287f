"""The affine optimal transport map between two normal distributions.

With Σx = L Lᵀ and Lᵀ Σy L = V R² Vᵀ (R ≥ 0 diagonal) the map is A = L⁻ᵀ V R Vᵀ L⁻¹, the only
positive semidefinite matrix with A Σx A = Σy. Σy may be singular, Σx may not. W = L⁻ᵀ V
diagonalises both: Wᵀ Σx W = 1 and A = W R Wᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.linalg import blas, lapack
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.introspection.autodiff import is_differentiated
from nlbench.introspection.threads import single_blas_thread
from nlbench.measures.linear_algebra.eigenpairs import eigenpairs
from nlbench.measures.linear_algebra.products import (
    gram,
    singular_value_decomposition,
    uses_one_core,
)
from nlbench.measures.statistics.samples import EPSILON

# Ratio of the smallest to the largest eigenvalue below which the root of the smallest would have
# fewer than eight digits.
MIN_EIGENVALUE_RATIO = 1e-8


def optimal_map(source: Tensor, target: Tensor) -> Tensor:
    """Compute the matrix A of the optimal transport map between two centred normal distributions.

    Parameters
    ----------
    source, target : tensor of shape (r, r)
        Σx and Σy.

    Returns
    -------
    tensor of shape (r, r)
        Symmetric and positive semidefinite, with A Σx A = Σy; samples x (n, r) map to x A.

    Raises
    ------
    nlbench.Undefined
        If Σx is singular.

    References
    ----------
    G. Peyré and M. Cuturi, "Computational Optimal Transport", Foundations and Trends in Machine
    Learning 11 (2019), remark 2.31.

    Examples
    --------
    >>> optimal_map(torch.eye(2).double(), 4 * torch.eye(2).double()).round()
    tensor([[2., 0.],
            [0., 2.]], dtype=torch.float64)
    """
    mapping = _OptimalMap.apply if is_differentiated(source, target) else _OptimalMap.forward
    return mapping(source, target)[0]


class _OptimalMap(torch.autograd.Function):
    """The map A as a function of Σx and Σy, with its factors L, V, R and W.

    Its differential solves dA Σx A + A Σx dA = dΣy - A dΣx A. With dA = W Z Wᵀ this is
    Z R + R Z = W⁻¹ (dΣy - A dΣx A) W⁻ᵀ, solved entry by entry. Unlike the derivative of a
    decomposition it has no singularity at repeated eigenvalues. At two zero eigenvalues, where
    the root has no derivative, it is set to zero.
    """

    @staticmethod
    def forward(source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        lower, vectors, roots, outward = _diagonalize(source.detach(), target.detach())
        return gram((outward * roots.sqrt()).T), lower, vectors, roots, outward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        source, matrix, lower, vectors, roots, outward = ctx.saved_tensors
        gradient = (gradient + gradient.T) / 2
        inward = lower @ vectors
        if torch.is_grad_enabled():
            solved = _Lyapunov.apply(gradient, source @ matrix, roots, outward, inward)
            return -matrix @ solved @ matrix, solved
        solved = _solve_diagonal(outward.T @ gradient @ outward, roots)
        source_gradient = -outward @ (roots[:, None] * solved * roots) @ outward.T
        return source_gradient, inward @ solved @ inward.T


class _Lyapunov(torch.autograd.Function):
    """Solution S of M S + S Mᵀ = G for symmetric G, as a function of G and M = U R Wᵀ, Uᵀ W = 1.

    Its derivative solves an equation of the same form, with the transpose of M, so it is infinitely
    differentiable.
    """

    @staticmethod
    def forward(
        right: Tensor, matrix: Tensor, roots: Tensor, outward: Tensor, inward: Tensor
    ) -> Tensor:
        """Solve in coordinates in which M is diagonal."""
        return inward @ _solve_diagonal(outward.T @ right @ outward, roots) @ inward.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, matrix, *parts = inputs
        ctx.save_for_backward(matrix, *parts, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Solve the adjoint equation Mᵀ Z + Z M = gradient."""
        matrix, roots, outward, inward, solution = ctx.saved_tensors
        gradient = (gradient + gradient.T) / 2
        adjoint = _Lyapunov.apply(gradient, matrix.T, roots, inward, outward)
        return adjoint, -2 * adjoint @ solution, None, None, None


def _solve_diagonal(values: Tensor, roots: Tensor) -> Tensor:
    """Solve X R + R X = values, with zero where both roots are zero."""
    sums = roots[:, None] + roots
    positive = sums > len(roots) * EPSILON * roots.max()
    return torch.where(positive, values / torch.where(positive, sums, 1.0), 0.0)


def _diagonalize(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute L, V, the diagonal of R, and W."""
    if uses_one_core(source):
        with single_blas_thread():
            return _map_with_scipy(source, target)
    lower, failed = torch.linalg.cholesky_ex(source)
    _check_pivots(lower, source, bool(failed))
    squares, vectors = torch.linalg.eigh(lower.T @ target @ lower)
    roots, vectors = _roots(squares, vectors, lower, target)
    outward = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
    return lower, vectors, roots, outward


def _map_with_scipy(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Both are symmetric, so their transposes are the same matrices in Fortran order.
    factor, failed = lapack.dpotrf(source.numpy().T, lower=1, clean=1)
    lower = torch.from_numpy(factor)
    _check_pivots(lower, source, failed != 0)
    middle, _ = lapack.dsygst(target.numpy().T, factor, itype=2, lower=1)
    squares, vectors = eigenpairs(middle)
    roots, axes = _roots(torch.from_numpy(squares), torch.from_numpy(vectors), lower, target)
    outward = blas.dtrsm(1.0, factor, axes.numpy(), lower=1, trans_a=1)
    return lower, axes, roots, torch.from_numpy(outward)


def _check_pivots(lower: Tensor, source: Tensor, failed: bool) -> None:
    # A pivot below the rounding of its diagonal entry shows that the column depends on others. A
    # ridge keeps pivots above ridge / d of the entry.
    pivots = lower.diagonal().square()
    floor = 10 * len(source) * EPSILON * source.diagonal()
    if failed or not (pivots > floor).all():
        raise Undefined("the covariance of x is singular: it needs a larger ridge")


def _roots(
    squares: Tensor, vectors: Tensor, lower: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute R (r,) and V (r, r), from L and Σy themselves if their product is inaccurate."""
    if squares[0] > MIN_EIGENVALUE_RATIO * squares[-1]:
        return squares.sqrt(), vectors
    # Singular values of B are the roots of the eigenvalues of BᵀB, but small ones are accurate too.
    _, roots, rows = singular_value_decomposition(_factor(target).T @ lower)
    return roots, rows.T


def _factor(matrix: Tensor) -> Tensor:
    """Compute a factor F of a possibly singular matrix F Fᵀ."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        factor = vectors * eigenvalues.clamp(min=0).sqrt()
    return factor
