"""Ranks, their intervals, ties and seeds."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scores import Replicates, scores_of

from nlbench.reports.estimates import change
from nlbench.reports.leaderboard import leaderboard, leaderboard_frame, parse_family
from nlbench.reports.tables import Score, mean_score

LESS, MORE = {"more_means": "less nonlinear"}, {"more_means": "more nonlinear"}


def table_of(conftest, places, measure="m", seeds=(0,)):
    """A table of one measure: the values of each model's places."""
    rows = []
    for model, values in places.items():
        for seed in seeds:
            named = {f"p{i}": v for i, v in enumerate(values)} if len(values) else {"p": "constant"}
            rows += conftest.cell_rows((model, "init", "d", seed), measure, named)
    return conftest.frame(rows)


def board(conftest, places, about, replicates=None, **kwargs):
    """A leaderboard of one measure, with the replicates and key of each network."""
    known = {
        (model, "init", "d", 0, "m"): Replicates(tuple(numbers), {}, key)
        for model, (key, numbers) in (replicates or {}).items()
    }
    scores = scores_of(table_of(conftest, places), {"m": about}, known)
    rows = leaderboard(scores, **kwargs)
    return {row.label: row.entries["m"] for row in rows}


def leave_one_out(values):
    values = np.asarray(values)
    return (values.sum() - values) / (len(values) - 1)


def sampled_board(conftest, groups, about=MORE, keys=None):
    """A leaderboard of networks whose values are means over groups of samples."""
    places = {name: [float(np.mean(values))] for name, values in groups.items()}
    keys = keys or dict.fromkeys(groups, "shared")
    replicates = {name: (keys[name], leave_one_out(v)) for name, v in groups.items()}
    return board(conftest, places, about, replicates)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.booleans())
def test_the_most_nonlinear_comes_first(conftest, values, more_is_more) -> None:
    about = MORE if more_is_more else LESS
    found = board(conftest, {f"m{i}": [v] for i, v in enumerate(values)}, about)
    expected = sorted(values, reverse=more_is_more)
    assert [entry.value for entry in found.values()] == expected


def test_measures_without_direction_rank_nothing(conftest) -> None:
    found = board(conftest, {"a": [0.2], "b": [0.9], "c": [0.1]}, {"more_means": "neither"})
    assert list(found) == ["a", "b", "c"]
    assert {entry.rank for entry in found.values()} == {None}


@pytest.mark.parametrize("about", [LESS, MORE])
def test_missing_numbers_come_last_without_rank(conftest, about) -> None:
    found = board(conftest, {"gone": [], "a": [0.5], "b": [0.7]}, about)
    assert list(found)[-1] == "gone"
    assert found["gone"].status == "undefined"
    assert (found["gone"].rank, found["gone"].best) == (None, None)
    assert math.isnan(found["gone"].value)
    assert {found["a"].rank, found["b"].rank} == {1, 2}


def test_intervals_stay_within_a_measures_bounds(conftest) -> None:
    groups = {"a": np.linspace(0.9, 1.0, 8)}
    entry = sampled_board(conftest, groups, {**MORE, "bounds": [0.0, 0.96]})["a"]
    assert entry.high == 0.96
    entry = sampled_board(conftest, groups, {**MORE, "bounds": [None, None]})["a"]
    assert entry.low < 0.94 < 0.96 < entry.high
    assert (entry.over, entry.best, entry.worst) == ("samples", 1, 1)


def test_values_without_replicates_have_no_interval(conftest) -> None:
    found = board(conftest, {"a": [1.0, 3.0], "b": [4.0, 5.0]}, MORE)
    assert all(math.isnan(e.error) and math.isnan(e.low) for e in found.values())
    assert [(e.rank, e.best, e.over) for e in found.values()] == [(1, None, ""), (2, None, "")]
    assert (found["a"].least, found["a"].greatest) == (1.0, 3.0)


