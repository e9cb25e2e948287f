"""Standard errors, intervals and tests of differences from replicates."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scores import Replicates, scores_of

from nlbench.reports.compare import compare_scores, mark_significant
from nlbench.reports.estimates import (
    Change,
    Estimate,
    change,
    exceeding,
    over_seeds,
    pairwise_excesses,
    relative_change,
)
from nlbench.reports.tables import MeasureInfo, Score

GROUPS = 8


def leave_one_out(values):
    values = np.asarray(values)
    return tuple((values.sum() - values) / (len(values) - 1))


def estimate_of(groups, key="a", unit="samples"):
    return Estimate(float(np.mean(groups)), leave_one_out(groups), key, unit)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_seeds_have_the_standard_error_of_their_mean(values):
    estimate = over_seeds(values, range(len(values)))
    assert estimate.value == pytest.approx(np.mean(values))
    expected = np.std(values, ddof=1) / math.sqrt(len(values))
    assert estimate.error == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_seeds_of_the_largest_floats_do_not_overflow():
    estimate = over_seeds([1.7e308, 1.6e308, 1.5e308], range(3))
    assert estimate.value == pytest.approx(1.6e308)
    assert math.isfinite(estimate.error)


def test_one_seed_has_no_error():
    assert math.isnan(over_seeds([2.0], [0]).error)


def test_paired_differences_leave_out_what_is_shared():
    random = np.random.default_rng(0)
    shared = random.normal(0, 1, GROUPS)
    own = random.normal(0, 0.01, GROUPS)
    before, after = estimate_of(shared), estimate_of(shared + own + 0.1)
    expected = np.std(own, ddof=1) / math.sqrt(GROUPS)
    assert change(before, after).error == pytest.approx(expected)
    other = estimate_of(shared + own + 0.1, key="b")
    assert change(before, other).error == pytest.approx(math.hypot(before.error, other.error))


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "b")])
def test_relative_changes_are_linearised_or_paired(keys):
    random = np.random.default_rng(1)
    before = estimate_of(2 + random.normal(0, 0.01, GROUPS), keys[0])
    after = estimate_of(3 + random.normal(0, 0.02, GROUPS), keys[1])
    found = relative_change(before, after)
    assert found.value == pytest.approx(0.5, abs=0.05)
    variances = before.error**2 * (after.value / before.value) ** 2 + after.error**2
    if keys[0] != keys[1]:
        assert found.error == pytest.approx(math.sqrt(variances) / before.value)
    else:
        assert 0 < found.error < 3 * math.sqrt(variances) / before.value


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (Estimate(1.0, unit="exact"), Estimate(2.0, unit="exact"), 0.0),
        (Estimate(1.0), Estimate(2.0), math.nan),
        (Estimate(1.0, unit="exact"), Estimate(2.0), math.nan),
    ],
)
def test_errors_are_exact_or_unknown(first, second, error):
    found = change(first, second).error
    assert found == error or (math.isnan(found) and math.isnan(error))


def test_rounding_and_numerical_errors_are_not_changes():
    exact = Estimate(1.0, unit="exact")
    assert change(exact, Estimate(1.0 + 1e-10, unit="exact")).excess() == 0
    assert change(exact, Estimate(1.1, unit="exact")).excess() == math.inf
    assert change(exact, Estimate(1.1, unit="exact", numerical_error=0.2)).excess() == 0


def test_an_excess_is_beyond_its_bound():
    found = Change(0.3, 0.1, 7, 0.0)
    assert found.excess(0.1) == pytest.approx(2)
    assert found.excess(0.4) == pytest.approx(-1)


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 30)), min_size=1, max_size=12))
def test_the_tests_are_those_of_holm(drawn):
    from scipy.stats import t as student

    sizes, degrees = zip(*drawn, strict=True)
    p_values = 2 * student.sf(np.abs(sizes), degrees)
    expected = np.zeros(len(sizes), dtype=bool)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] >= 0.05 / (len(sizes) - rank) * (1 - 1e-9):
            break
        expected[index] = True
    assert exceeding(sizes, degrees).tolist() == expected.tolist()


def test_quantiles_of_large_families_are_exact():
    from scipy.stats import t as student

    tail = 0.025 / 8e6  # of all pairs of 4,000 networks
    limit = student.isf(tail, 7)
    for factor in (0.99, 1.01):
        size = np.float32([factor * limit])
        assert exceeding(size, np.float32([7]), 1 - 2 * tail).tolist() == [factor > 1]


def test_unknown_errors_are_never_significant_and_cost_nothing():
    assert exceeding([math.nan, 2.5], [7, 7]).tolist() == [False, True]


@pytest.mark.parametrize("groups", [2, 8])
def test_all_pairs_agree_with_single_differences(groups):
    random = np.random.default_rng(groups)
    estimates = [
        estimate_of(random.normal(0, 1, groups), key) for key in ("a", "b", "a", "a", "", "")
    ]
    estimates += [Estimate(0.3, unit="exact"), Estimate(0.3), over_seeds([1.0, 1.2], [0, 1])]
    excesses = pairwise_excesses(estimates)
    assert np.isnan(np.tril(excesses, 0)[np.tril_indices(len(estimates))]).all()
    for i, one in enumerate(estimates):
        for j, other in enumerate(estimates[i + 1 :], i + 1):
            expected = change(other, one).excess()
            assert excesses[i, j] == pytest.approx(expected, rel=1e-5, nan_ok=True)


def drawn_cell(random, places, key, shared=0.0):
    """A cell of places that share a part of their sampling error, and their mean."""
    common = random.normal(0, 1, (1, GROUPS))
    groups = 0.8 + 0.01 * (shared * common + random.normal(0, 1, (places, GROUPS)))
    entries = tuple(
        Score(float(row.mean()), leave_one_out(row), key, "samples", name=f"p{i}", status="ok")
        for i, row in enumerate(groups)
    )
    mean = groups.mean(axis=0)
    replicates = leave_one_out(mean)
    return Score(float(mean.mean()), replicates, key, "samples", status="ok", places=entries)


@pytest.mark.parametrize(("keys", "shared"), [(("a", "b"), 0.0), (("a", "b"), 2.0)])
def test_equal_networks_rarely_change(keys, shared):
    random = np.random.default_rng(5)
    comparisons = 400
    changed = 0
    for _ in range(comparisons):
        cells = [drawn_cell(random, 6, key, shared) for key in keys]
        [found] = mark_significant([compare_scores("", "m", *cells)])
        changed += found.is_significant or any(d.is_significant for d in found.places)
    # Five in a hundred, and three standard deviations of that count.
    assert changed <= 0.05 * comparisons + 3 * math.sqrt(0.05 * 0.95 * comparisons)


def test_a_large_change_at_one_place_is_found():
    random = np.random.default_rng(6)
    before = drawn_cell(random, 6, "a")
    after = drawn_cell(random, 6, "b")
    moved = [
        replace(p, value=p.value + 0.2, replicates=tuple(r + 0.2 for r in p.replicates))
        for p in after.places[:1]
    ]
    after = replace(after, places=(*moved, *after.places[1:]))
    [found] = mark_significant([compare_scores("", "m", before, after)])
    assert [d.is_significant for d in found.places] == [True, False, False, False, False, False]
    assert found.verdict.endswith("; 1 of 6 layers")


def test_intervals_of_places_end_at_the_bounds(conftest):
    subject = ("a", "init", "d", 0)
    rows = conftest.cell_rows(subject, "affinity", {"relu": 0.999})
    known = {(*subject, "affinity"): Replicates((), {"relu": (0.99, 0.999, 1.0)}, "k")}
    info = MeasureInfo(probe="sites", bounds=(0.0, 1.0))
    scores = scores_of(conftest.frame(rows), {"affinity": vars(info)}, known)
    [place] = scores["a", "affinity"].places
    assert 0.9 < place.interval[0] < 0.99
    assert place.interval[1] == 1.0
    difference = compare_scores("a", "affinity", *[scores["a", "affinity"]] * 2)
    assert difference.places[0].first.interval[1] == 1.0


def test_intervals_hold_values_outside_the_bounds():
    estimate = Estimate(1.2, (1.1, 1.2, 1.3), bounds=(0.0, 1.0))
    assert estimate.interval[1] == 1.2
    assert estimate.interval[0] < 1.2
    assert estimate.scaled(-1.0).interval[0] < -1.2
