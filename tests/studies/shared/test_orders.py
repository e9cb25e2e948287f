"""Orders of a ladder: Kendall's tau, its tests and its words."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nlbench.reports.tables import MeasureInfo
from nlbench.studies.shared.orders import Order, adjusted, compute_order, round_digits

MORE = MeasureInfo(more_means="more nonlinear")
LESS = MeasureInfo(more_means="less nonlinear")


def cells(values, statuses="ok"):
    """Values by seed and rung."""
    rows = [(r, s, v, statuses, "because") for s, of in enumerate(values) for r, v in enumerate(of)]
    return pd.DataFrame(rows, columns=["rung", "seed", "value", "status", "reason"])


def test_tau_is_kendalls_of_each_seed():
    values = np.random.default_rng(0).normal(size=(4, 6)).round(1)
    taus = [stats.kendalltau(range(6), row, variant="b").statistic for row in values]
    order = compute_order(cells(values), MORE)
    assert order.tau == pytest.approx(np.mean(taus))
    assert -1 <= order.low <= order.tau <= order.high <= 1
    turned = compute_order(cells(values), LESS)
    assert turned.tau == pytest.approx(-order.tau)
    assert turned.p_rises == pytest.approx(order.p_falls)


def test_tau_by_hand():
    # Of six pairs one is the wrong way round, then two.
    order = compute_order(cells([[1, 3, 2, 4], [2, 1, 4, 3]]), MORE)
    assert order.tau == pytest.approx((4 / 6 + 2 / 6) / 2)


@pytest.mark.parametrize(
    ("values", "about", "word"),
    [
        ([[1, 2, 3, 4]] * 6, MORE, "recovers"),
        ([[1, 2, 3, 4]] * 5, MORE, "sees"),  # Too few networks for more than half of all.
        ([[1, 2, 3, 4]] * 7 + [[1, 2, 4, 3]], MORE, "sees"),
        ([[1, 2, 3, 4]] * 5, LESS, "inverts"),
        ([[1, 2, 4, 3]] * 8, MORE, "sees"),
        ([[1, 2]] * 3, MORE, "can't tell"),
        ([[1, 2]] * 8, MORE, "recovers"),
        ([[1, 2, 3], [3, 2, 1]] * 4, MORE, "not monotone"),
        ([[0, 9, 8, 6, 3]] * 5, MORE, "not monotone"),  # Tau is -0.2 for each network.
        ([[0, 9, 8, 6, 3]] * 2, MORE, "can't tell"),
        ([[7, 7, 7], [7, 7, 7 + 1e-12]], MORE, "the same on every rung"),
        ([[1, 2, 3], [2, 3, 4]], MeasureInfo(), "sees, no direction"),
    ],
)
def test_order_has_a_label(values, about, word):
    assert compute_order(cells(values), about).word == word


def test_network_with_few_values_has_no_order():
    table = cells([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [9, 8, np.nan, np.nan, np.nan]])
    table.loc[table.value.isna(), "status"] = "undefined"
    order = compute_order(table, MORE)
    assert (order.tau, order.seeds) == (1.0, 2)
    few = cells([[1, 2, np.nan, np.nan, np.nan]] * 2 + [[np.nan, np.nan, 3, np.nan, np.nan]])
    assert compute_order(few, MORE).mark == "no network has a value on half of the rungs"


def test_fewer_networks_only_weaken_the_verdict():
    """All verdicts of three networks out of eight are those of eight, or weaker."""
    weaker = {"recovers": {"recovers", "sees"}, "sees": {"sees"}, "inverts": {"inverts"}}
    rng = np.random.default_rng(0)
    for slope in np.repeat([-2, -0.5, 0.5, 2], 10):
        values = slope * np.arange(5) + 0.5 * rng.normal(size=(8, 5))
        full = compute_order(cells(values), MORE).word
        quick = compute_order(cells(values[:3]), MORE).word
        assert quick in {"can't tell", *weaker.get(full, ())}


def test_recovery_grows_with_the_evidence():
    """Further networks that recover the order never take a yes back."""
    answers = [Order(0.9, 0.8, 1.0, n, n, p_rises=0.001).recovery for n in range(1, 30)]
    assert [answer.agrees for answer in answers] == [None] * 5 + [True] * 24
    assert {answer.needed for answer in answers} == {6, 0}
    counts = [Order(0.9, 0.8, 1.0, 12, k, p_rises=0.001).recovery.agrees for k in range(13)]
    assert counts == [False] * 3 + [None] * 7 + [True] * 3


def test_certain_orders_of_another_kind_are_not_recovered():
    for order in (Order(-0.9, -1, -0.8, 5, p_falls=0.01), Order(-0.2, -0.2, -0.2, 5)):
        assert order.recovery.agrees is False
    assert Order(0.5, -1, 1, 2).recovery.needed == 6
    assert Order(0.5, 0, 1, 8).recovery.needed == 0


def test_p_values_are_adjusted_over_ladders_of_measure():
    order = Order(0.9, 0.8, 1.0, 8, 8, 0.01, 0.99)
    marked = Order(math.nan, math.nan, math.nan, mark="no value")
    orders = adjusted({"a": order, "b": replace(order, p_rises=0.2, p_falls=0.8), "c": marked})
    assert orders["a"].p_rises == pytest.approx(0.04)  # Two ladders, both sides.
    assert orders["b"].p_rises == pytest.approx(0.4)
    assert orders["c"] == marked
    falling = adjusted({"a": replace(order, p_rises=0.999, p_falls=0.002)})["a"]
    assert (falling.p_rises, falling.p_falls) == pytest.approx((1, 0.004))
    assert falling.word == "inverts"


def test_the_order_against_the_affine_residual():
    values = [[1, 2, 3], [1, 2, 3]]
    index = pd.MultiIndex.from_product([[0, 1], [0, 1, 2]], names=["seed", "rung"])
    residuals = pd.Series([0.1, 0.3, 0.2, 0.3, 0.2, 0.1], index)
    assert compute_order(cells(values), MORE, residuals).residual_tau == pytest.approx(
        (1 / 3 - 1) / 2
    )


def test_measure_without_values_is_marked_with_the_reason():
    order = compute_order(cells([[math.nan] * 3], "undefined"), MORE)
    assert order.word == "because"
    assert order.text == "–"


def test_rounding_keeps_nan_and_drops_rounding_errors():
    assert math.isnan(round_digits(math.nan))
    assert round_digits(1 + 1e-12) == 1
    assert round_digits(-1e-10) == 0
