"""Two runs beside each other."""

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import nlbench
from nlbench.cli.app import app
from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports import compare
from nlbench.reports.compare import Comparison, check_comparison_file, compare_runs, compare_scores
from nlbench.reports.exports import read_csv
from nlbench.reports.panels import dumbbell_figure
from nlbench.reports.tables import MeasureInfo, Score
from nlbench.reports.text import percentage
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run


def changed(run, measure, change, **facts):
    """The same run, with another reading of each cell of a measure."""
    records = [
        replace(r, result=change(r.result)) if r.measure.name == measure else r for r in run.records
    ]
    return Run(
        {**run.manifest, **Manifest().describe_records(records), **facts},
        records,
        Path("runs/after"),
    )


def shifted(by):
    def change(result):
        values = [replace(v, statistics={"value": v.statistics["value"] + by(i)})
                  for i, v in enumerate(result.values)]  # fmt: skip
        return Result.of(values)

    return change


@pytest.fixture
def before():
    run = make_run(3, measures=("affinity", "absdev", "pathlength"))
    return Run(run.manifest, run.records, Path("runs/before"))


def test_a_run_compared_with_itself_shows_no_difference(before):
    found = compare_runs(before, Run(before.manifest, before.records, Path("runs/same")))
    assert len(found.differences) == 9
    assert {d.change for d in found.differences} == {0.0}
    assert found.explanations == found.alone == ()
    assert found.broken(["* > 0"]) == []


def moved(by, error=0.0):
    """Add to each place's value, and to its replicates with noise."""

    def change(result):
        random = np.random.default_rng(0)

        def noise():
            drawn = random.normal(0, 1, 8)
            return error * (drawn - drawn.mean()) / drawn.std() / math.sqrt(7)

        values = []
        for i, v in enumerate(result.values):
            number = v.statistics["value"] + by(i)
            drawn = noise()
            numbers = tuple(r + by(i) + e for r, e in zip(v.replicates, drawn, strict=False))
            values.append(replace(v, statistics={"value": number}, replicates=numbers))
        shift = float(np.mean([by(i) for i in range(len(values))]))
        drawn = noise()
        whole = tuple(r + shift + e for r, e in zip(result.replicates, drawn, strict=False))
        return replace(Result.of(values), replicates=whole)

    return change


def of_measure(comparison, name):
    return [d for d in comparison.differences if d.measure == name]


def test_differences_are_paired_over_shared_samples(before):
    after = changed(before, "affinity", moved(lambda i: 0.1 if i else -0.2, 1e-4))
    for d in of_measure(compare_runs(before, after), "affinity"):
        assert d.error == pytest.approx(1e-4, rel=0.01)
        assert d.first.error > 5e-4  # either value is known less well
        assert d.is_significant
        assert [round(p.change, 6) for p in d.places[:3]] == [-0.2, 0.1, 0.1]
        assert all(p.is_significant for p in d.places)
        assert d.verdict == f"yes; {len(d.places)} of {len(d.places)} layers"


def test_variances_add_on_other_samples(before):
    after = changed(before, "affinity", moved(lambda i: 0.1, 1e-4))
    records = [replace(r, subject=replace(r.subject, sample_hash="other")) for r in after.records]
    after = Run(after.manifest, records, Path("runs/other"))
    for d in of_measure(compare_runs(before, after), "affinity"):
        assert d.error == pytest.approx(math.hypot(d.first.error, d.second.error))


def test_change_within_its_error_is_not_reported(before):
    after = changed(before, "affinity", moved(lambda i: 1e-4, 1e-2))
    for d in of_measure(compare_runs(before, after), "affinity"):
        assert not d.is_significant
        assert d.verdict.startswith("no; 0 of ")


def test_places_that_are_not_shared_are_counted(before):
    after = changed(
        before, "absdev", lambda result: Result.of([replace(v) for v in result.values[:5]])
    )
    for d in of_measure(compare_runs(before, after), "absdev"):
        assert d.change != 0
        assert d.note == "5 of 8 and 5 places are shared"


def test_places_of_functional_calls_have_a_line(before):
    name = before.records[0].result.values[0].place
    records = [
        replace(r, probe=replace(r.probe, facts={**r.probe.facts, "where": {name: "net.py:7"}}))
        for r in before.records
    ]
    comparison = compare_runs(before, Run(before.manifest, records, Path("runs/other")))
    console = Console(width=120, file=io.StringIO())
    comparison.print(console)
    assert f"functional calls: {name} at net.py:7" in console.file.getvalue()
    assert f"{name} (net.py:7)" in comparison.markdown()
    assert name in set(comparison.frame()["place"])


