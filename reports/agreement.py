"""Agreement between measures: rank correlations over networks, correlations over sites.

`scipy.stats` takes half a second to import, so it is imported only where there are enough networks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .leaderboard import CONFIDENCE, Row
from .tables import Score, Scores

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient with its confidence interval.

    Parameters
    ----------
    value : float
        NaN for fewer than three pairs, or if either variable is constant.
    low, high : float
        Interval; NaN for too few pairs, or if no ordering of the values would be significant.
    n : int
        Number of pairs.
    groups : int
        Number of networks that the pairs come from; 0 if each network contributes one pair.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    groups: int = 0

    @property
    def text(self) -> str:
        """The formatted value and interval.

        Examples
        --------
        >>> Correlation(0.5, 0.25, 0.75, 12).text, Correlation(1.0, np.nan, np.nan, 3).text
        ('0.50 (0.25 to 0.75)', '1.00 (too few for an interval)')
        """
        has_interval = np.isfinite(self.low) and np.isfinite(self.high)
        interval = (
            f"{self.low:.2f} to {self.high:.2f}" if has_interval else "too few for an interval"
        )
        return f"{self.value:.2f} ({interval})"


def spearman(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Compute Spearman's rank correlation of finite pairs with a confidence interval.

    References
    ----------
    D. G. Bonett, T. A. Wright, "Sample size requirements for estimating Pearson, Kendall and
    Spearman correlations", Psychometrika 65, 2000: the variance of the Fisher-transformed
    coefficient is (1 + r² / 2) / (n - 3). A coefficient of ±1 is moved towards 0 by half a step
    before the transformation, where a step is the effect of swapping two neighbours.

    Examples
    --------
    >>> spearman([1, 2, 3, 4, 5], [2, 4, 6, 8, 9]).text
    '1.00 (0.13 to 1.00)'
    >>> spearman([1, 2, 3, 4], [2, 4, 6, 8]).text
    '1.00 (too few for an interval)'
    """
    return _rank_correlation(
        "spearmanr", x, y, 3, lambda n, r: (1 + r**2 / 2, 6 / (n * (n**2 - 1)))
    )


