"""Linearity: how well an affine map predicts what a block of a network does to its tokens."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.introspection.distinct_rows import DistinctRows, RowNumbers
from nlbench.measure import Accumulator, MoreMeans, PooledMeasure
from nlbench.measure.left_out import LeftOut, NoReplicates, check_group_memory, fits_group_memory
from nlbench.measure.replicates import GROUPS
from nlbench.options import Option
from nlbench.probes.sites.site import SiteBatch

from .papers import bibtex
from .statistics.prepared import PreparedSamples, Samples, prepare_batch, prepare_samples
from .statistics.regression import RegressionSums
from .statistics.reservoir import Reservoir
from .statistics.samples import (
    EPSILON,
    check_count,
    constant_side,
    is_resolved,
    power_of_two,
    unresolved_side,
    varying,
)

FOLDS = 4
MAX_FOLDS = 100

# Number of rows whose products are added at once, so that their copies stay small.
CHUNK_ROWS = 4096

RESERVOIR_ROWS = 2048
"""Maximum number of rows from which per-token statistics are computed."""

TOP_FRACTION = 0.01
"""Fraction of the rows, those with the largest squares, that ``top_share`` refers to."""

AFFINE_ERROR = 0.01
"""Squared error of a token, relative to its squared distance from the mean, below which it counts
as affine."""


@torch.no_grad()
def linearity_score(x: Samples, y: Samples) -> Tensor:
    """Compute the published linearity score 1 - min_A ‖X A - Y‖² / ‖Y‖² of centred X and Y.

    The paper scales both to unit Frobenius norm, which gives the same score. The score is computed
    on the rows that the map is fitted to: for unrelated X and Y its mean is r / (n - 1), where r is
    the rank of X.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type. Computed in float64.
    y : tensor of shape (n, k)

    Returns
    -------
    tensor, scalar, float64
        In [0, 1]. It has no gradient.

    Raises
    ------
    nlbench.Undefined
        If the input or output is constant, or there are fewer than two rows.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the numbers of rows differ.

    References
    ----------
    A. Razzhigaev et al., "Your Transformer is Secretly Linear", ACL 2024, section 3.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 1.0], [1.0, 3.0]])
    >>> round(linearity_score(x, 5 * x.flip(1) - 7).item(), 9)
    1.0
    """
    accumulator = _LinearityAccumulator(folds=1, rows=0, parts=1)
    accumulator.add(x, y)
    sums = accumulator.total()
    fit = sums.fit(*accumulator.rounding_of_inputs)
    score = 1 - sums.squared_errors(fit) / sums.centered()[2].sum()
    return score.clamp(min=0)


def linearity_statistics(
    x: Samples, y: Samples, *, sample_index: Tensor | None = None, folds: int = FOLDS
) -> dict[str, float]:
    """Compute all statistics of `Linearity` for one place.

    Parameters
    ----------
    x : tensor of shape (n, d)
        Any real type.
    y : tensor of shape (n, k)
    sample_index : integer tensor of shape (n,), optional
        Index of the sequence that each row belongs to; by default each row is its own sequence.
        All rows of a sequence are in the same fold.
    folds : int
        Sequence i is in fold i mod `folds`.

    Raises
    ------
    nlbench.Undefined
        If the input or output is constant, or there are fewer than two sequences.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the numbers of rows differ, or there are fewer than two folds.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(4000, 1, generator=generator)
    >>> statistics = linearity_statistics(x, x.relu())
    >>> round(statistics["value"], 1)  # 1/4 / (1/2 - 1/(2 pi)) = 0.73
    0.7
    """
    if folds < 2:
        raise RequestError(f"folds = {folds}, expected at least 2")
    accumulator = _LinearityAccumulator(folds)
    accumulator.add(x, y, sample_index, has_branch=x.shape[1] == y.shape[1])
    return accumulator.statistics()


@dataclass(frozen=True)
class _Frame:
    """Origins x (d,) and y (k,) of the rows, and their unit, a power of two."""

    x: Tensor
    y: Tensor
    unit: float


class _LinearityAccumulator(Accumulator):
    """Accumulator of sums per part, about the first batch's means, and of a sample of the rows.

    Part i belongs to fold i modulo `folds`. By default there are as many parts as groups of samples
    if that is a multiple and few columns keep their sums small, or else as folds.
    """

    def __init__(self, folds: int, rows: int = RESERVOIR_ROWS, parts: int | None = None) -> None:
        self._folds = folds
        self._has_branch = False
        self.parts = parts or folds
        self._chooses_parts = parts is None
        self._reservoir = Reservoir(rows)
        self._frame: _Frame | None = None
        self.sums: dict[int, RegressionSums] = {}
        # Rows x and y of the first position of each sample, by part.
        self._first: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._samples = 0
        self._rows = DistinctRows()
        self._distinct = 0
        self._rounding = (EPSILON, EPSILON)
        # Minima and maxima of the columns of x and of y.
        self._extremes: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(
        self,
        x: Samples,
        y: Samples,
        sample_index: Tensor | None = None,
        samples: int | None = None,
        *,
        has_branch: bool = False,
        sources: RowNumbers | None = None,
    ) -> None:
        """Add one batch, with the index of each row's sample and the number of samples.

        Folds consist of whole `sources`, by default of `sample_index`, or of distinct rows.
        """
        x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
        if check_count(x, y, at_least=0) == 0:
            return
        self._has_branch = has_branch
        self._update_extremes(x, y)
        if self._frame is None:
            means = x.values.mean(0), y.values.mean(0)
            sides = zip(self._extremes, means, strict=True)
            spreads = [torch.cat([high - mean, mean - low]) for (low, high), mean in sides]
            self._frame = _Frame(*means, max(map(power_of_two, spreads)))
            size = group_bytes(*(len(mean) for mean in means))
            is_small = GROUPS % self._folds == 0 and fits_group_memory(size, None)
            if self._chooses_parts and is_small:
                self.parts = GROUPS
        numbers = sources or self._rows.add(torch.cat([x.values, y.values], 1))
        self._distinct += numbers.distinct
        if sources is None and sample_index is not None:
            part = (sample_index + self._samples) % self.parts
            self._samples += int(sample_index.max()) + 1 if samples is None else samples
        else:
            part = numbers.index.to(x.values.device) % self.parts
        self._add_sums(x, y, part)
        is_first = (
            _first_rows(sample_index) if sample_index is not None else torch.zeros_like(part).bool()
        )
        for index in torch.unique(part[is_first]).tolist():
            chosen = is_first & (part == index)
            pair = self._shift_and_scale(x.values[chosen], y.values[chosen])
            self._first[index].append(pair)
        # Rows of a float32 network lose nothing in float32.
        types = [torch.float32 if side.rounding > EPSILON else torch.float64 for side in (x, y)]
        columns = x.values, y.values, part, is_first
        self._reservoir.add(*columns, types=(*types, part.dtype, torch.bool))

    def _add_sums(self, x: PreparedSamples, y: PreparedSamples, parts: Tensor) -> None:
        """Add rows to the sums of the part (n,) that each belongs to."""
        for index in torch.unique(parts).tolist():
            for rows in (parts == index).nonzero()[:, 0].split(CHUNK_ROWS):
                part = RegressionSums.of(*self._shift_and_scale(x.values[rows], y.values[rows]))
                self.sums[index] = self.sums[index].plus(part) if index in self.sums else part

    def _shift_and_scale(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and scale rows, in place, to the origin and the unit of the sums."""
        assert self._frame is not None
        frame = self._frame
        return x.sub_(frame.x).div_(frame.unit), y.sub_(frame.y).div_(frame.unit)

    def _update_extremes(self, x: PreparedSamples, y: PreparedSamples) -> None:
        new = [x.extremes, y.extremes]
        if self._extremes:
            width = tuple(len(low) for low, _ in new)
            known = tuple(len(low) for low, _ in self._extremes)
            if width != known:
                raise RequestError(f"a batch has {width} columns, earlier ones had {known}")
            new = [
                (torch.minimum(low, old[0]), torch.maximum(high, old[1]))
                for (low, high), old in zip(new, self._extremes, strict=True)
            ]
        self._extremes = new
        self._rounding = (max(self._rounding[0], x.rounding), max(self._rounding[1], y.rounding))

    def folds(self) -> dict[int, list[int]]:
        """Return the parts of each fold that have rows."""
        folds: dict[int, list[int]] = defaultdict(list)
        for part in sorted(self.sums):
            folds[part % self._folds].append(part)
        return folds

    def total(self) -> RegressionSums:
        """Return the sums of all rows."""
        rows = sum(part.n for part in self.sums.values())
        if rows < 2:
            raise Undefined(f"n = {rows}: at least 2 rows are needed")
        assert self._frame is not None
        total = reduce(RegressionSums.plus, self.sums.values())
        squares = (
            total.xx.diagonal() - total.x.square() / rows,
            total.yy - total.y.square() / rows,
        )
        sides = zip(("input", "output"), self._extremes, self._rounding, squares, strict=True)
        for role, (low, high), rounding, square in sides:
            if not varying(low, high, rounding).any():
                raise constant_side(role, rounding, equal=torch.equal(low, high))
            norms = square.clamp(min=0).sqrt() * self._frame.unit
            if not is_resolved(low, high, norms, rows, rounding):
                raise unresolved_side(role)
        return total

    @property
    def rounding_of_inputs(self) -> tuple[Tensor, float]:
        """Largest magnitudes (d,) of the inputs, in column units, and their relative error."""
        assert self._frame is not None
        low, high = self._extremes[0]
        return torch.maximum(low.abs(), high.abs()) / self._frame.unit, self._rounding[0]

    def statistics(self) -> dict[str, float]:
        total = self.total()
        if len(self.folds()) < 2:
            raise Undefined("fewer than two distinct samples, so that none can be held out")
        fit_of_all = total.fit(*self.rounding_of_inputs)
        in_sample = total.squared_errors(fit_of_all)
        null = min(1.0, fit_of_all.rank / max(1, self._distinct - 1))
        del fit_of_all
        x, y, row_parts, is_first = self._reservoir.columns
        x, y = self._shift_and_scale(*(side.to(torch.float64, copy=True) for side in (x, y)))
        predicted = torch.zeros_like(y)
        held_out = 0.0
        first_errors = 0.0
        for fold, parts in self.folds().items():
            sums = reduce(RegressionSums.plus, (self.sums[part] for part in parts))
            fit = total.minus(sums).fit(*self.rounding_of_inputs)
            held_out += sums.squared_errors(fit)
            for first_x, first_y in itertools.chain(*(self._first[part] for part in parts)):
                first_errors += (first_y - fit(first_x)).square().sum().item()
            is_held_out = row_parts % self._folds == fold
            predicted[is_held_out] = fit(x[is_held_out])
        errors = (y - predicted).square().sum(1)
        xx, xy, yy = total.centered()
        target = _Target(yy.sum().item(), errors, _squared_distances(y, total.y / total.n))
        statistics = target.statistics(held_out, in_sample, null, total.n)
        statistics["null"] = null
        statistics |= self._score_later_rows(total, held_out - first_errors)
        if xx.shape == xy.shape:
            # The fit of the branch y - x is the fit of y minus x, with the same errors.
            inner = xy.trace().item()
            squares = xx.trace().item()
            statistics["identity"] = _squared_cosine(inner, squares, target.total)
            branch = target.total - 2 * inner + squares
            if self._has_branch and branch > EPSILON * squares:
                distances = _squared_distances(y - x, (total.y - total.x) / total.n)
                target = _Target(branch, errors, distances)
                branch_statistics = target.statistics(held_out, in_sample, null, total.n)
                branch_statistics["identity"] = _squared_cosine(inner - squares, squares, branch)
                branch_statistics |= _token_statistics(errors, y - x, is_first)
                statistics |= {f"branch_{name}": value for name, value in branch_statistics.items()}
            if self._has_branch:
                statistics |= self._after_norm(y, predicted)
                statistics |= _token_statistics(errors, y, is_first)
        return statistics

    def _score_later_rows(self, total: RegressionSums, errors: float) -> dict[str, float]:
        """Return the score of the rows after each sample's first one, given their squared errors.

        Nothing is returned if rows are samples, or if these outputs are constant.
        """
        first = [y for pairs in self._first.values() for _, y in pairs]
        if not first:
            return {}
        rows = torch.cat(first)
        n = total.n - len(rows)
        sums = total.y - rows.sum(0)
        squares = (total.yy - rows.square().sum(0) - sums.square() / n).sum().item()
        if squares <= EPSILON * total.yy.sum().item():
            return {}
        return {"without_first": 1 - max(0.0, errors) / squares}

    def _after_norm(self, y: Tensor, predicted: Tensor) -> dict[str, float]:
        """Return the score of rows scaled to unit length, or nothing if all are then equal."""
        assert self._frame is not None
        origin = self._frame.y / self._frame.unit
        y, predicted = (torch.nn.functional.normalize(side + origin) for side in (y, predicted))
        squares = _squared_distances(y, y.mean(0)).sum()
        if squares <= EPSILON * len(y):
            return {}
        return {"after_norm": 1 - ((y - predicted).square().sum() / squares).item()}


