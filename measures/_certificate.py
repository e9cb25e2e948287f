"""Proof that matching each sample with its own output is optimal, without a solver.

Potentials u (rows) and c_jj - u_j (columns) bound the cost of every matching from below,
once u is lowered to min_j (c_ij - c_jj + u_j); the mean of what that takes off is the gap
between the identity and the bound. The cheap guesses of u come first, then a few sweeps
that lower the last one again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._blas import has_single_products, outer_products

__all__ = ["SWEEPS", "certified_in_single_precision", "identity_is_optimal"]

SWEEPS = 8

# Half the distance of 1 to the next float32: the relative error of one rounding.
ROUNDING = torch.finfo(torch.float32).eps / 2

# Share of the rows that are worth another look in double precision.
DOUBTFUL = 1 / 8

# From this many coordinates on, one in so many is tried first.
MANY, FEW_OF = 64, 3

# From potentials u (n,) to lower bounds of min_j (c_ij - c_jj + u_j), at most u_i.
Lowering = Callable[[Tensor], Tensor]


def identity_is_optimal(excess: Tensor, diagonal: Tensor, *, allowed: float) -> bool:
    """Prove that matching i with i costs at most `allowed` a sample more than the least.

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

    def lowered(potential: Tensor) -> Tensor:
        return torch.add(excess, potential, out=scratch).amin(1)

    def guesses() -> Iterator[Tensor]:
        # Of the column potentials zero, the column minima, and half way between the means
        # of rows and columns.
        yield diagonal
        yield -excess.amin(0)
        yield (excess.mean(1) - excess.mean(0)) / 2

    return _is_proved(lowered, guesses(), allowed, SWEEPS)


def _is_proved(lowered: Lowering, guesses: Iterable[Tensor], allowed: float, sweeps: int) -> bool:
    for guess in guesses:
        potential, bound = guess, lowered(guess)
        if (potential - bound).mean() <= allowed:
            return True
    for _ in range(sweeps):
        if (potential - bound > allowed).sum() > len(bound) / 2:
            return False
        potential, bound = bound, lowered(bound)
        if (potential - bound).mean() <= allowed:
            return True
    return False


def certified_in_single_precision(a: Tensor, b: Tensor, *, allowed: float) -> bool:
    """Prove for squared distances what `identity_is_optimal` proves, in half the time.

    Inner products are taken in float32. A row whose smallest entry stands clear of the
    diagonal by more than all roundings together is settled; the others are looked at again
    in float64. The strongest few coordinates mostly suffice, so they are tried first.

    Parameters
    ----------
    a, b : tensor of shape (n, d), float64
        Both centred.
    allowed : float
        The gap that is good enough, in squared distance a sample.

    Returns
    -------
    bool
        True is a proof; False says nothing.
    """
    if not has_single_products(a):
        return False
    points = _Points(a, b, _inner(a, a), _inner(b, b), _inner(a, b))
    if a.shape[1] >= MANY:
        bounds = _SinglePrecision(points, *_shortened(points, a.shape[1] // FEW_OF))
        if _is_proved(bounds.lowered, [points.diagonal], allowed, sweeps=0):
            return True
    bounds = _SinglePrecision(points, a, b)
    return _is_proved(bounds.lowered, bounds.guesses(), allowed, SWEEPS)


@dataclass(frozen=True)
class _Points:
    """Points a, b (n, d), their |a_i|², |b_i|² and a_i·b_i, each (n,)."""

    a: Tensor
    b: Tensor
    size_a: Tensor
    size_b: Tensor
    own: Tensor

    @property
    def diagonal(self) -> Tensor:
        """c_jj (n,)."""
        return self.size_a + self.size_b - 2 * self.own


def _shortened(points: _Points, kept: int) -> tuple[Tensor, Tensor]:
    """Points with fewer coordinates, (n, kept + 1), whose inner products are no smaller.

    The last coordinate is the length of what was left out: of two such parts the product
    of the lengths is at least the inner product.
    """
    # In order, they are read faster.
    strongest = points.b.square().sum(0).topk(kept).indices.sort().values

    def short(values: Tensor, sizes: Tensor) -> Tensor:
        parts = values.index_select(1, strongest)
        # Rounded up by more than the difference may be rounded down.
        margin = 4 * values.shape[1] * torch.finfo(values.dtype).eps * sizes
        rest = (sizes - parts.square().sum(1) + margin).clamp(min=0).sqrt()
        return torch.cat([parts, rest[:, None]], 1)

    return short(points.a, points.size_a), short(points.b, points.size_b)


class _SinglePrecision:
    """Bounds of squared distances from float32 products.

    Parameters
    ----------
    points : _Points
    a, b : tensor of shape (n, k)
        As long as the points, but for rounding; with inner products that are no smaller.
    """

    def __init__(self, points: _Points, a: Tensor, b: Tensor) -> None:
        self._points = points
        # c_ij - c_jj = |a_i|² - |a_j|² + 2 a_j·b_j - 2 a_i·b_j
        self._column = 2 * points.own - points.size_a
        self._products = outer_products(a.float().mul_(-2), b.float())
        self._products.fill_diagonal_(torch.inf)
        self._scratch = torch.empty_like(self._products)
        lengths, longest = points.size_a.sqrt(), points.size_b.max().sqrt()
        # Of a product of k terms with rounded factors, and of what is added to it.
        self._roundings = 2 * (a.shape[1] + 6) * lengths * longest + 8 * points.size_a

    def lowered(self, potential: Tensor) -> Tensor:
        """Lower bounds of min_j (c_ij - c_jj + u_j), at most u_i."""
        points, offsets = self._points, self._column + potential
        beside = torch.add(self._products, offsets.float(), out=self._scratch).amin(1).double()
        beside += points.size_a
        error = 2 * ROUNDING * (self._roundings + 4 * offsets.abs().max() + beside.abs())
        bound = torch.minimum(beside - error, potential)
        doubtful = (bound < potential).nonzero()[:, 0]
        if 0 < len(doubtful) <= DOUBTFUL * len(bound):
            exact = offsets.repeat(len(doubtful), 1).addmm_(
                points.a[doubtful], points.b.T, alpha=-2
            )
            exact = exact.amin(1) + points.size_a[doubtful]
            bound[doubtful] = torch.minimum(exact, potential[doubtful])
        return bound

    def guesses(self) -> Iterator[Tensor]:
        """As in double precision; of centred points the means are known beforehand."""
        points = self._points
        yield points.diagonal
        beside = torch.add(self._products, points.size_a.float()[:, None], out=self._scratch)
        least = beside.amin(0).double() + self._column
        yield -torch.minimum(least, torch.zeros_like(least))
        yield points.size_a - points.own


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (n,) of the rows of a and b."""
    products: Tensor = torch.linalg.vecdot(a, b)
    return products