def kendall(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Compute Kendall's tau-b of finite pairs with a confidence interval.

    References
    ----------
    See `spearman`; here, the variance of the Fisher-transformed coefficient is 0.437 / (n - 4).

    Examples
    --------
    >>> round(kendall([1, 2, 3], [1, 3, 2]).value, 4)
    0.3333
    """
    return _rank_correlation("kendalltau", x, y, 4, lambda n, _: (0.437, 2 / (n * (n - 1))))


def _rank_correlation(
    coefficient: str,
    x: ArrayLike,
    y: ArrayLike,
    lost: int,
    variance: Callable[[int, float], tuple[float, float]],
) -> Correlation:
    """Compute a coefficient of `scipy.stats` with its interval.

    `variance` returns, for a number of pairs and a coefficient, the variance of the transformed
    coefficient times the degrees of freedom, and half a step of the coefficient.
    """
    x, y = _pairs(x, y)
    n = len(x)
    if n < 3 or not np.ptp(x) > 0 or not np.ptp(y) > 0:
        return Correlation(n=n)
    from scipy import stats

    value = float(getattr(stats, coefficient)(x, y).statistic)
    freedom = n - lost if _can_be_significant(x, y, value) else 0
    return _add_interval(value, n, freedom, *variance(n, value))


def within_groups(pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> Correlation:
    """Compute Pearson's correlation within groups, after subtracting each group's means.

    Parameters
    ----------
    pairs : sequence of pairs of arrays of shape (n_i,)
        One pair per network: the values of two measures at the same sites.

    References
    ----------
    J. Z. Bakdash, L. R. Marusich, "Repeated measures correlation", Frontiers in Psychology 8,
    2017: the coefficient has n - k - 1 degrees of freedom for k groups.

    Examples
    --------
    >>> within_groups([([0, 1, 2], [5, 6, 7]), ([0, 1, 2], [-3, -2, -1])]).value
    1.0
    """
    centred: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for first, second in pairs:
        x, y = _pairs(first, second)
        if len(x) > 1:
            centred.append((x - x.mean(), y - y.mean()))
    if not centred:
        return Correlation()
    x, y = (np.concatenate(side) for side in zip(*centred, strict=True))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    value = min(1.0, max(-1.0, float(x @ y) / scale)) if scale > 0 else math.nan
    found = _add_interval(value, len(x), len(x) - len(centred) - 2, 1.0)
    return replace(found, groups=len(centred))


def _pairs(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    return x[finite], y[finite]


def _can_be_significant(x: NDArray[np.float64], y: NDArray[np.float64], sign: float) -> bool:
    """Return True if the permutation test would be significant for some ordering of the values.

    The coefficient is most extreme if both are sorted, the second in reverse for a negative sign.
    Its two-sided p-value is twice the fraction of permutations with the same pairs of values.
    """
    first = np.sort(x)
    second = np.sort(y)[:: 1 if sign > 0 else -1]
    log_fraction = (
        _log_factorials(first)
        + _log_factorials(second)
        - _log_factorials(np.stack([first, second]))
        - math.lgamma(len(x) + 1)
    )
    return 2 * math.exp(log_fraction) < 1 - CONFIDENCE


def _log_factorials(columns: NDArray[np.float64]) -> float:
    """Sum log(m!) over the groups of m identical columns."""
    _, sizes = np.unique(columns, axis=-1, return_counts=True)
    return sum(math.lgamma(size + 1) for size in sizes)


def _add_interval(
    value: float, n: int, freedom: int, variance: float, half_step: float = 0.0
) -> Correlation:
    """Add an interval computed with Fisher's transformation.

    The magnitude of a rank correlation is first limited to half a step below 1, so that the
    interval for perfect agreement has a non-zero width.
    """
    if freedom < 1 or not math.isfinite(value):
        return Correlation(value, n=n)
    if abs(value) > 1 - 1e-12:  # ±1 up to rounding
        value = math.copysign(1.0, value)
    limit = 1 - half_step
    inner = min(limit, max(-limit, value))
    half = _WIDTH * math.sqrt(variance / freedom)
    middle = math.atanh(inner) if abs(inner) < 1 else math.copysign(math.inf, inner)
    low, high = math.tanh(middle - half), math.tanh(middle + half)
    return Correlation(value, min(value, low), max(value, high), n)


def agreement(rows: Sequence[Row], scores: Scores) -> dict[str, dict[tuple[str, str], Correlation]]:
    """Correlate all pairs of measures, oriented so that larger values mean more nonlinear.

    ``spearman`` and ``kendall`` are over networks, one per row, and ``pearson`` over sites within
    networks (only for measures that use the probe ``sites``), each keyed by pair of measures.
    Measures without a direction are not reoriented.
    """
    senses = {name: info.sense or 1 for name, info in scores.measures.items()}
    columns = {}
    for name in scores.measures:
        values = [row.entries[name].value for row in rows]
        columns[name] = senses[name] * np.array(values)
    coefficients: dict[str, dict[tuple[str, str], Correlation]] = {
        "spearman": {}, "kendall": {}, "pearson": {},
    }  # fmt: skip
    for a, b in itertools.combinations(scores.measures, 2):
        coefficients["spearman"][a, b] = spearman(columns[a], columns[b])
        coefficients["kendall"][a, b] = kendall(columns[a], columns[b])
        if {scores.measures[name].probe for name in (a, b)} == {"sites"}:
            common = []
            for subject in scores.subjects:
                x = _place_values(scores[subject.label, a])
                y = _place_values(scores[subject.label, b])
                places = [place for place in x if place in y]
                first = np.array([x[place] for place in places])
                second = np.array([y[place] for place in places])
                common.append((senses[a] * first, senses[b] * second))
            coefficients["pearson"][a, b] = within_groups(common)
    return coefficients


def _place_values(score: Score) -> dict[str, float]:
    return {place.name: place.value for place in score.places}


def agreement_frame(
    coefficients: Mapping[str, Mapping[tuple[str, str], Correlation]],
) -> pd.DataFrame:
    """Convert correlations to a tidy table with one row per coefficient and pair of measures."""
    import pandas as pd

    rows = [
        (kind, a, b, c.value, c.low, c.high, c.n, c.groups)
        for kind, pairs in coefficients.items()
        for (a, b), c in pairs.items()
    ]
    columns = ["coefficient", "measure", "other", "value", "low", "high", "n", "networks"]
    return pd.DataFrame(rows, columns=columns)
