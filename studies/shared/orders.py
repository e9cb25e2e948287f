"""The order in which a measure ranks the networks of a ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from nlbench.reports.tables import MeasureInfo
from nlbench.studies.framework.trends import (
    MIN_NETWORKS,
    SIGNIFICANCE,
    holm,
    network_interval,
    trend_test,
)
from nlbench.studies.framework.verdicts import Decision, in_most_networks

MIN_TAU = 0.9
"""Minimum Kendall's tau for the order of one seed's networks to count as recovered."""
SIGNIFICANT_DIGITS = 9
WORDS = ("recovers", "sees", "not monotone", "can't tell", "inverts")
SEEN = WORDS[:2]
CONSTANT = "the same on every rung"
NO_DIRECTION = ", no direction"
"""Suffix for measures without a declared direction, judged as if more were more nonlinear."""


@dataclass(frozen=True)
class Order:
    """The order in which a measure ranks the rungs of a ladder.

    Parameters
    ----------
    tau : float
        Kendall's tau-b between rung and value, mean over seeds; NaN if there are no values.
    low, high : float
        95% t interval over seeds, within [-1, 1].
    seeds, recovered : int
        Number of seeds, and number of seeds with a tau of at least `MIN_TAU`.
    p_rises, p_falls : float
        Exact p-values of `trend_test`; see `adjusted`.
    residual_tau : float
        Kendall's tau-b between the affine residual and the value, mean over seeds.
    taus : tuple of float
        Kendall's tau-b of each seed.
    mark : str
        Reason why the order is not judged; empty if it is judged.
    has_direction : bool
        True if the measure declares which values are more nonlinear.

    Examples
    --------
    >>> Order(0.95, 0.9, 1.0, 8, 8, 1e-6, 1.0).word, Order(0.1, -0.4, 0.4, 8, 0, 0.3, 0.7).word
    ('recovers', 'not monotone')
    """

    tau: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    recovered: int = 0
    p_rises: float = 1.0
    p_falls: float = 1.0
    residual_tau: float = math.nan
    taus: tuple[float, ...] = ()
    mark: str = ""
    has_direction: bool = True

    @property
    def word(self) -> str:
        """One of `WORDS`, with `NO_DIRECTION` if none is declared, or `mark` if not judged.

        A measure sees a ladder if its values rise significantly. It also recovers the ladder if
        most seeds recover the order, which requires at least six seeds. It inverts the ladder if
        its values fall significantly. Otherwise the order is not monotone if the interval of tau
        excludes ±`MIN_TAU`.
        """
        if self.mark:
            return self.mark
        return self._trend if self.has_direction else self._trend + NO_DIRECTION

    @property
    def _trend(self) -> str:
        if self.p_rises < SIGNIFICANCE:
            return "recovers" if self._majority.agrees else "sees"
        if self.p_falls < SIGNIFICANCE:
            return "inverts"
        return "not monotone" if -MIN_TAU < self.low <= self.high < MIN_TAU else "can't tell"

    @property
    def _majority(self) -> Decision:
        """Whether most seeds recover the order."""
        return in_most_networks(np.arange(self.seeds) < self.recovered)

    @property
    def recovery(self) -> Decision:
        """Decision on whether the measure recovers the ladder.

        Examples
        --------
        >>> Order(1.0, 1.0, 1.0, 5, 5, 1e-6, 1.0).recovery
        Decision(agrees=None, needed=6)
        """
        if self._trend in ("inverts", "not monotone"):
            return Decision(False)
        return (
            Decision(None, self._majority.needed) if self._trend == "can't tell" else self._majority
        )

    @property
    def text(self) -> str:
        """Tau with its interval, or with the number of seeds if all agree.

        Examples
        --------
        >>> Order(0.95, 0.8, 1.0, 8).text, Order(1.0, 1.0, 1.0, 3).text
        ('0.95 (0.80 to 1.00)', '1.00 for each of 3 seeds')
        """
        if math.isnan(self.tau):
            return "–"
        if not self.low < self.high:
            return f"{self.tau:.2f} for each of {self.seeds} seeds"
        return f"{self.tau:.2f} ({self.low:.2f} to {self.high:.2f})"


def compute_order(
    cells: pd.DataFrame, description: MeasureInfo, residuals: pd.Series[Any] | None = None
) -> Order:
    """Compute the order in which a measure ranks a ladder.

    Parameters
    ----------
    cells : DataFrame
        The measure's cells on the ladder, with columns ``rung, seed, value, status, reason``.
    description : MeasureInfo
    residuals : Series, optional
        Affine residuals of the networks on the ladder, by ``seed, rung``.

    Examples
    --------
    >>> cells = pd.DataFrame({"rung": [0, 1, 2] * 2, "seed": [0] * 3 + [1] * 3, "status": "ok",
    ...     "value": [3.0, 2.0, 1.0, 5.0, 3.0, 4.0], "reason": ""})
    >>> order = compute_order(cells, MeasureInfo(more_means="less nonlinear"))
    >>> round(order.tau, 3), order.seeds
    (0.667, 2)
    """
    known = cells[(cells.status == "ok") & np.isfinite(cells.value)]
    rungs = cells.rung.nunique()
    if known.rung.nunique() < max(2, rungs / 2):
        reasons = [reason for reason in cells.reason[cells.status != "ok"] if reason]
        return Order(mark=_most_frequent(reasons))
    table = known.pivot_table(index="seed", columns="rung", values="value").map(round_digits)
    if is_constant(known.value.map(round_digits)):
        return Order(mark=CONSTANT)
    table *= description.sense or 1
    blocks = [row.dropna() for _, row in table.iterrows() if row.count() >= max(2, rungs / 2)]
    if not blocks:
        return Order(mark="no network has a value on half of the rungs")
    trend = trend_test(blocks)
    low, high = network_interval(trend.taus) if len(blocks) >= MIN_NETWORKS else (-1.0, 1.0)
    return Order(
        trend.tau,
        max(low, -1.0),
        min(high, 1.0),
        len(blocks),
        sum(tau >= MIN_TAU for tau in trend.taus),
        trend.p_rises,
        trend.p_falls,
        math.nan if residuals is None else _residual_tau(table, residuals),
        trend.taus,
        has_direction=bool(description.sense),
    )


def orders_by_measure(
    cells: pd.DataFrame, descriptions: Mapping[str, MeasureInfo]
) -> dict[tuple[str, str], Order]:
    """Compute the order of each measure on each ladder, adjusted over its ladders."""
    orders: dict[tuple[str, str], Order] = {}
    for measure, rows in cells.groupby("measure", sort=True):
        by_ladder = {
            str(name): compute_order(group, descriptions[str(measure)])
            for name, group in rows.groupby("ladder", sort=False)
        }
        judged = adjusted(by_ladder)
        orders |= {(str(measure), name): order for name, order in judged.items()}
    return orders


def adjusted(orders: Mapping[str, Order]) -> dict[str, Order]:
    """Adjust the p-values of a measure's orders for the number of ladders and both directions.

    Orders are keyed by ladder; ladders that are not judged don't count. Each measure forms its own
    family of tests, so adding a measure changes no verdict.
    """
    judged = {name: order for name, order in orders.items() if not order.mark}
    p_values = holm({n: min(1, 2 * min(o.p_rises, o.p_falls)) for n, o in judged.items()})
    changed = {
        name: replace(
            order,
            p_rises=p_values[name] if order.p_rises < order.p_falls else 1.0,
            p_falls=p_values[name] if order.p_falls < order.p_rises else 1.0,
        )
        for name, order in judged.items()
    }
    return {**orders, **changed}


def _residual_tau(table: pd.DataFrame, residuals: pd.Series[Any]) -> float:
    taus = []
    for seed, row in table.iterrows():
        if seed not in residuals.index.get_level_values(0):
            continue
        both = pd.concat([row, residuals.xs(seed).map(round_digits)], axis=1, keys=[0, 1]).dropna()
        if len(both) > 1 and not any(is_constant(both[column]) for column in both):
            taus.append(float(stats.kendalltau(*both.to_numpy().T).statistic))
    return float(np.mean(taus)) if taus else math.nan


def _most_frequent(reasons: Sequence[str]) -> str:
    return (max(sorted(set(reasons)), key=reasons.count) if reasons else "no value")[:90]


def round_digits(value: float) -> float:
    """Round to nine significant digits, or to 0 below 1e-9."""
    is_zero = abs(value) <= 10.0**-SIGNIFICANT_DIGITS
    return 0.0 if is_zero else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def is_constant(values: pd.Series[Any]) -> bool:
    """Return True if all values are equal."""
    return bool((values == values.iloc[0]).all())
