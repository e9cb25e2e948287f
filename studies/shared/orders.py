"""Orders of a ladder: how a measure ranks networks whose order is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from nlbench.reports.leaderboard import CONFIDENCE, sense_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["MIN_TAU", "Order", "intraclass", "is_constant", "order_of", "round_digits"]


MIN_TAU = 0.9
"""Kendall's tau from which an order counts as recovered."""
SIGNIFICANT_DIGITS = 9


@dataclass(frozen=True)
class Order:
    """The order in which a measure ranks the rungs of a ladder.

    Parameters
    ----------
    tau : float
        Kendall's tau-b between rung and value, mean over seeds; NaN without values.
    low, high : float
        Its 95 % interval.
    seeds : int
    icc : float
        Intraclass correlation of values: rungs against seeds.
    mark : str
        Reason why it is not judged; empty if it is.

    Examples
    --------
    >>> Order(0.95, 0.8, 1.0, 3, 0.9).word, Order(0.0, -0.4, 0.4, 3, 0.1).word
    ('recovers', "can't tell")
    """

    tau: float
    low: float
    high: float
    seeds: int
    icc: float
    mark: str = ""

    @property
    def word(self) -> str:
        """``recovers``, ``sees``, ``inverts`` or ``can't tell``, or the mark if not judged."""
        if self.mark:
            return self.mark
        if self.low > 0:
            return "recovers" if self.tau >= MIN_TAU else "sees"
        return "inverts" if self.high < 0 else "can't tell"

    @property
    def text(self) -> str:
        """Tau with its interval, which does not exist if all seeds agree.

        Examples
        --------
        >>> Order(0.95, 0.8, 1.0, 3, 0.9).text, Order(1.0, 1.0, 1.0, 3, 0.9).text
        ('0.95 [0.80, 1.00]', '1.00 in each of 3 seeds')
        """
        if math.isnan(self.tau):
            return "–"
        if self.low == self.high:
            return f"{self.tau:.2f} in each of {self.seeds} seeds"
        return f"{self.tau:.2f} [{self.low:.2f}, {self.high:.2f}]"


def order_of(cells: pd.DataFrame, description: Mapping[str, Any]) -> Order:
    """Compute how one measure orders one ladder.

    Parameters
    ----------
    cells : DataFrame
        Cells of the measure on the ladder with the columns ``rung, seed, value, status, reason``.
    description : mapping
        Description of the measure, as recorded.

    Examples
    --------
    >>> cells = pd.DataFrame({"rung": [0, 1, 2] * 2, "seed": [0] * 3 + [1] * 3, "status": "ok",
    ...     "value": [3.0, 2.0, 1.0, 5.0, 3.0, 4.0], "reason": ""})
    >>> order = order_of(cells, {"more_means": "less nonlinear"})
    >>> round(order.tau, 3), order.seeds
    (0.667, 2)
    """
    known = cells[(cells.status == "ok") & np.isfinite(cells.value)]
    rungs = cells.rung.nunique()
    if known.rung.nunique() < max(2, rungs / 2):
        reasons = [reason for reason in cells.reason[cells.status != "ok"] if reason]
        return Order(math.nan, math.nan, math.nan, 0, math.nan, _most_frequent(reasons))
    values = known.value.map(round_digits)
    if is_constant(values):
        return Order(math.nan, math.nan, math.nan, 0, math.nan, "the same on every rung")
    sense = sense_of(description) or 1
    taus = [
        _tau(rows.rung, sense * values[rows.index])
        for _, rows in known.groupby("seed")
        if len(rows) > 1
    ]
    tau = float(np.mean(taus))
    low, high = _interval(taus)
    table = known.pivot_table(index="rung", columns="seed", values="value")
    mark = "" if sense_of(description) else "no direction"
    return Order(tau, low, high, len(taus), intraclass(table.dropna().to_numpy()), mark)


def _most_frequent(reasons: Sequence[str]) -> str:
    return (max(set(reasons), key=reasons.count) if reasons else "no value")[:90]


def round_digits(value: float) -> float:
    """Round to nine significant digits; to 0 below 1e-9."""
    is_zero = abs(value) <= 10.0**-SIGNIFICANT_DIGITS
    return 0.0 if is_zero else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def is_constant(values: pd.Series[Any]) -> bool:
    """Return True if all values are equal."""
    return bool((values == values.iloc[0]).all())


def _tau(rungs: pd.Series[Any], values: pd.Series[Any]) -> float:
    """Compute Kendall's tau-b; 0 if all values are equal."""
    if is_constant(values):
        return 0.0
    return float(stats.kendalltau(rungs, values).statistic)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute Student's interval of a mean of correlations, clipped to [-1, 1]."""
    n = len(values)
    if n < 2:
        return -1.0, 1.0
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    mean = float(np.mean(values))
    return max(-1.0, mean - float(half)), min(1.0, mean + float(half))


def intraclass(table: ArrayLike) -> float:
    """Compute the intraclass correlation ICC(1), the share of variance between groups.

    Parameters
    ----------
    table : array of shape (groups, k)
        k values per group.

    Returns
    -------
    float
        At most 1; negative if groups differ less than their members; NaN without variance or with
        one member per group.

    References
    ----------
    P. E. Shrout, J. L. Fleiss. Intraclass Correlations: Uses in Assessing Rater Reliability.
    Psychological Bulletin 86, 1979: ICC(1, 1).

    Examples
    --------
    >>> intraclass([[1, 1], [2, 2]]), intraclass([[0, 2], [0, 2]])
    (1.0, -1.0)
    """
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or min(values.shape) < 2:
        return math.nan
    groups, k = values.shape
    means = values.mean(1)
    between = k * means.var(ddof=1)
    within = ((values - means[:, None]) ** 2).sum() / (groups * (k - 1))
    total = between + (k - 1) * within
    return float((between - within) / total) if total > 0 else math.nan
