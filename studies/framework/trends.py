"""Statistics with networks as units: trend tests, Holm's correction and intervals.

A trend test ranks the values of one seed against the rungs of a ladder; seeds are independent
blocks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from nlbench.reports.agreement import Correlation

SIGNIFICANCE = 0.05
RESAMPLES = 4000
MAX_CORRELATION = 1 - 1e-9
"""Size to which correlations are limited, so that Fisher's transform is finite."""
MIN_NETWORKS = 3
"""Minimum number of networks, or of pairs of them, for an interval to decide a claim."""

Name = TypeVar("Name", bound=Hashable)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Trend:
    """A trend in values over ordered rungs, within several independent blocks.

    Parameters
    ----------
    taus : tuple of float
        Kendall's tau-b in each block; 0 if all its values are equal.
    p_rises, p_falls : float
        One-sided exact p-values: the probability of at least as many concordant, or discordant,
        pairs if all orders of the values within a block are equally likely.
    """

    taus: tuple[float, ...]
    p_rises: float
    p_falls: float

    @property
    def tau(self) -> float:
        """Mean tau-b over blocks."""
        return float(np.mean(self.taus))


def trend_test(blocks: Sequence[ArrayLike]) -> Trend:
    """Test whether values rise over ordered positions, within blocks.

    The statistic is Kendall's S summed over blocks, the Jonckheere-Terpstra statistic of a
    randomised block design. Its distribution is exact even with ties: the generating function of
    the inversions of a multiset is the Gaussian multinomial.

    Parameters
    ----------
    blocks : sequence of arrays of shape (k_i,)
        Values in the order of the positions; blocks may differ in length.

    References
    ----------
    M. Skillings, D. Wolfe, "Distribution-free tests for ordered alternatives in a randomized
    block design", JASA 73, 1978; R. Stanley, Enumerative Combinatorics 1, proposition 1.7.1.

    Examples
    --------
    >>> trend_test([[1, 2, 3], [1, 3, 5]]).p_rises * 36
    1.0
    """
    taus: list[float] = []
    counts = [1]
    observed = 0
    for block in blocks:
        values = np.asarray(block, dtype=np.float64)
        below = np.sign(values[None] - values[:, None])[np.triu_indices(len(values), 1)]
        falls = int((below < 0).sum())
        untied = int((below != 0).sum())
        pairs = len(below)
        taus.append((untied - 2 * falls) / math.sqrt(untied * pairs) if untied else 0.0)
        observed += falls
        counts = _multiply_by_inversions(counts, values)
    total = sum(counts)
    return Trend(tuple(taus), sum(counts[: observed + 1]) / total, sum(counts[observed:]) / total)


def _multiply_by_inversions(counts: list[int], values: NDArray[np.float64]) -> list[int]:
    """Multiply a polynomial in q by the generating function of the inversions of the values.

    The divisions are exact: every quotient has integer coefficients.
    """
    for size in range(2, len(values) + 1):
        counts = _multiply(counts, size)
    for repeats in Counter(values.tolist()).values():
        for size in range(2, repeats + 1):
            counts = _divide(counts, size)
    return counts


def _multiply(counts: list[int], size: int) -> list[int]:
    """Multiply a polynomial by 1 + q + ... + q^(size - 1)."""
    sums = list(itertools.accumulate([*counts, *[0] * (size - 1)]))
    return [last - first for last, first in zip(sums, [0] * size + sums, strict=False)]


def _divide(counts: list[int], size: int) -> list[int]:
    """Divide a polynomial by 1 + q + ... + q^(size - 1)."""
    quotient = [last - first for last, first in zip(counts, [0, *counts], strict=False)]
    for power in range(size, len(quotient)):
        quotient[power] += quotient[power - size]
    return quotient[: len(counts) - size + 1]


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Adjust the p-values of a family of tests by Holm's method.

    References
    ----------
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6, 1979.

    Examples
    --------
    >>> holm({"a": 0.01, "b": 0.04, "c": 0.02})
    {'a': 0.03, 'c': 0.04, 'b': 0.04}
    """
    adjusted = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = highest
    return adjusted


def network_interval(values: ArrayLike) -> Interval:
    """Compute the 95% t interval for a mean over networks. It is NaN for fewer than three networks.

    Examples
    --------
    >>> low, high = network_interval([4.4, 3.6, 3.6])
    >>> round(low, 2), round(high, 2)
    (2.72, 5.01)
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < MIN_NETWORKS:
        return math.nan, math.nan
    half = float(stats.t.ppf(1 - SIGNIFICANCE / 2, len(array) - 1) * stats.sem(array))
    return float(array.mean()) - half, float(array.mean()) + half


def deviation_interval(values: ArrayLike) -> Interval:
    """Compute the 95% interval for the standard deviation over networks, for normal values.

    It is NaN for fewer than three networks.

    Examples
    --------
    >>> low, high = deviation_interval([4.4, 3.6, 3.6])
    >>> round(low, 2), round(high, 2)
    (0.24, 2.9)
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < MIN_NETWORKS:
        return math.nan, math.nan
    freedom = len(array) - 1
    quantiles = stats.chi2.ppf([1 - SIGNIFICANCE / 2, SIGNIFICANCE / 2], freedom)
    low, high = array.std(ddof=1) * np.sqrt(freedom / quantiles)
    return float(low), float(high)


def mean_correlation(values: ArrayLike) -> Correlation:
    """Average correlations over networks by Fisher's transform, with a 95% t interval.

    Examples
    --------
    >>> mean_correlation([0.5, 0.7, 0.6]).text
    '0.61 (0.30 to 0.80)'
    """
    transformed = np.arctanh(np.clip(values, -MAX_CORRELATION, MAX_CORRELATION))
    value, low, high = map(math.tanh, (float(transformed.mean()), *network_interval(transformed)))
    return Correlation(value, low, high, len(transformed))
