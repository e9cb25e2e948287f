"""Partial rank correlation in groups of networks: value, interval and p-value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from .trends import LEVEL

RESAMPLES = 1000
MIN_NETWORKS = 4
RESIDUAL_DECIMALS = 10
"""Decimals to which residual scores, of the order of 1, agree if they differ by rounding only."""

Array = NDArray[np.float64]
Group = tuple[ArrayLike, ArrayLike, Sequence[ArrayLike]]
"""Two variables and the controls, each of shape (n,)."""


@dataclass(frozen=True)
class Association:
    """A partial rank correlation, the mean over groups.

    Parameters
    ----------
    value, low, high : float
        With its 95 % interval by bootstrap over the networks of each group.
    p : float
        Two-sided p-value of no association.
    by_group : tuple of float
        NaN for a group that was left out.
    networks : int
    """

    value: float
    low: float
    high: float
    p: float
    by_group: tuple[float, ...]
    networks: int


def kendall_tau(x: ArrayLike, y: ArrayLike) -> Any:
    """Compute Kendall's tau-b over the last axis; NaN where a variable is constant.

    Examples
    --------
    >>> float(kendall_tau([1, 2, 3, 4], [1, 3, 2, 4])).__round__(3)
    0.667
    """
    first, second = (_signs(np.asarray(v, dtype=np.float64)) for v in (x, y))
    untied = np.abs(first).sum((-1, -2)) * np.abs(second).sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first * second).sum((-1, -2)) / np.sqrt(untied)


def _signs(values: Array) -> Array:
    return np.sign(values[..., :, None] - values[..., None, :])


def partial_tau(x: ArrayLike, y: ArrayLike, controls: Sequence[ArrayLike]) -> Any:
    """Compute Kendall's tau-b of two variables without what the controls explain.

    All variables are replaced by normal scores Φ⁻¹(rank / (n + 1)), x and y by their residuals
    from the linear regression on the controls. It doesn't change under increasing maps of any
    variable, and is 0 in the limit if x and y are independent given the controls under a Gaussian
    copula. Kendall's own partial coefficient isn't: it leaves a share of the confounding. In small
    samples the noise of the ranks attenuates it.

    Parameters
    ----------
    x, y : array of shape (..., n)
    controls : sequence of arrays of shape (..., n)

    Returns
    -------
    array of shape (...)
        NaN where the controls determine a variable.

    References
    ----------
    B. L. van der Waerden. Order tests for the two-sample problem. Indagationes Mathematicae, 1952.

    Examples
    --------
    >>> size = np.arange(8.0)
    >>> bool(np.isnan(partial_tau(size**3, [1, 0, 3, 2, 5, 4, 7, 6], [size])))
    True
    """
    scores = [_normal_scores(variable) for variable in (x, y, *controls)]
    design = np.stack([np.ones_like(scores[0]), *scores[2:]], -1)
    fit = design @ np.linalg.pinv(design)
    residuals = (
        np.round(score - (fit @ score[..., None])[..., 0], RESIDUAL_DECIMALS)
        for score in scores[:2]
    )
    return kendall_tau(*residuals)


def _normal_scores(values: ArrayLike) -> Array:
    ranks = stats.rankdata(np.asarray(values, dtype=np.float64), axis=-1)
    scores: Array = special.ndtri(ranks / (ranks.shape[-1] + 1))
    return scores


def associate(groups: Sequence[Group], resamples: int = RESAMPLES) -> Association:
    """Compute the mean partial tau of groups, with its interval and its p-value.

    Without resamples the interval is NaN.

    Networks with a value that is not finite are left out, and groups of fewer than four networks
    or with a constant variable. The p-value is Kendall's normal approximation with the degrees of
    freedom that the controls leave.

    Examples
    --------
    >>> x = np.arange(12.0)
    >>> associate([(x, x, []), (x, -x, [])]).by_group
    (1.0, -1.0)
    """
    random, resampled = np.random.default_rng(0), np.zeros(resamples)
    values, variance, networks, used = [], 0.0, 0, 0
    for x, y, controls in groups:
        table = np.array([np.asarray(v, dtype=np.float64) for v in (x, y, *controls)])
        table = table[:, np.isfinite(table).all(0)]
        count = table.shape[1]
        value = (
            partial_tau(table[0], table[1], list(table[2:])) if count >= MIN_NETWORKS else math.nan
        )
        values.append(float(value))
        if math.isnan(value):
            continue
        used += 1
        picks = random.integers(count, size=(resamples, count))
        resampled += partial_tau(table[0][picks], table[1][picks], [c[picks] for c in table[2:]])
        freedom = max(count - len(controls), 2)
        variance += 2 * (2 * freedom + 5) / (9 * freedom * (freedom - 1))
        networks += count
    if not used:
        return Association(math.nan, math.nan, math.nan, 1.0, tuple(values), networks)
    low, high = math.nan, math.nan
    if resamples:
        low, high = np.nanquantile(resampled / used, [LEVEL / 2, 1 - LEVEL / 2])
    z = abs(np.nansum(values)) / math.sqrt(variance)
    mean, p = float(np.nanmean(values)), float(2 * stats.norm.sf(z))
    return Association(mean, float(low), float(high), p, tuple(values), networks)
