"""Verdicts on claims, with published and measured values, and the criteria that decide them.

A criterion is a pure function of numbers that returns True, False, or None if undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from .trends import SIGNIFICANCE

if TYPE_CHECKING:
    from nlbench.reports.agreement import Correlation


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim.

    Parameters
    ----------
    claim : str
        A sentence.
    published : str
        The paper's number or words; empty if nothing was published.
    ours : str
        Our value with its interval.
    agrees : bool or None
        None if undecided.
    remark : str
        The criterion and how the value was obtained.
    needed : int
        Number of networks that the criterion needs to decide either way; 0 if there are enough.

    Examples
    --------
    >>> Verdict("ReLU is the least nonlinear", "0.90", "0.91 ± 0.02", True).word
    'yes'
    """

    claim: str
    published: str = ""
    ours: str = ""
    agrees: bool | None = None
    remark: str = ""
    needed: int = 0

    @property
    def word(self) -> str:
        """``yes``, ``no``, ``can't tell`` or ``needs 6 networks``."""
        if self.agrees is None:
            return f"needs {self.needed} networks" if self.needed else "can't tell"
        return "yes" if self.agrees else "no"


MIN_POWER = 0.8
"""Probability with which a criterion has to accept a claim that is true, or else its opposite."""

CLAIMED_FRACTION = 0.98
"""Fraction of networks for which a claim about nearly all of them is taken to hold."""


@dataclass(frozen=True)
class Decision:
    """Whether a claim holds for most networks, and the number needed if there are too few."""

    agrees: bool | None
    needed: int = 0


def in_most_networks(holds: ArrayLike, networks: int | None = None) -> Decision:
    """Test whether a claim holds for more, or for fewer, than half of all networks.

    A two-sided sign test at 5 %. It is not used where it would accept a claim that holds for 98 %
    of the networks with a probability below 80 %: five networks decide nothing even if all agree.

    Parameters
    ----------
    holds : bool array of shape (n,)
        Whether the claim holds for each network, or pair of networks.
    networks : int, optional
        Number of independent ones; n by default.

    Examples
    --------
    >>> in_most_networks([True] * 6), in_most_networks([True] * 3)
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=6))
    """
    array = np.asarray(holds, dtype=bool)
    n = len(array) if networks is None else networks
    if not len(array) or sign_test_power(n) < MIN_POWER:
        needed = n + 1
        while sign_test_power(needed) < MIN_POWER:
            needed += 1
        return Decision(None, needed)
    fraction = float(array.mean())
    if _is_majority(math.floor(fraction * n + 1e-9), n):
        return Decision(True)
    if _is_majority(math.floor((1 - fraction) * n + 1e-9), n):
        return Decision(False)
    return Decision(None)


def sign_test_power(networks: int, fraction: float = CLAIMED_FRACTION) -> float:
    """Compute the probability that the sign test accepts a claim that holds for a fraction.

    By symmetry it is also that of rejecting a claim that holds for 1 - `fraction`.

    Examples
    --------
    >>> [round(sign_test_power(n), 2) for n in (3, 5, 6, 9)]
    [0.0, 0.0, 0.89, 0.99]
    """
    return math.fsum(
        math.comb(networks, count) * fraction**count * (1 - fraction) ** (networks - count)
        for count in range(networks + 1)
        if _is_majority(count, networks)
    )


def _is_majority(count: int, networks: int) -> bool:
    """Return True if so many of the networks are significantly more than half."""
    tail = sum(math.comb(networks, k) for k in range(count, networks + 1)) / 2**networks
    return bool(2 * tail < SIGNIFICANCE)


def within(values: ArrayLike, target: float, tolerance: ArrayLike) -> bool | None:
    """Test whether all values lie within a tolerance of a target.

    Examples
    --------
    >>> within([0.71, 0.69], 0.7, 0.02), within([], 0.7, 0.02)
    (True, None)
    """
    error = np.abs(_array(values) - target)
    return bool((error <= tolerance).all()) if _is_known(error) else None


def above(values: ArrayLike, bound: float = 0.0) -> bool | None:
    """Test whether all values, or both ends of an interval, lie above a bound.

    The result is False if all lie below the bound, and None otherwise.

    Examples
    --------
    >>> above([1, 3]), above([-3, -1]), above([-1, 3])
    (True, False, None)
    """
    array = _array(values)
    if not array.size:
        return None
    return True if (array > bound).all() else False if (array < bound).all() else None


def below(values: ArrayLike, bound: float = 0.0) -> bool | None:
    """Test whether all values, or both ends of an interval, lie below a bound.

    Examples
    --------
    >>> below([-3, -1]), below([1, 3]), below([-1, 3])
    (True, False, None)
    """
    return above(-_array(values), -bound)


