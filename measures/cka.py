"""CKA: the similarity between the geometries of an activation's input and output."""

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
from nlbench.measure.pooled import ROW_LIMIT
from nlbench.options import Option, OptionValue

from .linear_algebra.products import gram, product
from .papers import bibtex
from .statistics.moments import PairsAccumulator, PairsMeasure
from .statistics.prepared import PreparedSamples, Samples, prepare_samples
from .statistics.samples import centered, check_count, power_of_two

# Fraction of (tr K)², or of the mean square of a Gaussian kernel K, below which the HSIC of K with
# itself is rounding error.
MIN_RELATIVE_HSIC = 1e-12

# Maximum ratio of the samples' squared norm to that of the centred samples for which the kernel may
# be centred instead. Its rounding errors grow by this factor.
MAX_OFFSET = 16


# The middle of the fractions that Kornblith et al. compare.
BANDWIDTH = 0.4


def linear_cka(x: Samples, y: Samples, *, debiased: bool = False) -> Tensor:
    """Compute the linear centred kernel alignment of two sets of features for the same n samples.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = x xᵀ and L = y yᵀ, computed from the
    (d, k) cross products of the centred features or from the (n, n) Gram matrices, whichever takes
    fewer operations.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. Computed in float64.
    y : tensor of shape (n, k)
        Any real type.
    debiased : bool
        Use the unbiased estimator of HSIC, whose value does not approach 1 as the features
        outnumber the samples.

    Returns
    -------
    tensor, scalar, float64
        In [0, 1]; if debiased, it may be slightly negative or above 1.

    Raises
    ------
    nlbench.Undefined
        If features are constant, if there are fewer than two samples (debiased: four), or if the
        unbiased HSIC of a set of features with itself vanishes.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the numbers of samples differ.

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
    x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
    check_count(x, y, at_least=_min_samples(debiased))
    x.check_varies("input")
    y.check_varies("output")
    if debiased:
        return _unbiased_linear_terms(x.centered, y.centered).alignment()
    if _is_wide(len(x), x.shape[1], y.shape[1]):
        k, l = _centered_kernel(x), _centered_kernel(y)  # noqa: E741
        return _alignment(_inner(k, l), _inner(k, k), _inner(l, l))
    return _alignment(*_inner_products(x.scaled, y.scaled))


def _min_samples(debiased: bool) -> int:
    # The unbiased HSIC divides by n - 3.
    return 4 if debiased else 2


def _inner_products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ⟨K, L⟩, ⟨K, K⟩ and ⟨L, L⟩ of the Gram matrices of centred x (n, d) and y (n, k)."""
    if _is_wide(len(x), x.shape[1], y.shape[1]):
        k, l = gram(x.T), gram(y.T)  # noqa: E741
        return _inner(k, l), _inner(k, k), _inner(l, l)
    xy = product(x.T, y)
    xx = gram(x)
    yy = gram(y)
    return _inner(xy, xy), _inner(xx, xx), _inner(yy, yy)


def _is_wide(n: int, d: int, k: int) -> bool:
    """Return True if kernels (n, n) take fewer operations than products of features."""
    return d * d + d * k + k * k > n * (d + k)


def _centered_kernel(side: PreparedSamples) -> Tensor:
    """Compute the inner products (n, n) of centred samples, without centring them if possible."""
    if side.unit == 1:
        kernel = gram(side.values.T)
        trace = kernel.diagonal().sum().item()
        means = kernel.mean(0)
        # In place, since memory for more matrices takes as long as the arithmetic.
        kernel.sub_(means).sub_(means[:, None]).add_(means.mean())
        if trace <= MAX_OFFSET * kernel.diagonal().sum().item():
            return kernel
    return gram(side.scaled.T)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


