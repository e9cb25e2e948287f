"""Partial rank correlation against SciPy and in planted cases."""

import numpy as np
import pytest
from scipy import stats

from nlbench.studies.framework.partial_tau import associate


def partial_tau(x, y, controls):
    return associate([(x, y, controls, range(len(x)))]).value


def draws(seed, count, n):
    return np.random.default_rng(seed).standard_normal((count, n))


@pytest.mark.parametrize("decimals", [0, 8])
def test_tau_without_controls_is_scipys_with_ties(decimals):
    x, y = draws(0, 2, 40).round(decimals)
    assert partial_tau(x, y, []) == pytest.approx(stats.kendalltau(x, y).statistic)


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


def test_variable_that_controls_determine_has_no_partial_tau():
    x, y, z = draws(6, 3, 30)
    assert np.isnan(partial_tau(2 * z, y, [z]))
    assert np.isnan(associate([(z**3, y, [z], range(30))]).value)
    assert np.isfinite(partial_tau(x, y, [z]))


def studies(seed, *, shape_effect, signal=0.0, shapes=15, networks=4):
    """Return three groups of shapes that differ in size and in effects on both variables."""
    random, groups = np.random.default_rng([8, seed]), []
    for _ in range(3):
        size, *effects = random.standard_normal((3, shapes)).repeat(networks, 1)
        loss, *noise = random.standard_normal((3, shapes * networks))
        first, second = shape_effect * np.array(effects) + noise
        labels = random.permutation(48)[:shapes].repeat(networks)
        groups.append((first + size, second + signal * first + loss, [size, loss], labels))
    return groups


@pytest.mark.parametrize("shape_effect", [0, 2])
def test_null_is_rejected_at_the_nominal_rate(shape_effect):
    results = [associate(studies(seed, shape_effect=shape_effect)) for seed in range(400)]
    assert 0.02 < np.mean([result.p < 0.05 for result in results]) < 0.08
    assert all((result.p < 0.05) == (result.low * result.high > 0) for result in results)


def test_planted_association_survives_shape_effects():
    results = [associate(studies(seed, shape_effect=2, signal=0.6)) for seed in range(50)]
    assert np.mean([result.p < 0.05 for result in results]) > 0.9


def weighted_tau(x, y, weights):
    first, second = (np.sign(v[:, None] - v) for v in (x, y))
    pairs = np.outer(weights, weights)
    untied = (pairs * first**2).sum() * (pairs * second**2).sum()
    return (pairs * first * second).sum() / np.sqrt(untied)


@pytest.mark.parametrize("decimals", [0, 8])
def test_standard_error_sums_derivatives_by_weights_of_clusters(decimals):
    x, y = (2 * draws(13, 2, 10).repeat(4, 1) + draws(14, 2, 40)).round(decimals)
    labels = np.arange(10).repeat(4)
    slopes = [
        (weighted_tau(x, y, 1 + 1e-6 * (labels == label)) - weighted_tau(x, y, np.ones(40))) / 1e-6
        for label in range(10)
    ]
    error = np.sqrt(10 / 9 * np.sum(np.square(slopes)))
    result = associate([(x, y, [], labels)])
    assert result.low == pytest.approx(result.value - stats.t.ppf(0.975, 9) * error, abs=1e-5)
    assert result.p == pytest.approx(2 * stats.t.sf(abs(result.value) / error, 9), rel=1e-3)


def test_labels_shared_by_groups_are_one_cluster():
    (x, y, controls, labels), *_ = studies(0, shape_effect=2, signal=1)
    group, other = (x, y, controls, labels), (x, y, controls, labels + 100)
    once, same, apart = (associate([group, *more]) for more in ([], [group], [other]))
    assert (once.clusters, same.clusters, apart.clusters) == (15, 15, 30)
    assert (same.low, same.p) == pytest.approx((once.low, once.p))
    assert apart.low > same.low


def test_perfect_agreement_is_not_certain():
    x = np.arange(8.0)
    result = associate([(x, x, [], range(8))])
    kendall = np.sqrt(2 * (2 * 8 + 5) / (9 * 8 * 7))
    assert result.value == result.high == 1
    assert result.low == pytest.approx(1 - stats.t.ppf(0.975, 7) * kendall)


def test_too_few_clusters_have_no_interval():
    x, y, z = draws(14, 3, 12)
    result = associate([(x, y, [z], np.arange(2).repeat(6))])
    assert np.isfinite(result.value)
    assert np.isnan([result.low, result.high]).all()
    assert result.p == 1


def test_interval_contains_planted_value():
    shared, first, second = draws(12, 3, 160).reshape(3, 2, 80)
    one, other = (
        (s + a, s + b, [], range(start, start + 80))
        for s, a, b, start in zip(shared, first, second, (0, 80), strict=True)
    )
    association = associate([one, (np.ones(80), first[0], [], range(80)), other])
    assert association.low < 1 / 3 < association.high
    values = [stats.kendalltau(*group[:2]).statistic for group in (one, other)]
    assert association.by_group == pytest.approx((values[0], np.nan, values[1]), nan_ok=True)
    assert association.value == pytest.approx(np.mean(values))
    assert association.networks == association.clusters == 160


def test_missing_values_leave_networks_out():
    x, y = draws(11, 2, 20)
    x[:5] = np.nan
    association = associate([(x, y, [], range(20))])
    assert association.networks == association.clusters == 15
    assert association.value == pytest.approx(stats.kendalltau(x[5:], y[5:]).statistic)
    assert np.isnan(associate([(x[:7], y[:7], [], range(7))]).value)