def test_two_checkpoints_are_compared_fact_by_fact():
    first = make_run(1)
    facts = {"weights": "epoch=5.ckpt", "weights_hash": "other"}
    records = [replace(r, subject=replace(r.subject, **facts)) for r in first.records]
    second = Run(
        {**first.manifest, **Manifest().describe_records(records)}, records, Path("runs/other")
    )
    comparison = compare_runs(first, second)
    names = [name for name, _, _ in comparison.explanations]
    # Their hashes differ because the weights do.
    assert names == ["weights"]
    assert all("epoch 5" in d.subject for d in comparison.differences)


def test_runs_without_replicates_have_no_errors(before):
    def bare(result):
        return Result.of([replace(v, replicates=()) for v in result.values])

    old = changed(before, "affinity", bare)
    after = changed(old, "affinity", moved(lambda i: 0.1))
    comparison = compare_runs(old, after)
    for d in of_measure(comparison, "affinity"):
        assert math.isnan(d.error)
        assert d.verdict == "unknown"
        assert "±" not in d.estimate.text
    # Without an error, a condition holds by the values alone.
    lines = comparison.broken(["affinity > 0.05"])
    assert len(lines) == 3
    assert all("error unknown" in line for line in lines)


def test_possible_causes_of_difference_are_named(before):
    affinity = {"name": "affinity", "version": "2", "options": {"ridge": 0.1}}
    other = {**before.manifest["measures"], "affinity": affinity}
    after = Run({**before.manifest, "device": "cuda", "measures": other}, before.records)
    found = {what: (a, b) for what, a, b in compare_runs(before, after).explanations}
    assert found == {
        "device": ("cpu", "cuda"),
        "affinity.version": ("1", "2"),
        "affinity.ridge": ("", "0.1"),
    }


@pytest.mark.parametrize(
    ("fact", "old", "new", "expected"),
    [
        ("arguments", {"act": "relu"}, {"act": "tanh"}, ("model.act", "relu", "tanh")),
        ("arguments", None, {"act": "tanh"}, ("model.act", "", "tanh")),
        ("data_options", {"size": 4}, {"size": 8}, ("data.size", "4", "8")),
        ("sources", {"a.py:A": "da"}, {"a.py:A": "ec"}, ("version of a.py:A", "da", "ec")),
        ("files", {"x.csv": "da"}, {"x.csv": "ec"}, ("version of x.csv", "da", "ec")),
        ("batch_norm", "trained", "samples", ("batch norm", "trained", "samples")),
        ("files", None, {"x.csv": "ec"}, None),
        ("key", "1", "2", None),
    ],
)
def test_options_and_files_of_a_subject_explain_a_difference(before, fact, old, new, expected):
    runs = [
        Run({**before.manifest, "subjects": [{**s, fact: value} for s in subjects]}, before.records)
        for subjects in [before.manifest["subjects"]]
        for value in (old, new)
    ]
    assert compare_runs(*runs).explanations == (() if expected is None else (expected,))


def test_options_of_one_run_only_explain_nothing(before):
    probes = {**before.manifest["probes"], "planes": {"size": 100}}
    parameters = {"name": "parameters", "version": "1", "options": {"base": 2}}
    measures = {**before.manifest["measures"], "parameters": parameters}
    after = Run({**before.manifest, "probes": probes, "measures": measures}, before.records)
    assert compare_runs(before, after).explanations == ()


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("absdev > 1", 3), ("absdev > 3", 0), ("absdev > -5", 3), ("absdev > +1", 3),
        ("absdev < -1", 0), ("abs* > 0.0001%", 3), ("absdev > 99%", 0), ("affinity > 0", 0),
    ],
)  # fmt: skip
def test_conditions_say_which_cells_changed_too_much(before, condition, count):
    after = changed(before, "absdev", moved(lambda i: 2.0, 0.01))
    assert len(compare_runs(before, after).broken([condition])) == count


