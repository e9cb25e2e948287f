"""R²: how much of an activation's output an affine least-squares fit explains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined, nearest
from nlbench.measure import Accumulator, MoreMeans
from nlbench.options import Option, OptionValue

from ._blas import singular_value_decomposition
from ._crossvalidation import FoldAccumulator, crossvalidated_r2
from ._moments import Moments, PairsAccumulator, PairsMeasure
from ._prepared import Samples, prepared
from ._samples import EPSILON, centered, check_count, rounding_norms

__all__ = ["R2", "r2_score"]

KINDS = ("ordinary", "adjusted", "crossvalidated")
FOLDS = 5

# Of a stream, each fold has moments of its own and is fitted by those of all others: the
# memory grows with the number of folds, the time with its square.
MOST_FOLDS = 100


@torch.no_grad()
def r2_score(x: Samples, y: Samples, *, kind: str = "ordinary", folds: int = FOLDS) -> Tensor:
    """Coefficient of determination of the least-squares affine fit of y on x.

    R² = 1 - ‖y - fit‖² / ‖y - mean‖² of each output column, averaged over those that
    vary. The fit has an intercept and is made on centred float64 data, through a
    singular value decomposition: dead and duplicate inputs are no trouble. Nor are inputs that
    depend on each other but for the rounding of the type they are given in: directions that a
    few roundings of each input explain count as absent.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type.
    y : tensor of shape (n, k)
        Any real type.
    kind : {"ordinary", "adjusted", "crossvalidated"}
        Adjusted is 1 - (1 - R²) (n - 1) / (n - r - 1), r the rank of the inputs: it does
        not grow with the number of inputs alone, and may be negative. Cross-validated is
        1 - Σ (y - prediction)² / Σ (y - mean)² with each sample predicted by a fit to the
        other folds: also where n <= d + 1, since no fit is judged by the samples it was
        made of. Of several equal fits it takes the one with the smallest coefficients of
        standardised inputs.
    folds : int
        Of the cross-validation; sample i is in fold i mod `folds`. From n on it is
        leave-one-out.

    Returns
    -------
    tensor, scalar, float64
        Ordinary in [0, 1], the others at most 1. No gradient flows through it.

    Raises
    ------
    nlbench.Undefined
        For n <= d + 1, where the fit is exact whatever the data, unless cross-validated;
        for a constant output, or fewer than two samples.
    nlbench.NotFinite
        For NaN or infinities.
    nlbench.RequestError
        For numbers of samples that differ, an unknown kind, or fewer than two folds.

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
    x, y = prepared(x, "x"), prepared(y, "y")
    n = check_count(x, y)
    if kind == "crossvalidated":
        if folds < 2:
            raise RequestError(f"folds = {folds}, expected at least 2")
        return crossvalidated_r2(x, y, folds)
    _check_enough(n, x.shape[1])
    _check_varies(y.varying)
    varying = x.values[:, x.varying]
    inputs, targets = centered(varying), _unit_columns(centered(y.values[:, y.varying]))
    scale = inputs.abs().amax(0)
    directions, strengths, columns = singular_value_decomposition(inputs / scale)
    errors = rounding_norms(varying.abs().amax(0), n, x.rounding) / scale
    kept = strengths > max(inputs.shape) * EPSILON * strengths[:1]
    kept &= strengths.square() > columns.square() @ errors.square()
    directions = directions[:, kept]
    residuals = targets - directions @ (directions.T @ targets)
    unexplained = residuals.square().sum(0) / targets.square().sum(0)
    return _average(unexplained, n, directions.shape[1], kind)


def _r2_of_moments(moments: Moments, kind: str) -> Tensor:
    """Same as `r2_score`, from pooled moments.

    Their condition number is the square of the data's: input directions whose spread is
    below sqrt(d ε) of the strongest, 3e-7 for d = 512, are rounding of the moments and count as
    absent, as those do that are rounding of the data.
    """
    inputs, outputs = moments.varying_x, moments.varying_y
    _check_enough(moments.n, moments.inputs)
    _check_varies(outputs)
    scale = moments.xx.diagonal()[inputs].sqrt()
    correlation = moments.xx[inputs][:, inputs] / torch.outer(scale, scale)
    loads = moments.xy[inputs][:, outputs] / scale[:, None]
    strengths, directions = torch.linalg.eigh(correlation)
    kept = strengths > len(strengths) * EPSILON * strengths[-1:]
    kept &= strengths > (moments.rounding_x[inputs] / scale).square() @ directions.square()
    loads = directions[:, kept].T @ loads / strengths[kept].sqrt()[:, None]
    explained = loads.square().sum(0) / moments.yy.diagonal()[outputs]
    # A sum of squares is left over, which rounding may take below zero.
    return _average((1 - explained).clamp(min=0), moments.n, int(kept.sum()), kind)


def _average(unexplained: Tensor, n: int, rank: int, kind: str) -> Tensor:
    """Mean R² of columns whose unexplained shares (k,) are given."""
    factor = (n - 1) / (n - rank - 1) if kind == "adjusted" else 1.0
    return 1 - factor * unexplained.mean()


def _unit_columns(values: Tensor) -> Tensor:
    return values / values.abs().amax(0)


def _check_enough(n: int, d: int) -> None:
    if n <= d + 1:
        raise Undefined(
            f"n = {n} samples are too few for d = {d} inputs: the fit is exact whatever the data; "
            "r2.kind=crossvalidated has a value"
        )


def _check_varies(outputs: Tensor) -> None:
    if not outputs.any():
        raise Undefined("constant output")


class _R2Accumulator(PairsAccumulator):
    """All batches of a site, for one fit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def statistics(self) -> dict[str, float]:
        """R² of all samples together."""
        pairs = self.pairs
        if pairs.n == 0:
            raise Undefined("no samples")
        if pairs.moments is None:
            return {"value": r2_score(*pairs.rows(), kind=self._kind).item()}
        return {"value": _r2_of_moments(pairs.moments, self._kind).item()}


class R2(PairsMeasure):
    """R² of the affine least-squares fit of a site's output on its input.

    One fit for all samples of the run, from second moments that are accumulated in
    float64. A site with at most d + 1 samples for its d inputs is undefined: the fit would
    be exact whatever the activation. The cross-validated value exists there too. The
    ordinary value is in [0, 1]; the others may be negative.
    """

    name: ClassVar[str] = "r2"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    version: ClassVar[str] = "2"
    options: ClassVar[Mapping[str, Option]] = {
        "kind": Option(
            "ordinary",
            "plain R², adjusted for the number of inputs, or of samples that the fit has not seen",
            choices=KINDS,
        ),
        "folds": Option(FOLDS, "folds of the cross-validated value", minimum=2, maximum=MOST_FOLDS),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "offsets")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        "N. R. Draper and H. Smith, Applied Regression Analysis, third edition, Wiley 1998",
        "coefficient of determination, and its adjusted form",
        """@book{draper1998applied,
    author    = {Draper, Norman R. and Smith, Harry},
    title     = {Applied Regression Analysis},
    edition   = {3},
    publisher = {Wiley},
    year      = {1998}
}""",
    )

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Give the bounds: only the ordinary value is never negative."""
        return cls.bounds if options["kind"] == "ordinary" else (-math.inf, 1.0)

    def accumulator(self) -> Accumulator:
        """Make what takes in the batches of one site."""
        kind = str(self.settings["kind"])
        if kind == "crossvalidated":
            return FoldAccumulator(int(self.settings["folds"]))
        return _R2Accumulator(kind)
