"""R²: the fraction of an activation's output variance that an affine least-squares fit explains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, RequestError, Undefined, nearest
from nlbench.introspection.distinct_rows import DistinctRows, RowNumbers
from nlbench.measure import Accumulator, MoreMeans
from nlbench.options import Option, OptionValue
from nlbench.probes.sites.site import SiteBatch

from .linear_algebra.products import gram, product, singular_value_decomposition
from .papers import bibtex
from .statistics.moments import Moments, PairsAccumulator, PairsMeasure
from .statistics.prepared import (
    MAX_UNSCALED_RANGE,
    MIN_UNSCALED_RANGE,
    PreparedSamples,
    Samples,
    prepare_samples,
)
from .statistics.samples import (
    EPSILON,
    centered,
    check_count,
    column_units,
    rounding_norms,
    varying_columns,
)

KINDS = ("ordinary", "adjusted", "crossvalidated")
WEIGHTINGS = ("uniform", "variance")
FOLDS = 5

# Smallest singular value of a site's standardised inputs that a fit uses, relative to the largest.
# Smaller ones consist of rounding errors in float32, and may be 0 in float64. Sites have few
# samples per input, so every additional direction explains some of the output by chance.
MIN_RELATIVE_SPREAD = 1e-5

# Ratio of the smallest to the largest singular value above which normal equations replace the
# singular value decomposition. Their error, at most ε / ratio² of the output's norm, is orthogonal
# to the residual, so that it enters R² by its square: 1e-12 at most.
MIN_CHOLESKY_SPREAD = 1e-5

# Each fold of a stream has its own moments, and is predicted from those of all others, so memory
# grows with the number of folds and time with its square.
MAX_FOLDS = 100


@torch.no_grad()
def r2_score(
    x: Samples,
    y: Samples,
    *,
    kind: str = "ordinary",
    folds: int = FOLDS,
    weighting: str = "uniform",
) -> Tensor:
    """Compute the coefficient of determination of the least-squares affine fit of y on x.

    R² = 1 - ‖y - fit‖² / ‖y - mean‖² for each output column, averaged over those that vary. The
    fit has an intercept, and uses a singular value decomposition of centred float64 data unless the
    inputs are well-conditioned, so that they may be constant or linearly dependent. Directions
    within rounding error of the inputs' original dtype are dropped.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type.
    y : tensor of shape (n, k)
        Any real type.
    kind : {"ordinary", "adjusted", "crossvalidated"}
        Adjusted is 1 - (1 - R²) (n - 1) / (n - r - 1), where r is the rank of the inputs:
        additional inputs alone do not increase it, and it may be negative. Cross-validated is
        1 - Σ (y - prediction)² / Σ (y - mean)², with each sample predicted by a fit to the other
        folds. It is also defined for n <= d + 1, where the minimum-norm least-squares fit on
        standardised inputs is used.
    folds : int
        Number of cross-validation folds; distinct sample i is in fold i mod `folds`, with all its
        copies. With `folds` ≥ n it is leave-one-out.
    weighting : {"uniform", "variance"}
        Weights of the columns in the average. With ``variance``, the value is the fraction of the
        total variance that the fit explains.

    Returns
    -------
    tensor, scalar, float64
        In [0, 1] if ordinary, otherwise at most 1. It has no gradient.

    Raises
    ------
    nlbench.Undefined
        If n <= d + 1 for n distinct samples and the kind isn't cross-validated, since the fit is
        exact for any data; if
        the output is constant, or there are fewer than two samples.
    nlbench.NotFinite
        If a value is NaN or infinite, or the range overflows.
    nlbench.RequestError
        If the numbers of samples differ, the kind or weighting is unknown, or `folds` is below 2.

    References
    ----------
    N. R. Draper and H. Smith, "Applied Regression Analysis", third edition, Wiley 1998.

    Examples
    --------
    >>> import torch
    >>> x = torch.arange(6.0, dtype=torch.float64)[:, None]
    >>> round(r2_score(x, 1e-4 * x + 3e4).item(), 9)
    1.0
    >>> round(r2_score(x, x**2).item(), 4)
    0.9214
    """
    if kind not in KINDS:
        raise RequestError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
    if weighting not in WEIGHTINGS:
        raise RequestError(f"unknown weighting '{weighting}'{nearest(weighting, WEIGHTINGS)}")
    x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
    check_count(x, y)
    if kind != "crossvalidated":
        return _r2_of_rows(x, y, _count_distinct(x, y, kind), kind, weighting)
    if folds < 2:
        raise RequestError(f"folds = {folds}, expected at least 2")
    index = _number_rows(DistinctRows(), x, y).index
    return _crossvalidate(x, y, index, folds, weighting)


def _count_distinct(x: PreparedSamples, y: PreparedSamples, kind: str) -> int:
    """Count the distinct samples. For the ordinary R², a lower bound that is enough may do."""
    count = len(torch.unique(x.values[:, 0]))
    if count == len(x) or (kind == "ordinary" and count > x.shape[1] + 1):
        return count
    return _number_rows(DistinctRows(), x, y).distinct


def _number_rows(distinct: DistinctRows, x: PreparedSamples, y: PreparedSamples) -> RowNumbers:
    return distinct.add(torch.cat([x.values, y.values], 1))


def _r2_of_rows(
    x: PreparedSamples,
    y: PreparedSamples,
    distinct: int,
    kind: str,
    weighting: str,
    cutoff: float = 0.0,
) -> Tensor:
    """Compute the ordinary or adjusted R² of `r2_score`, given the number of distinct samples."""
    _check_enough(check_count(x, y), distinct, x.shape[1])
    y.check_varies("output")
    inputs = centered(x.varying_values)
    targets = centered(y.varying_values)
    input_unit = _column_units(x)
    output_unit = _column_units(y)
    if input_unit is not None:
        inputs /= input_unit
    if output_unit is None:
        output_unit = torch.ones_like(targets[0])
    else:
        targets /= output_unit
    low, high = (side[x.varying] for side in x.extremes)
    peaks = torch.maximum(-low, high)
    peaks = peaks if input_unit is None else peaks / input_unit
    residuals, rank = _residuals(inputs, targets, peaks, x.rounding, cutoff)
    totals = targets.square().sum(0)
    unexplained = _average(residuals.square().sum(0) / totals, totals, output_unit, weighting)
    return _score(unexplained, distinct, rank, kind)


def _column_units(side: PreparedSamples) -> Tensor | None:
    """Return units of the varying columns, or None if no square over- or underflows without."""
    low, high = (extremes[side.varying] for extremes in side.extremes)
    ranges = high - low
    if ((ranges >= MIN_UNSCALED_RANGE) & (ranges <= MAX_UNSCALED_RANGE)).all():
        return None
    return column_units(centered(side.varying_values))


def _residuals(
    inputs: Tensor, targets: Tensor, peaks: Tensor, rounding: float, cutoff: float
) -> tuple[Tensor, int]:
    """Compute the residuals (n, k) of the least-squares fit, and its rank.

    A Cholesky factor R of the inputs' correlation replaces their singular value decomposition where
    it proves that the decomposition would omit no direction. The error of residuals from R, of the
    order of ε times the squared condition number, is orthogonal to them up to rounding.

    Parameters
    ----------
    inputs, targets : tensor of shape (n, d), (n, k)
        Centred, in units in which no square over- or underflows.
    peaks, rounding, cutoff
        See `_decompose`.
    """
    correlation = gram(inputs)
    scale = correlation.diagonal().sqrt()
    correlation = correlation / scale / scale[:, None]
    lower, failed = torch.linalg.cholesky_ex(correlation)
    if len(inputs) > len(correlation) > 0 and not failed:
        identity = torch.eye(len(lower)).to(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        # Bounds of the smallest and largest singular value of the inputs over their scale.
        smallest = 1 / torch.linalg.matrix_norm(inverse).item()
        largest = correlation.abs().sum(0).max().sqrt().item()
        errors = rounding_norms(peaks, len(inputs), rounding) / scale
        if smallest > max(MIN_CHOLESKY_SPREAD, cutoff) * largest and smallest > errors.max():
            projected = product(inputs.T, targets) / scale[:, None]
            coefficients = product(inverse.T, product(inverse, projected)) / scale[:, None]
            return targets - product(inputs, coefficients), len(lower)
    directions, _, _ = _decompose(inputs, scale, peaks, rounding, cutoff)
    return targets - directions @ (directions.T @ targets), directions.shape[1]


def _decompose(
    inputs: Tensor, scale: Tensor, peaks: Tensor, rounding: float, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the singular value decomposition of centred inputs (n, d) divided by their scale.

    Omits directions within rounding error of the computation or of the inputs, and those with a
    singular value below `cutoff` times the largest. `peaks` (d,) are the largest magnitudes of the
    inputs before centring.
    """
    left, singular_values, right = singular_value_decomposition(inputs / scale)
    errors = rounding_norms(peaks, len(inputs), rounding) / scale
    cutoff = max(cutoff, max(inputs.shape) * EPSILON)
    is_significant = singular_values > cutoff * singular_values[:1]
    is_significant &= singular_values.square() > right.square() @ errors.square()
    return left[:, is_significant], singular_values[is_significant], right[is_significant]


