"""Least-squares fits of y on x from sums over rows, accumulated in O(d²) memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.measures.linear_algebra.products import gram, product

from .samples import rounding_norms

# Smallest eigenvalue of the correlation matrix that a fit uses, relative to the largest. It is the
# square of a tolerance for the data, since X'X has the squared condition number of X.
MIN_RELATIVE_EIGENVALUE = 1e-12

# If the pivots of a Cholesky decomposition exceed the rounding of the inputs by this factor, so do
# the inputs in all directions.
PIVOT_MARGIN = 100


SPARE_DIRECTIONS = 8
"""Oversampling: number of random vectors in a range finder beyond a matrix's expected rank."""


@dataclass(frozen=True)
class RegressionMap:
    """The map x ↦ (x - mean_x) coefficients + mean_y.

    Parameters
    ----------
    coefficients : tensor of shape (d, k)
    mean_x : tensor of shape (d,)
    mean_y : tensor of shape (k,)
    rank : int
        Number of directions of x that the fit uses.
    """

    coefficients: Tensor
    mean_x: Tensor
    mean_y: Tensor
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows (n, d) to (n, k)."""
        return (x - self.mean_x) @ self.coefficients + self.mean_y


@dataclass(frozen=True)
class RegressionSums:
    """Sums over n rows of x (d,) and y (k,), in float64.

    Values should be small differences from a common origin: means are subtracted afterwards.

    Parameters
    ----------
    x, y : tensor of shape (d,), (k,)
        Sums of rows.
    xx, xy : tensor of shape (d, d), (d, k)
        Sums of products.
    yy : tensor of shape (k,)
        Sums of squares.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 1.0]]).double()
    >>> sums = RegressionSums.of(x, x @ torch.tensor([[2.0], [1.0]]).double() + 5)
    >>> sums.fit(torch.zeros(2).double()).coefficients.round(decimals=6)
    tensor([[2.],
            [1.]], dtype=torch.float64)
    """

    n: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> RegressionSums:
        """Compute the sums of rows x (n, d) and y (n, k), both float64."""
        squares = torch.linalg.vector_norm(y, dim=0).square()
        return cls(len(x), x.sum(0), y.sum(0), gram(x), product(x.T, y), squares)

    def plus(self, other: RegressionSums) -> RegressionSums:
        """Add the sums of other rows."""
        return RegressionSums(*map(operator.add, vars(self).values(), vars(other).values()))

    def minus(self, other: RegressionSums) -> RegressionSums:
        """Remove the sums of some of the rows."""
        return RegressionSums(*map(operator.sub, vars(self).values(), vars(other).values()))

    def about(self, mean_x: Tensor, mean_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``xx``, ``xy`` and ``yy`` after subtracting the given means from the rows."""
        # One pass over each matrix, which at large widths takes a considerable part of the memory.
        rest_x = self.x - self.n * mean_x
        columns = torch.stack([mean_x, rest_x], 1)
        xx = torch.addmm(self.xx, columns, torch.stack([self.x, mean_x]), alpha=-1)
        xy = torch.addmm(self.xy, columns, torch.stack([self.y, mean_y]), alpha=-1)
        yy = self.yy - 2 * mean_y * self.y + self.n * mean_y.square()
        return xx, xy, yy.clamp(min=0)

    def centered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``xx``, ``xy`` and ``yy`` after subtracting the rows' own means."""
        xx = self.xx.addr(self.x, self.x, alpha=-1 / self.n)
        xy = self.xy.addr(self.x, self.y, alpha=-1 / self.n)
        return xx, xy, (self.yy - self.y.square() / self.n).clamp(min=0)

    def fit(self, peaks: Tensor, rounding: float = 0.0) -> RegressionMap:
        """Fit y on x by least squares, with minimum norm if there are several solutions.

        Parameters
        ----------
        peaks : tensor of shape (d,)
            Largest magnitude of each column of x before its origin was subtracted.
        rounding : float
            Relative error of the values of x; directions that vary by less are left out.
        """
        mean_x = self.x / self.n
        mean_y = self.y / self.n
        xx, xy, _ = self.centered()
        squares = xx.diagonal()
        errors = rounding_norms(peaks, self.n, rounding).square()
        columns = squares > errors
        scale = squares[columns].sqrt()
        noise = errors[columns] / squares[columns]
        if not columns.any():
            return RegressionMap(xy.zero_(), mean_x, mean_y, 0)
        uses_all = bool(columns.all())
        correlation = xx if uses_all else xx[columns][:, columns]
        right = xy if uses_all else xy[columns]
        correlation.div_(scale[:, None]).div_(scale)
        solved, rank = _solve(correlation, right.div_(scale[:, None]), noise, self.n - 1)
        solved.div_(scale[:, None])
        if not uses_all:
            solved = torch.zeros_like(xy).index_copy_(0, columns.nonzero()[:, 0], solved)
        return RegressionMap(solved, mean_x, mean_y, rank)

    def squared_errors(self, fit: RegressionMap) -> float:
        """Sum the squared errors of a fit on these rows, over all columns of y."""
        xx, xy, yy = self.about(fit.mean_x, fit.mean_y)
        coefficients = fit.coefficients.flatten()
        explained = 2 * torch.dot(coefficients, xy.flatten())
        mapped = torch.dot(coefficients, (xx @ fit.coefficients).flatten())
        # Rounding may make this sum of squares negative.
        return max(0.0, (yy.sum() - explained + mapped).item())


def _solve(correlation: Tensor, right: Tensor, noise: Tensor, max_rank: int) -> tuple[Tensor, int]:
    """Solve the normal equations, and count the directions that exceed rounding.

    Parameters
    ----------
    correlation : tensor of shape (d, d)
    right : tensor of shape (d, k)
    noise : tensor of shape (d,)
        Fraction of each input's variance that is due to rounding.
    max_rank : int
        Maximum rank that the number of rows allows.
    """
    if max_rank >= len(correlation):
        lower, failed = torch.linalg.cholesky_ex(correlation)
        smallest = max(PIVOT_MARGIN * noise.max().item(), MIN_RELATIVE_EIGENVALUE)
        if not failed and lower.diagonal().min().item() ** 2 > smallest:
            return torch.cholesky_solve(right, lower), len(correlation)
    eigenvalues, directions = _directions(correlation, max_rank + SPARE_DIRECTIONS)
    is_significant = eigenvalues > MIN_RELATIVE_EIGENVALUE * eigenvalues[-1]
    is_significant &= eigenvalues > noise @ directions.square()
    eigenvalues = eigenvalues[is_significant]
    directions = directions[:, is_significant]
    return directions @ ((directions.T @ right) / eigenvalues[:, None]), len(eigenvalues)


def _directions(correlation: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors.

    If `count` is low, only the `count` largest are returned. A matrix of low rank maps random
    vectors to a basis of its range.
    """
    if 2 * count > len(correlation):
        return torch.linalg.eigh(correlation)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(correlation), count, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(correlation @ vectors.to(correlation)).Q
    eigenvalues, inner = torch.linalg.eigh(basis.T @ correlation @ basis)
    return eigenvalues, basis @ inner