@pytest.mark.parametrize("error", [1e-3, 0.1])
@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("affinity@* > 0.05", 3), ("affinity@layer0.0.act1 > 0.05", 3), ("affinity@* < -0.05", 3),
        ("affinity@*.act2 > 0.05", 0), ("affinity@layer0.0.act1 > 5%", 3), ("affinity@* > 0.3", 0),
        ("affinity@* > +0.05", 0), ("affinity > 0.1", 0),
    ],
)  # fmt: skip
def test_conditions_on_places_hold_beyond_the_error(before, condition, count, error):
    after = changed(before, "affinity", moved(lambda i: -0.2 * (i == 0), error))
    lines = compare_runs(before, after).broken([condition])
    assert len(lines) == (count if error < 0.01 else 0)
    assert all("affinity@layer0.0.act1, " in line for line in lines)


def test_a_place_without_a_value_breaks_its_conditions(before):
    def gone(result):
        first = Value.missing(result.values[0].place, "undefined", "constant output", 8)
        return Result.of([first, *result.values[1:]])

    lines = compare_runs(before, changed(before, "affinity", gone)).broken(["affinity@* > 9"])
    assert len(lines) == 3
    assert all("no longer has a value: constant output" in line for line in lines)


def test_missing_numbers_break_any_condition(before):
    gone = changed(before, "absdev", lambda _: Result.missing("failed", "out of memory"))
    comparison = compare_runs(before, gone)
    lines = comparison.broken(["absdev > 1000%"])
    assert len(lines) == 3
    assert all("out of memory" in line for line in lines)
    assert math.isnan(comparison.frame().set_index("measure").loc["absdev", "second"].iloc[0])


def test_measures_that_depend_on_units_are_marked(before):
    comparison = compare_runs(before, before)
    assert "absdev grows with the logits" in comparison.markdown()
    assert "affinity grows" not in comparison.markdown()


def test_percentages_are_of_the_first_value(before):
    after = changed(before, "absdev", moved(lambda i: 2.0, 1e-6))
    comparison = compare_runs(before, after)
    shares = sorted(200.0 / d.first.value for d in comparison.differences if d.measure == "absdev")
    for count, bound in [(3, 0.9 * shares[0]), (0, 1.5 * shares[2])]:
        assert len(comparison.broken([f"absdev > {bound:.6f}%"])) == count


def around(value, error):
    """An estimate with a given standard error, whose replicates alternate around the value."""
    step = error / math.sqrt(7)
    return Score(value, (value - step, value + step) * 4, unit="samples", status="ok")


@pytest.mark.parametrize(
    ("first", "second", "condition", "holds"),
    [
        (around(0.0, 0.01), around(0.001, 0.01), "r2 > 5%", False),
        (around(0.0, 0.01), around(0.5, 0.01), "r2 > 5%", True),
        (around(0.001, 0.01), around(0.5, 0.01), "r2 > 5%", True),
        (around(-0.001, 0.01), around(0.5, 0.01), "r2 > +5%", True),
        (around(-0.001, 0.01), around(0.5, 0.01), "r2 < -5%", False),
        (around(0.001, 0.01), around(0.0, 0.01), "r2 > 5%", False),
        (around(-1.0, 0.001), around(-1.1, 0.001), "r2 < -5%", True),
        (around(-1.0, 0.001), around(-1.1, 0.001), "r2 < -15%", False),
        (around(-1.0, 0.001), around(-0.9, 0.001), "r2 > +5%", True),
        (around(1.0, 0.001), around(-1.0, 0.001), "r2 < -150%", True),
        (around(1.0, 0.001), around(1.01, 0.001), "r2 < 5%", True),
    ],
)
def test_percentages_of_values_near_zero(first, second, condition, holds):
    difference = compare_scores("vgg8", "r2", first, second)
    comparison = Comparison(("a", "b"), (difference,), (), (), {"r2": MeasureInfo()})
    assert bool(comparison.broken([condition])) == holds


def test_replicates_of_zero_leave_a_percentage_its_error():
    first = Score(0.01, (0.0, *[0.0114] * 7), "samples", "samples", status="ok")
    second = Score(0.011, (0.002, *[0.012] * 7), "samples", "samples", status="ok")
    difference = compare_scores("vgg8", "accuracy", first, second)
    comparison = Comparison(("a", "b"), (difference,), (), (), {"accuracy": MeasureInfo()})
    assert comparison.broken(["accuracy > 5%"]) == []


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        ("absdev 5", "'absdev 5'"),
        ("absdef > 5%", "'absdev'"),
        ("affinity@layer0.0.act9 > 5%", "'layer0.0.act2'"),
        ("affinity@ > 5%", "'affinity@ > 5%'"),
    ],
)
def test_unreadable_conditions_are_refused_in_one_line(before, condition, name):
    with pytest.raises(RequestError, match=name):
        compare_runs(before, before).broken([condition])


