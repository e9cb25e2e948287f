"""Kernel alignment with a Gaussian kernel, whose width follows the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import RequestError, Undefined
from nlbench.measure import Accumulator

from ._prepared import Samples, prepared
from ._samples import centered, check_count, power_of_two, varying_columns

__all__ = ["BANDWIDTH", "RBFAccumulator", "rbf_cka"]

# Of the fractions that Kornblith et al. compare, the middle one.
BANDWIDTH = 0.4

# The unbiased HSIC divides by n - 3.
FEWEST = 4

# Below this share of the mean squared kernel value an unbiased norm is rounding.
ROUNDING = 1e-12


def rbf_cka(
    x: Samples, y: Samples, *, bandwidth: float = BANDWIDTH, debiased: bool = False
) -> Tensor:
    """Centred alignment of Gaussian kernels of two sets of features of the same n samples.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K_ij = exp(-‖x_i - x_j‖² / (2 σ²))
    and L the same of y. σ is a fraction of the median distance between two different
    samples, of x and of y each, so that units don't matter. A small fraction sees close
    neighbours only, a large one comes near the linear kernel. Gradients hold σ fixed.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. The work is done in float64, with (n, n) matrices.
    y : tensor of shape (n, k)
        Any real type.
    bandwidth : float
        The fraction, above 0. Distances of zero don't count for the median.
    debiased : bool
        Use the unbiased estimator of HSIC.

    Returns
    -------
    tensor, scalar, float64
        In [0, 1]; debiased it may be slightly negative, or above 1.

    Raises
    ------
    nlbench.Undefined
        For constant features, for fewer than two samples (debiased: four), and where an
        unbiased HSIC of features with themselves vanishes.
    nlbench.NotFinite
        For NaN or infinities.
    nlbench.RequestError
        For numbers of samples that differ, or a bandwidth of 0 or less.

    References
    ----------
    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML
    2019, section 3 and appendix; unbiased HSIC: L. Song et al., JMLR 13 (2012).

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [2.0], [4.0]])
    >>> round(rbf_cka(x, 3 - 7 * x).item(), 9)
    1.0
    >>> bool(rbf_cka(x, (x - 2) ** 2) < 0.7)
    True
    """
    sums = RBFAccumulator(bandwidth, debiased)
    x, y = prepared(x, "x"), prepared(y, "y")
    check_count(x, y, at_least=FEWEST if debiased else 2)
    return sums.terms(x.values, y.values).alignment()


@dataclass(frozen=True)
class _Terms:
    """HSIC of K with L, K with K, L with L, and what rounding of the last two is relative to."""

    xy: Tensor
    xx: Tensor
    yy: Tensor
    size_x: Tensor
    size_y: Tensor

    def plus(self, other: _Terms) -> _Terms:
        return _Terms(
            self.xy + other.xy,
            self.xx + other.xx,
            self.yy + other.yy,
            self.size_x + other.size_x,
            self.size_y + other.size_y,
        )

    def alignment(self) -> Tensor:
        for norm, size, role in ((self.xx, self.size_x, "input"), (self.yy, self.size_y, "output")):
            if norm <= ROUNDING * size:
                raise Undefined(f"the {role}'s similarity to itself vanishes")
        return self.xy / (self.xx.sqrt() * self.yy.sqrt())


class RBFAccumulator(Accumulator):
    """Sums of HSIC over the batches of a site, the ratio last; O(1) memory.

    The widths of both kernels are those of the first batch, so that all batches share one
    kernel.
    """

    def __init__(self, bandwidth: float, debiased: bool) -> None:
        if not bandwidth > 0:
            raise RequestError(f"bandwidth = {bandwidth}, expected a number above 0")
        self._bandwidth, self._debiased = bandwidth, debiased
        self._fewest = FEWEST if debiased else 2
        # Of each of both, a power of two to measure it in and the kernel's width.
        self._scales: list[tuple[float, float]] = []
        self._sums: _Terms | None = None
        self._left_out = 0

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        """Take in one batch, unless it is too small."""
        x, y = prepared(x, "x"), prepared(y, "y")
        if check_count(x, y, at_least=0) < self._fewest:
            self._left_out += 1
            return
        terms = self.terms(x.values, y.values)
        self._sums = self._sums.plus(terms) if self._sums else terms

    def terms(self, x: Tensor, y: Tensor) -> _Terms:
        """HSIC of one batch x (n, d), y (n, k), both float64."""
        if not self._scales:
            self._scales = [self._scale(x, "input"), self._scale(y, "output")]
        k, l = (  # noqa: E741
            torch.exp(_squared_distances(values, unit) / (-2 * width**2))
            for values, (unit, width) in zip((x, y), self._scales, strict=True)
        )
        hsic = _unbiased if self._debiased else _biased
        scale = k.numel()
        return _Terms(
            hsic(k, l), hsic(k, k), hsic(l, l), (k * k).sum() / scale, (l * l).sum() / scale
        )

    def _scale(self, values: Tensor, role: str) -> tuple[float, float]:
        if not varying_columns(values).any():
            raise Undefined(f"constant {role}")
        unit = power_of_two(centered(values))
        squares = _squared_distances(values.detach(), unit)
        apart = torch.ones_like(squares, dtype=torch.bool).triu(1)
        # Equal samples differ by the rounding of their squares at most.
        found = squares[apart & (squares > ROUNDING * squares.max())]
        return unit, self._bandwidth * _median(found.sqrt())

    def statistics(self) -> dict[str, float]:
        """CKA of the sums."""
        if self._sums is None:
            raise Undefined(f"no batch of at least {self._fewest} samples")
        return {"value": self._sums.alignment().item()}

    def remark(self) -> str:
        """Say how many batches were too small."""
        few = f"batches of fewer than {self._fewest} samples left out: {self._left_out}"
        return few if self._left_out else ""


def _median(values: Tensor) -> float:
    """The middle of values (m,), or the mean of both that are; PyTorch's is the lower one."""
    below, above = (len(values) + 1) // 2, len(values) // 2 + 1
    return float((values.kthvalue(below).values + values.kthvalue(above).values) / 2)


def _squared_distances(values: Tensor, unit: float) -> Tensor:
    """Between all rows of an (n, d) tensor, measured in a unit; exactly 0 on the diagonal."""
    values = centered(values) / unit
    norms = values.square().sum(1)
    squares = (norms[:, None] + norms - 2 * values @ values.T).clamp(min=0)
    return squares - torch.diag(squares.diagonal())


def _biased(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """tr(K H L H) / (n - 1)² with the centring matrix H."""
    hidden = k - k.mean(0) - k.mean(1)[:, None] + k.mean()
    product: Tensor = (hidden * l).sum() / (len(k) - 1) ** 2
    return product


def _unbiased(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """The estimator HSIC1 of Song et al., of both kernels without their diagonals."""
    n = len(k)
    k, l = k - torch.diag(k.diagonal()), l - torch.diag(l.diagonal())  # noqa: E741
    sums_k, sums_l = k.sum(0), l.sum(0)
    total = (k * l).sum() - 2 / (n - 2) * (sums_k @ sums_l)
    total = total + sums_k.sum() * sums_l.sum() / ((n - 1) * (n - 2))
    estimate: Tensor = total / (n * (n - 3))
    return estimate