def _first_rows(sample_index: Tensor) -> Tensor:
    """Return a mask (n,) of the first row of each sample. None if no sample has others."""
    numbers, index = torch.unique(sample_index, return_inverse=True)
    is_first = torch.zeros(len(sample_index), dtype=torch.bool, device=sample_index.device)
    if len(numbers) == len(sample_index):
        return is_first
    rows = torch.arange(len(sample_index), device=sample_index.device)
    first = rows.new_full((len(numbers),), len(sample_index)).scatter_reduce(0, index, rows, "amin")
    is_first[first] = True
    return is_first


def _token_statistics(errors: Tensor, rows: Tensor, is_first: Tensor) -> dict[str, float]:
    """Return how squared errors are distributed over rows (n, k), first and later rows apart.

    They are relative to the squared distance from the mean of the later rows.
    """
    is_later = ~is_first
    if not is_later.any():
        return {}
    squares = _squared_distances(rows, rows[is_later].mean(0))
    relative = errors / squares
    later = relative[is_later & (squares > 0)]
    statistics = {}
    if len(later):
        statistics["affine_tokens"] = (later < AFFINE_ERROR).double().mean().item()
        for percent in (10, 50, 90):
            statistics[f"token_p{percent}"] = later.quantile(percent / 100).item()
    first = relative[is_first & (squares > 0)]
    if len(first):
        statistics["first_token"] = first.median().item()
    return statistics