def test_runs_of_single_subjects_are_aligned():
    first, second = make_run(1, measures=("absdev",)), make_run(2, measures=("absdev",))
    other = Run(second.manifest, second.records[1:])
    (found,) = compare_runs(first, other).differences
    assert "→" in found.subject


@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 2), (2, 1)])
def test_different_subjects_need_runs_of_one_subject(first, second):
    run = make_run(first + second, measures=("absdev",))
    one, other = (Run(run.manifest, r) for r in (run.records[:first], run.records[first:]))
    with pytest.raises(RequestError):
        compare_runs(one, other)


def test_runs_that_share_nothing_are_refused(before):
    with pytest.raises(RequestError):
        compare_runs(before, make_run(3, measures=("density",)))


def test_cells_of_one_run_alone_are_said(before):
    fewer = Run(before.manifest, before.records[3:], Path("runs/fewer"))
    found = compare_runs(before, fewer)
    assert len(found.differences) == 6
    label = before.scores["model"].iloc[0]
    assert found.alone == (("before", label),)


def test_a_measure_of_one_run_alone_is_named(before):
    records = [r for r in before.records if r.measure.name != "absdev"]
    manifest = {**before.manifest, **Manifest().describe_records(records)}
    fewer = Run(manifest, records, Path("runs/fewer"))
    assert compare_runs(before, fewer).alone == (("before", "absdev of every subject"),)
    assert compare_runs(fewer, before).alone == (("before", "absdev of every subject"),)


def test_a_cell_of_one_run_alone_is_named(before):
    gone = next(r for r in before.records[3:] if r.measure.name == "absdev")
    fewer = Run(before.manifest, [r for r in before.records if r is not gone], Path("runs/fewer"))
    alone = (("before", f"absdev, {gone.subject.model}"),)
    assert compare_runs(before, fewer).alone == alone
    assert compare_runs(fewer, before).alone == alone


def test_long_comparisons_print_the_largest_changes(before, monkeypatch):
    monkeypatch.setattr(compare, "_MAX_ROWS", 2)
    means = before.scores.query("measure == 'absdev' and place == '' and statistic == 'value'")
    for factors in ([0.01, 0.2, 0.1], [0.1, 0.2, 0.01], [0.2, 0.01, 0.1]):
        steps = iter(np.repeat(means["value"] * factors, 8))
        after = changed(before, "absdev", shifted(lambda i, steps=steps: next(steps)))
        stream = io.StringIO()
        compare_runs(before, after).print(Console(file=stream, width=200))
        rows = [
            line.split(":")[0].strip()
            for line in stream.getvalue().splitlines()
            if ": absdev " in line
        ]
        assert rows == means["model"][np.array(factors) > 0.05].tolist()
        assert "values that changed less" in stream.getvalue()


def test_printed_and_written_numbers_agree(before, tmp_path):
    after = changed(before, "affinity", moved(lambda i: -0.1 * (i < 2), 1e-4))
    comparison = compare_runs(before, after)
    stream = io.StringIO()
    comparison.print(Console(file=stream, width=200))
    texts = [stream.getvalue()]
    for ending in ("html", "md"):
        file = comparison.write(tmp_path / "new" / f"out.{ending}")
        texts.append(file.read_text(encoding="utf-8"))
    for d in of_measure(comparison, "affinity"):
        changes = f"2 of {len(d.places)} layers changed (more nonlinear)"
        for text in texts:
            assert d.estimate.text in text
            assert d.places[0].estimate.text in text
            assert changes in text
    assert texts[1].count('class="dumbbell"') == 3
    table = read_csv(comparison.write(tmp_path / "out.csv"))
    np.testing.assert_allclose(table["difference"], comparison.frame()["difference"])
    np.testing.assert_allclose(table["error"], comparison.frame()["error"])
    assert table.query("changed")["measure"].unique().tolist() == ["affinity"]
    with pytest.raises(RequestError):
        comparison.write(tmp_path / "out.txt")