def _alignment(xy: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    return xy / (xx.sqrt() * yy.sqrt())


def rbf_cka(
    x: Samples, y: Samples, *, bandwidth: float = BANDWIDTH, debiased: bool = False
) -> Tensor:
    """Compute the centred alignment of Gaussian kernels of two sets of features for n samples.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K_ij = exp(-‖x_i - x_j‖² / (2 σ²)) and L
    the same for y. σ is a fraction of the median distance between distinct samples, separately for
    x and y, so the value is independent of units. With a small fraction only close neighbours
    matter; with a large one the result approaches linear CKA. Gradients treat σ as a constant.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. Computed in float64, with (n, n) matrices.
    y : tensor of shape (n, k)
        Any real type.
    bandwidth : float
        σ as a fraction of the median of the nonzero distances; above 0.
    debiased : bool
        Use the unbiased estimator of HSIC.

    Returns
    -------
    tensor, scalar, float64
        In [0, 1]; if debiased, it may be slightly negative or above 1.

    Raises
    ------
    nlbench.Undefined, nlbench.NotFinite
        See `linear_cka`.
    nlbench.RequestError
        If the numbers of samples differ, or the bandwidth is not positive.

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
    _check_bandwidth(bandwidth)
    x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
    check_count(x, y, at_least=_min_samples(debiased))
    kernels = (
        _GaussianKernel.of(x, bandwidth, "input"),
        _GaussianKernel.of(y, bandwidth, "output"),
    )
    return _gaussian_terms(x, y, kernels, debiased).alignment()


def _check_bandwidth(bandwidth: float) -> None:
    if not bandwidth > 0:
        raise RequestError(f"bandwidth = {bandwidth}, expected a positive number")


@dataclass(frozen=True)
class _HSICTerms:
    """HSIC of x with y, x with x and y with y, or their sums over minibatches.

    Parameters
    ----------
    size_x, size_y : tensor, scalar
        Scales of the rounding errors of xx and yy.
    unit_x, unit_y : float
        Units of x and y, powers of two in which no fourth power underflows or overflows; 1 for a
        Gaussian kernel, which has no unit.
    """

    xy: Tensor
    xx: Tensor
    yy: Tensor
    size_x: Tensor
    size_y: Tensor
    unit_x: float = 1.0
    unit_y: float = 1.0

    def convert_units(self, unit_x: float, unit_y: float) -> _HSICTerms:
        """Convert to larger or equal units."""
        x = (self.unit_x / unit_x) ** 2 if unit_x else 1.0
        y = (self.unit_y / unit_y) ** 2 if unit_y else 1.0
        return _HSICTerms(
            self.xy * x * y,
            self.xx * x * x,
            self.yy * y * y,
            self.size_x * x * x,
            self.size_y * y * y,
            unit_x,
            unit_y,
        )

    def plus(self, other: _HSICTerms) -> _HSICTerms:
        units = max(self.unit_x, other.unit_x), max(self.unit_y, other.unit_y)
        first, second = (vars(each.convert_units(*units)) for each in (self, other))
        sums = {name: first[name] + second[name] for name in ("xy", "xx", "yy", "size_x", "size_y")}
        return _HSICTerms(**sums, unit_x=units[0], unit_y=units[1])

    def alignment(self) -> Tensor:
        """Compute CKA from the terms. Raise `Undefined` if xx or yy is zero up to rounding."""
        for norm, size, role in ((self.xx, self.size_x, "input"), (self.yy, self.size_y, "output")):
            if size == 0:
                raise Undefined(f"constant {role}")
            if norm <= MIN_RELATIVE_HSIC * size:
                raise Undefined(f"the {role}'s similarity to itself vanishes")
        return _alignment(self.xy, self.xx, self.yy)


def _unbiased_linear_terms(x: Tensor, y: Tensor) -> _HSICTerms:
    """Compute the unbiased linear-kernel HSIC of centred x (n, d) and y (n, k), n >= 4.

    The estimator depends only on off-diagonal entries and not on offsets of the features, so they
    may be centred. The rows of K then sum to 0, and to -κ without its diagonal κ, so all sums in
    the definition become sums of κ and of the diagonal λ of L.
    """
    n = len(x)
    # Constant columns, possibly all of them, have been removed.
    unit_x, unit_y = (power_of_two(v) if v.numel() else 0.0 for v in (x, y))
    x, y = x / (unit_x or 1.0), y / (unit_y or 1.0)
    kappa = x.square().sum(1)
    lam = y.square().sum(1)
    trace_x = kappa.sum()
    trace_y = lam.sum()
    xy, xx, yy = _inner_products(x, y)

    def corrected(product: Tensor, diagonal: Tensor, traces: Tensor) -> Tensor:
        total = product - diagonal * n / (n - 2) + traces / ((n - 1) * (n - 2))
        return total / (n * (n - 3))

    return _HSICTerms(
        corrected(xy, kappa @ lam, trace_x * trace_y),
        corrected(xx, kappa @ kappa, trace_x**2),
        corrected(yy, lam @ lam, trace_y**2),
        trace_x**2 / (n * (n - 3)),
        trace_y**2 / (n * (n - 3)),
        unit_x,
        unit_y,
    )


@dataclass(frozen=True)
class _GaussianKernel:
    """Kernel exp(-‖a - b‖² / (2 width²)) of samples divided by `unit`, a power of two."""

    unit: float
    width: float

    @classmethod
    def of(cls, side: PreparedSamples, bandwidth: float, role: str) -> _GaussianKernel:
        """Choose the width as a fraction of the median distance between distinct samples."""
        side.check_varies(role)
        squares = _squared_distances(side.values.detach(), side.unit)
        upper = torch.ones_like(squares, dtype=torch.bool).triu(1)
        # Squared distances between equal samples are zero only up to rounding.
        distances = squares[upper & (squares > MIN_RELATIVE_HSIC * squares.max())].sqrt()
        return cls(side.unit, bandwidth * _median(distances))

    def matrix(self, side: PreparedSamples) -> Tensor:
        """Compute the kernel matrix (n, n)."""
        return torch.exp(_squared_distances(side.values, self.unit) / (-2 * self.width**2))


def _gaussian_terms(
    x: PreparedSamples,
    y: PreparedSamples,
    kernels: tuple[_GaussianKernel, _GaussianKernel],
    debiased: bool,
) -> _HSICTerms:
    k, l = (kernel.matrix(side) for kernel, side in zip(kernels, (x, y), strict=True))  # noqa: E741
    hsic = _unbiased_hsic if debiased else _biased_hsic
    scale = k.numel()
    return _HSICTerms(
        hsic(k, l), hsic(k, k), hsic(l, l), (k * k).sum() / scale, (l * l).sum() / scale
    )


def _median(values: Tensor) -> float:
    """Compute the median of values (m,). PyTorch returns the lower of the two middle values."""
    lower, upper = (len(values) + 1) // 2, len(values) // 2 + 1
    return float((values.kthvalue(lower).values + values.kthvalue(upper).values) / 2)


def _squared_distances(values: Tensor, unit: float) -> Tensor:
    """Compute the squared distances (n, n) between rows over `unit`.

    They are exactly 0 on the diagonal.
    """
    values = centered(values) / unit
    norms = values.square().sum(1)
    squares = (norms[:, None] + norms - 2 * values @ values.T).clamp(min=0)
    return squares - torch.diag(squares.diagonal())


def _biased_hsic(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """Compute tr(K H L H) / (n - 1)² with the centring matrix H."""
    centred = k - k.mean(0) - k.mean(1)[:, None] + k.mean()
    return (centred * l).sum() / (len(k) - 1) ** 2


def _unbiased_hsic(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """Compute the estimator HSIC1 of Song et al., from kernels without their diagonals."""
    n = len(k)
    k, l = k - torch.diag(k.diagonal()), l - torch.diag(l.diagonal())  # noqa: E741
    sums_k = k.sum(0)
    sums_l = l.sum(0)
    total = (k * l).sum() - 2 / (n - 2) * (sums_k @ sums_l)
    total = total + sums_k.sum() * sums_l.sum() / ((n - 1) * (n - 2))
    return total / (n * (n - 3))


class _BiasedAccumulator(PairsAccumulator):
    """Accumulator of the biased value over all batches, in O(d²) memory."""

    def statistics(self) -> dict[str, float]:
        if self.pairs.n == 0:
            raise Undefined("no samples")
        moments = self.pairs.moments
        if moments is None:
            return {"value": linear_cka(*self.pairs.rows()).item()}
        moments.check_varies("input")
        moments.check_varies("output")
        moments = moments.unify_units()
        norms = (m.square().sum() for m in (moments.xy, moments.xx, moments.yy))
        return {"value": _alignment(*norms).item()}


class _SumsAccumulator(Accumulator):
    """Accumulator that sums HSIC over batches before the ratio is taken, in O(1) memory."""

    def __init__(self, min_samples: int) -> None:
        self._min_samples = min_samples
        self._sums: _HSICTerms | None = None
        self._skipped = 0

    @abstractmethod
    def terms(self, x: PreparedSamples, y: PreparedSamples) -> _HSICTerms:
        """Compute the HSIC terms of one batch x (n, d), y (n, k)."""

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
        if check_count(x, y, at_least=0) < self._min_samples:
            self._skipped += 1
            return
        batch = self.terms(x, y)
        self._sums = self._sums.plus(batch) if self._sums else batch

    def statistics(self) -> dict[str, float]:
        if self._sums is None:
            raise Undefined(f"no batch of at least {self._min_samples} samples")
        return {"value": self._sums.alignment().item()}

    def remark(self) -> str:
        note = f"batches of fewer than {self._min_samples} samples left out: {self._skipped}"
        return note if self._skipped else ""


class _DebiasedAccumulator(_SumsAccumulator):
    def __init__(self) -> None:
        super().__init__(_min_samples(debiased=True))

    def terms(self, x: PreparedSamples, y: PreparedSamples) -> _HSICTerms:
        # Constant columns are dropped: their rounding errors alone would yield a ratio.
        before, after = (centered(side.values[:, side.varying]) for side in (x, y))
        return _unbiased_linear_terms(before, after)


class _RBFAccumulator(_SumsAccumulator):
    """Accumulator of HSIC with Gaussian kernels, whose widths are set by the first batch."""

    def __init__(self, bandwidth: float, debiased: bool) -> None:
        _check_bandwidth(bandwidth)
        super().__init__(_min_samples(debiased))
        self._bandwidth = bandwidth
        self._debiased = debiased
        self._kernels: tuple[_GaussianKernel, _GaussianKernel] | None = None

    def terms(self, x: PreparedSamples, y: PreparedSamples) -> _HSICTerms:
        if self._kernels is None:
            self._kernels = (
                _GaussianKernel.of(x, self._bandwidth, "input"),
                _GaussianKernel.of(y, self._bandwidth, "output"),
            )
        return _gaussian_terms(x, y, self._kernels, self._debiased)


class CKA(PairsMeasure):
    r"""CKA between an activation's input and output: 1 if the geometry is preserved.

    By default the value is biased and computed from all samples of the run. With ``debiased=true``
    the three unbiased HSIC terms are summed over batches before the ratio is taken; batches of
    fewer than four samples are left out. The debiased value has no bounds: it may be slightly
    negative, or above 1.

    The default kernel is linear. ``kernel=rbf`` is Gaussian, with a width of ``bandwidth`` times
    the median distance between the samples of the first batch. Its HSIC terms, biased or not, are
    summed over batches, since a kernel of all samples would not fit in memory.

    Definition
    ----------
    For centred x and y and Frobenius norms,

    .. math::

        \operatorname{CKA} = \frac{\|y^\top x\|_F^2}{\|x^\top x\|_F \, \|y^\top y\|_F} ;

    with a kernel it is :math:`\operatorname{HSIC}(K, L) /
    \sqrt{\operatorname{HSIC}(K, K) \operatorname{HSIC}(L, L)}`.

    Units
    -----
    None. A value of 1 means a rotation combined with a common scaling and an offset.

    Undefined
    ---------
    A constant input or output, or no samples; if debiased, also no batch of at least four samples,
    or a zero similarity of the input or the output to itself.

    Cost
    ----
    One forward pass for all sites; O(n d²) per site with memory O(d²). With ``kernel=rbf``
    O(n² d) per batch.

    Limits
    ------
    Directions of large variance dominate the value. Without ``debiased``, unrelated features that
    far outnumber the samples have a value near 1. An affine map that stretches some directions has
    a value below 1.

    Published code
    --------------
    Constant features give 0/0, and summing squares in float32 causes an error of 4e-4. Averages of
    the ratio over minibatches depend on their size; nlbench sums the three terms first.

    Examples
    --------
    For one input and one output it is the squared correlation: 1/4 / (1/2 - 1/2π) for the ReLU of
    a standard normal variable.

    >>> points = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    >>> x = torch.distributions.Normal(0.0, 1.0).icdf(points)[:, None]
    >>> round(linear_cka(x, x.relu()).item(), 3)
    0.733
    """

    name: ClassVar[str] = "cka"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    version: ClassVar[str] = "3"
    options: ClassVar[Mapping[str, Option]] = {
        "debiased": Option(False, "unbiased HSIC, summed over batches before the ratio is taken"),
        "kernel": Option(
            "linear", "kernel of the features: linear or Gaussian", choices=("linear", "rbf")
        ),
        "bandwidth": Option(
            BANDWIDTH, "width of kernel=rbf relative to median distance", minimum=1e-3, maximum=1e3
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
        bibtex("kornblith2019similarity", "song2012feature", "nguyen2021wide"),
    )

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Return the bounds. The debiased value has none."""
        return (-math.inf, math.inf) if options["debiased"] else cls.bounds

    @classmethod
    def row_limit_of(cls, options: Mapping[str, OptionValue]) -> int | None:
        """Return the number of token rows to sample from a batch, or None for all."""
        return ROW_LIMIT if options["kernel"] == "rbf" else None

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        if self.settings["kernel"] == "rbf":
            bandwidth = float(self.settings["bandwidth"])
            return _RBFAccumulator(bandwidth, bool(self.settings["debiased"]))
        return _DebiasedAccumulator() if self.settings["debiased"] else _BiasedAccumulator()
