"""Criteria of verdicts: yes, no and undecided follow from the numbers."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, norm, t

from nlbench.reports.agreement import Correlation, kendall, spearman
from nlbench.studies.framework.trends import mean_correlation
from nlbench.studies.framework.verdicts import (
    CLAIMED_FRACTION,
    Decision,
    Verdict,
    above,
    all_hold,
    below,
    correlates,
    correlates_weakly,
    correlation_text,
    falls,
    in_most_networks,
    mean_above,
    mean_and_spread,
    mean_below,
    mean_near,
    networks_ordered,
    ordered,
    range_text,
    rises,
    rises_in_networks,
    sign_test_power,
    within,
)


@pytest.mark.parametrize(("agrees", "word"), [(True, "yes"), (False, "no"), (None, "can't tell")])
def test_answer_has_a_label(agrees, word):
    assert Verdict("claim", agrees=agrees).word == word


@pytest.mark.parametrize(
    ("values", "agrees"),
    [(0.5, True), ([0.4, 0.6], True), ([0.4, 0.61], False), ([], None), (math.nan, None),
     ([0.5, math.nan], None), (pd.Series([0.45]), True)],
)  # fmt: skip
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
    ("value", "networks", "answer"),
    [(0.0, 60, True), (0.1, 60, True), (0.3, 60, None), (-0.9, 9, False), (0.0, 20, None)],
)
def test_weak_correlation_needs_an_interval_within(value, networks, answer):
    half = norm.ppf(0.975) / math.sqrt(networks - 3)
    low, high = (math.tanh(math.atanh(value) + sign * half) for sign in (-1, 1))
    decision = correlates_weakly(Correlation(value, low, high, networks), 0.5)
    assert decision.agrees is answer
    assert bool(decision.needed) is (networks == 20)


def test_power_of_a_weak_correlation_is_that_of_none():
    """Spearman's interval is wider at 0.63 than at 0, so as many networks as here suffice."""
    found = spearman(*_pairs_with_correlation(0.63, 42))
    widening = math.sqrt(1 + found.value**2 / 2)
    assert correlates_weakly(found, 0.5).needed > 42
    assert correlates_weakly(found, 0.5, widening) == Decision(None)
    none = spearman(*_pairs_with_correlation(0.0, 42))
    assert correlates_weakly(none, 0.5).agrees


def _pairs_with_correlation(value, networks):
    rng = np.random.default_rng(0)
    pairs = (
        rng.multivariate_normal([0, 0], [[1, value], [value, 1]], networks).T for _ in range(200)
    )
    return min(pairs, key=lambda xy: abs(spearman(*xy).value - value))


@pytest.mark.parametrize("networks", [3, 9, 40])
def test_weak_correlations_are_accepted_with_power(networks):
    """Where the test is used, it accepts unrelated networks in four of five simulated studies."""
    rng = np.random.default_rng(networks)
    spread = 0.9 * math.atanh(0.5) * math.sqrt(networks) / t.ppf([0.975, 0.9], networks - 1).sum()
    drawn = (np.tanh(rng.normal(0, spread, networks)) for _ in range(300))
    intervals = [mean_correlation(values) for values in drawn]
    accepted = [correlates_weakly(interval, 0.5).agrees for interval in intervals]
    limits = [max(-interval.low, interval.high) for interval in intervals]
    assert np.mean(np.array(limits) < 0.5) > 0.7
    assert False not in accepted
    assert all(
        answer is None or limit < 0.5 for answer, limit in zip(accepted, limits, strict=True)
    )


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ([0.71, 0.70, 0.69, 0.70], True),
        ([0.81, 0.80, 0.79, 0.80], False),
        ([0.5, 0.9, 0.7, 0.7], None),
        ([0.7, 0.7, 0.7], True),
    ],
)
def test_mean_is_near_by_its_interval(values, answer):
    decision = mean_near(values, 0.7, 0.05)
    assert decision.agrees is answer
    assert bool(decision.needed) is (answer is None)
    assert mean_near(values[:2], 0.7, 0.05) == Decision(None, 3)


