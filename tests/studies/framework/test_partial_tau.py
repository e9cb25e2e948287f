"""Partial rank correlation against SciPy and in planted cases."""

import numpy as np
import pytest
from scipy import stats

from nlbench.studies.framework.partial_tau import associate, kendall_tau, partial_tau


def draws(seed, count, n):
    return np.random.default_rng(seed).standard_normal((count, n))


@pytest.mark.parametrize("decimals", [0, 8])
def test_tau_is_scipys_with_ties(decimals):
    x, y = draws(0, 2, 40).round(decimals)
    assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)


def test_tau_of_several_resamples_at_once():
    x, y = draws(1, 2, 30).reshape(2, 3, 10)
    expected = [stats.kendalltau(a, b).statistic for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(kendall_tau(x, y), expected)


def test_residuals_are_those_of_normal_scores():
    x, y, z = draws(2, 3, 50)
    scores = [stats.norm.ppf(stats.rankdata(v) / 51) for v in (x, y, z)]
    left = [v - np.polyval(np.polyfit(scores[2], v, 1), scores[2]) for v in scores[:2]]
    assert partial_tau(x, y, [z]) == pytest.approx(stats.kendalltau(*left).statistic)


def test_partial_tau_ignores_increasing_maps():
    x, y, z = draws(3, 3, 50)
    changed = partial_tau(np.exp(x), y**3, [np.arctan(z)])
    assert partial_tau(x, y, [z]) == pytest.approx(changed)


def test_confounding_by_size_leaves_no_partial_tau():
    size, first, second = draws(4, 3, 1500)
    x, y = size + first / 2, size + second / 2
    tau = stats.kendalltau(x, y).statistic
    taus = stats.kendalltau(x, size).statistic, stats.kendalltau(y, size).statistic
    kendalls = (tau - taus[0] * taus[1]) / np.sqrt((1 - taus[0] ** 2) * (1 - taus[1] ** 2))
    assert tau > 0.5
    assert kendalls > 0.1
    assert abs(partial_tau(x, y, [size])) < 0.04


def test_planted_correlation_is_recovered_under_a_control():
    size, shared, first, second = draws(5, 4, 1500)
    # Given the size, the correlation is 1 / (1 + 1) = 1/2, and tau 2/π arcsin(1/2) = 1/3.
    x, y = 3 * size + shared + first, shared + second - 2 * size
    assert stats.kendalltau(x, y).statistic < 0
    assert partial_tau(x, y, [size]) == pytest.approx(1 / 3, abs=0.04)


def test_variable_that_the_controls_determine_has_no_partial_tau():
    x, y, z = draws(6, 3, 30)
    assert np.isnan(partial_tau(2 * z, y, [z]))
    assert np.isnan(associate([(z**3, y, [z])]).value)
    assert np.isfinite(partial_tau(x, y, [z]))


def test_p_value_of_one_group_is_scipys_without_controls():
    x, y = draws(7, 2, 60)
    expected = stats.kendalltau(x, y, method="asymptotic")
    association = associate([(x, y, [])])
    assert association.value == pytest.approx(expected.statistic)
    assert association.p == pytest.approx(expected.pvalue, rel=0.01)


def test_null_is_rejected_at_the_nominal_rate():
    p_values = []
    for seed in range(200):
        groups = []
        for part in draws([8, seed], 2, 3 * 30).reshape(2, 3, 30).swapaxes(0, 1):
            size, loss = draws([9, seed], 2, 30)
            groups.append((part[0] + size, part[1] + loss, [size, loss]))
        values = [partial_tau(x, y, given) for x, y, given in groups]
        p_values.append(associate_p(values, 28))
    rate = np.mean(np.array(p_values) < 0.05)
    assert 0.01 < rate < 0.1


def associate_p(values, freedom):
    """Return the p-value of `associate` without its bootstrap."""
    variance = len(values) * 2 * (2 * freedom + 5) / (9 * freedom * (freedom - 1))
    return 2 * stats.norm.sf(abs(sum(values)) / np.sqrt(variance))


def test_interval_holds_the_planted_value_and_groups_keep_their_place():
    shared, first, second = draws(12, 3, 160).reshape(3, 2, 80)
    one, other = ((s + a, s + b, []) for s, a, b in zip(shared, first, second, strict=True))
    association = associate([one, (np.ones(80), first[0], []), other])
    assert association.low < 1 / 3 < association.high
    values = [stats.kendalltau(*group[:2]).statistic for group in (one, other)]
    assert association.by_group == pytest.approx((values[0], np.nan, values[1]), nan_ok=True)
    assert association.value == pytest.approx(np.mean(values))
    assert association.networks == 160


def test_missing_values_leave_networks_out():
    x, y = draws(11, 2, 20)
    x[:5] = np.nan
    association = associate([(x, y, [])])
    assert association.networks == 15
    assert association.value == pytest.approx(stats.kendalltau(x[5:], y[5:]).statistic)
    assert np.isnan(associate([(x[:7], y[:7], [])]).value)