class _LeftOutSums(LeftOut):
    """Replicates from an accumulator whose parts are groups, or from one of their own."""

    def __init__(self, accumulator: _LinearityAccumulator, folds: int, memory: int | None) -> None:
        if GROUPS % folds:
            raise NoReplicates(f"linearity.folds = {folds} does not divide {GROUPS} groups")
        self._has_own = accumulator.parts != GROUPS
        if self._has_own:
            accumulator = _LinearityAccumulator(folds, rows=0, parts=GROUPS)
        self._accumulator = accumulator
        self._memory = memory

    def add(self, observation: SiteBatch, groups: Tensor) -> None:
        """Add one batch, unless the accumulator has its rows."""
        x, y = observation.shared(prepare_batch)
        check_group_memory(group_bytes(x.shape[1], y.shape[1]), self._memory)
        if self._has_own:
            self._accumulator.add(x, y, sources=observation.sources)

    @torch.no_grad()
    def replicates(self) -> tuple[float, ...]:
        """Compute the held-out score without each group."""
        groups = self._accumulator.sums
        if len(groups) < 2:
            return ()
        total = self._accumulator.total()
        rounding = self._accumulator.rounding_of_inputs
        errors = dict.fromkeys(sorted(groups), 0.0)
        is_determined = True
        for members in self._accumulator.folds().values():
            held_out = reduce(RegressionSums.plus, (groups[member] for member in members))
            others = total.minus(held_out)
            fit_of_others = others.fit(*rounding)
            for left_out in errors:
                if left_out not in members:
                    fitted = others.minus(groups[left_out])
                    fit = fitted.fit(*rounding)
                    is_determined &= fit.rank < fitted.n - 1
                    errors[left_out] += held_out.squared_errors(fit)
                elif len(members) > 1:
                    rest = held_out.minus(groups[left_out])
                    errors[left_out] += rest.squared_errors(fit_of_others)
        # Held-out errors peak where a fit has as many rows as directions, so those on both sides
        # of the peak tell nothing of each other.
        if not is_determined and total.fit(*rounding).rank < total.n - 1:
            raise NoReplicates("without a group, fits have fewer samples than directions")
        limit = total.n * EPSILON * total.centered()[2].sum().item()
        replicates = []
        for left_out, error in errors.items():
            squares = total.minus(groups[left_out]).centered()[2].sum().item()
            if squares <= limit:  # rounding errors of equal outputs
                raise Undefined("constant output")
            replicates.append(1 - error / squares)
        return tuple(replicates)


