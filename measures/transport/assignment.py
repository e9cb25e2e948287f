"""Exact optimal transport between two sets of n points with equal weights, as an assignment.

For an activation, matching each sample with its own output is nearly always optimal. Potentials u
(rows) and c_jj - u_j (columns) prove it in a fraction of a solver's time: they bound the cost of
every matching from below, once u is lowered to min_j (c_ij - c_jj + u_j). The mean reduction of u
is the gap between the identity and the bound. Cheap guesses for u are tried first, then a few
sweeps that repeatedly lower the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nlbench.introspection.autodiff import is_differentiated
from nlbench.measures.linear_algebra.products import has_exact_float32_products, outer_products

# Minimum number of samples for which the certificate in single precision saves time.
MIN_SINGLE_PRECISION_SAMPLES = 256

# Maximum number of coordinates that are sorted for the solver's potentials.
MAX_SORTED_COORDINATES = 32

MAX_SWEEPS = 8

# Relative error of one rounding to float32: half the distance from 1 to the next number.
FLOAT32_ROUNDING = torch.finfo(torch.float32).eps / 2

# Maximum fraction of unproved rows for which double precision is tried.
MAX_DOUBTFUL_FRACTION = 1 / 8

# Minimum number of coordinates for which a proof with the strongest third of them is tried first.
MIN_SHORTENED_COORDINATES = 64
COORDINATES_PER_STRONGEST = 3

# Maps potentials u (n,) to lower bounds of min_j (c_ij - c_jj + u_j), at most u_i.
Lowering = Callable[[Tensor], Tensor]


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute the squared distances (n, n) between the rows of a and b, both (n, d) and centred.

    Expanded into inner products, which is accurate for centred data.
    """
    norms = a.square().sum(1)[:, None] + b.square().sum(1)
    return norms.addmm_(a, b.T, alpha=-2)


def optimal_matching(a: Tensor, b: Tensor, *, precision: float) -> Tensor:
    """Match each row of a with a row of b, minimising the total squared distance.

    Parameters
    ----------
    a, b : tensor of shape (n, d)
        Both centred.
    precision : float
        Allowed excess of the matching's root mean squared distance over the minimum.

    Returns
    -------
    tensor of shape (n,), int64
        Indices of rows of b.

    Examples
    --------
    >>> a = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    >>> optimal_matching(a, -a, precision=0.0)
    tensor([1, 0])
    """
    match = _Matching.apply if is_differentiated(a, b) else _Matching.forward
    return match(a.detach(), b.detach(), precision)


