"""Ranks, their intervals, ties and seeds."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

import nlbench.reports.leaderboard as leaderboard_module
from nlbench.reports.leaderboard import (
    family_of,
    leaderboard,
    leaderboard_frame,
    rank_intervals,
    resampled_means,
)
from nlbench.reports.tables import Scores, mean_cell

LESS, MORE = {"more_means": "less nonlinear"}, {"more_means": "more nonlinear"}


def scores_of(conftest, places, measure="m", seeds=(0,)):
    """A table of one measure: the values of each model's places."""
    rows = []
    for model, values in places.items():
        for seed in seeds:
            named = {f"p{i}": v for i, v in enumerate(values)} if len(values) else {"p": "constant"}
            rows += conftest.cell_rows((model, "init", "d", seed), measure, named)
    return conftest.frame(rows)


def board(conftest, places, about, **kwargs):
    rows = leaderboard(Scores(scores_of(conftest, places), {"m": about}), {"m": about}, **kwargs)
    return {row.label: row.entries["m"] for row in rows}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.booleans())
@settings(max_examples=40)
def test_the_most_nonlinear_comes_first(conftest, values, more_is_more) -> None:
    about = MORE if more_is_more else LESS
    found = board(conftest, {f"m{i}": [v] for i, v in enumerate(values)}, about, repeats=2)
    expected = sorted(values, reverse=more_is_more)
    assert [entry.value for entry in found.values()] == expected


def test_a_measure_without_direction_orders_nothing_and_ranks_nothing(conftest) -> None:
    found = board(conftest, {"a": [0.2], "b": [0.9], "c": [0.1]}, {"more_means": "neither"})
    assert list(found) == ["a", "b", "c"]
    assert {entry.rank for entry in found.values()} == {None}


@pytest.mark.parametrize("about", [LESS, MORE])
def test_what_has_no_number_comes_last_and_is_never_ranked(conftest, about) -> None:
    found = board(conftest, {"gone": [], "a": [0.5], "b": [0.7]}, about)
    assert list(found)[-1] == "gone"
    assert found["gone"].status == "undefined"
    assert (found["gone"].rank, found["gone"].best, found["gone"].quantile) == (None, None, None)
    assert math.isnan(found["gone"].value)
    assert {found["a"].rank, found["b"].rank} == {1, 2}


def drawn_mean(values, random):
    """Mean of values drawn again, as far from theirs as Student has it."""
    n, middle = len(values), np.mean(values)
    wider = student.ppf(0.975, n - 1) * np.sqrt(n / (n - 1)) / 1.959964
    return middle + wider * (np.mean(random.choice(values, n)) - middle)


def direct_bootstrap(samples, repeats, random):
    """Ranks of the means of resampled places, the largest first, by plain loops."""
    ranks = []
    for _ in range(repeats):
        resources = [drawn_mean(values, random) for values in samples]
        ranks.append([1 + sum(other > mean for other in resources) for mean in resources])
    return np.array(ranks)


def test_rank_intervals_are_those_of_a_direct_bootstrap(conftest) -> None:
    random = np.random.default_rng(3)
    samples = {f"m{i}": random.normal(level, 1.0, 12) for i, level in enumerate((0, 0.4, 0.8, 3))}
    found = board(conftest, samples, MORE, repeats=20000)
    ranks = direct_bootstrap(list(samples.values()), 4000, random)
    for index, name in enumerate(samples):
        low, high = np.quantile(ranks[:, index], [0.025, 0.975])
        assert (found[name].best, found[name].worst) == (low, high)


def test_the_interval_of_a_number_is_that_of_a_direct_bootstrap(conftest) -> None:
    random = np.random.default_rng(4)
    values = random.gamma(3, 1, 30)
    entry = board(conftest, {"a": values}, MORE, repeats=20000)["a"]
    resources = [drawn_mean(values, random) for _ in range(20000)]
    np.testing.assert_allclose(
        [entry.low, entry.high], np.quantile(resources, [0.025, 0.975]), rtol=0.02
    )


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_intervals_of_few_values_hold_as_often_as_they_say(n) -> None:
    random = np.random.default_rng(n)
    held = 0
    for number in range(800):
        means = resampled_means(random.normal(0, 1, n), 300, str(number))
        low, high = np.quantile(means, [0.025, 0.975])
        held += low <= 0 <= high
    # The plain bootstrap's hold 49, 73, 84 and 91 times in a hundred.
    assert 0.92 <= held / 800 <= 0.97


