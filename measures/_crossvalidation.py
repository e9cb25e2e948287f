"""R² of samples that the affine fit has not seen: the folds of a cross-validation."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.measure import Accumulator

from ._blas import singular_value_decomposition
from ._moments import Moments
from ._prepared import Prepared, Samples, prepared
from ._samples import EPSILON, centered, check_count, rounding_norms, varying_columns

__all__ = ["FoldAccumulator", "crossvalidated_r2"]


def crossvalidated_r2(x: Prepared, y: Prepared, folds: int) -> Tensor:
    """R² of each sample's prediction from the other folds, averaged over columns that vary.

    Sample i belongs to fold i mod `folds`. Inputs are standardised within the training
    samples, and of all fits the one with the smallest coefficients is taken.

    Parameters
    ----------
    x : Prepared, of shape (n, d)
    y : Prepared, of shape (n, k)
    folds : int

    Returns
    -------
    tensor, scalar
        1 - Σ (y - prediction)² / Σ (y - mean)²: at most 1.
    """
    if not y.varying.any():
        raise Undefined("constant output")
    targets = centered(y.values[:, y.varying])
    targets = targets / targets.abs().amax(0)
    fold = torch.arange(len(x), device=targets.device) % folds
    missed = torch.zeros_like(targets[0])
    for held_out in range(min(folds, len(x))):
        test = fold == held_out
        train = x.values[~test], targets[~test]
        errors = _errors(*train, x.values[test], targets[test], x.rounding)
        missed += errors.square().sum(0)
    score: Tensor = 1 - (missed / targets.square().sum(0)).mean()
    return score


def _errors(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, rounding: float) -> Tensor:
    """Errors (m, k) of the predictions for samples that the fit has not seen."""
    inputs = varying_columns(x)
    x, origin = x[:, inputs], x[0, inputs]
    level, shift = y.mean(0), (x - origin).mean(0)
    away = centered(x)
    scale = torch.linalg.vector_norm(away, dim=0)
    left, strengths, right = singular_value_decomposition(away / scale)
    kept = strengths > max(away.shape) * EPSILON * strengths[:1]
    roundings = rounding_norms(x.abs().amax(0), len(x), rounding) / scale
    kept &= strengths.square() > right.square() @ roundings.square()
    loads = left[:, kept].T @ (y - level) / strengths[kept][:, None]
    new = (test_x[:, inputs] - origin - shift) / scale
    errors: Tensor = test_y - level - (new @ right[kept].T) @ loads
    return errors


class FoldAccumulator(Accumulator):
    """All batches of a site, in folds: rows while few, moments when many.

    Rows are kept up to twice the larger number of columns, so that the fit of moments,
    with fewer digits, is never one of about as many samples as inputs.
    """

    def __init__(self, folds: int) -> None:
        self.n = 0
        self._folds = folds
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._rounding = EPSILON
        self._origin: Tensor | None = None
        self._moments: dict[int, Moments] = {}

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        """Take in one batch; the tensors are copied.

        Raises
        ------
        nlbench.NotFinite, nlbench.RequestError
            For what can't be taken in, such as another number of columns than before.
        """
        x, y = prepared(x, "x"), prepared(y, "y")
        if check_count(x, y, at_least=0) == 0:
            return
        if self._origin is None:
            self._origin = torch.cat([x.values[0], y.values[0]])
            self._widths = (x.shape[1], y.shape[1])
        if self._widths != (x.shape[1], y.shape[1]):
            raise RequestError(
                f"a batch has {(x.shape[1], y.shape[1])} columns, those before {self._widths}"
            )
        self._rows.append((x.values.clone(), y.values.clone()))
        self._rounding = max(self._rounding, x.rounding)
        self.n += len(x)
        if self._moments or self.n > 2 * max(self._widths) + self._folds:
            self._condense()

    def _condense(self) -> None:
        assert self._origin is not None
        x, y = self._gathered()
        fold = torch.arange(self.n - len(x), self.n, device=x.device) % self._folds
        for index in torch.unique(fold).tolist():
            rows = fold == index
            part = Moments.of(x[rows], y[rows], self._origin, self._rounding)
            before = self._moments.get(index)
            self._moments[index] = before.merged(part) if before else part
        self._rows.clear()

    def _gathered(self) -> tuple[Tensor, Tensor]:
        return torch.cat([x for x, _ in self._rows]), torch.cat([y for _, y in self._rows])

    def statistics(self) -> dict[str, float]:
        """Cross-validated R² of all samples together."""
        if self.n == 0:
            raise Undefined("no samples")
        if self._moments:
            return {"value": self._of_moments().item()}
        x, y = (Prepared(values, self._rounding) for values in self._gathered())
        check_count(x, y)
        return {"value": crossvalidated_r2(x, y, self._folds).item()}

    def remark(self) -> str:
        """Say how many folds."""
        return f"cross-validated over {min(self._folds, self.n)} folds"

    def _of_moments(self) -> Tensor:
        whole = reduce(Moments.merged, self._moments.values())
        outputs = whole.varying_y
        if not outputs.any():
            raise Undefined("constant output")
        parts = {index: part.in_units(whole.unit) for index, part in self._moments.items()}
        missed = torch.zeros_like(whole.mean[whole.inputs :][outputs])
        for index, test in parts.items():
            train = reduce(Moments.merged, (p for i, p in parts.items() if i != index))
            missed += _squared_errors(train.in_units(whole.unit), test)[outputs]
        share = missed / whole.yy.diagonal()[outputs]
        if not torch.isfinite(share).all():
            raise NotFinite("the share of the output that is not predicted is not finite")
        return 1 - share.mean()


def _squared_errors(train: Moments, test: Moments) -> Tensor:
    """Sums (k,) of squared errors of the test samples, by the fit of the training samples."""
    inputs = train.varying_x
    scale = train.xx.diagonal()[inputs].sqrt()
    strengths, directions = torch.linalg.eigh(
        train.xx[inputs][:, inputs] / torch.outer(scale, scale)
    )
    kept = strengths > len(strengths) * EPSILON * strengths[-1:]
    kept &= strengths > (train.rounding_x[inputs] / scale).square() @ directions.square()
    frame = directions[:, kept] / scale[:, None]
    loads = (frame / strengths[kept]) @ (frame.T @ train.xy[inputs])
    step = test.mean - train.mean
    offset = step[train.inputs :] - step[: train.inputs][inputs] @ loads
    crossed = (loads * test.xy[inputs]).sum(0)
    explained = (loads * (test.xx[inputs][:, inputs] @ loads)).sum(0)
    spread = test.yy.diagonal() - 2 * crossed + explained
    # A sum of squares, which rounding may take below zero.
    errors: Tensor = spread.clamp(min=0) + test.n * offset.square()
    return errors