class _Matching(torch.autograd.Function):
    """The matching as a single operation, which function transforms do not trace."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, precision: float) -> Tensor:
        return _match(a, b, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _match(a: Tensor, b: Tensor, precision: float) -> Tensor:
    if a.shape[1] == 1:
        # In one dimension optimal transport matches ranks.
        matching = torch.empty(len(a), dtype=torch.int64, device=a.device)
        matching[a[:, 0].argsort(stable=True)] = b[:, 0].argsort(stable=True)
        return matching
    distance = torch.linalg.vector_norm(a - b).item() / math.sqrt(len(a))
    step = min(precision, distance)
    # Reduction of the squared distance that reduces its root by `step`.
    allowed = step * (2 * distance - step)
    identity = torch.arange(len(a), device=a.device)
    is_large = len(a) >= MIN_SINGLE_PRECISION_SAMPLES
    if is_large and certified_in_single_precision(a, b, allowed=allowed):
        return identity
    cost = squared_distances(a, b)
    diagonal = cost.diagonal()
    excess = cost - diagonal
    if not identity_is_swapped(excess, allowed=allowed) and identity_is_optimal(
        excess, diagonal, allowed=allowed
    ):
        return identity
    del excess  # As large as the costs.
    # The optimum is the same for any potentials; the solver's time is not.
    cost -= column_potentials(a, b, cost)
    # It takes 0.15 s to import, and is rarely needed.
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, device=a.device)


def column_potentials(a: Tensor, b: Tensor, cost: Tensor) -> Tensor:
    """Return column potentials (n,) for which the assignment's lower bound is large.

    Potentials v bound the cost of every assignment by Σ_i min_j (c_ij - v_j) + Σ_j v_j. The closer
    the bound is to the optimum, the less of the cost matrix a solver visits: in two dimensions
    it takes up to 80 times as long with zeros. Column minima are compared with the potentials of
    transport in each coordinate.

    Parameters
    ----------
    a, b : tensor of shape (n, d)
    cost : tensor of shape (n, n)
        Squared distances between the rows of a and b.

    Examples
    --------
    >>> a = torch.tensor([[0.0], [1.0], [2.0]])
    >>> cost = (a - a.T) ** 2
    >>> column_potentials(a, a, cost)
    tensor([0., 0., 0.])
    """
    scratch = torch.empty_like(cost)
    minima = cost.amin(0)
    if a.shape[1] > MAX_SORTED_COORDINATES:
        return minima
    rows = torch.sub(cost, minima, out=scratch).amin(1)
    bound = rows.sum() + minima.sum()
    rows = torch.sub(cost, coordinate_potentials(a, b), out=scratch).amin(1)
    raised = torch.sub(cost, rows[:, None], out=scratch).amin(0)
    return raised if rows.sum() + raised.sum() > bound else minima


def coordinate_potentials(a: Tensor, b: Tensor) -> Tensor:
    """Sum the optimal column potentials (n,) of the d transport problems in one dimension.

    They are optimal for independent coordinates and an activation that acts on each of them.
    """
    x = a.sort(0).values
    y, order = b.sort(0)
    # For sorted points, y_k and y_(k+1) are equally good halfway between x_k and x_(k+1).
    steps = y.diff(dim=0) * (y[1:] + y[:-1] - x[1:] - x[:-1])
    sorted_potentials = torch.zeros_like(y)
    torch.cumsum(steps, 0, out=sorted_potentials[1:])
    return torch.zeros_like(y).scatter_(0, order, sorted_potentials).sum(1)


def identity_is_optimal(excess: Tensor, diagonal: Tensor, *, allowed: float) -> bool:
    """Prove that matching i with i costs at most `allowed` per sample more than the optimum.

    Parameters
    ----------
    excess : tensor of shape (n, n)
        c_ij - c_jj for costs c.
    diagonal : tensor of shape (n,)
        c_jj.
    allowed : float
        Maximum gap that is accepted.

    Returns
    -------
    bool
        True if it is proved; False is inconclusive.

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
        # Column potentials: zero, the column minima, and halfway between the means of rows and
        # columns.
        yield diagonal
        yield -excess.amin(0)
        yield (excess.mean(1) - excess.mean(0)) / 2

    return _is_proved(lowered, guesses(), allowed, MAX_SWEEPS)


def identity_is_swapped(excess: Tensor, *, allowed: float) -> bool:
    """Return True if exchanging two partners improves the identity by more than `allowed` a sample.

    Only the cheapest partner of each row is tried.

    Parameters
    ----------
    excess : tensor of shape (n, n)
        c_ij - c_jj for costs c.
    allowed : float
        See `identity_is_optimal`, which is then false.

    Examples
    --------
    >>> identity_is_swapped(torch.tensor([[0.0, -1.0], [-1.0, 0.0]]), allowed=0.0)
    True
    """
    smallest, partner = excess.min(1)
    gains = smallest + excess[partner, torch.arange(len(excess), device=excess.device)]
    return bool(gains.min() < -allowed * len(excess))


def _is_proved(lowered: Lowering, guesses: Iterable[Tensor], allowed: float, sweeps: int) -> bool:
    for guess in guesses:
        potential = guess
        bound = lowered(guess)
        if (potential - bound).mean() <= allowed:
            return True
    for _ in range(sweeps):
        if (potential - bound > allowed).sum() > len(bound) / 2:
            return False
        potential = bound
        bound = lowered(bound)
        if (potential - bound).mean() <= allowed:
            return True
    return False