def test_an_interval_stays_within_the_bounds_of_its_measure(conftest) -> None:
    entry = board(conftest, {"a": [0.7, 1.0]}, {**MORE, "bounds": [0.0, 1.0]})["a"]
    assert (entry.low, entry.high) == (0.0, 1.0)
    entry = board(conftest, {"a": [0.7, 1.0]}, {**MORE, "bounds": [None, None]})["a"]
    assert entry.low < 0 < 1 < entry.high


def test_equal_numbers_share_the_ranks_that_they_take_up(conftest) -> None:
    found = board(conftest, {"a": [13.0], "b": [7.0], "c": [13.0], "d": [2.0]}, MORE)
    assert [(e.rank, e.tied, e.best, e.worst) for e in found.values()] == [
        (1, True, 1, 2), (1, True, 1, 2), (3, False, 3, 3), (4, False, 4, 4),
    ]  # fmt: skip
    assert [e.quantile for e in found.values()] == [5 / 6, 5 / 6, 1 / 3, 0]


def test_networks_whose_intervals_overlap_are_tied_and_others_are_not(conftest) -> None:
    near = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.2, 2.2, 3.2, 4.2], "far": [90.0, 91.0, 92.0, 93.0]}
    found = board(conftest, near, MORE)
    assert (found["far"].rank, found["far"].tied) == (1, False)
    assert [(found[n].rank, found[n].tied, found[n].best, found[n].worst) for n in "ab"] == [
        (2, True, 2, 3), (2, True, 2, 3),
    ]  # fmt: skip


@given(st.lists(st.lists(st.floats(-5, 5), min_size=9, max_size=9), min_size=1, max_size=6))
def test_the_best_rank_is_never_beyond_the_worst_and_all_are_possible(scores) -> None:
    best, worst = rank_intervals(scores)
    assert (best >= 1).all()
    assert (best <= worst).all()
    assert (worst <= len(scores)).all()


@pytest.mark.parametrize("networks", [2, 6, 20])
def test_equal_values_with_standard_errors_are_rarely_ordered(conftest, networks) -> None:
    random, about = np.random.default_rng(networks), {"m": {**MORE, "probe": "function"}}
    ordered = 0
    for _ in range(100):
        values = {f"m{i}": [random.normal(5.0, 0.1)] for i in range(networks)}
        table = scores_of(conftest, values)
        stated = table[table["statistic"] == "value"].assign(statistic="error", value=0.1)
        table = pd.concat([table, stated[stated["place"] == ""]]).assign(n=200)
        entries = [row.entries["m"] for row in leaderboard(Scores(table, about), about)]
        ordered += any((e.rank, e.best, e.worst) != (1, 1, networks) for e in entries)
    assert ordered <= 10


def test_values_many_standard_errors_apart_are_ordered(conftest) -> None:
    table = scores_of(conftest, {"a": [4.0], "b": [3.9], "c": [1.0]})
    stated = table[table["statistic"] == "value"].assign(statistic="error", value=0.1)
    table = pd.concat([table, stated[stated["place"] == ""]]).assign(n=200)
    about = {"m": {**MORE, "probe": "function"}}
    entries = [row.entries["m"] for row in leaderboard(Scores(table, about), about)]
    assert [(e.rank, e.best, e.worst) for e in entries] == [(1, 1, 2), (1, 1, 2), (3, 3, 3)]


@pytest.mark.parametrize(("error", "ranks"), [(0.0, [1, 2, 3]), (0.6, [1, 1, 3]), (2.0, [1, 1, 1])])
def test_an_estimate_within_its_error_of_another_is_not_marked_as_different(
    conftest, error, ranks
) -> None:
    table = scores_of(conftest, {"a": [4.0], "b": [3.0], "c": [1.0]})
    stated = table[table["statistic"] == "value"].assign(statistic="error", value=error)
    table = pd.concat([table, stated[stated["place"] == ""]])
    about = {"m": {**MORE, "probe": "lines"}}
    entries = [row.entries["m"] for row in leaderboard(Scores(table, about), about)]
    assert [entry.rank for entry in entries] == ranks
    assert [entry.best for entry in entries] == ranks
    assert entries[0].worst == ranks.count(1)


