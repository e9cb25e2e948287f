"""Affine residual: the fraction of a network's output that no affine map of its input predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.introspection.distinct_rows import DistinctRows, RowNumbers
from nlbench.measure import Measure, MoreMeans, Result
from nlbench.measure.replicates import SampleGroups, leave_groups_out
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch

from .linear_algebra.products import singular_value_decomposition
from .papers import bibtex
from .statistics.prepared import PreparedSamples, Samples, prepare_samples
from .statistics.samples import EPSILON, ERROR_IN_ROUNDINGS, check_count

FOLDS = 5
MIN_SAMPLES = 4

# Ridge penalties in units of the mean squared singular value of the inputs: none, half decades,
# and infinity, which predicts the mean.
PENALTIES = (0.0, *(10 ** (power / 2) for power in range(-12, 9)), math.inf)


@torch.no_grad()
def affine_residual(x: Samples, y: Samples, *, folds: int = FOLDS) -> Tensor:
    """Compute 1 - R² of the best affine map from x to y on held-out samples.

    It is Σ ‖y - prediction‖² / Σ ‖y - mean‖², summed over all outputs, with each sample predicted
    by ridge regression on the other folds. The penalty for each fold minimises the generalised
    cross-validation score of its training samples; it is 0 if they determine an affine map.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. Inputs are not standardised before the penalty is applied.
    y : tensor of shape (n, k)
        Any real type.
    folds : int
        Distinct sample i is in fold i mod `folds`, with all its copies. With `folds` ≥ n it is
        leave-one-out.

    Returns
    -------
    tensor, scalar, float64
        At least 0; 0 for an affine function. About 1 if no affine map predicts the output better
        than its mean; above 1 if the best one generalises worse.

    Raises
    ------
    nlbench.Undefined
        If there are fewer than four distinct samples, or the output is constant.
    nlbench.NotFinite
        If a value is NaN or infinite, or the range overflows.
    nlbench.RequestError
        If the numbers of samples differ, or there are fewer than two folds.

    References
    ----------
    A. E. Hoerl, R. W. Kennard, "Ridge Regression: Biased Estimation for Nonorthogonal Problems",
    Technometrics 12, 1970; G. H. Golub, M. Heath, G. Wahba, "Generalized Cross-Validation as a
    Method for Choosing a Good Ridge Parameter", Technometrics 21, 1979.

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    >>> round(affine_residual(x, 3 * x - 2).item(), 9), round(affine_residual(x, x**2).item(), 1)
    (0.0, 1.0)
    """
    x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
    check_count(x, y)
    numbers = DistinctRows().add(torch.cat([x.values, y.values], 1))
    inputs = _coordinates(x)
    outputs = _outputs(y)
    errors = _squared_errors(inputs, outputs[:, None], numbers, folds)[:, 0]
    return _ratio(errors.sum(), outputs.square().sum())


def _coordinates(x: PreparedSamples) -> Tensor:
    """Return the inputs' principal components (n, r), on which ridge regression has the same fit.

    Directions within rounding error of the inputs' original dtype are dropped.
    """
    if not x.varying.any():
        return x.values[:, :0]
    n, d = x.shape
    if d > n:
        # The Gram matrix resolves directions down to 1e-8 of the largest, enough for float32.
        squares, left = torch.linalg.eigh(x.scaled @ x.scaled.T)
        singular_values = squares.clamp(min=0).sqrt()
        cutoff = math.sqrt(n * EPSILON)
    else:
        left, singular_values, _ = singular_value_decomposition(x.scaled)
        cutoff = n * EPSILON
    peak = float(x.values.abs().amax()) / x.unit
    rounding = ERROR_IN_ROUNDINGS * x.rounding * math.sqrt(max(n, d)) * peak
    is_significant = singular_values > max(cutoff * float(singular_values.max()), rounding)
    return left[:, is_significant] * singular_values[is_significant]


def _outputs(y: PreparedSamples) -> Tensor:
    y.check_varies("output")
    return y.scaled[:, y.varying]


def _squared_errors(inputs: Tensor, outputs: Tensor, numbers: RowNumbers, folds: int) -> Tensor:
    """Compute the squared prediction errors (n, m) separately for each of m outputs (n, m, k)."""
    if numbers.distinct < MIN_SAMPLES:
        raise Undefined(
            f"n = {numbers.distinct}: at least {MIN_SAMPLES} distinct samples are needed"
        )
    if folds < 2:
        raise RequestError(f"folds = {folds}, expected at least 2")
    index = numbers.index.to(outputs.device)
    fold = index % folds
    errors = torch.empty_like(outputs[..., 0])
    for held_out in torch.unique(fold).tolist():
        test = fold == held_out
        distinct = len(torch.unique(index[~test]))
        predicted = _predictions(inputs[~test], outputs[~test], inputs[test], distinct)
        errors[test] = (outputs[test] - predicted).square().sum(-1)
    return errors


def _predictions(x: Tensor, y: Tensor, test: Tensor, n: int) -> Tensor:
    """Predict outputs (t, m, k) for test inputs (t, r) by ridge regression of y on x.

    n is the number of distinct samples in x.
    """
    x_mean = x.mean(0)
    y_mean = y.mean(0)
    if x.shape[1] == 0:
        return y_mean.expand(len(test), *y_mean.shape)
    left, scales, right = singular_value_decomposition(x - x_mean)
    significant = scales > max(x.shape) * EPSILON * scales.max()
    left = left[:, significant]
    scales = scales[significant]
    right = right[significant]
    squares = scales.square()
    centred = y - y_mean
    projections = torch.einsum("nr,nmk->rmk", left, centred)
    penalties = torch.tensor(PENALTIES, dtype=y.dtype, device=y.device) * squares.mean()
    shrinkage = squares / (squares + penalties[:, None])  # (penalties, r)
    freedom = n - 1 - shrinkage.sum(1, keepdim=True)
    explained = (2 * shrinkage - shrinkage.square()) @ projections.square().sum(2)
    unexplained = centred.square().sum((0, 2)) - explained
    scores = unexplained.clamp(min=0) / freedom.square()
    # An exact fit with as many directions as samples carries no information.
    scores[freedom[:, 0] < 0.5] = math.inf
    best = shrinkage[scores.argmin(0)].T  # (r, m)
    return y_mean + torch.einsum(
        "tr,rmk->tmk", (test - x_mean) @ right.T / scales, best[..., None] * projections
    )


def _ratio(errors: Tensor, total: Tensor) -> Tensor:
    ratio: Tensor = errors / total
    if not torch.isfinite(ratio):
        raise NotFinite("the unexplained share of the output is not finite")
    return ratio


class AffineResidual(Measure):
    r"""Fraction of the network's output that the best affine map of its input leaves unexplained.

    Outputs are predicted on held-out samples by ridge regression. The value is 0 for an affine
    network, and about 1 if no affine map predicts anything. ``permuted`` is the mean value for
    randomly permuted outputs, which no map can predict; a value close to it means that no affine
    part was found.

    Definition
    ----------
    For predictions :math:`\hat y` on held-out samples, summed over all outputs,

    .. math::

        \frac{\sum_i \|y_i - \hat y_i\|^2}{\sum_i \|y_i - \bar y\|^2} .

    Units
    -----
    None. A value of 0 means an affine network.

    Undefined
    ---------
    Fewer than four distinct samples, or a constant output.

    Cost
    ----
    One forward pass, and a ridge regression for each fold.

    Limits
    ------
    It is a single number for the whole network and does not locate the nonlinearity. Unless a
    fold's training samples outnumber the directions of the input, an affine network does not have
    the value 0. If there are many more, no map predicts anything. A remark says so, and the value
    has to be compared with ``permuted``.
    """

    name: ClassVar[str] = "affine-residual"
    # 2: copies of a sample are in one fold, and count once.
    version: ClassVar[str] = "2"
    probe: ClassVar[str] = "function"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    options: ClassVar[Mapping[str, Option]] = {
        "folds": Option(FOLDS, "number of cross-validation folds", minimum=2, maximum=100),
        "permutations": Option(4, "random permutations for `permuted`", minimum=1, maximum=100),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches",)
    source: ClassVar[Source] = Source(
        "A. E. Hoerl and R. W. Kennard, Ridge Regression: Biased Estimation for Nonorthogonal "
        "Problems, Technometrics 12, 1970",
        "unexplained share of ridge regression, cross-validated",
        bibtex("hoerl1970ridge"),
    )

    def reset(self) -> None:
        """Discard all batches."""
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._groups = SampleGroups()

    def update(self, observation: FunctionBatch) -> None:
        """Run the network on one batch."""
        self._inputs.append(observation.inputs.detach().flatten(1).cpu())
        if self.replicated:
            self._groups.add(observation.inputs, observation.sources)
        with torch.no_grad():
            self._outputs.append(observation.function(observation.inputs).cpu())

    @torch.no_grad()
    def compute(self) -> Result:
        """Return the residual over all samples."""
        if not self._inputs:
            raise Undefined("no samples")
        samples = torch.cat(self._inputs)
        numbers = DistinctRows().add(samples)
        inputs = _coordinates(prepare_samples(samples, "x"))
        outputs = _outputs(prepare_samples(torch.cat(self._outputs), "y"))
        n = numbers.distinct
        generator = torch.Generator().manual_seed(0)
        orders = (torch.randperm(n, generator=generator) for _ in range(self._permutations))
        distinct = outputs[~numbers.is_copy]
        permuted = (distinct[order][numbers.index] for order in orders)
        stacked = torch.stack([outputs, *permuted], 1)
        errors = _squared_errors(inputs, stacked, numbers, int(self.settings["folds"]))
        total = outputs.square().sum()
        ratios = torch.stack([_ratio(column, total) for column in errors.sum(0)])
        summary = {"value": ratios[0].item(), "permuted": ratios[1:].mean().item()}
        replicates: tuple[float, ...] = ()
        if self.replicated:
            replicates = leave_groups_out(
                self._groups.array,
                lambda kept: self._residual(inputs, outputs, numbers, torch.from_numpy(kept)),
            )
        return Result(
            summary, reason=self._remark(n, inputs.shape[1]), n=len(outputs), replicates=replicates
        )

    def _residual(
        self, inputs: Tensor, outputs: Tensor, numbers: RowNumbers, kept: Tensor
    ) -> float:
        """Return the residual over some of the samples, whose folds stay the same."""
        inputs = inputs[kept]
        outputs = outputs[kept] - outputs[kept].mean(0)
        kept_numbers = numbers.select_rows(kept.nonzero()[:, 0])
        folds = int(self.settings["folds"])
        errors = _squared_errors(inputs, outputs[:, None], kept_numbers, folds)
        return _ratio(errors.sum(), outputs.square().sum()).item()

    def _remark(self, distinct: int, directions: int) -> str:
        """Return a remark if a fold's training samples don't determine an affine map."""
        folds = min(int(self.settings["folds"]), distinct)
        training = distinct - -(-distinct // folds)
        if directions < training - 1:
            return ""
        return (
            f"{distinct} samples don't determine an affine map of {directions} directions of the "
            "input, so that affine networks have no 0 either: compare with permuted"
        )

    @property
    def _permutations(self) -> int:
        return int(self.settings["permutations"])