@pytest.mark.parametrize("ending", ["html", "md", "csv"])
def test_only_a_comparison_is_replaced(before, ending, tmp_path):
    file = tmp_path / f"out.{ending}"
    check_comparison_file(file)
    comparison = compare_runs(before, before)
    comparison.write(file)
    check_comparison_file(file)
    file.write_text("a,b\n", "utf-8")
    with pytest.raises(RequestError):
        check_comparison_file(file)
    file.unlink()
    file.symlink_to("missing")
    with pytest.raises(RequestError):
        check_comparison_file(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(RequestError):
        check_comparison_file(file)


def test_the_command_leaves_files_of_others(before, tmp_path):
    before.save(tmp_path / "run")
    file = tmp_path / "scores.csv"
    file.write_text("a,b\n", "utf-8")
    runs = [str(tmp_path / "run")] * 2
    result = CliRunner().invoke(app, ["compare", *runs, "-o", str(file)])
    assert isinstance(result.exception, RequestError)
    assert file.read_text("utf-8") == "a,b\n"


def test_the_axis_of_a_plot_holds_all_intervals(before):
    after = changed(before, "affinity", moved(lambda i: -0.1, 0.3))
    [d, *_] = of_measure(compare_runs(before, after), "affinity")
    figure = dumbbell_figure(d, ("a", "b"), MeasureInfo())
    (axes,) = figure.axes
    drawn = [c for c in axes.collections if isinstance(c, LineCollection)]
    ends = np.concatenate([segment[:, 0] for c in drawn for segment in c.get_segments()])
    intervals = [e.interval for each in (*d.places, d) for e in (each.first, each.second)]
    assert np.min(intervals) == pytest.approx(ends.min())
    assert np.max(intervals) == pytest.approx(ends.max())
    low, high = axes.get_xlim()
    assert low <= ends.min() < ends.max() <= high
    # The differences stand to the right of the axis, within the figure.
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.x0 >= axes.get_window_extent().x1
        assert box.x1 <= figure.bbox.width


def test_rounding_does_not_count_as_change():
    def cell(values):
        places = [Score(v, unit="exact", name=f"p{i}", status="ok") for i, v in enumerate(values)]
        return Score(values[0], unit="exact", status="ok", places=tuple(places))

    for scale in (1e-30, 1.0, 1e30):
        first, second = (cell([scale * v for v in values]) for values in ((1, 2), (1 + 1e-12, 2.1)))
        [d] = compare.mark_significant([compare_scores("a", "m", first, second)])
        assert [p.is_significant for p in d.places] == [False, True]


def renamed(run, **facts):
    """The same run with other facts of its subjects."""
    records = [replace(r, subject=replace(r.subject, **facts)) for r in run.records]
    return Run(
        {**run.manifest, **Manifest().describe_records(records)}, records, Path("runs/renamed")
    )


def test_other_weights_are_named_once():
    first = make_run(1, measures=("affinity",))
    second = renamed(first, weights="epoch2", weights_hash="1e" * 32)
    assert compare_runs(first, second).explanations == (("weights", "trained", "epoch2"),)
    retrained = renamed(first, weights_hash="1e" * 32)
    expected = (("weights hash", "0f" * 32, "1e" * 32),)
    assert compare_runs(first, retrained).explanations == expected


def test_facts_of_one_network_name_it(before):
    records = [
        replace(r, subject=replace(r.subject, samples=9)) if r.subject.model == "vgg8" else r
        for r in before.records
    ]
    after = Run({**before.manifest, **Manifest().describe_records(records)}, records)
    (line,) = compare_runs(before, after).explanations
    assert line == ("vgg8: samples", "512", "9")


@pytest.mark.parametrize(
    ("fraction", "error", "text"),
    [
        (-2.13e-5, 4e-4, "0.00 %"), (-2.13e-5, math.nan, "−0.0021 %"), (0.12345, 0.002, "+12.3 %"),
        (-0.5, 0.02, "−50 %"), (0.0, math.nan, "0 %"),
    ],
)  # fmt: skip
def test_percentages_have_the_digits_of_their_errors(fraction, error, text):
    assert percentage(fraction, error) == text


def test_a_network_rarely_changes_on_other_samples():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.Tanh())
    samples = torch.randn(30, 2, 64, 6)
    changed = 0
    for halves in samples:
        first, second = (nlbench.evaluate(network, x, ["norm", "influence"]) for x in halves)
        changed += any(d.is_significant for d in nlbench.compare(first, second).rows())
    assert changed <= 4  # of 30, where at most 5 % are expected