def group_bytes(inputs: int, outputs: int) -> int:
    """Return the size in bytes of all groups' sums, given the numbers of columns."""
    return 8 * GROUPS * inputs * (inputs + outputs)


def _squared_distances(rows: Tensor, mean: Tensor) -> Tensor:
    return (rows - mean).square().sum(1)


def _squared_cosine(inner: float, first: float, second: float) -> float:
    return inner**2 / (first * second) if first * second > 0 else 0.0


@dataclass(frozen=True)
class _Target:
    """Target of the prediction: the outputs or the branch.

    Parameters
    ----------
    total : float
        Sum of squares about the mean.
    errors, squares : tensor of shape (rows,)
        Squared errors of single rows, and their squared distances from the mean.
    """

    total: float
    errors: Tensor
    squares: Tensor

    def statistics(
        self, held_out: float, in_sample: float, null: float, n: int
    ) -> dict[str, float]:
        """Return the statistics, given the sums of squared errors."""
        errors = self.errors
        squares = self.squares
        statistics = {
            "value": 1 - held_out / self.total,
            "in_sample": max(0.0, 1 - in_sample / self.total),
        }
        if null < 1:
            statistics["adjusted"] = 1 - in_sample / self.total / (1 - null)
        differs = squares > 0
        if differs.any():
            count = math.ceil(TOP_FRACTION * len(squares))
            statistics["per_token"] = (errors[differs] / squares[differs]).mean().item()
            statistics["top_share"] = (squares.topk(count).values.sum() / squares.sum()).item()
        return statistics


