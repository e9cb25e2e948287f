"""Estimates with replicates, their differences, and which differences exceed their errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlbench.measure.replicates import combine, standard_error, student_quantile

from .text import plus_minus

LEVEL = 0.95
ROUNDING = 1e-9
"""Relative difference up to which two values are equal: records round to about nine digits."""


@dataclass(frozen=True)
class Estimate:
    """A value with its replicates.

    Parameters
    ----------
    value : float
        NaN if there is none.
    replicates : tuple of float
        The value without each group of samples or paths, or without each seed; empty if unknown.
    key : str
        Identifies the groups. The replicates of two estimates with the same key are paired.
    unit : str
        What was left out: ``samples``, ``paths``, ``seeds``; ``exact`` if the value doesn't depend
        on samples, empty if its error is unknown.
    numerical_error : float
        Bound for the error of the method itself; 0 if there is none.
    bounds : tuple of float
        Minimum and maximum possible value.
    """

    value: float
    replicates: tuple[float, ...] = ()
    key: str = ""
    unit: str = ""
    numerical_error: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @cached_property
    def error(self) -> float:
        """Standard error, or 0 if the value is exact, NaN if it is unknown."""
        return 0.0 if self.unit == "exact" else _known(standard_error(self.replicates))

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the standard error, or infinite if the value is exact."""
        return math.inf if self.unit == "exact" else len(self.replicates) - 1

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval, with the numerical error, within the bounds, or NaN."""
        low, high = interval(self.value, self.error, self.degrees)
        if math.isnan(low):
            return low, high
        least = min(self.bounds[0], self.value)
        greatest = max(self.bounds[1], self.value)
        return max(low - self.numerical_error, least), min(high + self.numerical_error, greatest)

    @property
    def text(self) -> str:
        """The formatted value with its error."""
        return "–" if math.isnan(self.value) else plus_minus(self.value, self.error)

    def scaled(self, factor: float) -> Self:
        """Return a multiple of the estimate, with the same key."""
        return replace(
            self,
            bounds=(-math.inf, math.inf),
            value=factor * self.value,
            replicates=tuple(factor * replicate for replicate in self.replicates),
            numerical_error=abs(factor) * self.numerical_error,
        )


def interval(value: float, error: float, degrees: float) -> tuple[float, float]:
    """Return the confidence interval for a value with a standard error, or NaN if unknown.

    Examples
    --------
    >>> [round(end, 3) for end in interval(0.8, 0.001, 7)]
    [0.798, 0.802]
    """
    if math.isnan(error):
        return math.nan, math.nan
    half = error * _quantile(degrees, (1 - LEVEL) / 2) if error else 0.0
    return value - half, value + half


def _quantile(degrees: float, tail: float) -> float:
    return student_quantile(1 - tail, min(degrees, 1e6))


def over_seeds(values: Iterable[float], seeds: Iterable[int]) -> Estimate:
    """Return the mean over seeds, whose replicates leave out one seed each.

    Examples
    --------
    >>> estimate = over_seeds([1.0, 2.0, 6.0], [0, 1, 2])
    >>> estimate.value, round(estimate.error, 3)  # the standard error of the mean
    (3.0, 1.528)
    """
    numbers = np.array(list(values), dtype=np.float64)
    # A power of two by which no sum or square of the values overflows.
    largest = float(np.abs(numbers).max(initial=0.0))
    scale = 1.0 if largest < 1e150 else 2.0 ** (math.frexp(largest)[1] - 1)
    scaled = numbers / scale
    mean = float(scaled.mean())
    key = f"seeds {' '.join(map(str, seeds))}"
    if len(numbers) < 2:
        return Estimate(scale * mean, key=key)
    without = (scaled.sum() - scaled) / (len(numbers) - 1)
    return Estimate(scale * mean, tuple((scale * without).tolist()), key, "seeds")


@dataclass(frozen=True)
class Change:
    """Difference of two estimates.

    Parameters
    ----------
    value : float
        The second value minus the first; NaN if one is missing.
    error : float
        Standard error, paired if the estimates have the same key; NaN if unknown.
    degrees : float
        Degrees of freedom.
    tolerance : float
        Difference that rounding and the method's own error can explain.
    """

    value: float
    error: float
    degrees: float
    tolerance: float

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval, or NaN if unknown."""
        return interval(self.value, self.error, self.degrees)

    @property
    def text(self) -> str:
        """The formatted difference with its error."""
        is_unknown = math.isnan(self.value)
        return "–" if is_unknown else plus_minus(self.value, self.error, signed=True)

    def excess(self, bound: float = 0.0) -> float:
        """Return by how many standard errors the change exceeds a bound, or NaN if unknown."""
        beyond = self.value - bound
        beyond -= math.copysign(min(self.tolerance, abs(beyond)), beyond)
        if math.isnan(self.error) or math.isnan(beyond):
            return math.nan
        if self.error == 0:
            return math.copysign(math.inf, beyond) if beyond else 0.0
        return beyond / self.error


