"""Verdicts on claims, with published and measured values, and the criteria that decide them.

A criterion is a pure function of numbers that returns True, False, or None if undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from nlbench.reports.agreement import Correlation

from .trends import MAX_CORRELATION, MIN_NETWORKS, SIGNIFICANCE, network_interval, trend_test


@dataclass(frozen=True)
class Decision:
    """Verdict on a claim about networks, and the number needed if there are too few."""

    agrees: bool | None
    needed: int = 0
    unit: str = field(default="networks", repr=False)


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
    agrees : bool, None or Decision
        None if undecided. A decision also sets `needed` and `unit`.
    remark : str
        The criterion and how the value was obtained.
    needed : int
        Number of networks that the criterion needs to decide either way; 0 if there are enough.
    unit : str
        What is counted, if not networks.

    Examples
    --------
    >>> Verdict("ReLU is the least nonlinear", "0.90", "0.91 ± 0.02", True).word
    'yes'
    """

    claim: str
    published: str = ""
    ours: str = ""
    agrees: bool | Decision | None = None
    remark: str = ""
    needed: int = 0
    unit: str = "networks"

    def __post_init__(self) -> None:
        if isinstance(self.agrees, Decision):
            object.__setattr__(self, "unit", self.agrees.unit)
            object.__setattr__(self, "needed", self.agrees.needed)
            object.__setattr__(self, "agrees", self.agrees.agrees)

    @property
    def word(self) -> str:
        """``yes``, ``no``, ``can't tell`` or ``needs 6 networks``."""
        if self.agrees is None:
            return f"needs {self.needed} {self.unit}" if self.needed else "can't tell"
        return "yes" if self.agrees else "no"


MIN_POWER = 0.8
"""Probability with which a criterion has to accept a claim that is true, or else its opposite."""

CLAIMED_FRACTION = 0.98
"""Fraction of networks for which a claim about nearly all of them is taken to hold."""

TIE_TOLERANCE = 1e-9
"""Difference up to which the values of networks count as equal."""


def in_most_networks(
    holds: ArrayLike, networks: int | None = None, chance: float = 0.5, unit: str = "networks"
) -> Decision:
    """Test whether a claim holds for more, or for fewer, networks than by chance.

    A two-sided binomial test at 5 %, by default a sign test. It is not used where it would accept
    a claim that holds for 98 % of the networks with a probability below 80 %: five networks decide
    nothing even if all agree.

    Parameters
    ----------
    holds : bool array of shape (n,)
        Whether the claim holds for each network, or pair of networks.
    networks : int, optional
        Number of independent ones; n by default.
    chance : float
        Fraction of networks for which it would hold by chance.
    unit : str
        What is counted, if not networks.

    Examples
    --------
    >>> in_most_networks([True] * 6), in_most_networks([True] * 3)
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=6))
    """
    array = np.asarray(holds, dtype=bool)
    n = len(array) if networks is None else networks
    if not len(array) or sign_test_power(n, chance=chance) < MIN_POWER:
        needed = n + 1
        while sign_test_power(needed, chance=chance) < MIN_POWER:
            needed += 1
        return Decision(None, needed, unit)
    fraction = float(array.mean())
    if _exceeds(math.floor(fraction * n + 1e-9), n, chance):
        return Decision(True)
    if _exceeds(math.floor((1 - fraction) * n + 1e-9), n, 1 - chance):
        return Decision(False)
    return Decision(None)


def sign_test_power(networks: int, chance: float = 0.5, held: float = CLAIMED_FRACTION) -> float:
    """Compute the probability that `in_most_networks` accepts a claim that holds for a fraction.

    Examples
    --------
    >>> [round(sign_test_power(n), 2) for n in (3, 5, 6, 9)]
    [0.0, 0.0, 0.89, 0.99]
    """
    counts = np.arange(networks + 1)
    probabilities = stats.binom.pmf(counts, networks, held)
    return float(probabilities[_exceeds(counts, networks, chance)].sum())


def _exceeds(count: ArrayLike, networks: int, chance: float) -> Any:
    """Return True where so many of the networks are significantly more than by chance."""
    return 2 * stats.binom.sf(np.asarray(count) - 1, networks, chance) < SIGNIFICANCE


def smallest_mean(networks: int) -> float:
    """Compute the distance from the bound that `mean_above` finds with the minimum power.

    Returns
    -------
    float
        In standard deviations over networks.

    Examples
    --------
    >>> round(smallest_mean(3), 2), round(smallest_mean(20), 2)
    (3.26, 0.66)
    """
    critical = stats.t.ppf(1 - SIGNIFICANCE / 2, networks - 1)
    shift = optimize.brentq(
        lambda shift: stats.nct.sf(critical, networks - 1, shift) - MIN_POWER, 0, 100
    )
    return float(shift / math.sqrt(networks))