def test_equal_exact_numbers_share_their_ranks(conftest) -> None:
    values = {"a": 13.0, "b": 7.0, "c": 13.0, "d": 2.0}
    known = {(n, "init", "d", 0, "m"): Replicates(unit="exact") for n in values}
    table = table_of(conftest, {name: [value] for name, value in values.items()})
    rows = leaderboard(scores_of(table, {"m": MORE}, known))
    found = [row.entries["m"] for row in rows]
    assert [(e.rank, e.tied, e.best, e.worst) for e in found] == [
        (1, True, 1, 2), (1, True, 1, 2), (3, False, 3, 3), (4, False, 4, 4),
    ]  # fmt: skip
    assert {e.over for e in found} == {"exact"}


@pytest.mark.parametrize("keys", [["shared"] * 20, [f"own {i}" for i in range(20)]])
@pytest.mark.parametrize("networks", [2, 12])
def test_equal_networks_are_rarely_ordered(conftest, networks, keys) -> None:
    random = np.random.default_rng(networks)
    ordered = 0
    for _ in range(40):
        groups = {f"m{i}": random.normal(5.0, 0.1, 8) for i in range(networks)}
        found = sampled_board(conftest, groups, keys=dict(zip(groups, keys, strict=False)))
        ordered += any((e.rank, e.best, e.worst) != (1, 1, networks) for e in found.values())
    assert ordered <= 0.05 * 40 + 3 * math.sqrt(0.05 * 0.95 * 40)


def test_values_many_standard_errors_apart_are_ordered(conftest) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (3, 8))
    noise -= noise.mean(axis=1, keepdims=True)
    groups = {"a": 4.0 + noise[0], "b": 3.99 + noise[1], "c": 1.0 + noise[2]}
    found = sampled_board(conftest, groups)
    assert [(e.rank, e.best, e.worst) for e in found.values()] == [(1, 1, 2), (1, 1, 2), (3, 3, 3)]


def test_networks_on_shared_samples_are_paired(conftest) -> None:
    # One is above the other in every group by little: on other samples they would be tied.
    level = np.array([1.0, 5.0, 20.0, 80.0, 3.0, 4.0, 30.0, 9.0])
    groups = {"a": level, "b": level + np.linspace(0.4, 0.6, 8)}
    paired = sampled_board(conftest, groups)
    assert [(e.best, e.worst) for e in paired.values()] == [(1, 1), (2, 2)]
    apart = sampled_board(conftest, groups, keys={"a": "one", "b": "other"})
    assert [(e.best, e.worst) for e in apart.values()] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(("error", "ranks"), [(0.0, [1, 2, 3]), (0.6, [1, 1, 3]), (2.0, [1, 1, 1])])
def test_values_within_numerical_error_are_tied(conftest, error, ranks) -> None:
    table = table_of(conftest, {"a": [4.0], "b": [3.0], "c": [1.0]})
    stated = table[table["statistic"] == "value"].assign(statistic="numerical_error", value=error)
    table = pd.concat([table, stated[stated["place"] == ""]])
    known = {(n, "init", "d", 0, "m"): Replicates(unit="exact") for n in "abc"}
    rows = leaderboard(scores_of(table, {"m": MORE}, known))
    entries = [row.entries["m"] for row in rows]
    assert [entry.rank for entry in entries] == ranks
    assert [entry.best for entry in entries] == ranks
    assert entries[0].worst == ranks.count(1)


def test_seeds_make_one_row_with_an_interval(conftest) -> None:
    rows = []
    for seed, value in enumerate((1.0, 2.0, 6.0)):
        rows += conftest.cell_rows(("a", "init", "d", seed), "m", {"p": value})
    (row,) = leaderboard(scores_of(conftest.frame(rows), {"m": MORE}))
    entry = row.entries["m"]
    assert row.label == "a"
    assert len(row.subjects) == 3
    assert (entry.value, entry.over) == (3.0, "3 seeds")
    assert entry.error == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert (entry.least, entry.greatest) == (1.0, 6.0)
    assert entry.low < 1 < 6 < entry.high
    apart = leaderboard(scores_of(conftest.frame(rows), {"m": MORE}), together=False)
    assert [r.label for r in apart] == ["a · seed 2", "a · seed 1", "a · seed 0"]