def change(before: Estimate, after: Estimate) -> Change:
    """Subtract two estimates.

    Examples
    --------
    The replicates of both move together, so that their difference is better known than either.

    >>> first = Estimate(0.8, (0.7, 0.8, 0.9), "a", "samples")
    >>> second = Estimate(0.9, (0.8, 0.9, 1.0), "a", "samples")
    >>> round(first.error, 3), round(change(first, second).error, 3)
    (0.115, 0.0)
    """
    largest = max(abs(before.value), abs(after.value))
    tolerance = ROUNDING * largest + before.numerical_error + after.numerical_error
    error, degrees = contrast_error([(-1.0, before), (1.0, after)])
    return Change(after.value - before.value, error, degrees, tolerance)


def relative_change(before: Estimate, after: Estimate) -> Change:
    """Subtract two estimates, as a fraction of the first.

    Examples
    --------
    >>> found = relative_change(Estimate(0.8, unit="exact"), Estimate(0.9, unit="exact"))
    >>> round(found.value, 3), found.error
    (0.125, 0.0)
    """
    plain = change(before, after)
    if not before.value:
        value = math.copysign(math.inf, plain.value) if plain.value else 0.0
        return Change(value, plain.error, plain.degrees, plain.tolerance)
    unit = abs(before.value)
    value = plain.value / unit
    if _is_paired(before, after):
        ratios = combine(lambda x, y: (y - x) / abs(x), before.replicates, after.replicates)
        error = _known(standard_error(ratios))
    else:
        # To first order, the error of the first value counts by the ratio.
        error = math.hypot(after.error, before.error * after.value / before.value) / unit
    return Change(value, error, plain.degrees, plain.tolerance / unit)


def _is_paired(before: Estimate, after: Estimate) -> bool:
    """Return True if two estimates have replicates from the same groups."""
    if "exact" in (before.unit, after.unit) or not before.key or before.key != after.key:
        return False
    return len(before.replicates) == len(after.replicates)


def contrast_error(terms: Iterable[tuple[float, Estimate]]) -> tuple[float, float]:
    """Return the standard error of a weighted sum of estimates and its degrees of freedom.

    The replicates of estimates with the same key are summed one by one; otherwise variances add.

    Examples
    --------
    >>> first = Estimate(0.8, (0.7, 0.8, 0.9), "a", "samples")
    >>> round(contrast_error([(2.0, first)])[0], 3), contrast_error([(1.0, first), (-1.0, first)])
    (0.231, (0.0, 2))
    """
    sums: dict[tuple[object, ...], NDArray[np.float64]] = {}
    for index, (weight, estimate) in enumerate(terms):
        if estimate.unit != "exact":
            # An estimate without a key is paired with none.
            key = (estimate.key or index, len(estimate.replicates))
            sums[key] = sums.get(key, 0.0) + weight * np.array(estimate.replicates)
    errors = [_known(standard_error(replicates.tolist())) for replicates in sums.values()]
    return math.hypot(*errors), min((len(r) - 1 for r in sums.values()), default=math.inf)


def _known(error: float | None) -> float:
    return math.nan if error is None else error