def between(interval: tuple[float, float], limits: tuple[float, float]) -> bool | None:
    """Test whether an interval lies between two limits; undecided if it contains either.

    Examples
    --------
    >>> [between(i, limits=(-0.3, 0.3)) for i in ((-0.1, 0.2), (0.4, 0.6), (0.2, 0.4))]
    [True, False, None]
    """
    (low, high), (minimum, maximum) = interval, limits
    if low >= minimum and high <= maximum:
        return True
    return False if low > maximum or high < minimum else None


def ordered(lower: ArrayLike, higher: ArrayLike) -> bool | None:
    """Test whether every value in one group lies below every value in another.

    Examples
    --------
    >>> ordered([1, 2], 3), ordered([1, 3], 2), ordered([], 3)
    (True, False, None)
    """
    first, second = _array(lower), _array(higher)
    return bool(first.max() < second.min()) if _is_known(first) and _is_known(second) else None


def rises(values: ArrayLike, tolerance: float = 0.0) -> bool | None:
    """Test whether a curve, or each of several curves of equal length, rises at every step.

    Examples
    --------
    >>> rises([1, 2, 4]), rises([[1, 2], [3, 2]]), rises([1])
    (True, False, None)
    """
    steps = np.diff(_array(values))
    return bool((steps > -tolerance).all()) if _is_known(steps) else None


def falls(values: ArrayLike) -> bool | None:
    """Test whether a curve, or each of several curves of equal length, falls at every step.

    Examples
    --------
    >>> falls([4, 2, 1]), falls([1, 2])
    (True, False)
    """
    return rises(-_array(values))


def correlates(correlation: Correlation, sign: int = 1) -> bool | None:
    """Test whether the whole interval of a correlation has the given sign.

    Examples
    --------
    >>> from nlbench.reports.agreement import Correlation
    >>> correlates(Correlation(0.5, 0.2, 0.7, 12)), correlates(Correlation(0.5, -0.2, 0.9, 5))
    (True, None)
    """
    return above([sign * correlation.low, sign * correlation.high])


def share_above(share: Correlation, bound: float = 0.5) -> bool | None:
    """Test whether the interval of a fraction lies above a bound.

    The result is None if even full agreement of so few networks would not be significant.

    Examples
    --------
    >>> from nlbench.reports.agreement import paired_share
    >>> [share_above(paired_share([1.0] * networks)) for networks in (5, 6)]
    [None, True]
    """
    answer = above([share.low, share.high], bound)
    if answer is None:
        return None
    # Full agreement of so few networks may be likely by chance (two-sided).
    chance = bound if answer else 1 - bound
    return answer if 2 * chance ** (share.groups or share.n) < SIGNIFICANCE else None


def _array(values: ArrayLike) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _is_known(array: np.ndarray) -> bool:
    return array.size > 0 and not np.isnan(array).any()


def correlation_text(symbol: str, correlation: Correlation) -> str:
    """Format a correlation over networks with its interval.

    Examples
    --------
    >>> from nlbench.reports.agreement import Correlation
    >>> correlation_text("τ", Correlation(0.5, 0.25, 0.75, 12))
    'τ = 0.50 (0.25 to 0.75), 12 networks'
    >>> correlation_text("τ", Correlation(math.nan, math.nan, math.nan, 2))
    'too few networks: 2'
    """
    if not math.isfinite(correlation.value):
        return f"too few networks: {correlation.n}"
    return f"{symbol} = {correlation.text}, {correlation.n} networks"


def share_text(share: Correlation) -> str:
    """Format a fraction and its interval in percent.

    Examples
    --------
    >>> from nlbench.reports.agreement import paired_share
    >>> share_text(paired_share([1.0] * 15))
    '100% of 15 (80% to 100%)'
    """
    if not math.isfinite(share.low):
        return f"{share.value:.0%} of {share.n}" if share.n else "none"
    return f"{share.value:.0%} of {share.n} ({share.low:.0%} to {share.high:.0%})"


def mean_and_spread(values: ArrayLike, form: str = ".2f") -> str:
    """Format a mean, and the standard deviation if there are several values.

    Examples
    --------
    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([2.0], ".1f")
    ('2.00 ± 1.41', '2.0')
    """
    array = _array(values)
    spread = f" ± {array.std(ddof=1):{form}}" if len(array) > 1 else ""
    return f"{array.mean():{form}}{spread}"


def range_text(values: ArrayLike, form: str = ".2f") -> str:
    """Format a mean with the minimum and the maximum.

    Examples
    --------
    >>> range_text([1.0, 2.0, 4.5])
    '2.50 (1.00 to 4.50)'
    """
    array = _array(values)
    return f"{array.mean():{form}} ({array.min():{form}} to {array.max():{form}})"
