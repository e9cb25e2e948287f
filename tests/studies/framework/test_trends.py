"""Trend tests against all permutations, SciPy and published examples."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from nlbench.studies.framework.trends import holm, network_interval, trend_test


def concordance(values):
    return sum(np.sign(b - a) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize(
    "blocks",
    [
        [[1, 3, 2, 4]],
        [[1, 3, 2], [2, 1, 3], [1, 2, 3]],
        [[1, 1, 2], [2, 2, 1]],
        [[0, 0, 1, 1, 1], [3, 2, 2]],
        [[5, 5, 5], [1, 2, 3]],
    ],
)
def test_p_values_are_those_of_all_permutations(blocks):
    observed = sum(concordance(block) for block in blocks)
    every = [
        sum(map(concordance, orders))
        for orders in itertools.product(*(list(itertools.permutations(b)) for b in blocks))
    ]
    trend = trend_test(blocks)
    assert trend.p_rises == pytest.approx(np.mean([s >= observed for s in every]))
    assert trend.p_falls == pytest.approx(np.mean([s <= observed for s in every]))


def test_single_block_equals_kendalls_exact_test():
    values = np.random.default_rng(0).normal(size=9)
    expected = stats.kendalltau(range(9), values, alternative="greater", method="exact")
    trend = trend_test([values])
    assert trend.p_rises == pytest.approx(expected.pvalue)
    assert trend.tau == pytest.approx(expected.statistic)


@pytest.mark.parametrize("size", [19, 20, 25, 40])
def test_p_values_with_ties_equal_enumeration(size):
    # The smaller values, in all places that they can take among the others: by dynamic programming.
    smaller = size // 3
    values = np.random.default_rng(size).permutation([0] * smaller + [1] * (size - smaller))
    ways = {(0, 0): 1}
    for place in range(size):
        placed = {}
        for (used, falls), count in ways.items():
            for is_small in (True, False):
                larger_before = place - used
                key = (used + is_small, falls + is_small * larger_before)
                placed[key] = placed.get(key, 0) + count
        ways = placed
    counts = {falls: n for (used, falls), n in ways.items() if used == smaller}
    observed = sum(int(a > b) for a, b in itertools.combinations(values.tolist(), 2))
    total = math.comb(size, smaller)
    trend = trend_test([values])
    assert trend.p_rises == sum(n for falls, n in counts.items() if falls <= observed) / total
    assert trend.p_falls == sum(n for falls, n in counts.items() if falls >= observed) / total


def test_exact_test_agrees_with_pages_at_extremes():
    table = np.tile(np.arange(5), (4, 1))
    page = stats.page_trend_test(table, method="exact").pvalue
    assert trend_test(list(table)).p_rises == pytest.approx(page) == pytest.approx(120.0**-4)


def test_tau_handles_ties_as_tau_b():
    values = [1, 2, 2, 3, 1, 4]
    expected = stats.kendalltau(range(6), values, variant="b").statistic
    assert trend_test([values]).tau == pytest.approx(expected)
    assert trend_test([[7, 7, 7]]).taus == (0.0,)


def test_the_size_of_the_test_is_its_level():
    rng = np.random.default_rng(1)
    rejected = [trend_test(list(rng.normal(size=(4, 4)))).p_rises < 0.05 for _ in range(800)]
    assert 0.015 < np.mean(rejected) < 0.055  # Attainable levels are discrete.


def test_holm_is_that_of_a_published_example():
    # Wright, "Adjusted P-values for simultaneous inference", Biometrics 48, 1992: three tests.
    adjusted = holm({"a": 0.0099, "b": 0.0131, "c": 0.9847})
    assert adjusted["a"] == pytest.approx(0.0297)
    assert adjusted["b"] == pytest.approx(0.0297)
    assert adjusted["c"] == pytest.approx(0.9847)
    assert holm({}) == {}


@pytest.mark.parametrize("size", [3, 8, 25])
def test_the_interval_covers_the_mean(size):
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(300):
        low, high = network_interval(rng.normal(size=size))
        covered.append(low < 0 < high)
    assert 0.91 < np.mean(covered) <= 0.98


def test_fewer_than_three_networks_have_no_interval():
    assert np.isnan(network_interval([1.0, 1.1])).all()
    assert np.isfinite(network_interval([1.0, 1.1, 1.2])).all()
