"""CKA: how alike the geometry of an activation's input and output is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.measure import Accumulator, MoreMeans
from nlbench.options import Option, OptionValue

from .statistics.moments import PairsAccumulator, PairsMeasure
from .statistics.prepared import Prepared, Samples, prepared
from .statistics.samples import centered, check_count, power_of_two

__all__ = ["CKA", "linear_cka", "rbf_cka"]

# Below this share of (tr K)², or of the mean squared value of a Gaussian kernel, an HSIC of K with
# itself is rounding, not a number.
ROUNDING = 1e-12

# The unbiased HSIC divides by n - 3.
FEWEST = 4

# Of the fractions that Kornblith et al. compare, the middle one.
BANDWIDTH = 0.4


def linear_cka(x: Samples, y: Samples, *, debiased: bool = False) -> Tensor:
    """Linear centred kernel alignment of two sets of features of the same n samples.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = x xᵀ and L = y yᵀ. It is
    computed from the (d, k) cross products of the centred features or from the (n, n)
    Gram matrices, whichever takes fewer operations.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. The work is done in float64.
    y : tensor of shape (n, k)
        Any real type.
    debiased : bool
        Use the unbiased estimator of HSIC, whose value does not rise towards 1 when the
        features outnumber the samples.

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
        For numbers of samples that differ.

    References
    ----------
    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML
    2019, section 3. Unbiased HSIC: L. Song et al., "Feature Selection via Dependence
    Maximization", JMLR 13 (2012), the estimator HSIC1.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 1.0]])
    >>> round(linear_cka(x, 5 * x.flip(1) - 7).item(), 9)
    1.0
    """
    x, y = prepared(x, "x"), prepared(y, "y")
    check_count(x, y, at_least=FEWEST if debiased else 2)
    for side, role in ((x, "input"), (y, "output")):
        if not side.varying.any():
            raise Undefined(f"constant {role}")
    if debiased:
        return _unbiased_terms(x.centered, y.centered).alignment()
    return _alignment(*_inner_products(x.scaled, y.scaled))


def _inner_products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """⟨K, L⟩, ⟨K, K⟩ and ⟨L, L⟩ of the Gram matrices of centred x (n, d) and y (n, k)."""
    (n, d), k = x.shape, y.shape[1]
    if d * d + d * k + k * k <= n * (d + k):
        return (x.T @ y).square().sum(), (x.T @ x).square().sum(), (y.T @ y).square().sum()
    gram_x, gram_y = x @ x.T, y @ y.T
    return (gram_x * gram_y).sum(), gram_x.square().sum(), gram_y.square().sum()


def _alignment(xy: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    return xy / (xx.sqrt() * yy.sqrt())


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
    sums = _RBFAccumulator(bandwidth, debiased)
    x, y = prepared(x, "x"), prepared(y, "y")
    check_count(x, y, at_least=sums.fewest)
    return sums.terms(x, y).alignment()


@dataclass(frozen=True)
class _Terms:
    """HSIC of x with y, x with x, y with y; sums of it over minibatches.

    Parameters
    ----------
    xy, xx, yy : tensor, scalar
    size_x, size_y : tensor, scalar
        What rounding of the last two is relative to.
    unit_x, unit_y : float
        Powers of two that x and y are measured in, so that no fourth power of theirs
        under- or overflows; a Gaussian kernel has no unit.
    """

    xy: Tensor
    xx: Tensor
    yy: Tensor
    size_x: Tensor
    size_y: Tensor
    unit_x: float = 1.0
    unit_y: float = 1.0

    def in_units(self, unit_x: float, unit_y: float) -> _Terms:
        """Give the same terms in units that are no smaller."""
        x = (self.unit_x / unit_x) ** 2 if unit_x else 1.0
        y = (self.unit_y / unit_y) ** 2 if unit_y else 1.0
        return _Terms(
            self.xy * x * y,
            self.xx * x * x,
            self.yy * y * y,
            self.size_x * x * x,
            self.size_y * y * y,
            unit_x,
            unit_y,
        )

    def plus(self, other: _Terms) -> _Terms:
        """Add another minibatch."""
        units = max(self.unit_x, other.unit_x), max(self.unit_y, other.unit_y)
        first, second = self.in_units(*units), other.in_units(*units)
        return _Terms(
            first.xy + second.xy,
            first.xx + second.xx,
            first.yy + second.yy,
            first.size_x + second.size_x,
            first.size_y + second.size_y,
            *units,
        )

    def alignment(self) -> Tensor:
        """CKA of the sums; undefined where one of the two norms is rounding."""
        for norm, size, role in ((self.xx, self.size_x, "input"), (self.yy, self.size_y, "output")):
            if size == 0:
                raise Undefined(f"constant {role}")
            if norm <= ROUNDING * size:
                raise Undefined(f"the {role}'s similarity to itself vanishes")
        return _alignment(self.xy, self.xx, self.yy)


def _unbiased_terms(x: Tensor, y: Tensor) -> _Terms:
    """Unbiased HSIC, with the linear kernel, of centred x (n, d) and y (n, k), n >= 4.

    The estimator sees only off-diagonal entries and no offset of the features, so
    they may be centred. The rows of K then sum to zero, and without its diagonal κ to
    -κ: all sums of the definition become sums of κ and of the diagonal λ of L.
    """
    n = len(x)
    # No column varies, and none is left, where a batch is constant.
    unit_x, unit_y = (power_of_two(v) if v.numel() else 0.0 for v in (x, y))
    x, y = x / (unit_x or 1.0), y / (unit_y or 1.0)
    kappa, lam = x.square().sum(1), y.square().sum(1)
    trace_x, trace_y = kappa.sum(), lam.sum()
    xy, xx, yy = _inner_products(x, y)

    def corrected(product: Tensor, diagonal: Tensor, traces: Tensor) -> Tensor:
        total = product - diagonal * n / (n - 2) + traces / ((n - 1) * (n - 2))
        return total / (n * (n - 3))

    return _Terms(
        corrected(xy, kappa @ lam, trace_x * trace_y),
        corrected(xx, kappa @ kappa, trace_x**2),
        corrected(yy, lam @ lam, trace_y**2),
        trace_x**2 / (n * (n - 3)),
        trace_y**2 / (n * (n - 3)),
        unit_x,
        unit_y,
    )


class _BiasedAccumulator(PairsAccumulator):
    """All batches of a site as one; O(d²) memory."""

    def statistics(self) -> dict[str, float]:
        """CKA of all samples together."""
        if self.pairs.n == 0:
            raise Undefined("no samples")
        moments = self.pairs.moments
        if moments is None:
            return {"value": linear_cka(*self.pairs.rows()).item()}
        for varies, role in ((moments.varying_x, "input"), (moments.varying_y, "output")):
            if not varies.any():
                raise Undefined(f"constant {role}")
        moments = moments.in_common_units()
        norms = (m.square().sum() for m in (moments.xy, moments.xx, moments.yy))
        return {"value": _alignment(*norms).item()}


class _SumsAccumulator(Accumulator):
    """Sums of HSIC over the batches of a site, the ratio last; O(1) memory."""

    def __init__(self, fewest: int = FEWEST) -> None:
        self.fewest = fewest
        self._sums: _Terms | None = None
        self._left_out = 0

    @abstractmethod
    def terms(self, x: Prepared, y: Prepared) -> _Terms:
        """HSIC of one batch x (n, d), y (n, k)."""

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        """Take in one batch, unless it is too small."""
        x, y = prepared(x, "x"), prepared(y, "y")
        if check_count(x, y, at_least=0) < self.fewest:
            self._left_out += 1
            return
        batch = self.terms(x, y)
        self._sums = self._sums.plus(batch) if self._sums else batch

    def statistics(self) -> dict[str, float]:
        """CKA of the sums."""
        if self._sums is None:
            raise Undefined(f"no batch of at least {self.fewest} samples")
        return {"value": self._sums.alignment().item()}

    def remark(self) -> str:
        """Say how many batches were too small."""
        few = f"batches of fewer than {self.fewest} samples left out: {self._left_out}"
        return few if self._left_out else ""


class _DebiasedAccumulator(_SumsAccumulator):
    """Unbiased HSIC with the linear kernel."""

    def terms(self, x: Prepared, y: Prepared) -> _Terms:
        # Rounding alone would make a sum of constant columns, of any size, a ratio.
        before, after = (centered(side.values[:, side.varying]) for side in (x, y))
        return _unbiased_terms(before, after)


class _RBFAccumulator(_SumsAccumulator):
    """HSIC with Gaussian kernels.

    The widths of both are those of the first batch, so that all batches share one kernel.
    """

    def __init__(self, bandwidth: float, debiased: bool) -> None:
        if not bandwidth > 0:
            raise RequestError(f"bandwidth = {bandwidth}, expected a number above 0")
        super().__init__(FEWEST if debiased else 2)
        self._bandwidth, self._debiased = bandwidth, debiased
        # Of each of both, a power of two to measure it in and the kernel's width.
        self._scales: list[tuple[float, float]] = []

    def terms(self, x: Prepared, y: Prepared) -> _Terms:
        if not self._scales:
            self._scales = [self._scale(x, "input"), self._scale(y, "output")]
        k, l = (  # noqa: E741
            torch.exp(_squared_distances(side.values, unit) / (-2 * width**2))
            for side, (unit, width) in zip((x, y), self._scales, strict=True)
        )
        hsic = _unbiased if self._debiased else _biased
        scale = k.numel()
        return _Terms(
            hsic(k, l), hsic(k, k), hsic(l, l), (k * k).sum() / scale, (l * l).sum() / scale
        )

    def _scale(self, side: Prepared, role: str) -> tuple[float, float]:
        if not side.varying.any():
            raise Undefined(f"constant {role}")
        squares = _squared_distances(side.values.detach(), side.unit)
        apart = torch.ones_like(squares, dtype=torch.bool).triu(1)
        # Equal samples differ by the rounding of their squares at most.
        found = squares[apart & (squares > ROUNDING * squares.max())]
        return side.unit, self._bandwidth * _median(found.sqrt())


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


class CKA(PairsMeasure):
    """CKA between a site's input and output: 1 where the geometry is kept.

    By default the biased value of all samples of the run as one, whatever the batches. With
    ``debiased=true`` the three unbiased HSIC terms are summed over batches and their ratio
    is taken last; batches of fewer than four samples are left out. That value has no bounds:
    it may be slightly negative, or above 1.

    The kernel is linear. ``kernel=rbf`` is Gaussian, with a width of ``bandwidth`` times the
    median distance between the samples of the first batch. Its HSIC terms, biased or not,
    are summed over batches, since a kernel of all samples would not fit into memory.
    """

    name: ClassVar[str] = "cka"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    version: ClassVar[str] = "2"
    options: ClassVar[Mapping[str, Option]] = {
        "debiased": Option(False, "unbiased HSIC, summed over batches before the ratio is taken"),
        "kernel": Option("linear", "of features, or Gaussian", choices=("linear", "rbf")),
        "bandwidth": Option(
            BANDWIDTH, "width of kernel=rbf in median distances", minimum=1e-3, maximum=1e3
        ),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "offsets", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        "S. Kornblith, M. Norouzi, H. Lee and G. Hinton, Similarity of Neural Network "
        "Representations Revisited, ICML 2019; debiased: L. Song et al., Feature Selection via "
        "Dependence Maximization, JMLR 13 (2012), 1393-1434; over minibatches: T. Nguyen, "
        "M. Raghu and S. Kornblith, Do Wide and Deep Networks Learn the Same Things?, ICLR 2021",
        "Kornblith section 3; Song, estimator HSIC1; Nguyen, minibatch CKA",
        """@inproceedings{kornblith2019similarity,
    author    = {Kornblith, Simon and Norouzi, Mohammad and Lee, Honglak and Hinton, Geoffrey},
    title     = {Similarity of Neural Network Representations Revisited},
    booktitle = {Proceedings of the 36th International Conference on Machine Learning},
    year      = {2019}
}
@article{song2012feature,
    author    = {Song, Le and Smola, Alex and Gretton, Arthur and Bedo, Justin
                 and Borgwardt, Karsten},
    title     = {Feature Selection via Dependence Maximization},
    journal   = {Journal of Machine Learning Research},
    volume    = {13},
    pages     = {1393--1434},
    year      = {2012}
}
@inproceedings{nguyen2021wide,
    author    = {Nguyen, Thao and Raghu, Maithra and Kornblith, Simon},
    title     = {Do Wide and Deep Networks Learn the Same Things? Uncovering How Neural
                 Network Representations Vary with Width and Depth},
    booktitle = {International Conference on Learning Representations},
    year      = {2021}
}""",
    )

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Give the bounds, which the debiased value doesn't have."""
        return (-math.inf, math.inf) if options["debiased"] else cls.bounds

    def accumulator(self) -> Accumulator:
        """Make what takes in the batches of one site."""
        if self.settings["kernel"] == "rbf":
            bandwidth = float(self.settings["bandwidth"])
            return _RBFAccumulator(bandwidth, bool(self.settings["debiased"]))
        return _DebiasedAccumulator() if self.settings["debiased"] else _BiasedAccumulator()