def mean_above(values: ArrayLike, bound: float = 0.0) -> Decision:
    """Test whether the mean over networks lies above a bound, by its 95% t interval.

    Equal values, whose interval has no width, are compared by a sign test. Fractions are often
    equal to their bound, and are compared by `in_most_networks` instead.

    Parameters
    ----------
    values : array of shape (n,)
        One value per network.

    Examples
    --------
    >>> mean_above([1.0, 1.2, 0.9]), mean_above([1.0])
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=3))
    """
    array = _array(values)
    if len(array) < MIN_NETWORKS:
        return Decision(None, MIN_NETWORKS)
    if np.ptp(array) <= TIE_TOLERANCE and abs(array[0] - bound) > TIE_TOLERANCE:
        return in_most_networks(array > bound)
    return Decision(above(network_interval(array), bound))


def mean_below(values: ArrayLike, bound: float = 0.0) -> Decision:
    """Test whether the mean over networks lies below a bound. See `mean_above`."""
    return mean_above(-_array(values), -bound)


def rises_in_networks(curves: Sequence[ArrayLike]) -> Decision:
    """Test whether curves of several networks rise, by the exact trend test at 5 %.

    Parameters
    ----------
    curves : sequence of arrays of shape (k,)
        One curve per network or seed.

    Examples
    --------
    >>> rises_in_networks([[1, 2, 3]] * 3), rises_in_networks([[1, 2, 3]])
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=3))
    """
    steps = max((np.size(curve) for curve in curves), default=0)
    if steps < 2:
        return Decision(None)
    needed = MIN_NETWORKS
    while 2 / math.factorial(steps) ** needed >= SIGNIFICANCE:
        needed += 1
    if len(curves) < needed:
        return Decision(None, needed)
    trend = trend_test(curves)
    if 2 * trend.p_rises < SIGNIFICANCE:
        return Decision(True)
    return Decision(False if 2 * trend.p_falls < SIGNIFICANCE else None)


def networks_ordered(lower: ArrayLike, higher: ArrayLike) -> Decision:
    """Test whether every network of one group has a lower value than every network of another.

    It is not used for fewer than three networks, or where such an order has a probability of 5 % or
    more by chance. The number needed is that of the smaller group. Groups that overlap are
    undecided, and no number of networks changes that.

    Examples
    --------
    >>> networks_ordered([1, 2, 3], range(4, 9)), networks_ordered([1, 2], range(4, 9))
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=3))
    """
    fewer, more = sorted((np.size(lower), np.size(higher)))
    if not fewer or ordered(lower, higher) is None:
        return Decision(None)
    needed = max(fewer, MIN_NETWORKS)
    while 2 / math.comb(needed + max(more, needed), needed) >= SIGNIFICANCE:
        needed += 1
    return Decision(None, needed) if needed > fewer else Decision(ordered(lower, higher))


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


def correlates_weakly(correlation: Correlation, bound: float, widening: float = 1.0) -> Decision:
    """Test whether a correlation is smaller than a bound in size, by its 95% interval.

    An equivalence test: it agrees if the interval lies within ±`bound`, and disagrees if it lies
    outside. Otherwise it needs more networks if a correlation of 0 would be accepted with a
    probability below 80%.

    Parameters
    ----------
    correlation : Correlation
    bound : float
    widening : float
        Width of the interval, relative to that of a correlation of 0 over as many networks.

    Examples
    --------
    >>> from nlbench.reports.agreement import Correlation
    >>> correlates_weakly(Correlation(0.1, -0.1, 0.2, 30), 0.3)
    Decision(agrees=True, needed=0)
    >>> correlates_weakly(Correlation(0.0, -0.4, 0.4, 20), 0.3)
    Decision(agrees=None, needed=92)
    """
    if not math.isfinite(correlation.low):
        return Decision(None, MIN_NETWORKS if correlation.n < MIN_NETWORKS else 0)
    limits = np.array([correlation.low, correlation.high])
    low, high = np.arctanh(np.clip(limits, -MAX_CORRELATION, MAX_CORRELATION))
    return _lies_within((low, high), math.atanh(bound), correlation.n, widening)


