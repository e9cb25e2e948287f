"""Correlations of measures, and shares of paired differences."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scores import scores_of
from scipy.stats import pearsonr

from nlbench.reports.agreement import agreement, agreement_frame, kendall, spearman, within_groups
from nlbench.reports.leaderboard import leaderboard

numbers = st.floats(-100, 100)
pairs = st.lists(st.tuples(numbers, numbers), min_size=3, max_size=12)


def ranks(values):
    """Average ranks, by counting."""
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def varied(points):
    return all(len({point[axis] for point in points}) > 1 for axis in (0, 1))


@given(pairs.filter(varied))
def test_spearman_is_pearson_of_the_ranks(points) -> None:
    x, y = zip(*points, strict=True)
    expected = pearsonr(ranks(x), ranks(y)).statistic
    assert spearman(x, y).value == pytest.approx(expected, abs=1e-9)


@given(pairs.filter(varied))
def test_kendall_counts_pairs(points) -> None:
    score, one, other = 0.0, 0, 0
    for (a, b), (c, d) in itertools.combinations(points, 2):
        score += np.sign(a - c) * np.sign(b - d)
        one += a != c
        other += b != d
    found = kendall(*zip(*points, strict=True))
    assert found.value == pytest.approx(score / math.sqrt(one * other), abs=1e-9)


def test_intervals_have_their_stated_coverage() -> None:
    random = np.random.default_rng(0)
    # Spearman's ρ of a normal pair whose Pearson correlation is r.
    truth = 6 / math.pi * math.asin(0.6 / 2)
    covered = 0
    for _ in range(400):
        x, e = random.normal(size=(2, 25))
        found = spearman(x, 0.6 * x + 0.8 * e)
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("correlate", [spearman, kendall])
def test_too_few_or_constant_numbers_have_no_correlation(correlate) -> None:
    assert math.isnan(correlate([1, 2], [3, 4]).value)
    assert math.isnan(correlate([1, 2, 3], [5, 5, 5]).value)
    assert correlate([1, 2, 3, math.nan], [1, 2, 3, 4]).n == 3


@pytest.mark.parametrize("correlate", [spearman, kendall])
@pytest.mark.parametrize("sign", [1, -1])
def test_significant_perfect_orders_have_an_interval(correlate, sign) -> None:
    lows = []
    for n in range(3, 30):
        found = correlate(range(n), sign * np.arange(n))
        low, high = sorted((sign * found.low, sign * found.high))
        assert found.value == pytest.approx(sign)
        if n < 5:  # 2 of 24 orders of four values are perfect: p = 0.083
            assert math.isnan(low)
        else:
            assert 0 < low < 1 == high
            lows.append(low)
    assert lows == sorted(lows)
    assert lows[-1] > 0.99


@pytest.mark.parametrize("n", [4, 5, 6])
def test_decided_orders_are_significant_by_permutation(n) -> None:
    orders = list(itertools.permutations(range(n)))
    rhos = [spearman(range(n), order) for order in orders]
    sizes = np.abs([rho.value for rho in rhos])
    for rho in rhos:
        if rho.low > 0 or rho.high < 0:
            assert np.mean(sizes >= abs(rho.value) - 1e-9) < 0.05
    assert any(rho.low > 0 for rho in rhos) is (n > 4)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=4, max_size=7).filter(varied)
)
def test_ties_count_in_the_smallest_p_value(points) -> None:
    x, y = zip(*points, strict=True)
    found = spearman(x, y)
    sign = 1 if found.value > 0 else -1
    products = [sign * np.dot(x, order) for order in itertools.permutations(y)]
    p = 2 * np.mean(np.array(products) == max(products))
    assert math.isfinite(found.low) is bool(p < 0.05)


@given(st.lists(pairs, min_size=1, max_size=4), st.lists(numbers, min_size=4, max_size=4))
def test_group_level_does_not_affect_within_groups(groups, shifts) -> None:
    plain = [tuple(zip(*points, strict=True)) for points in groups]
    moved = [
        (np.array(x) + shift, np.array(y) - shift)
        for (x, y), shift in zip(plain, shifts, strict=False)
    ]
    first, second = within_groups(plain), within_groups(moved)
    spread = min(np.ptp(axis) for pair in plain for axis in pair)
    if spread > 1e-3:
        assert first.value == pytest.approx(second.value, abs=1e-6)
    assert first.n == second.n == sum(map(len, groups))


def test_single_groups_have_pearsons_fisher_interval() -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(2, 40))
    found = within_groups([(x, x + y)])
    expected = pearsonr(x, x + y)
    assert found.value == pytest.approx(expected.statistic)
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_groups_without_pairs_or_variation_have_no_correlation() -> None:
    for groups, n, kept in [([], 0, 0), ([([1], [2])], 0, 0), ([([1, 1], [2, 3])], 2, 1)]:
        found = within_groups(groups)
        assert math.isnan(found.value)
        assert math.isnan(found.low)
        assert (found.n, found.groups) == (n, kept)


def test_groups_of_different_levels_do_not_agree_within() -> None:
    groups = [([0, 1, 0, 1], [0, 0, 1, 1]), ([50, 51, 50, 51], [50, 50, 51, 51])]
    assert within_groups(groups).value == 0
    assert pearsonr(*(np.concatenate(side) for side in zip(*groups, strict=True))).statistic > 0.99


def test_directions_are_undone_and_networks_counted_once(conftest) -> None:
    rows = []
    for number, seed in itertools.product(range(5), (0, 1)):
        subject = (f"m{number}", "init", "d", seed)
        rows += conftest.cell_rows(subject, "low", {"a": 1.0 - number / 10, "b": 0.5})
        rows += conftest.cell_rows(subject, "high", {"a": 3.0 + number, "b": 2.0})
    measures = {
        "low": {"more_means": "less nonlinear", "probe": "sites"},
        "high": {"more_means": "more nonlinear", "probe": "sites"},
    }
    scores = scores_of(conftest.frame(rows), measures)
    found = agreement(leaderboard(scores), scores)
    assert {kind: list(pairs) for kind, pairs in found.items()} == {
        kind: [("low", "high")] for kind in ("spearman", "kendall", "pearson")
    }
    over = found["spearman"]["low", "high"]
    assert (over.value, over.n) == (1.0, 5)
    inside = found["pearson"]["low", "high"]
    assert (inside.n, inside.groups) == (20, 10)
    frame = agreement_frame(found)
    assert frame["coefficient"].tolist() == ["spearman", "kendall", "pearson"]