def certified_in_single_precision(a: Tensor, b: Tensor, *, allowed: float) -> bool:
    """Prove that the identity is an optimal matching, faster than `identity_is_optimal`.

    The costs are squared distances, with inner products in float32. A row is settled if its
    smallest entry exceeds the diagonal by more than the total rounding error; the others are
    recomputed in float64. A few of the strongest coordinates usually suffice, so they are tried
    first.

    Parameters
    ----------
    a, b : tensor of shape (n, d), float64
        Both centred.
    allowed : float
        Maximum gap that is accepted, in squared distance per sample.
    """
    if not has_exact_float32_products(a):
        return False
    inner = torch.linalg.vecdot
    points = _Points(a, b, inner(a, a), inner(b, b), inner(a, b))
    if a.shape[1] >= MIN_SHORTENED_COORDINATES:
        strongest = a.shape[1] // COORDINATES_PER_STRONGEST
        bounds = _SinglePrecisionBounds(points, *_shorten(points, strongest))
        if _is_proved(bounds.lowered, [points.diagonal], allowed, sweeps=0):
            return True
    bounds = _SinglePrecisionBounds(points, a, b)
    return _is_proved(bounds.lowered, bounds.guesses(), allowed, MAX_SWEEPS)


@dataclass(frozen=True)
class _Points:
    """Points a, b (n, d) with |a_i|², |b_i|² and a_i·b_i, each (n,)."""

    a: Tensor
    b: Tensor
    squares_a: Tensor
    squares_b: Tensor
    inner: Tensor

    @property
    def diagonal(self) -> Tensor:
        """Costs c_jj (n,)."""
        return self.squares_a + self.squares_b - 2 * self.inner


def _shorten(points: _Points, count: int) -> tuple[Tensor, Tensor]:
    """Reduce points to the strongest coordinates (n, count + 1) without reducing inner products.

    The last coordinate is the length of the omitted part: the product of two such lengths is at
    least the inner product of the omitted parts.
    """
    # Sorted, since memory is read faster in order.
    strongest = points.b.square().sum(0).topk(count).indices.sort().values

    def short(values: Tensor, squares: Tensor) -> Tensor:
        parts = values.index_select(1, strongest)
        # The margin exceeds the rounding error of the difference.
        margin = 4 * values.shape[1] * torch.finfo(values.dtype).eps * squares
        rest = (squares - parts.square().sum(1) + margin).clamp(min=0).sqrt()
        return torch.cat([parts, rest[:, None]], 1)

    return short(points.a, points.squares_a), short(points.b, points.squares_b)


class _SinglePrecisionBounds:
    """Lower bounds of squared distances from float32 products.

    Parameters
    ----------
    a, b : tensor of shape (n, k)
        Vectors with the lengths of the points, and with inner products at least as large.
    """

    def __init__(self, points: _Points, a: Tensor, b: Tensor) -> None:
        self._points = points
        # c_ij - c_jj = |a_i|² - |a_j|² + 2 a_j·b_j - 2 a_i·b_j
        self._column = 2 * points.inner - points.squares_a
        self._products = outer_products(a.float().mul_(-2), b.float())
        self._products.fill_diagonal_(torch.inf)
        self._scratch = torch.empty_like(self._products)
        lengths = points.squares_a.sqrt()
        longest = points.squares_b.max().sqrt()
        # Roundings of a product of k terms with rounded factors, and of its sums.
        self._roundings = 2 * (a.shape[1] + 6) * lengths * longest + 8 * points.squares_a

    def lowered(self, potential: Tensor) -> Tensor:
        """Bound min_j (c_ij - c_jj + u_j) from below, by at most u_i."""
        points = self._points
        offsets = self._column + potential
        # The smallest entry off the diagonal.
        smallest = torch.add(self._products, offsets.float(), out=self._scratch).amin(1).double()
        smallest += points.squares_a
        error = self._roundings + 4 * offsets.abs().max() + smallest.abs()
        error = 2 * FLOAT32_ROUNDING * error
        bound = torch.minimum(smallest - error, potential)
        doubtful = (bound < potential).nonzero()[:, 0]
        if 0 < len(doubtful) <= MAX_DOUBTFUL_FRACTION * len(bound):
            exact = offsets.repeat(len(doubtful), 1).addmm_(
                points.a[doubtful], points.b.T, alpha=-2
            )
            exact = exact.amin(1) + points.squares_a[doubtful]
            bound[doubtful] = torch.minimum(exact, potential[doubtful])
        return bound

    def guesses(self) -> Iterator[Tensor]:
        """Yield the guesses of `identity_is_optimal`, with closed forms for centred points."""
        points = self._points
        yield points.diagonal
        entries = torch.add(self._products, points.squares_a.float()[:, None], out=self._scratch)
        smallest = entries.amin(0).double() + self._column
        yield -torch.minimum(smallest, torch.zeros_like(smallest))
        yield points.squares_a - points.inner