def mean_near(values: ArrayLike, target: float, tolerance: float) -> Decision:
    """Test whether the mean over networks is near a target, by its 95% t interval.

    An equivalence test, as `correlates_weakly`.

    Examples
    --------
    >>> mean_near([0.71, 0.7, 0.69], 0.7, 0.05), mean_near([0.6, 0.9, 0.7], 0.7, 0.05)
    (Decision(agrees=True, needed=0), Decision(agrees=None, needed=101))
    """
    array = _array(values)
    if len(array) < MIN_NETWORKS:
        return Decision(None, MIN_NETWORKS)
    low, high = network_interval(array - target)
    return _lies_within((low, high), tolerance, len(array))


def smallest_tolerance(networks: int) -> float:
    """Compute the tolerance with which equivalence is found with the minimum power.

    Returns
    -------
    float
        In standard deviations over networks, for an exact match.

    Examples
    --------
    >>> round(smallest_tolerance(3), 2), round(smallest_tolerance(20), 2)
    (3.57, 0.76)
    """
    return _equivalence_width(networks) / math.sqrt(networks)


def _lies_within(
    interval: tuple[float, float], limit: float, networks: int, widening: float = 1.0
) -> Decision:
    """Test whether a t interval over networks lies within ± a limit, if it has the power to."""
    low, high = interval
    if low > limit or high < -limit:
        return Decision(False)
    error = (high - low) / 2 / stats.t.ppf(1 - SIGNIFICANCE / 2, networks - 1) / widening
    if error * _equivalence_width(networks) <= limit:
        return Decision(True if max(-low, high) <= limit else None)
    # Normal quantiles are smaller than those of t, so this is a lower bound.
    needed = math.floor(networks * (error * _equivalence_width() / limit) ** 2)
    needed = max(networks + 1, needed)
    while error * math.sqrt(networks / needed) * _equivalence_width(needed) > limit:
        needed += 1
    return Decision(None, needed)


def _equivalence_width(networks: float = math.inf) -> float:
    """Return the limit, in standard errors, for which the test has the minimum power."""
    quantiles = [1 - SIGNIFICANCE / 2, (1 + MIN_POWER) / 2]
    return float(stats.t.ppf(quantiles, networks - 1).sum())


def all_hold(decisions: Iterable[Decision]) -> Decision:
    """Combine the decisions on the parts of a claim, which fails if one of them does.

    Examples
    --------
    >>> all_hold([Decision(True), Decision(None, 6)])
    Decision(agrees=None, needed=6)
    >>> all_hold([Decision(True), Decision(False)])
    Decision(agrees=False, needed=0)
    """
    parts = list(decisions)
    answers = [part.agrees for part in parts]
    if False in answers:
        return Decision(False)
    if None in answers or not answers:
        undecided = [part for part in parts if part.agrees is None]
        return max(undecided, key=lambda part: part.needed, default=Decision(None))
    return Decision(True)


def ordered(lower: ArrayLike, higher: ArrayLike) -> bool | None:
    """Test whether every value in one group lies below every value in another.

    The result is False if every value lies above, and None otherwise, as in `above`. For networks
    use `networks_ordered`.

    Examples
    --------
    >>> ordered([1, 2], 3), ordered([2, 3], 1), ordered([1, 3], 2)
    (True, False, None)
    """
    return above(np.subtract.outer(_array(higher), _array(lower)))


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


def mean_and_spread(values: ArrayLike) -> str:
    """Format a mean, and the standard deviation if there are several values.

    Examples
    --------
    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([2.0])
    ('2.00 ± 1.41', '2.00')
    """
    array = _array(values)
    spread = f" ± {array.std(ddof=1):.2f}" if len(array) > 1 else ""
    return f"{array.mean():.2f}{spread}"


def interval_text(values: ArrayLike, form: str = ".2f") -> str:
    """Format a mean over networks with its 95% t interval, if there are at least three.

    Examples
    --------
    >>> interval_text([4.4, 3.6, 3.6]), interval_text([2.0], "+.1f")
    ('3.87 (2.72 to 5.01)', '+2.0')
    """
    array = _array(values)
    low, high = network_interval(array)
    interval = f" ({low:{form}} to {high:{form}})" if math.isfinite(low) else ""
    return f"{array.mean():{form}}{interval}"


def range_text(values: ArrayLike, form: str = ".2f") -> str:
    """Format a mean with the minimum and the maximum.

    Examples
    --------
    >>> range_text([1.0, 2.0, 4.5])
    '2.50 (1.00 to 4.50)'
    """
    array = _array(values)
    return f"{array.mean():{form}} ({array.min():{form}} to {array.max():{form}})"