def test_a_number_that_is_not_the_mean_of_its_places_is_not_drawn_again(conftest) -> None:
    scores = scores_of(conftest, {"a": [1.0, 3.0]})
    scores.loc[(scores["place"] == "") & (scores["statistic"] == "value"), "value"] = 7.0
    (row,) = leaderboard(Scores(scores), {"m": MORE})
    entry = row.entries["m"]
    assert entry.value == 7.0
    assert entry.over == ""
    assert math.isnan(entry.low)
    assert (entry.best, entry.worst) == (1, 1)


def test_paths_that_networks_share_are_drawn_together(conftest) -> None:
    # One is above the other on every path by little: apart from each other they would be tied.
    level = np.array([1.0, 5.0, 20.0, 80.0])
    about = {**MORE, "probe": "lines"}
    found = board(conftest, {"a": level, "b": level + 0.5}, about)
    assert [(e.best, e.worst) for e in found.values()] == [(1, 1), (2, 2)]
    apart = board(conftest, {"a": level, "b": level + 0.5}, {**MORE, "probe": "sites"})
    assert [(e.best, e.worst) for e in apart.values()] == [(1, 2), (1, 2)]


def test_seeds_make_one_row_with_their_mean_and_an_interval_over_them(conftest) -> None:
    rows = []
    for seed, value in enumerate((1.0, 2.0, 6.0)):
        rows += conftest.cell_rows(("a", "init", "d", seed), "m", {"p": value})
    (row,) = leaderboard(Scores(conftest.frame(rows)), {"m": MORE})
    entry = row.entries["m"]
    assert row.label == "a"
    assert len(row.subjects) == 3
    assert (entry.value, entry.over) == (3.0, "seeds")
    assert entry.std == pytest.approx(np.std([1, 2, 6], ddof=1))
    assert entry.low < 1 < 6 < entry.high
    apart = leaderboard(Scores(conftest.frame(rows)), {"m": MORE}, together=False)
    assert [r.label for r in apart] == ["a · seed 2", "a · seed 1", "a · seed 0"]


@pytest.mark.parametrize(("status", "kept"), [("undefined", True), ("failed", False)])
def test_a_seed_without_a_number_is_said_and_one_that_failed_leaves_none(
    conftest, status, kept
) -> None:
    rows = conftest.cell_rows(("a", "init", "d", 0), "m", {"p": 2.0})
    rows += conftest.missing_row(("a", "init", "d", 1), "m", status, "no luck")
    (row,) = leaderboard(Scores(conftest.frame(rows)), {"m": MORE})
    entry = row.entries["m"]
    assert entry.status == ("ok" if kept else "failed")
    assert "seed 1" in entry.reason
    assert "no luck" in entry.reason
    assert math.isnan(entry.value) is not kept


@pytest.mark.parametrize(
    ("statuses", "status", "reason"),
    [
        (("undefined", "undefined", "undefined"), "undefined", "seed 0: reason 0"),
        (("undefined", "failed", "failed"), "failed", "seed 1: reason 1"),
    ],
)
def test_seeds_without_any_value_have_the_first_reason(conftest, statuses, status, reason) -> None:
    rows = []
    for seed, each in enumerate(statuses):
        rows += conftest.missing_row(("a", "init", "d", seed), "m", each, f"reason {seed}")
    (row,) = leaderboard(Scores(conftest.frame(rows)), {"m": MORE})
    entry = row.entries["m"]
    assert (entry.status, entry.reason) == (status, reason)
    assert math.isnan(entry.value)


