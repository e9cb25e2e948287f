"""Affinity score: how close an activation is to an affine optimal transport map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, RequestError, nearest
from nlbench.introspection.function_calls import is_vmapped
from nlbench.measure import FunctionMeasure, MoreMeans
from nlbench.options import Option, OptionValue
from nlbench.probes.sites.site import SiteBatch

from .linear_algebra.products import product
from .papers import affinity_paper
from .statistics.prepared import PreparedSamples, Samples, prepare_batch, prepare_pair
from .statistics.samples import check_count
from .transport.assignment import optimal_matching
from .transport.covariance import joint_coordinates, regularized_covariance
from .transport.gaussian_map import optimal_map

SHRINKAGES = ("ledoit-wolf", "none")
RIDGE_UNITS = ("relative", "absolute")
RIDGE = 1e-6

# Maximum error in the score that a suboptimal matching may cause.
MATCHING_TOLERANCE = 1e-9


def affinity_score(
    x: Samples,
    y: Samples,
    *,
    shrinkage: str = "ledoit-wolf",
    ridge: float = RIDGE,
    ridge_unit: str = "relative",
) -> Tensor:
    """Compute the affinity score ρ = 1 - W2(T x, y) / sqrt(2 tr Σy) of an activation.

    T is the optimal transport map between the Gaussian approximations of x and y, which is affine
    with a positive semidefinite matrix, and W2 the exact optimal transport distance between the n
    points T x_i and the n points y_j. A score of 1 means that the activation is such a map. The
    score is invariant to the offsets of x and y, and to their units unless the ridge is absolute.

    It is infinitely differentiable (twice for n < d / 2): gradients flow through T and the matched
    distances, with the optimal matching held fixed, and are zero at ρ = 1. `torch.func.grad` is
    supported; forward mode and `torch.func.vmap` raise an error, since each pair of samples has
    its own assignment problem.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Input and output of an activation, any real type. Computed in float64.
    shrinkage : {"ledoit-wolf", "none"}
        Ledoit and Wolf's estimator of the covariances, or the unbiased sample covariances.
    ridge : float
        Ridge added to the diagonal of the covariances.
    ridge_unit : {"relative", "absolute"}
        Whether the ridge is relative to the mean variance tr Σ / d, or an absolute variance as in
        the published code.

    Returns
    -------
    tensor, scalar, float64
        At most 1; without shrinkage at least 0. With shrinkage the covariances of T x and y differ,
        so the score may be negative (−0.15 is the lowest known, for six samples in four
        dimensions). It is not clipped.

    Raises
    ------
    nlbench.Undefined
        If there are fewer than two samples, the input or output is constant, or Σx is singular with
        ``ridge=0``. Samples that differ only by their dtype's rounding error count as constant.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the shapes differ, an option is invalid, or it runs under `torch.func.vmap`.

    References
    ----------
    Q. Bouniot et al., "From Alexnet to Transformers: Measuring the Non-linearity of Deep
    Neural Networks with Affine Optimal Transport", CVPR 2025, equations (4) and (5).

    Examples
    --------
    >>> import torch
    >>> x = torch.linspace(-1, 1, 1000)[:, None]
    >>> round(affinity_score(x, x**3, shrinkage="none").item(), 2)
    0.71
    """
    _check_options(shrinkage, ridge, ridge_unit)
    if is_vmapped(x) or is_vmapped(y):
        raise RequestError(
            "affinity_score does not support vmap, since each pair of samples has its own "
            "assignment problem; use torch.stack([affinity_score(a, b) for a, b in zip(x, y)])"
        )
    x, y = prepare_pair(x, y)
    n = check_count(x, y)
    y.check_varies("output")
    x.check_varies("input")
    added = [0.0, 0.0]
    if ridge_unit == "absolute":
        added = [_convert_ridge(ridge, side.unit) for side in (x, y)]
        ridge = 0.0
    before = x.scaled
    after = y.scaled
    dim = before.shape[1]
    if 2 * n < dim:
        # Outside the span both covariances are isotropic and no sample has a component.
        before, after = joint_coordinates(before, after)
    source, target = (
        regularized_covariance(values, dim=dim, shrinkage=shrinkage, ridge=ridge, added=variance)
        for values, variance in zip((before, after), added, strict=True)
    )
    mapped = product(before, optimal_map(source.matrix, target.matrix))
    largest = (2 * target.trace).sqrt()
    matching = optimal_matching(mapped, after, precision=MATCHING_TOLERANCE * largest.item())
    # A norm, unlike the root of a sum, has a gradient (zero) at distance zero.
    distance = torch.linalg.vector_norm(mapped - after[matching]) / math.sqrt(n)
    return 1 - distance / largest


def _convert_ridge(ridge: float, unit: float) -> float:
    scaled = ridge / unit / unit
    if not math.isfinite(scaled):
        raise NotFinite(f"a ridge of {ridge:g} overflows in units of the data")
    return scaled


def _check_options(shrinkage: str, ridge: float, ridge_unit: str) -> None:
    if ridge_unit not in RIDGE_UNITS:
        raise RequestError(f"unknown ridge_unit '{ridge_unit}'{nearest(ridge_unit, RIDGE_UNITS)}")
    if shrinkage not in SHRINKAGES:
        raise RequestError(f"unknown shrinkage '{shrinkage}'{nearest(shrinkage, SHRINKAGES)}")
    if not (0 <= ridge < math.inf):
        raise RequestError(f"ridge = {ridge}, expected a finite, non-negative number")


class Affinity(FunctionMeasure):
    r"""Closeness to an affine optimal transport map: 1 is affine, lower is more nonlinear.

    The score is computed per batch; the value of a site is the mean over batches, and ``std`` the
    population standard deviation. The summary has the statistics of the non-linearity signature.
    The score is at most 1, and without shrinkage at least 0. With shrinkage it may fall below 0
    when there are only about as many samples as dimensions.

    Definition
    ----------
    For the n samples of a batch, with covariances :math:`\Sigma_x = L L^\top` and :math:`\Sigma_y`,

    .. math::

        \rho = 1 - \frac{W_2(T x,\, y)}{\sqrt{2 \operatorname{tr} \Sigma_y}}, \qquad
        T(z) = L^{-\top} (L^\top \Sigma_y L)^{1/2} L^{-1} (z - \mu_x) + \mu_y .

    T is the optimal transport map between the Gaussian approximations of x and y, and
    :math:`W_2` the exact optimal transport distance between the two sets of n points.

    Units
    -----
    None. A score of 1 means an affine map with a positive semidefinite matrix.

    Undefined
    ---------
    Fewer than two samples, a constant input or output, or a singular covariance without a ridge.

    Cost
    ----
    One forward pass for all sites. Per batch and site O(n d² + d³), or O(n² d) for n < d / 2; if
    the identity can't be certified as the optimal matching, an assignment problem with n samples
    must also be solved.

    Limits
    ------
    It compares the distributions of input and output, not how samples are paired: an independent
    copy of the input scores 0.97, although no sample is mapped to its own copy. Linear maps that
    are not positive semidefinite score low: 0.46 for a rotation in 16 dimensions. It does not
    detect kinks that are many and small. The score is scale-free, so it doesn't show which sites
    can be removed.

    Published code
    --------------
    It adds a ridge of 1e-6 in units of the data, averages over the last axes of a tensor
    regardless of what they represent, runs in-place activations twice, and scores constant
    outputs. The options ``ridge_unit=absolute`` and ``sites.reduction=published`` select its
    formula.

    Examples
    --------
    Powers of x at evenly spaced points in [-1, 1] reproduce the scores in the authors' slides:

    >>> x = torch.linspace(-1, 1, 1000, dtype=torch.float64)[:, None]
    >>> [round(affinity_score(x, x**k, shrinkage="none").item(), 2) for k in (1, 3, 5, 7, 11, 41)]
    [1.0, 0.71, 0.58, 0.5, 0.4, 0.2]

    An independent copy of normally distributed inputs, and a rotation of such inputs:

    >>> _ = torch.manual_seed(0)
    >>> x, copy = torch.randn(2, 2048, 1, dtype=torch.float64)
    >>> round(affinity_score(x, copy).item(), 2)
    0.97
    >>> x = torch.randn(2048, 16, dtype=torch.float64)
    >>> rotation = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q
    >>> round(affinity_score(x, x @ rotation).item(), 1)
    0.5
    """

    name: ClassVar[str] = "affinity"
    probe: ClassVar[str] = "sites"
    bounds: ClassVar[tuple[float, float]] = (-math.inf, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    version: ClassVar[str] = "2"
    options: ClassVar[Mapping[str, Option]] = {
        "shrinkage": Option(
            "ledoit-wolf",
            "covariance estimator: Ledoit-Wolf or sample covariance",
            choices=SHRINKAGES,
        ),
        "ridge": Option(RIDGE, "ridge added to the covariances", minimum=0, maximum=1e6),
        "ridge_unit": Option(
            "relative",
            "ridge relative to the mean variance, or absolute, as in the published code",
            choices=RIDGE_UNITS,
        ),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("order", "units", "offsets", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("equations (4) and (5)")
    function = staticmethod(affinity_score)

    def samples(self, observation: SiteBatch) -> tuple[PreparedSamples, PreparedSamples]:
        """Return the prepared samples of a batch."""
        return observation.shared(prepare_batch)

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Return the bounds, which are 0 and 1 without shrinkage."""
        return (0.0, 1.0) if options["shrinkage"] == "none" else cls.bounds
