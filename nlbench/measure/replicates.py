"""Replicates: the value of a measure with one group of samples left out.

The samples of a subject are dealt into `GROUPS` groups. The replicates of a value are the numbers
that the measure has without one of the groups, for each group in turn (the delete-a-group
jackknife). They determine the standard error of the value and of any function of several values.

References
----------
[1] P. S. Kott. The delete-a-group jackknife. Journal of Official Statistics, 17(4), 2001.
[2] M. H. Quenouille. Notes on bias in estimation. Biometrika, 43, 1956.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nlbench.errors import NlbenchError

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.introspection.distinct_rows import RowNumbers

Index = TypeVar("Index", bound=Any)

GROUPS = 8
"""Number of groups."""


def group_index(sample_index: Index) -> Index:
    """Return the group of a sample by its index in the order in which samples were drawn.

    An array or tensor of indices gives one of groups.

    Neighbours are in different groups, so that all groups have as many samples of each batch, up to
    one.

    Examples
    --------
    >>> [group_index(index) for index in (0, 1, 7, 8)]
    [0, 1, 7, 0]
    """
    return sample_index % GROUPS


def standard_error(replicates: Sequence[float]) -> float | None:
    """Compute the standard error √((G−1)/G Σ (r_g − r̄)²) from G replicates.

    Returns
    -------
    float or None
        None for fewer than two replicates, and if one isn't finite.

    Examples
    --------
    The replicates of a mean give its usual standard error, here of 1, 2, 3, 4.

    >>> round(standard_error([3.0, 8 / 3, 7 / 3, 2.0]), 6)
    0.645497
    >>> standard_error([]) is None
    True
    """
    if len(replicates) < 2 or not all(map(math.isfinite, replicates)):
        return None
    mean = math.fsum(number / len(replicates) for number in replicates)
    deviations = (number - mean for number in replicates)
    return math.sqrt(1 - 1 / len(replicates)) * math.hypot(*deviations)


def interval(
    value: float, replicates: Sequence[float], level: float = 0.95
) -> tuple[float, float] | None:
    """Compute a confidence interval by Student's t-distribution with G − 1 degrees of freedom.

    Returns
    -------
    tuple of float, or None
        None if there is no standard error.

    Examples
    --------
    >>> low, high = interval(2.5, [3.0, 8 / 3, 7 / 3, 2.0])
    >>> round(low, 4), round(high, 4)
    (0.4457, 4.5543)
    """
    error = standard_error(replicates)
    if error is None:
        return None
    half = error * student_quantile(0.5 + level / 2, len(replicates) - 1)
    return value - half, value + half


def difference_error(a: Sequence[float], b: Sequence[float], paired: bool) -> float | None:
    """Compute the standard error of the difference of two values from their replicates.

    Parameters
    ----------
    a, b : sequence of float
        Replicates of the two values.
    paired : bool
        True if both values are from the same samples in the same groups: the replicates are
        subtracted one by one. Otherwise, the variances add.

    Returns
    -------
    float or None
        None if one of the standard errors is unknown, or paired values have a different number of
        replicates.

    Examples
    --------
    >>> difference_error([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], paired=True)
    0.0
    >>> round(difference_error([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], paired=False), 6)
    1.632993
    """
    if paired:
        return standard_error(combine(lambda x, y: x - y, a, b))
    first = standard_error(a)
    second = standard_error(b)
    if first is None or second is None:
        return None
    return math.hypot(first, second)


def combine(function: Callable[..., float], *replicates: Sequence[float]) -> tuple[float, ...]:
    """Compute the replicates of a function of values from the values' replicates.

    Returns
    -------
    tuple of float
        Empty if the values don't all have the same number of replicates, or the function is
        undefined for one of them.

    Examples
    --------
    >>> combine(lambda x, y: x / y, [2.0, 3.0], [1.0, 2.0])
    (2.0, 1.5)
    >>> combine(lambda x, y: x / y, [2.0, 3.0], [])
    ()
    """
    if len({len(numbers) for numbers in replicates}) != 1:
        return ()
    try:
        combined = tuple(float(function(*numbers)) for numbers in zip(*replicates, strict=True))
    except (ArithmeticError, ValueError):
        return ()
    return combined if all(map(math.isfinite, combined)) else ()


@lru_cache(maxsize=256)
def student_quantile(probability: float, degrees: float) -> float:
    """Return a quantile of Student's t-distribution.

    Examples
    --------
    >>> round(student_quantile(0.975, 7), 4)
    2.3646
    """
    from scipy.special import stdtrit

    # Of a NumPy float32, SciPy would round the probability to 32 bits.
    return float(stdtrit(float(degrees), float(probability)))


def leave_groups_out(
    groups: NDArray[np.integer[Any]], function: Callable[[NDArray[np.bool_]], float]
) -> tuple[float, ...]:
    """Compute a function of the samples without each group that occurs.

    The function takes a mask (n,) of the samples that are not left out. There are no values for
    fewer than two groups, or if one is undefined.

    Examples
    --------
    >>> samples = np.array([1.0, 2.0, 6.0])
    >>> leave_groups_out(np.arange(3), lambda kept: samples[kept].mean())
    (4.0, 3.5, 1.5)
    """
    present = np.unique(groups).tolist()
    if len(present) < 2:
        return ()
    try:
        return tuple(float(function(groups != group)) for group in present)
    except (NlbenchError, ArithmeticError, ValueError):
        return ()


class SampleGroups:
    """Groups of the samples of several batches, with copies of a sample in one group.

    Examples
    --------
    >>> import torch
    >>> groups = SampleGroups()
    >>> groups.add(torch.tensor([[5.0], [7.0], [5.0]]))
    array([0, 1, 0])
    >>> groups.add(torch.tensor([[9.0]]))
    array([2])
    >>> groups.array
    array([0, 1, 0, 2])
    """

    def __init__(self) -> None:
        from nlbench.introspection.distinct_rows import DistinctRows

        self._distinct = DistinctRows()
        self._groups: list[NDArray[np.integer[Any]]] = []

    def add(self, samples: Tensor, sources: RowNumbers | None = None) -> NDArray[np.integer[Any]]:
        """Add a batch of samples (n, ...), and return their groups (n,).

        `sources` are the samples' numbers, if they are known.
        """
        numbers = sources or self._distinct.add(samples)
        self._groups.append(group_index(numbers.index.numpy()))
        return self._groups[-1]

    @property
    def array(self) -> NDArray[np.integer[Any]]:
        """Group of each sample (n,) so far."""
        return np.concatenate(self._groups) if self._groups else np.empty(0, dtype=np.int64)
