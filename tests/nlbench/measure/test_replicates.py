import math

import numpy as np
import pytest
from scipy import stats

from nlbench.measure import Result, Value
from nlbench.measure.replicates import (
    GROUPS,
    combine,
    difference_error,
    group_index,
    interval,
    standard_error,
)


def leave_out(samples, function):
    groups = np.array([group_index(index) for index in range(len(samples))])
    return tuple(function(samples[groups != group]) for group in range(GROUPS))


def test_groups_are_equal_and_follow_the_index():
    counts = np.bincount([group_index(index) for index in range(20)], minlength=GROUPS)
    assert len(counts) == GROUPS
    assert counts.max() - counts.min() <= 1
    assert group_index(3) == group_index(3 + GROUPS)


def test_error_of_mean_is_that_of_group_means():
    samples = np.random.default_rng(0).normal(size=80)
    means = samples.reshape(-1, GROUPS).mean(0)
    assert standard_error(leave_out(samples, np.mean)) == pytest.approx(stats.sem(means))


def test_interval_is_students():
    replicates = leave_out(np.random.default_rng(1).normal(size=80), np.mean)
    low, high = interval(0.5, replicates, level=0.9)
    expected = stats.t.interval(0.9, GROUPS - 1, 0.5, standard_error(replicates))
    assert (low, high) == pytest.approx(expected)


@pytest.mark.parametrize("replicates", [(), (1.0,), (1.0, math.nan)])
def test_error_is_unknown_without_replicates(replicates):
    assert standard_error(replicates) is None
    assert interval(1.0, replicates) is None
    assert difference_error(replicates, (1.0, 2.0), paired=False) is None
    assert difference_error(replicates, (1.0, 2.0), paired=True) is None


def test_pairing_removes_the_common_part():
    generator = np.random.default_rng(2)
    common = generator.normal(size=160)
    first = leave_out(common + 0.01 * generator.normal(size=160), np.mean)
    second = leave_out(common, np.mean)
    paired = difference_error(first, second, paired=True)
    assert paired < 0.1 * difference_error(first, second, paired=False)
    assert difference_error(first, second, paired=False) == pytest.approx(
        math.hypot(standard_error(first), standard_error(second))
    )


def test_paired_difference_needs_the_same_groups():
    assert difference_error((1.0, 2.0), (1.0, 2.0, 3.0), paired=True) is None


def test_function_of_values_is_that_of_replicates():
    samples = np.random.default_rng(3).lognormal(size=4000)
    ratio = combine(lambda a, b: a / b, leave_out(samples, np.mean), leave_out(samples, np.median))
    assert ratio == pytest.approx(leave_out(samples, lambda x: x.mean() / np.median(x)))
    assert combine(lambda a: 1 / a, (0.0, 1.0)) == ()
    assert combine(lambda a: a, (math.inf, 1.0)) == ()


def test_summary_combines_the_places():
    values = [
        Value("a", {"value": 1.0}, replicates=(1.0, 2.0)),
        Value.missing("b", "undefined", ""),
    ]
    values.append(Value("c", {"value": 2.0}, replicates=(2.0, 5.0)))
    result = Result.of(values)
    assert result.replicates == (1.5, 3.5)
    assert result.numbers["error"] == pytest.approx(standard_error((1.5, 3.5)))
    values.append(Value("d", {"value": 2.0}))
    assert Result.of(values).replicates == ()
    assert "error" not in Result.of(values).numbers


def test_replicates_are_rounded():
    assert Value("a", {"value": 1.0}, replicates=(1 / 3, 2e-30 / 3)).replicates == (
        0.333333333,
        6.66666667e-31,
    )


@pytest.mark.parametrize("part", [Value, Result])
def test_replicates_at_a_limit_are_dropped(part):
    def replicates(value, numbers):
        statistics = {"value": value}
        args = ("a", statistics) if part is Value else (statistics,)
        return part(*args, replicates=numbers).replicates

    assert replicates(0.966, (1.0, 1.0, 1.0 - 1e-8)) == ()
    assert replicates(1.0, (1.0, 1.0, 1.0)) == (1.0, 1.0, 1.0)
    assert replicates(0.1 + 0.2, (0.3, 0.3, 0.3)) == (0.3, 0.3, 0.3)
    assert len(replicates(0.966, (1.0, 0.99, 1.0))) == 3
