"""Findings name what stands out, and the reference population places a value."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scores import Replicates, records_of, scores_of

from nlbench import registry
from nlbench.reports import population
from nlbench.reports.agreement import Correlation, agreement
from nlbench.reports.findings import findings, standout_places
from nlbench.reports.leaderboard import leaderboard
from nlbench.reports.population import Population, find_population
from nlbench.reports.remarks import Gap, gaps
from nlbench.reports.tables import MeasureInfo, Score, Scores

DOCS = Path(__file__).parents[2] / "docs"
MORE = {"probe": "sites", "more_means": "more nonlinear", "version": "1", "options": {}}
LESS = {"probe": "sites", "more_means": "less nonlinear", "version": "1", "options": {}}


def cell_of(values):
    places = tuple(Score(v, name=f"p{i}") for i, v in enumerate(values))
    return Score(float(np.mean(values)), places=places)


def replicates_of(values, error):
    """Replicates of values with a standard error, and of their mean. Groups are independent."""
    random = np.random.default_rng(0)
    drawn = {}
    for name, value in values.items():
        noise = random.normal(0, 1, 8)
        noise -= noise.mean()
        drawn[name] = tuple(value + error / 7 * noise / noise.std() * math.sqrt(7))
    return (tuple(np.mean(list(drawn.values()), axis=0)), drawn, "k")


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


def single_network_finding(conftest, places, error):
    subject = ("n", "init", "d", 0)
    table = conftest.frame(conftest.cell_rows(subject, "affinity", places))
    known = {(*subject, "affinity"): Replicates(*replicates_of(places, error))} if error else {}
    scores = scores_of(table, {"affinity": LESS}, known)
    [sentence] = findings(leaderboard(scores), scores, [], {})
    return sentence


@pytest.mark.parametrize(
    ("places", "finding"),
    [
        (
            {"a": 0.9, "b": 0.5, "c": 0.93, "d": 0.95},
            "stands out as the most nonlinear; the other 3 activations lie in 0.90–0.95.",
        ),
        (
            {"a": 0.6, "b": 0.5, "c": 0.9, "d": 0.8, "e": 0.7},
            "is the most nonlinear of 5 activations and c (0.900 ± 0.004) the least.",
        ),
    ],
)
def test_layers_are_named_beyond_their_errors(conftest, places, finding):
    expected = f"By affinity, b (0.500 ± 0.004) {finding}"
    assert single_network_finding(conftest, places, 0.004) == expected


@pytest.mark.parametrize(
    ("error", "rest"), [(0.2, "; the errors do not tell which is the most nonlinear."), (0, ".")]
)
def test_values_within_error_do_not_stand_out(conftest, error, rest):
    for b in (0.5, 0.85):
        places = {"a": 0.9, "b": b, "c": 0.93, "d": 0.95}
        expected = f"By affinity, 4 activations lie in {b:.2f}–0.95{rest}"
        assert single_network_finding(conftest, places, error) == expected


def test_measures_that_disagree_say_why(conftest, monkeypatch):
    values = {f"n{i}": i / 10 for i in range(10)}
    entry = {"version": "1", "options": {}, "values": values}
    monkeypatch.setattr(population, "_load", lambda: {"affinity": entry, "nlc": entry})
    subject = ("n", "init", "d", 0)
    rows = conftest.cell_rows(subject, "affinity", {"a": 0.05})
    rows += conftest.cell_rows(subject, "nlc", {"a": 0.05})
    measures = {"affinity": LESS, "nlc": {**MORE, "probe": "function"}}
    scores = scores_of(conftest.frame(rows), measures)
    found = findings(leaderboard(scores), scores, [], {})
    assert found[-1] == (
        "The two disagree: affinity looks at each activation, nlc at the whole function, "
        "and their reference networks differ."
    )
    assert "(10 trained; 0 to 0.9)" in found[0]


@pytest.mark.parametrize(("value", "text"), [(0.25, "0.2500"), (math.nan, None)])
def test_single_networks_are_placed_among_references(conftest, monkeypatch, value, text):
    entry = {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(5)}}
    monkeypatch.setattr(population, "_load", lambda: {"absdev": entry})
    subject = ("n", "init", "d", 0)
    rows = conftest.cell_rows(subject, "absdev", {"path0": 3.0})
    rows.append((*subject, "absdev", "", "over_range", value, 8, "ok", ""))
    rows += conftest.cell_rows(subject, "unplaced", {"path0": 3.0})
    info = MeasureInfo.from_dict({**MORE, "probe": "lines"})
    given = {"absdev": info, "unplaced": info}
    scores = Scores({"": records_of(conftest.frame(rows))}, given)
    sentences = findings(leaderboard(scores), scores, [], {})
    expected = (
        f"By absdev.relative ({text}), it is more nonlinear than 60 % of 5 reference "
        "networks (5 trained; 0 to 0.4)."
    )
    assert sentences == ([expected] if text else [])


@pytest.mark.parametrize(("networks", "is_placed"), [(4, False), (5, True)])
def test_a_population_has_at_least_five_networks(monkeypatch, networks, is_placed):
    entry = {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(networks)}}
    monkeypatch.setattr(population, "_load", lambda: {"m": entry})
    assert (find_population("m", MeasureInfo.from_dict(LESS)) is not None) is is_placed


def test_missing_file_gives_no_population(tmp_path, monkeypatch):
    monkeypatch.setattr(population, "FILE", tmp_path / "missing.json")
    population._load.cache_clear()
    assert find_population("affinity", MeasureInfo.from_dict(LESS)) is None
    population._load.cache_clear()


@pytest.mark.parametrize("about", [LESS, MORE])
@pytest.mark.parametrize(
    ("error", "middle", "expected"),
    [
        (
            0.001,
            0.3,
            "By m, a ({a} ± 0.0010) is the most nonlinear and c ({c} ± 0.0010) the least.",
        ),
        (
            0.02,
            0.11,
            "By m, 2 networks are the most nonlinear within the error, led by a ({a} ± 0.02), "
            "and c ({c} ± 0.02) the least.",
        ),
        (0.9, 0.3, "By m, the networks ({range}) do not differ beyond their errors."),
        (0.0, 0.3, "By m, networks range from a ({a}) to c ({c}); their errors are unknown."),
    ],
)
def test_extremes_are_named_beyond_their_errors(conftest, about, error, middle, expected):
    values = {"a": 0.1, "b": middle, "c": 0.8}
    if about["more_means"] == "more nonlinear":
        values = {name: 1 - value for name, value in values.items()}
    rows = []
    known = {}
    for name, value in values.items():
        subject = (name, "init", "d", 0)
        rows += conftest.cell_rows(subject, "m", {"p": value})
        noise = np.random.default_rng(len(known)).normal(0, 1, 8)
        noise -= noise.mean()
        numbers = tuple(value + error * noise / noise.std() / math.sqrt(7))
        if error:
            known[*subject, "m"] = Replicates(numbers, {}, "k")
    scores = scores_of(conftest.frame(rows), {"m": about}, known)
    sentence = findings(leaderboard(scores), scores, [], {})[0]
    decimals = 4 if error in (0.0, 0.001) else 2
    texts = {n: f"{values[n]:.{decimals}f}" for n in "ac"}
    low, high = sorted(values.values())[:: len(values) - 1]
    assert sentence == expected.format(**texts, range=f"{low:.2f}–{high:.2f}")


def test_networks_without_errors_have_no_extremes(conftest):
    rows = []
    known = {}
    for name, value in {"a": 0.1, "b": 0.3, "c": 0.8}.items():
        subject = (name, "init", "d", 0)
        rows += conftest.cell_rows(subject, "m", {"p": value})
        if name != "b":
            known[*subject, "m"] = Replicates((value - 0.001, value + 0.001), {}, "k")
    scores = scores_of(conftest.frame(rows), {"m": LESS}, known)
    sentence = findings(leaderboard(scores), scores, [], {})[0]
    assert sentence.startswith("By m, networks range from a (")
    assert sentence.endswith("; some errors are unknown.")


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
    scores = scores_of(conftest.frame([]))
    assert findings([], scores, missing, spearman) == [
        "a and b rank the networks in opposite order (ρ −0.90 (−0.99 to −0.50)).",
        "m is undefined for n0, n1, n2: 7–9 samples are too few.",
        "m is undefined for n3: constant.",
        "k is failed for n0: no memory.",
    ]


def test_networks_are_described_by_extremes_and_gaps(conftest):
    run = conftest.realistic_run()
    measures = run.manifest["measures"]
    scores = scores_of(run.scores, measures)
    board = leaderboard(scores)
    missing = gaps([], scores)
    spearman = agreement(board, scores)["spearman"]
    text = " ".join(findings(board, scores, missing, spearman))
    assert f"By affinity, networks range from {board[0].label} (" in text
    assert "their errors are unknown" in text
    assert "undefined for" in text


def test_a_value_is_placed_among_the_reference_networks(tmp_path, monkeypatch):
    content = {"m": {"version": "1", "options": {}, "values": {f"n{i}": i / 10 for i in range(10)}}}
    (tmp_path / "reference.json").write_text(json.dumps(content))
    monkeypatch.setattr(population, "FILE", tmp_path / "reference.json")
    population._load.cache_clear()
    found = find_population("m", MeasureInfo.from_dict(LESS))
    assert found is not None
    assert found.sentence(0.25).startswith("More nonlinear than 70 % of 10 reference networks")
    assert find_population("m", MeasureInfo.from_dict({**LESS, "version": "2"})) is None
    assert find_population("m", MeasureInfo.from_dict({**LESS, "options": {"ridge": 1}})) is None
    assert find_population("m", MeasureInfo.from_dict({**LESS, "more_means": "neither"})) is None
    assert find_population("other", MeasureInfo.from_dict(LESS)) is None
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
    build_population = runpy.run_path(str(DOCS / "reference_networks.py"))["build_population"]
    built = build_population([run])
    table = run.scores.query("measure == 'affinity' and place == '' and statistic == 'value'")
    table = table[table["status"] == "ok"]
    assert len(built["affinity"]["values"]) == len(table)
    other = conftest.FakeRun(
        "b", None, run.scores, {"measures": {"affinity": {**LESS, "version": "9"}}}
    )
    with pytest.raises(ValueError, match="version"):
        build_population([run, other])


def test_the_shipped_population_is_of_the_registered_measures():
    content = json.loads(population.FILE.read_text())
    assert len(content) >= 4
    for name, entry in content.items():
        measure = registry.load("measures", name)
        assert entry["version"] == measure.version, f"{name}: measure the reference networks anew"
        assert entry["options"] == {key: o.default for key, o in measure.options.items()}
        assert len(entry["values"]) >= population.MIN_NETWORKS
