"""Criteria of verdicts: yes, no and undecided follow from the numbers."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from nlbench.reports.agreement import Correlation, kendall, paired_share, spearman
from nlbench.studies.framework.verdicts import (
    CLAIMED_FRACTION,
    Verdict,
    above,
    below,
    between,
    correlates,
    correlation_text,
    falls,
    in_most_networks,
    mean_and_spread,
    ordered,
    range_text,
    rises,
    share_above,
    share_text,
    sign_test_power,
    within,
)


@pytest.mark.parametrize(("agrees", "word"), [(True, "yes"), (False, "no"), (None, "can't tell")])
def test_an_answer_has_a_word(agrees, word):
    assert Verdict("claim", agrees=agrees).word == word


@pytest.mark.parametrize(
    ("values", "agrees"),
    [
        (0.5, True),
        ([0.4, 0.6], True),
        ([0.4, 0.61], False),
        ([], None),
        (math.nan, None),
        ([0.5, math.nan], None),
        (pd.Series([0.45]), True),
    ],
)
def test_within_a_tolerance(values, agrees):
    assert within(values, 0.5, 0.1) is agrees


def test_tolerances_may_differ_by_value():
    values = [0.1, -0.3]
    assert within(values, 0, [0.1, 0.3])
    assert within(values, 0, [0.3, 0.1]) is False


@pytest.mark.parametrize(
    ("values", "agrees"),
    [((0.1, 0.3), True), ((-0.3, -0.1), False), ((-0.1, 0.3), None), ((), None),
     ((0.1, math.nan), None), ((0.0, 0.3), None)],
)  # fmt: skip
def test_above_and_below_are_opposites(values, agrees):
    assert above(values) is agrees
    assert above(np.array(values) + 7, 7) is agrees
    opposite = None if agrees is None else not agrees
    assert below(values) is opposite
    assert below(np.negative(values)) is agrees


@pytest.mark.parametrize(
    ("interval", "agrees"),
    [((0.2, 0.8), True), ((-0.5, -0.1), False), ((1.1, 1.2), False), ((0.5, 1.1), None),
     ((-1, 2), None), ((math.nan, math.nan), None)],
)  # fmt: skip
def test_between_limits(interval, agrees):
    assert between(interval, (0, 1)) is agrees


@pytest.mark.parametrize(
    ("lower", "higher", "agrees"),
    [([1, 2], [3, 4], True), ([1, 3], [2, 4], False), (1, [2], True), (2, 2, False),
     ([], [1], None), ([1, math.nan], [2], None)],
)  # fmt: skip
def test_groups_are_ordered_where_none_overlap(lower, higher, agrees):
    assert ordered(lower, higher) is agrees


@pytest.mark.parametrize(
    ("values", "agrees"),
    [([1, 2, 3], True), ([1, 3, 2], False), ([1, 1], False), ([1], None), ([1, math.nan], None),
     ([[1, 2], [3, 4]], True), ([[1, 2], [4, 3]], False)],
)  # fmt: skip
def test_curves_rise_at_every_step_or_not(values, agrees):
    assert rises(values) is agrees
    assert falls(np.negative(values)) is agrees


def test_a_step_within_the_tolerance_counts():
    assert rises([1, 1 - 1e-7], 1e-6)
    assert rises([1, 0.9], 1e-6) is False


@pytest.mark.parametrize(
    ("low", "high", "agrees"),
    [(0.2, 0.7, True), (-0.7, -0.2, False), (-0.1, 0.5, None), (0.0, 0.5, None)],
)
def test_correlations_have_a_sign(low, high, agrees):
    correlation = Correlation((low + high) / 2, low, high, 12)
    assert correlates(correlation) is agrees
    assert correlates(correlation, -1) is (None if agrees is None else not agrees)


@pytest.mark.parametrize(("networks", "agrees"), [(3, None), (4, None), (5, True), (6, True)])
@pytest.mark.parametrize("correlation", [spearman, kendall])
def test_perfect_order_of_few_networks_is_undecided(correlation, networks, agrees):
    order = np.arange(networks)
    assert correlates(correlation(order, order)) is agrees
    assert correlates(correlation(order, -order), -1) is agrees


def test_missing_correlation_is_undecided():
    missing = Correlation(math.nan, math.nan, math.nan, 2)
    assert correlates(missing) is None
    assert correlation_text("τ", missing) == "too few networks: 2"


def test_fractions_are_judged_by_their_intervals():
    most, half = paired_share([1.0] * 40), paired_share([1.0, -1.0] * 20)
    assert share_above(most, 0.9) is True
    assert share_above(half) is None
    assert share_above(half, 0.9) is False
    assert share_above(paired_share([]), math.nan) is None


def test_numbers_are_written_with_their_spread():
    assert mean_and_spread(pd.Series([1.0, 2.0])) == "1.50 ± 0.71"
    assert range_text([0.5], ".1f") == "0.5 (0.5 to 0.5)"
    assert share_text(paired_share([1.0] * 15)) == "100% of 15 (80% to 100%)"


@pytest.mark.parametrize(("networks", "needed"), [(0, 6), (1, 6), (3, 6), (5, 6)])
def test_few_networks_need_more(networks, needed):
    decision = in_most_networks([True] * networks)
    assert decision.agrees is None
    assert decision.needed == needed
    verdict = Verdict("claim", agrees=decision.agrees, needed=decision.needed)
    assert verdict.word == "needs 6 networks"


@pytest.mark.parametrize("n", range(6, 40))
def test_most_networks_are_those_of_the_sign_test(n):
    for count in range(n + 1):
        p = binomtest(count, n).pvalue
        expected = count > n / 2 if p < 0.05 else None
        decision = in_most_networks([True] * count + [False] * (n - count))
        if not decision.needed:
            assert decision.agrees is expected


@pytest.mark.parametrize("n", [6, 7, 9, 12, 30])
def test_admitted_criteria_accept_claims_and_their_opposites(n):
    generator = np.random.default_rng(n)
    draws = generator.random((4000, n)) < CLAIMED_FRACTION
    power = sign_test_power(n)
    for answer, holds in ((True, draws), (False, ~draws)):
        share = np.mean([in_most_networks(row).agrees is answer for row in holds])
        assert share == pytest.approx(power, abs=0.025)
        assert share >= 0.8 - 0.025


def test_pairs_that_share_networks_count_by_networks():
    assert in_most_networks([True] * 30, networks=3).needed == 6
    assert in_most_networks([True] * 36, networks=6).agrees is True
    assert in_most_networks([True] * 33 + [False] * 3, networks=6).agrees is None
