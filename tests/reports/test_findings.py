"""Findings name what stands out, and the reference population places a value."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench import registry
from nlbench.reports import population
from nlbench.reports.agreement import Correlation, agreement
from nlbench.reports.findings import findings, standout_places
from nlbench.reports.leaderboard import leaderboard, standard_error
from nlbench.reports.population import Population, build_population, population_of
from nlbench.reports.remarks import Gap, gaps
from nlbench.reports.tables import Place, Scores, TableCell

MORE = {"probe": "sites", "more_means": "more nonlinear", "version": "1", "options": {}}
LESS = {"probe": "sites", "more_means": "less nonlinear", "version": "1", "options": {}}


def cell_of(values):
    places = tuple(Place(f"p{i}", {"value": v}, 8, "ok", "") for i, v in enumerate(values))
    return TableCell({"value": float(np.mean(values))}, 8, "ok", "", places)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12))
def test_places_are_split_without_loss_and_in_order(values):
    for sense in (1, -1):
        standout, others = standout_places(cell_of(values), sense)
        assert sorted(standout + others) == sorted(f"p{i}" for i in range(len(values)))
        assert len(standout) <= 3
        by_name = {f"p{i}": sense * v for i, v in enumerate(values)}
        if standout:
            assert min(by_name[n] for n in standout) >= max(by_name[n] for n in others)


def test_two_layers_that_stand_out_are_named():
    values = [0.873, 0.949, 0.923, 0.895, 0.626, 0.550, 0.791]
    assert standout_places(cell_of(values), -1)[0] == ["p5", "p4"]


def test_evenly_spread_places_do_not_stand_out():
    assert standout_places(cell_of(np.linspace(0.5, 0.9, 9)), -1)[0] == []


def test_a_single_network_is_described_by_its_layers(conftest):
    rows = conftest.cell_rows(
        ("vgg8", "trained", "digits", 0),
        "affinity",
        {"a": 0.9, "b": 0.5, "c": 0.93, "d": 0.95},
    )
    scores = Scores(conftest.frame(rows))
    measures = {"affinity": LESS}
    board = leaderboard(scores, measures)
    [sentence] = findings(board, scores, measures, [], {})
    assert sentence == (
        "By affinity, b (0.50) stands out as the most nonlinear; "
        "the other 3 activations lie between 0.90 and 0.95."
    )


def test_without_a_place_that_stands_out_both_ends_are_named(conftest):
    places = {"a": 0.6, "b": 0.5, "c": 0.9, "d": 0.8, "e": 0.7}
    scores = Scores(conftest.frame(conftest.cell_rows(("n", "init", "d", 0), "affinity", places)))
    board = leaderboard(scores, {"affinity": LESS})
    assert findings(board, scores, {"affinity": LESS}, [], {}) == [
        "By affinity, b (0.50) is the most nonlinear of 5 activations and c (0.90) the least."
    ]


@pytest.mark.parametrize(("value", "text"), [(0.25, "0.2500"), (math.nan, None)])
def test_a_single_network_is_placed_among_the_reference_networks(
    conftest, monkeypatch, value, text
):
    entry = {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(5)}}
    monkeypatch.setattr(population, "_load", lambda: {"absdev": entry})
    subject = ("n", "init", "d", 0)
    rows = conftest.cell_rows(subject, "absdev", {"path0": 3.0})
    rows.append((*subject, "absdev", "", "over_range", value, 8, "ok", ""))
    rows += conftest.cell_rows(subject, "unplaced", {"path0": 3.0})
    scores = Scores(conftest.frame(rows))
    measures = {name: {**MORE, "probe": "lines"} for name in ("absdev", "unplaced")}
    sentences = findings(leaderboard(scores, measures), scores, measures, [], {})
    expected = (
        f"By absdev relative to its range ({text}), it is more nonlinear than 60 % of 5 reference "
        "networks (0 to 0.4)."
    )
    assert sentences == ([expected] if text else [])


@pytest.mark.parametrize(("networks", "is_placed"), [(4, False), (5, True)])
def test_a_population_has_at_least_five_networks(monkeypatch, networks, is_placed):
    entry = {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(networks)}}
    monkeypatch.setattr(population, "_load", lambda: {"m": entry})
    assert (population_of("m", LESS) is not None) is is_placed


def test_without_a_file_there_is_no_population(tmp_path, monkeypatch):
    monkeypatch.setattr(population, "FILE", tmp_path / "missing.json")
    population._load.cache_clear()
    assert population_of("affinity", LESS) is None
    population._load.cache_clear()


@pytest.mark.parametrize("about", [LESS, MORE])
@pytest.mark.parametrize(
    ("values", "rest"),
    [
        # Four sites a network: the intervals of the first two networks overlap or do not.
        ({"a": 0.1, "b": 0.3, "c": 0.8}, "."),
        ({"a": 0.1, "b": 0.11, "c": 0.8}, "; 1 more may be equally nonlinear."),
        ({"a": 0.1, "b": 0.11, "c": 0.12}, "; their intervals overlap."),
    ],
)
def test_extremes_of_several_networks(conftest, about, values, rest):
    about = {**about, "probe": "lines"}
    if about["more_means"] == "more nonlinear":
        values = {name: 1 - value for name, value in values.items()}
    rows = []
    for name, value in values.items():
        places = {f"p{i}": value + 0.01 * by for i, by in enumerate((-1.5, -0.5, 0.5, 1.5))}
        rows += conftest.cell_rows((name, "init", "d", 0), "m", places)
    scores = Scores(conftest.frame(rows), {"m": about})
    sentence = findings(leaderboard(scores, {"m": about}), scores, {"m": about}, [], {})[0]
    first, last = (f"{values[name]:.3f}" for name in ("a", "c"))
    assert sentence == f"By m, a ({first}) is the most nonlinear and c ({last}) the least{rest}"


def test_opposite_orders_and_gaps_are_findings(conftest):
    missing = [
        Gap(f"n{i}", "m", "", "undefined", f"{i + 7} samples are too few; try more")
        for i in range(3)
    ] + [Gap("n3", "m", "", "undefined", "constant"), Gap("n0", "k", "", "failed", "no memory")]
    missing.append(Gap("n4", "m", "relu", "undefined", "one place only"))
    spearman = {
        ("a", "b"): Correlation(-0.9, -0.99, -0.5, 9),
        ("a", "c"): Correlation(-0.4, -0.8, 0.1, 9),
        ("b", "c"): Correlation(-1.0, math.nan, math.nan, 3),
    }
    scores = Scores(conftest.frame([]))
    assert findings([], scores, {}, missing, spearman) == [
        "a and b rank the networks in opposite order (ρ -0.90 (-0.99 to -0.50)).",
        "m is undefined for n0, n1, n2: 7–9 samples are too few.",
        "m is undefined for n3: constant.",
        "k is failed for n0: no memory.",
    ]


def test_several_networks_are_described_by_their_extremes_and_gaps(conftest):
    run = conftest.realistic_run()
    measures = run.manifest["measures"]
    scores = Scores(run.scores, measures)
    board = leaderboard(scores, measures)
    missing = gaps([], scores)
    spearman = agreement(board, scores, measures)["spearman"]
    text = " ".join(findings(board, scores, measures, missing, spearman))
    assert f"By affinity, {board[0].label} (" in text
    assert "is the most nonlinear" in text
    assert "undefined for" in text


def test_a_value_is_placed_among_the_reference_networks(tmp_path, monkeypatch):
    content = {"m": {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(10)}}}
    (tmp_path / "reference.json").write_text(json.dumps(content))
    monkeypatch.setattr(population, "FILE", tmp_path / "reference.json")
    population._load.cache_clear()
    found = population_of("m", LESS)
    assert found is not None
    assert found.sentence(0.25).startswith("More nonlinear than 70 % of 10 reference networks")
    assert population_of("m", {**LESS, "version": "2"}) is None
    assert population_of("m", {**LESS, "options": {"ridge": 1}}) is None
    assert population_of("m", {**LESS, "more_means": "neither"}) is None
    assert population_of("other", LESS) is None
    population._load.cache_clear()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-5, 5))
def test_the_share_of_reference_networks_is_counted(values, value):
    for sense in (1, -1):
        text = Population(np.array(values), math.nan, sense).sentence(value)
        share = sum(sense * v < sense * value for v in values) / len(values)
        expected = {0: "none", 1: "all"}.get(share, f"{100 * share:.0f} %")
        assert f"than {expected} of {len(values)} reference" in text


def test_the_population_is_collected_from_runs(conftest):
    run = conftest.realistic_run()
    built = build_population([run])
    table = run.scores.query("measure == 'affinity' and place == '' and statistic == 'value'")
    table = table[table["status"] == "ok"]
    assert len(built["affinity"]["values"]) == len(table)
    other = conftest.FakeRun(
        "b", None, run.scores, {"measures": {"affinity": {**LESS, "version": "9"}}}
    )
    with pytest.raises(ValueError, match="different version"):
        build_population([run, other])


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9))
def test_the_standard_error_is_that_of_a_mean(values):
    expected = np.std(values, ddof=1) / math.sqrt(len(values))
    assert standard_error(cell_of(values)) == pytest.approx(expected, abs=1e-12)


def test_the_shipped_population_is_of_the_registered_measures():
    content = json.loads(population.FILE.read_text())
    assert len(content) >= 4
    for name, entry in content.items():
        measure = registry.load("measures", name)
        assert entry["version"] == measure.version, f"{name}: measure the reference networks anew"
        assert entry["options"] == {key: o.default for key, o in measure.options.items()}
        assert len(entry["values"]) >= population.MIN_NETWORKS
