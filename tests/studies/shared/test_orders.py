"""Orders of a ladder: Kendall's tau, its interval, and the intraclass correlation."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from nlbench.studies.shared.orders import intraclass, order_of, round_digits

MORE, LESS = {"more_means": "more nonlinear"}, {"more_means": "less nonlinear"}


def cells(values, statuses="ok"):
    """Values by seed and rung."""
    rows = [(r, s, v, statuses, "because") for s, of in enumerate(values) for r, v in enumerate(of)]
    return pd.DataFrame(rows, columns=["rung", "seed", "value", "status", "reason"])


def test_tau_is_kendalls_of_each_seed_and_its_interval_students():
    values = np.random.default_rng(0).normal(size=(4, 6)).round(1)
    taus = [stats.kendalltau(range(6), row, variant="b").statistic for row in values]
    found = order_of(cells(values), MORE)
    assert found.tau == pytest.approx(np.mean(taus))
    low, high = stats.t.interval(0.95, 3, np.mean(taus), stats.sem(taus))
    assert (found.low, found.high) == pytest.approx((max(-1, low), min(1, high)))
    turned = order_of(cells(values), LESS)
    assert turned.tau == pytest.approx(-found.tau)


def test_tau_by_hand():
    # Of six pairs one is the wrong way round, then two.
    found = order_of(cells([[1, 3, 2, 4], [2, 1, 4, 3]]), MORE)
    assert found.tau == pytest.approx((4 / 6 + 2 / 6) / 2)
    assert found.word == "can't tell"


@pytest.mark.parametrize(
    ("values", "about", "word"),
    [
        ([[1, 2, 3], [2, 3, 4], [5, 6, 9]], MORE, "recovers"),
        ([[1, 2, 3], [2, 3, 4], [5, 6, 9]], LESS, "inverts"),
        ([[1, 2, 3, 4], [1, 2, 4, 3], [1, 2, 3, 4]], MORE, "sees"),
        ([[7, 7, 7], [7, 7, 7 + 1e-12]], MORE, "the same on every rung"),
        ([[1, 2, 3], [2, 3, 4]], {"more_means": "neither"}, "no direction"),
    ],
)
def test_an_order_has_a_word(values, about, word):
    found = order_of(cells(values), about)
    # Two seeds of three out of four pairs: Student's interval is wide.
    assert found.word == word or (word == "sees" and found.tau == pytest.approx(8 / 9))


def test_a_measure_without_values_is_marked_with_the_reason():
    found = order_of(cells([[math.nan] * 3], "undefined"), MORE)
    assert found.word == "because"
    assert found.text == "–"


def test_the_intraclass_correlation_is_that_of_a_published_example():
    # Shrout and Fleiss, table 2: six targets, four judges; ICC(1, 1) is 0.17.
    table = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
    assert intraclass(table) == pytest.approx(0.166, abs=1e-3)
    f = stats.f_oneway(*table).statistic
    assert intraclass(table) == pytest.approx((f - 1) / (f + 3))
    assert math.isnan(intraclass([[1, 1], [1, 1]]))


def test_rounding_keeps_nan_and_drops_rounding_errors():
    assert math.isnan(round_digits(math.nan))
    assert round_digits(1 + 1e-12) == 1
    assert round_digits(-1e-10) == 0