def exceeding(excesses: ArrayLike, degrees: ArrayLike, level: float = LEVEL) -> NDArray[np.bool_]:
    """Test differences by Holm's method, so that some equal ones differ in 5 % of all families.

    Parameters
    ----------
    excesses : array
        Differences in standard errors; NaN where unknown, which is never significant.
    degrees : array of the same shape
        Degrees of freedom.

    References
    ----------
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6, 1979.

    Examples
    --------
    >>> exceeding([4.0, 2.0, 0.1], [7, 7, 7]).tolist()
    [True, False, False]
    """
    sizes = np.abs(excesses)
    tests = int(np.count_nonzero(~np.isnan(sizes)))
    classes = [each for each in np.unique(degrees) if each > 0]
    significant = np.zeros(sizes.shape, dtype=bool)
    count = -1
    while tests > np.count_nonzero(significant) > count:
        count = int(np.count_nonzero(significant))
        tail = (1 - level) / 2 / (tests - count)
        significant[...] = False
        for each in classes:
            significant |= (sizes > _quantile(each, tail)) & (np.asarray(degrees) == each)
    return significant


def all_exceed(changes: Sequence[Change]) -> bool:
    """Return True if there are changes, and all are positive beyond their errors."""
    excesses = [each.excess() for each in changes]
    clear = exceeding(excesses, [each.degrees for each in changes])
    return bool(changes) and bool(clear.all()) and min(excesses) > 0


_BLOCK_ROWS = 256


def clear_orders(estimates: Sequence[Estimate]) -> NDArray[np.int8]:
    """Compare all pairs of estimates by Holm's method.

    The result is 1 where the row clearly exceeds the column, -1 where the column clearly exceeds
    the row, and else 0.

    Examples
    --------
    >>> values = (0.8, (0.79, 0.8, 0.81)), (0.9, (0.89, 0.9, 0.91)), (0.8, (0.81, 0.8, 0.79))
    >>> clear_orders([Estimate(*value, "a", "samples") for value in values]).tolist()
    [[0, -1, 0], [1, 0, 0], [0, 0, 0]]
    """
    excesses = pairwise_excesses(estimates)
    degrees = np.array([estimate.degrees for estimate in estimates])
    is_common = bool((degrees == degrees[0]).all())
    clear = exceeding(excesses, degrees[0] if is_common else np.minimum.outer(degrees, degrees))
    signs = np.where(clear, np.sign(excesses), 0).astype(np.int8)
    return np.subtract(signs, signs.T, dtype=np.int8)


def pairwise_excesses(estimates: Sequence[Estimate]) -> NDArray[np.float32]:
    """Return `Change.excess` of each later estimate (column) and each earlier one (row), or NaN."""
    n = len(estimates)
    values = np.array([e.value for e in estimates])
    numerical = np.array([e.numerical_error for e in estimates])
    variances = np.array([e.error for e in estimates]) ** 2
    # Estimates with the same number are paired; all others have one of their own.
    groups = -1 - np.arange(n)
    centred = np.zeros((n, max(len(e.replicates) for e in estimates)))
    keys: dict[tuple[str, int], int] = {}
    for index, e in enumerate(estimates):
        if e.key and e.unit != "exact" and math.isfinite(e.error):
            key = (e.key, len(e.replicates))
            groups[index] = keys.setdefault(key, len(keys))
            deviations = np.array(e.replicates) - np.mean(e.replicates)
            centred[index, : key[1]] = deviations * math.sqrt(1 - 1 / key[1])
    excesses = np.full((n, n), math.nan, dtype=np.float32)
    for start in range(0, n, _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        beyond = values[rows, None] - values[None, start:]
        tolerance = ROUNDING * np.maximum(abs(values[rows, None]), abs(values[None, start:]))
        tolerance += numerical[rows, None] + numerical[None, start:]
        np.copysign(np.maximum(np.abs(beyond) - tolerance, 0.0), beyond, out=beyond)
        variance = variances[rows, None] + variances[None, start:]
        is_paired = groups[rows, None] == groups[None, start:]
        # ‖a - b‖² = ‖a‖² + ‖b‖² - 2 a·b, at least its rounding error.
        rounding = 16 * np.finfo(np.float64).eps * variance
        shared = 2 * centred[rows] @ centred[start:].T
        np.subtract(variance, shared, out=variance, where=is_paired)
        np.maximum(variance, rounding, out=variance)
        with np.errstate(divide="ignore", invalid="ignore"):
            block = beyond / np.sqrt(variance)
        block[(beyond == 0) & ~np.isnan(variance)] = 0.0
        block[np.tril_indices(len(block))] = math.nan
        excesses[rows, start:] = block
    return excesses
