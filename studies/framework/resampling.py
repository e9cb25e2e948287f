"""Bootstrap intervals for means over networks."""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
REPEATS = 1000


def mean_interval(values: ArrayLike, seed: str) -> tuple[float, float]:
    """Return the bootstrap interval for a mean, or NaN for fewer than two values.

    Examples
    --------
    >>> mean_interval([2.0, 2.0], "a"), mean_interval([2.0], "a")
    ((2.0, 2.0), (nan, nan))
    """
    if len(np.asarray(values)) < 2:
        return math.nan, math.nan
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled_means(values, REPEATS, seed), [tail, 100 - tail])
    return float(low), float(high)


def resampled_means(values: ArrayLike, repeats: int, seed: str) -> NDArray[np.float64]:
    """Compute bootstrap means, widened to the scale of Student's t-distribution.

    Plain bootstrap intervals are too narrow for small samples: by a factor of 9 for two values, 2
    for four and 1.1 for twenty (T. C. Hesterberg, What Teachers Should Know About the Bootstrap,
    The American Statistician, 2015, section 4.2).

    Parameters
    ----------
    values : array of shape (n,)
        At least two values.
    seed : str
        Arrays with the same length and seed are resampled with the same indices.

    Returns
    -------
    array of shape (repeats,)
    """
    numbers = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(zlib.crc32(seed.encode("utf-8", "surrogatepass")))
    drawn = random.integers(0, len(numbers), (repeats, len(numbers)), dtype=np.int32)
    middle = numbers.mean()
    means: NDArray[np.float64] = middle + _widening(len(numbers)) * (
        numbers[drawn].mean(axis=1) - middle
    )
    return means


def _widening(n: int) -> float:
    """Return the ratio of the widths of the Student and bootstrap intervals for `n` values."""
    from scipy.special import ndtri, stdtrit

    probability = (1 + CONFIDENCE) / 2
    return float(stdtrit(n - 1, probability) / ndtri(probability)) * math.sqrt(n / (n - 1))