class Linearity(PooledMeasure):
    r"""Linearity: fraction of a layer's output that an affine map of its input predicts.

    The map is fitted by least squares, from sums accumulated in float64. The value is computed on
    held-out rows: folds consist of whole sequences, and each fold is predicted by the fit to the
    others. `in_sample` is the published score, `adjusted` corrects it for the number of rows as if
    they were independent, `null` is the in-sample score of unrelated rows, and `identity` the
    squared cosine between input and output. For a block, `branch_…` are the same statistics for the
    output minus the input.

    A few rows may dominate a sum of squares. `top_share` is the fraction due to the 1 % of rows
    with the largest squares, and `per_token` the mean over rows of the squared error of a held-out
    row relative to its own squared distance from the mean: 0 for an affine map. `after_norm` is the
    held-out score of a block's outputs and their predictions at unit length, as after the norm at
    the start of the next block. For a block, `affine_tokens` is the fraction of tokens whose
    relative squared error is below 1 %, `token_p10`, `token_p50` and `token_p90` are percentiles
    of this error, and `first_token` is its median over the first token of each sequence, which the
    others leave out. All of these are computed from up to 2,048 rows.

    `without_first` is the held-out score of all tokens but the first of each sequence, which remain
    in the fit: in language models the first one may have a hundred times the norm of the others.

    Definition
    ----------
    For centred rows X before and Y after a place, and predictions of held-out sequences,

    .. math::

        1 - \frac{\|Y - \hat Y\|_F^2}{\|Y\|_F^2} .

    Units
    -----
    None. A value of 1 means an affine map.

    Undefined
    ---------
    Fewer than two rows, fewer than two distinct samples, or a constant input or output.

    Cost
    ----
    One forward pass for all places; O(rows · d²) per place, with 128 d² bytes for each place, or
    16 d² for each of its folds where d exceeds 1,448: of one place at a time if all samples are in
    one batch (``sites.batch``), else of all places.

    Limits
    ------
    A block with a small branch has a value near 1: compare with ``branch_value``. A few rows with
    large squares can dominate it; see ``top_share``. It doesn't predict the cost of a removal.

    Published code
    --------------
    It computes the in-sample score by singular value decompositions in float32, which is off by up
    to 8.8e-4 at width 1,024 and, for few rows, exceeds the held-out value.
    """

    name: ClassVar[str] = "linearity"
    # 3: of several outputs of a block, the stream counts, not the first.
    version: ClassVar[str] = "3"
    bounds: ClassVar[tuple[float, float]] = (-math.inf, 1.0)
    more_means: ClassVar[MoreMeans] = "less nonlinear"
    options: ClassVar[Mapping[str, Option]] = {
        "folds": Option(FOLDS, "number of folds of whole sequences", minimum=2, maximum=MAX_FOLDS)
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "units", "offsets", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        "A. Razzhigaev, M. Mikhalchuk, E. Goncharova, N. Gerasimenko, I. Oseledets, D. Dimitrov "
        "and A. Kuznetsov, Your Transformer is Secretly Linear, ACL 2024",
        "section 3, the linearity score; held out here",
        bibtex("razzhigaev2024secretly"),
    )

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        return _LinearityAccumulator(int(self.settings["folds"]))

    def left_out(self, accumulator: Any) -> LeftOut:
        """Create the replicates of one place from its accumulator."""
        return _LeftOutSums(accumulator, int(self.settings["folds"]), self.memory)

    def take(self, accumulator: Any, observation: SiteBatch) -> None:
        """Add one batch of one site."""
        x, y = observation.shared(prepare_batch)
        has_branch = observation.site.role in ("block", "span")
        accumulator.add(
            x,
            y,
            observation.sample_index,
            observation.count,
            has_branch=has_branch,
            sources=observation.sources,
        )