def test_draws_depend_on_seed_and_number_alone() -> None:
    first, again = (resampled_means([1.0, 2.0, 5.0], 50, "a") for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(resampled_means([11.0, 12.0, 15.0], 50, "a"), first + 10)
    assert (resampled_means([1.0, 2.0, 5.0], 50, "b") != first).any()


def test_every_summary_of_the_scores_is_on_the_leaderboard(run) -> None:
    measures = run.manifest["measures"]
    frame = leaderboard_frame(leaderboard(Scores(run.scores, measures), measures), list(measures))
    summaries = run.scores.query("place == '' and statistic == 'value' and status == 'ok'")
    assert len(summaries) == 15
    for row in summaries.itertuples():
        subject = frame.query("model == @row.model and weights == @row.weights")
        assert subject[row.measure, "value"].tolist() == [row.value]


def test_a_cell_that_was_never_recorded_is_told_from_an_undefined_one(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", {"relu": 0.5})
    rows += conftest.cell_rows(("b", "init", "digits", 0), "other", {"relu": "constant output"})
    found = leaderboard(Scores(conftest.frame(rows)), {})
    assert {(r.label, n): e.status for r in found for n, e in r.entries.items()} == {
        ("a", "m"): "ok",
        ("a", "other"): "absent",
        ("b", "m"): "absent",
        ("b", "other"): "undefined",
    }


def test_a_family_is_the_leading_letters_of_a_name() -> None:
    names = ("torchvision/resnet18", "vit_b_16", "vgg", "3layer", "zoo/a/mixer-7")
    assert [*map(family_of, names)] == ["resnet", "vit", "vgg", "3layer", "mixer"]


@given(st.text(max_size=20))
def test_every_name_has_a_family(name) -> None:
    assert family_of(name) != "" or name.rpartition("/")[2] == ""


def test_weights_named_after_their_seed_are_of_one_network(conftest) -> None:
    rows = []
    for seed in (0, 1):
        for kind in ("random-0.5", "random-0.7"):
            subject = ("net", f"{kind}-seed{seed}", "d", seed)
            rows += conftest.cell_rows(subject, "m", {"p": 1.0 + seed})
    found = leaderboard(Scores(conftest.frame(rows)), {"m": MORE})
    assert {row.label: len(row.subjects) for row in found} == {
        "net · random-0.5": 2,
        "net · random-0.7": 2,
    }


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=n, max_size=n),
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
        )
    )
)
def test_rank_intervals_equal_counts_of_pairs(drawn):
    numbers, errors = np.array(drawn[0], dtype=float), np.array(drawn[1], dtype=float)
    best, worst = rank_intervals(numbers, 0.999, errors)
    for i in range(len(numbers)):
        above = [
            sum(numbers[j, r] - errors[j] > numbers[i, r] + errors[i] for j in range(len(numbers)))
            for r in range(3)
        ]
        below = [
            sum(numbers[j, r] + errors[j] < numbers[i, r] - errors[i] for j in range(len(numbers)))
            for r in range(3)
        ]
        assert best[i] == 1 + min(above)
        assert worst[i] == len(numbers) - min(below)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [1.0, 1.7e308])
def test_moments_of_the_largest_floats_do_not_overflow(largest):
    values = largest * np.array([0.5, 0.75, 1.0, 1.0])
    mean, std = leaderboard_module._mean_and_std(values)
    assert mean == pytest.approx(largest * 0.8125, rel=1e-12)
    assert std == pytest.approx(largest * np.std([0.5, 0.75, 1.0, 1.0], ddof=1), rel=1e-12)
    means = leaderboard_module.resampled_means(values, 100, "a")
    ordinary = leaderboard_module.resampled_means(values / largest, 100, "a")
    finite = np.isfinite(means)
    assert means[finite] == pytest.approx(largest * ordinary[finite], rel=1e-12)


def test_moments_of_ordinary_values_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=50) * 1e140
    mean, std = leaderboard_module._mean_and_std(values)
    assert (mean, std) == (values.mean(), values.std(ddof=1))


def test_a_further_seed_with_some_measures_keeps_the_values(conftest) -> None:
    rows = [
        row
        for seed in (0, 1, 2)
        for name, value in (("m", 2.0 + seed), ("other", 1.0))
        if (seed, name) != (2, "m")
        for row in conftest.cell_rows(("a", "init", "d", seed), name, {"p": value})
    ]
    scores = Scores(conftest.frame(rows))
    (row,) = leaderboard(scores, {"m": MORE})
    entry = row.entries["m"]
    assert (entry.value, entry.status, entry.over) == (2.5, "ok", "seeds")
    assert "seed 2" in entry.reason
    assert "nothing is recorded" in entry.reason
    for seeds in ((0, 1, 2), (2, 0, 1)):
        mean = mean_cell([scores[f"a · seed {seed}", "m"] for seed in seeds])
        assert [place.value for place in mean.places] == [2.5]