def test_too_few_networks_have_no_weak_correlation():
    unknown = Correlation(0.1, math.nan, math.nan, 2)
    assert correlates_weakly(unknown, 0.5) == Decision(None, 3)


def test_all_parts_of_a_claim_have_to_hold():
    yes, no, few = Decision(True), Decision(False), Decision(None, 6)
    assert all_hold([yes, yes]) == yes
    assert all_hold([yes, few, Decision(None, 3)]) == few
    assert all_hold([few, no]) == no
    assert all_hold([]) == Decision(None)


@pytest.mark.parametrize(
    ("lower", "higher", "agrees"),
    [([1, 2], [3, 4], True), ([3, 4], [1, 2], False), ([1, 3], [2, 4], None), (1, [2], True),
     (2, 2, None), ([], [1], None), ([1, math.nan], [2], None)],
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


def test_numbers_are_written_with_their_spread():
    assert mean_and_spread(pd.Series([1.0, 2.0])) == "1.50 ± 0.71"
    assert range_text([0.5], ".1f") == "0.5 (0.5 to 0.5)"


@pytest.mark.parametrize(("networks", "needed"), [(0, 6), (1, 6), (3, 6), (5, 6)])
def test_few_networks_need_more(networks, needed):
    decision = in_most_networks([True] * networks)
    assert decision.agrees is None
    assert decision.needed == needed
    assert Verdict("claim", agrees=decision).word == "needs 6 networks"


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


@pytest.mark.parametrize("chance", [0.1, 0.4, 0.5, 0.8])
def test_chance_moves_the_majority_that_counts(chance):
    for n in (9, 15):
        for count in range(n + 1):
            test = binomtest(count, n, chance, alternative="greater")
            decision = in_most_networks([True] * count + [False] * (n - count), chance=chance)
            if not decision.needed:
                assert (decision.agrees is True) == (2 * test.pvalue < 0.05)


def test_means_of_few_networks_need_three():
    assert mean_above([1.0, 1.1]) == mean_below([]) == Decision(None, 3)
    assert mean_above([1.0, 1.1, 1.2]) == Decision(True)
    assert mean_above([1.0, 1.1, 1.2], 2.0) == Decision(False)
    assert mean_above([1.0, 5.0, -3.0]) == Decision(None)


@pytest.mark.parametrize(("networks", "decision"), [(5, Decision(None, 6)), (6, Decision(True))])
def test_equal_values_are_not_certain(networks, decision):
    assert mean_above([1.0] * networks) == decision
    assert mean_below([-1.0] * networks) == decision


def test_trends_need_several_networks():
    rising = [[1, 2, 3], [2, 5, 7], [0, 1, 9]]
    assert rises_in_networks(rising) == Decision(True)
    assert rises_in_networks(-np.array(rising)) == Decision(False)
    assert rises_in_networks(rising[:2]) == Decision(None, 3)
    assert rises_in_networks([[1, 2]] * 5) == Decision(None, 6)
    assert rises_in_networks([[1, 3, 2], [3, 1, 2], [2, 1, 3]]) == Decision(None)
    assert rises_in_networks([[1.0]]) == rises_in_networks([]) == Decision(None)


@pytest.mark.parametrize(("fewer", "more", "needed"), [(2, 5, 3), (3, 3, 4), (1, 1, 4), (1, 38, 3)])
def test_orders_likely_by_chance_need_more_networks(fewer, more, needed):
    low, high = np.arange(fewer), 100 + np.arange(more)
    assert networks_ordered(low, high) == networks_ordered(high, low) == Decision(None, needed)
    enough = np.arange(needed)
    larger = 100 + np.arange(max(more, needed))
    assert networks_ordered(enough, larger) == Decision(True)
    assert networks_ordered(larger, enough) == Decision(False)
    assert 2 / math.comb(len(enough) + len(larger), needed) < 0.05


def test_no_number_of_networks_orders_groups_that_overlap():
    assert networks_ordered([1, 4], [2, 3, 5]) == Decision(None)