@pytest.mark.parametrize(("status", "kept"), [("undefined", True), ("failed", False)])
def test_seeds_without_a_number_are_reported(conftest, status, kept) -> None:
    rows = conftest.cell_rows(("a", "init", "d", 0), "m", {"p": 2.0})
    rows += conftest.missing_row(("a", "init", "d", 1), "m", status, "no luck")
    (row,) = leaderboard(scores_of(conftest.frame(rows), {"m": MORE}))
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
    (row,) = leaderboard(scores_of(conftest.frame(rows), {"m": MORE}))
    entry = row.entries["m"]
    assert (entry.status, entry.reason) == (status, reason)
    assert math.isnan(entry.value)


def test_summaries_are_on_the_leaderboard(run) -> None:
    measures = run.manifest["measures"]
    frame = leaderboard_frame(leaderboard(scores_of(run.scores, measures)), list(measures))
    summaries = run.scores.query("place == '' and statistic == 'value' and status == 'ok'")
    assert len(summaries) == 15
    for row in summaries.itertuples():
        subject = frame.query("model == @row.model and weights == @row.weights")
        assert subject[row.measure, "value"].tolist() == [row.value]


def test_absent_cells_differ_from_undefined_ones(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", {"relu": 0.5})
    rows += conftest.cell_rows(("b", "init", "digits", 0), "other", {"relu": "constant output"})
    found = leaderboard(scores_of(conftest.frame(rows)))
    assert {(r.label, n): e.status for r in found for n, e in r.entries.items()} == {
        ("a", "m"): "ok",
        ("a", "other"): "absent",
        ("b", "m"): "absent",
        ("b", "other"): "undefined",
    }


def test_families_are_the_leading_letters_of_names() -> None:
    names = ("torchvision/resnet18", "vit_b_16", "vgg", "3layer", "zoo/a/mixer-7")
    assert [*map(parse_family, names)] == ["resnet", "vit", "vgg", "3layer", "mixer"]


@given(st.text(max_size=20))
def test_every_name_has_a_family(name) -> None:
    assert parse_family(name) != "" or name.rpartition("/")[2] == ""


def test_weights_named_by_seed_are_one_network(conftest) -> None:
    rows = []
    for seed in (0, 1):
        for kind in ("random-0.5", "random-0.7"):
            subject = ("net", f"{kind}-seed{seed}", "d", seed)
            rows += conftest.cell_rows(subject, "m", {"p": 1.0 + seed})
    found = leaderboard(scores_of(conftest.frame(rows), {"m": MORE}))
    assert {row.label: len(row.subjects) for row in found} == {
        "net · random-0.5": 2,
        "net · random-0.7": 2,
    }


def test_seeds_with_some_measures_keep_other_values(conftest) -> None:
    rows = [
        row
        for seed in (0, 1, 2)
        for name, value in (("m", 2.0 + seed), ("other", 1.0))
        if (seed, name) != (2, "m")
        for row in conftest.cell_rows(("a", "init", "d", seed), name, {"p": value})
    ]
    scores = scores_of(conftest.frame(rows), {"m": MORE})
    (row,) = leaderboard(scores)
    entry = row.entries["m"]
    assert (entry.value, entry.status, entry.over) == (2.5, "ok", "2 seeds")
    assert "seed 2" in entry.reason
    assert "nothing is recorded" in entry.reason
    for seeds in ((0, 1, 2), (2, 0, 1)):
        mean = mean_score([scores[f"a · seed {seed}", "m"] for seed in seeds], seeds)
        assert [place.value for place in mean.places] == [2.5]


def test_places_are_paired_over_the_same_seeds() -> None:
    def place(name, value):
        return Score(value, name=name, status="ok" if math.isfinite(value) else "undefined")

    def network(*values):
        places = tuple(place(name, value) for name, value in zip("abc", values, strict=True))
        return Score(0.5, status="ok", places=places)

    nan = math.nan
    scores = [network(0.1, 0.2, nan), network(0.2, 0.3, 0.3), network(0.4, nan, 0.5)]
    a, b, c = mean_score(scores, [0, 1, 2]).places
    assert change(a, a).error == 0
    assert change(b, c).error == pytest.approx(math.hypot(b.error, c.error))
    paired = mean_score([network(0.1, 0.2, 0.3), network(0.2, 0.3, 0.6)], [0, 1]).places
    assert change(*paired[:2]).error == pytest.approx(0, abs=1e-12)