def _find_directions(moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales (d,) of the varying inputs, and eigenpairs (r,), (d, r) of their correlation.

    Omits directions below `MIN_RELATIVE_SPREAD` or within rounding error of the data. The
    condition number of moments is the square of the data's, so they resolve singular values down
    to sqrt(d ε) of the largest, 3e-7 for d = 512.
    """
    inputs = moments.varying_x
    scale = moments.xx.diagonal()[inputs].sqrt()
    correlation = moments.xx[inputs][:, inputs] / torch.outer(scale, scale)
    eigenvalues, directions = torch.linalg.eigh(correlation)
    errors = moments.rounding_x[inputs] / scale
    is_significant = eigenvalues > MIN_RELATIVE_SPREAD**2 * eigenvalues[-1:]
    is_significant &= eigenvalues > errors.square() @ directions.square()
    return scale, eigenvalues[is_significant], directions[:, is_significant]


def _r2_of_moments(moments: Moments, distinct: int, kind: str, weighting: str) -> Tensor:
    inputs = moments.varying_x
    outputs = moments.varying_y
    _check_enough(moments.n, distinct, moments.inputs)
    moments.check_varies("output")
    scale, eigenvalues, directions = _find_directions(moments)
    projections = moments.xy[inputs][:, outputs] / scale[:, None]
    projections = directions.T @ projections / eigenvalues.sqrt()[:, None]
    totals = moments.yy.diagonal()[outputs]
    # The unexplained fraction is a sum of squares, which rounding may make negative.
    unexplained = (1 - projections.square().sum(0) / totals).clamp(min=0)
    unexplained = _average(unexplained, totals, moments.unit_y[outputs], weighting)
    return _score(unexplained, distinct, len(eigenvalues), kind)


def _average(unexplained: Tensor, totals: Tensor, unit: Tensor, weighting: str) -> Tensor:
    """Average the unexplained fractions (k,) of columns.

    `totals` (k,) are the columns' sums of squares, in the squares of their units (k,).
    """
    if weighting == "uniform":
        return unexplained.mean()
    weights = totals * (unit / unit.amax()).square()
    return (weights * unexplained).sum() / weights.sum()


def _score(unexplained: Tensor, n: int, rank: int, kind: str) -> Tensor:
    factor = (n - 1) / (n - rank - 1) if kind == "adjusted" else 1.0
    return 1 - factor * unexplained


def _peaks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each column."""
    peaks = values.abs().amax(0)
    if not torch.isfinite(peaks).all():
        raise NotFinite("the range of the values is too large for float64")
    return peaks


def _check_enough(n: int, distinct: int, d: int) -> None:
    if distinct <= d + 1:
        samples = "samples" if distinct == n else "distinct samples"
        raise Undefined(
            f"n = {distinct} {samples} are too few for d = {d} inputs: the fit is exact for any "
            "data; r2.kind=crossvalidated has a value, and so has sites.rows=tokens where each "
            "sample has many"
        )


def _crossvalidate(
    x: PreparedSamples,
    y: PreparedSamples,
    index: Tensor,
    folds: int,
    weighting: str,
    cutoff: float = 0.0,
) -> Tensor:
    """Compute the cross-validated R² of `r2_score`, given each sample's number (n,)."""
    check_count(x, y)
    y.check_varies("output")
    targets = centered(y.values[:, y.varying])
    unit = _peaks(targets)
    targets = targets / unit
    fold = index.to(targets.device) % folds
    residual = torch.zeros_like(targets[0])
    for held_out in torch.unique(fold).tolist():
        test = fold == held_out
        train = x.values[~test], targets[~test]
        errors = _prediction_errors(*train, x.values[test], targets[test], x.rounding, cutoff)
        residual += errors.square().sum(0)
    return _mean_score(residual, targets.square().sum(0), unit, weighting)


def _mean_score(residual: Tensor, totals: Tensor, unit: Tensor, weighting: str) -> Tensor:
    """Average 1 - residual / total over columns, given as sums of squares (k,) in units² (k,)."""
    unexplained = residual / totals
    if not torch.isfinite(unexplained).all():
        raise NotFinite("the unexplained share of the output is not finite")
    return 1 - _average(unexplained, totals, unit, weighting)


def _prediction_errors(
    x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, rounding: float, cutoff: float
) -> Tensor:
    """Compute the prediction errors (m, k) of the fit of y on x for test samples.

    Inputs are standardised by the training samples, and scaled so that no square underflows or
    overflows.
    """
    inputs = varying_columns(x, rounding)
    x, origin = x[:, inputs], x[0, inputs]
    y_mean = y.mean(0)
    shift = (x - origin).mean(0)
    deviations = centered(x)
    unit = column_units(deviations)
    deviations /= unit
    scale = torch.linalg.vector_norm(deviations, dim=0)
    left, scales, right = _decompose(deviations, scale, _peaks(x) / unit, rounding, cutoff)
    coefficients = left.T @ (y - y_mean) / scales[:, None]
    standardized = (test_x[:, inputs] - origin - shift) / unit / scale
    return test_y - y_mean - (standardized @ right.T) @ coefficients


class _R2Accumulator(PairsAccumulator):
    """Accumulator of all batches of a site, for one fit."""

    def __init__(self, kind: str, weighting: str) -> None:
        super().__init__()
        self._kind = kind
        self._weighting = weighting
        self._rows = DistinctRows()
        self._distinct = 0

    def add(self, x: Samples, y: Samples) -> None:
        """Add one batch, whose rows are numbered by value."""
        x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
        super().add(x, y)
        self.count(x, y, None)

    def count(self, x: PreparedSamples, y: PreparedSamples, sources: RowNumbers | None) -> None:
        """Count the distinct samples of a batch."""
        self._distinct += (sources or _number_rows(self._rows, x, y)).distinct

    def statistics(self) -> dict[str, float]:
        pairs = self.pairs
        if pairs.n == 0:
            raise Undefined("no samples")
        options = (self._distinct + pairs.distinct, self._kind, self._weighting)
        if pairs.moments is not None:
            return {"value": _r2_of_moments(pairs.moments, *options).item()}
        x, y = pairs.rows()
        return {"value": _r2_of_rows(x, y, *options, MIN_RELATIVE_SPREAD).item()}


class _FoldAccumulator(Accumulator):
    """Accumulator of a site's folds, stored as rows if there are few samples, else as moments.

    Up to twice as many rows are stored as there are columns in the wider side, so that the fit from
    moments, which is less accurate, always has more samples than inputs.
    """

    def __init__(self, folds: int, weighting: str) -> None:
        self.n = 0
        self._folds = folds
        self._weighting = weighting
        self._distinct = DistinctRows()
        # Inputs, outputs and numbers of samples.
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._used: set[int] = set()
        self._rounding = (EPSILON, EPSILON)
        self._origin: Tensor | None = None
        self._moments: dict[int, Moments] = {}

    @torch.no_grad()
    def add(self, x: Samples, y: Samples, sources: RowNumbers | None = None) -> None:
        """Add one batch. The tensors are copied."""
        x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
        if check_count(x, y, at_least=0) == 0:
            return
        if self._origin is None:
            self._origin = torch.cat([x.values[0], y.values[0]])
            self._widths = (x.shape[1], y.shape[1])
        if self._widths != (x.shape[1], y.shape[1]):
            raise RequestError(
                f"a batch has {(x.shape[1], y.shape[1])} columns, earlier ones had {self._widths}"
            )
        index = (sources or _number_rows(self._distinct, x, y)).index.to(x.values.device)
        self._rows.append((x.values.clone(), y.values.clone(), index))
        self._used.update(torch.unique(index % self._folds).tolist())
        self._rounding = (max(self._rounding[0], x.rounding), max(self._rounding[1], y.rounding))
        self.n += len(x)
        if self._moments or self.n > 2 * max(self._widths) + self._folds:
            self._condense()

    @property
    def moment_bytes(self) -> int:
        """Size of the moments."""
        return sum(moments.scatter.nbytes for moments in self._moments.values())

    def _condense(self) -> None:
        assert self._origin is not None
        x, y, numbers = self._gather()
        fold = numbers % self._folds
        for index in torch.unique(fold).tolist():
            rows = fold == index
            part = Moments.of(x[rows], y[rows], self._origin, self._rounding)
            earlier = self._moments.get(index)
            self._moments[index] = earlier.merged(part) if earlier else part
        self._rows.clear()

    def _gather(self) -> tuple[Tensor, Tensor, Tensor]:
        x, y, numbers = (torch.cat(column) for column in zip(*self._rows, strict=True))
        return x, y, numbers

    def statistics(self) -> dict[str, float]:
        if self.n == 0:
            raise Undefined("no samples")
        if self._moments:
            return {"value": self._score_of_moments().item()}
        *values, index = self._gather()
        x, y = map(PreparedSamples, values, self._rounding)
        score = _crossvalidate(x, y, index, self._folds, self._weighting, MIN_RELATIVE_SPREAD)
        return {"value": score.item()}

    def remark(self) -> str:
        return f"cross-validated over {len(self._used)} folds"

    def _score_of_moments(self) -> Tensor:
        total = reduce(Moments.merged, self._moments.values())
        outputs = total.varying_y
        total.check_varies("output")
        parts = {index: part.convert_units(total.unit) for index, part in self._moments.items()}
        residual = torch.zeros_like(total.mean[total.inputs :][outputs])
        for index, test in parts.items():
            train = reduce(Moments.merged, (p for i, p in parts.items() if i != index))
            residual += _squared_errors(train.convert_units(total.unit), test)[outputs]
        totals = total.yy.diagonal()[outputs]
        unit = total.unit_y[outputs]
        return _mean_score(residual, totals, unit, self._weighting)


def _squared_errors(train: Moments, test: Moments) -> Tensor:
    """Sum the squared prediction errors (k,) of the fit to training samples for test samples."""
    inputs = train.varying_x
    scale, eigenvalues, directions = _find_directions(train)
    frame = directions / scale[:, None]
    slopes = (frame / eigenvalues) @ (frame.T @ train.xy[inputs])
    shift = test.mean - train.mean
    offset = shift[train.inputs :] - shift[: train.inputs][inputs] @ slopes
    mixed = (slopes * test.xy[inputs]).sum(0)
    explained = (slopes * (test.xx[inputs][:, inputs] @ slopes)).sum(0)
    scatter = test.yy.diagonal() - 2 * mixed + explained
    # Rounding may make this sum of squares negative.
    return scatter.clamp(min=0) + test.n * offset.square()


class R2(PairsMeasure):
    r"""R² of the affine least-squares fit of an activation's output on its input.

    A single fit for all samples of the run, from second moments accumulated in float64. Directions
    of the standardised inputs below 1e-5 of the strongest are dropped. With at most d + 1 samples
    for d inputs, only the cross-validated value is defined, since the fit would be exact for any
    activation. The ordinary value is in [0, 1]; the others may be negative. Weighted by variance,
    it is the fraction of the output's total variance that the fit explains, and depends on the
    columns' units.

    Definition
    ----------
    Averaged uniformly over the columns j of y that vary,

    .. math::

        R^2 = 1 - \min_{A, b}
        \frac{\sum_i (y_{ij} - (A x_i + b)_j)^2}{\sum_i (y_{ij} - \bar y_j)^2} .

    Units
    -----
    None. A value of 1 means an affine map with any matrix.

    Undefined
    ---------
    A constant output; fewer than two distinct samples; with ``kind=ordinary`` and ``adjusted`` also
    n ≤ d + 1 distinct samples for d inputs, since the fit would be exact for any activation.

    Cost
    ----
    One forward pass for all sites. O(n d²) per site for the moments, O(d³) once for the fit; memory
    O(d²), for each fold with ``kind=crossvalidated``.

    Limits
    ------
    With few samples per input, every direction explains some of the output by chance: compare with
    ``kind=adjusted``. The uniform average gives columns of negligible variance full weight. The
    value is scale-free, so it doesn't show which sites can be removed.

    Published code
    --------------
    Uncentred sums of squares give values above 1, or 1 for any fit, if the targets have a small
    scale or a large offset.

    Examples
    --------
    The ReLU of a standard normal variable, exactly 1/4 / (1/2 - 1/2π), and the variable's square:

    >>> points = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    >>> x = torch.distributions.Normal(0.0, 1.0).icdf(points)[:, None]
    >>> round(r2_score(x, x.relu()).item(), 3), round(r2_score(x, x**2).item(), 3) + 0.0
    (0.733, 0.0)
    """

    name: ClassVar[str] = "r2"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    # 4: copies of a sample are in one fold, and count once.
    version: ClassVar[str] = "4"
    options: ClassVar[Mapping[str, Option]] = {
        "kind": Option(
            "ordinary",
            "R² of the fit, adjusted for the number of inputs, or of held-out samples",
            choices=KINDS,
        ),
        "folds": Option(FOLDS, "number of cross-validation folds", minimum=2, maximum=MAX_FOLDS),
        "weighting": Option(
            "uniform",
            "weights of the output's columns: equal, or by variance (fraction of total variance)",
            choices=WEIGHTINGS,
        ),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "offsets")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        "N. R. Draper and H. Smith, Applied Regression Analysis, third edition, Wiley 1998",
        "coefficient of determination, and its adjusted form",
        bibtex("draper1998applied"),
    )

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Return the bounds. Only the ordinary value is never negative."""
        return cls.bounds if options["kind"] == "ordinary" else (-math.inf, 1.0)

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        kind = str(self.settings["kind"])
        weighting = str(self.settings["weighting"])
        if kind == "crossvalidated":
            return _FoldAccumulator(int(self.settings["folds"]), weighting)
        return _R2Accumulator(kind, weighting)

    def take(self, accumulator: Any, observation: SiteBatch) -> None:
        """Add one batch, with the numbers of its samples."""
        x, y = self.samples(observation)
        if isinstance(accumulator, _FoldAccumulator):
            accumulator.add(x, y, observation.sources)
        else:
            super().take(accumulator, observation)
            accumulator.count(x, y, observation.sources)
