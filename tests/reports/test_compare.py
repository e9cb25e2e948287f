"""Two runs beside each other."""

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports import compare
from nlbench.reports.compare import compare_runs, difference_of
from nlbench.reports.exports import read_csv
from nlbench.reports.tables import _cell_of
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
        {**run.manifest, **Manifest().of_records(records), **facts}, records, Path("runs/after")
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


def test_differences_are_paired_over_places(before):
    after = changed(before, "absdev", shifted(lambda i: 10.0 if i else -2.0))
    found = [d for d in compare_runs(before, after).differences if d.measure == "absdev"]
    for d in found:
        assert d.change == pytest.approx((7 * 10 - 2) / 8)
        assert (d.share.value, d.share.n) == (7 / 8, 8)
        # the values spread over hundreds, their differences over twelve
        assert 4 <= d.low < d.change < d.high <= 11


def test_a_difference_over_other_places_has_no_interval_and_a_note(before):
    after = changed(
        before, "absdev", lambda result: Result.of([replace(v) for v in result.values[:5]])
    )
    for d in (d for d in compare_runs(before, after).differences if d.measure == "absdev"):
        assert d.change != 0
        assert math.isnan(d.low)
        assert math.isnan(d.high)
        assert d.note.startswith("5 of 8 and 5 places are shared; their mean difference is +0")


def test_a_place_without_a_value_is_left_out(before):
    def change(result):
        gone = Value.missing(result.values[3].place, "undefined", "constant", 8)
        return Result.of([gone if i == 3 else value for i, value in enumerate(result.values)])

    after = changed(before, "absdev", change)
    for d in (d for d in compare_runs(before, after).differences if d.measure == "absdev"):
        assert d.share.n == 7
        assert d.note == ("7 of 8 and 7 places are shared; their mean difference is +0 (+0 to +0)")


def test_a_difference_over_two_places_has_an_interval(before):
    few = changed(before, "absdev", lambda result: Result.of(result.values[:2]))
    after = changed(few, "absdev", shifted(lambda i: 1.0 + i))
    for d in (d for d in compare_runs(few, after).differences if d.measure == "absdev"):
        assert d.low < d.change < d.high
        assert d.share.n == 2


@pytest.mark.parametrize("by", [lambda i: 0.5 * i, lambda i: -1.0, lambda i: (-1) ** i])
def test_an_interval_contains_its_estimate(before, by):
    for d in compare_runs(before, changed(before, "absdev", shifted(by))).differences:
        if math.isfinite(d.low):
            assert d.low <= d.change + 1e-9
            assert d.change <= d.high + 1e-9


def test_what_could_explain_a_difference_is_named(before):
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
    ("condition", "count"),
    [
        ("absdev > 1", 3), ("absdev > 3", 0), ("absdev > -5", 3), ("absdev > +1", 3),
        ("absdev < -1", 0), ("abs* > 0.0001%", 3), ("absdev > 99%", 0), ("affinity > 0", 0),
    ],
)  # fmt: skip
def test_conditions_say_which_cells_changed_too_much(before, condition, count):
    comparison = compare_runs(before, changed(before, "absdev", shifted(lambda i: 2.0)))
    assert len(comparison.broken([condition])) == count


def test_a_number_that_is_gone_breaks_any_condition_on_it(before):
    gone = changed(before, "absdev", lambda _: Result.missing("failed", "out of memory"))
    comparison = compare_runs(before, gone)
    lines = comparison.broken(["absdev > 1000%"])
    assert len(lines) == 3
    assert all("out of memory" in line for line in lines)
    assert math.isnan(comparison.frame().set_index("measure").loc["absdev", "second"].iloc[0])


def test_percentages_are_of_the_first_value(before):
    after = changed(before, "absdev", shifted(lambda i: 2.0))
    comparison = compare_runs(before, after)
    shares = sorted(200.0 / d.before for d in comparison.differences if d.measure == "absdev")
    for count, bound in [(3, shares[0] - 1e-3), (2, shares[0] + 1e-3), (0, shares[2] + 1e-3)]:
        assert len(comparison.broken([f"absdev > {bound:.6f}%"])) == count
        assert len(comparison.broken([f"absdev > {bound / 100:.8f}"])) == 3


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("absdev 5", "expected a condition like 'absdev > 5%'"),
        ("absdef > 5%", "did you mean 'absdev'"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_in_one_line(before, condition, said):
    with pytest.raises(RequestError, match=said):
        compare_runs(before, before).broken([condition])


def test_runs_of_one_subject_each_are_aligned_by_measure():
    first, second = make_run(1, measures=("absdev",)), make_run(2, measures=("absdev",))
    other = Run(second.manifest, second.records[1:])
    (found,) = compare_runs(first, other).differences
    assert "→" in found.subject


@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 2), (2, 1)])
def test_different_subjects_are_compared_in_runs_of_one_subject_only(first, second):
    run = make_run(first + second, measures=("absdev",))
    one, other = (Run(run.manifest, r) for r in (run.records[:first], run.records[first:]))
    with pytest.raises(RequestError, match="no cell in common"):
        compare_runs(one, other)


def test_runs_that_share_nothing_are_refused(before):
    with pytest.raises(RequestError, match="no cell in common"):
        compare_runs(before, make_run(3, measures=("density",)))


def test_cells_of_one_run_alone_are_said(before):
    fewer = Run(before.manifest, before.records[3:], Path("runs/fewer"))
    found = compare_runs(before, fewer)
    assert len(found.differences) == 6
    label = before.scores["model"].iloc[0]
    assert found.alone == (("before", label),)


def test_a_measure_of_one_run_alone_is_named(before):
    records = [r for r in before.records if r.measure.name != "absdev"]
    manifest = {**before.manifest, **Manifest().of_records(records)}
    fewer = Run(manifest, records, Path("runs/fewer"))
    assert compare_runs(before, fewer).alone == (("before", "absdev of every subject"),)
    assert compare_runs(fewer, before).alone == (("before", "absdev of every subject"),)


def test_a_cell_of_one_run_alone_is_named(before):
    gone = next(r for r in before.records[3:] if r.measure.name == "absdev")
    fewer = Run(before.manifest, [r for r in before.records if r is not gone], Path("runs/fewer"))
    alone = (("before", f"absdev, {gone.subject.model}"),)
    assert compare_runs(before, fewer).alone == alone
    assert compare_runs(fewer, before).alone == alone


def test_a_long_comparison_prints_the_largest_changes_in_order(before, monkeypatch):
    monkeypatch.setattr(compare, "_MAX_ROWS", 2)
    means = before.scores.query("measure == 'absdev' and place == '' and statistic == 'value'")
    for factors in ([0.01, 0.2, 0.1], [0.1, 0.2, 0.01], [0.2, 0.01, 0.1]):
        steps = iter(np.repeat(means["value"] * factors, 8))
        after = changed(before, "absdev", shifted(lambda i, steps=steps: next(steps)))
        stream = io.StringIO()
        compare_runs(before, after).print(Console(file=stream, width=200))
        rows = [line.split()[0] for line in stream.getvalue().splitlines() if " % of 8" in line]
        assert rows == means["model"][np.array(factors) > 0.05].tolist()
        assert "and 7 cells that changed less" in stream.getvalue()


def test_it_is_printed_and_written_with_the_same_numbers(before, tmp_path):
    after = changed(before, "absdev", shifted(lambda i: 2.0))
    comparison = compare_runs(before, after)
    stream = io.StringIO()
    comparison.print(Console(file=stream, width=200))
    texts = [stream.getvalue()]
    for ending in ("html", "md"):
        file = comparison.write(tmp_path / "new" / f"out.{ending}")
        texts.append(file.read_text(encoding="utf-8"))
    for text in texts:
        assert text.count("100 % of 8") == 3
    table = read_csv(comparison.write(tmp_path / "out.csv"))
    np.testing.assert_allclose(table["difference"], comparison.frame()["difference"])
    with pytest.raises(RequestError, match=r"ending in \.html, \.md, \.csv"):
        comparison.write(tmp_path / "out.txt")


@pytest.mark.parametrize(
    ("by", "rose", "fell"),
    [
        (lambda i: 5.0 * (i == 0), 1 / 8, 0.0),
        (lambda i: 0.0, 0.0, 0.0),
        (lambda i: -9e-13, 0.0, 0.0),
        (lambda i: (-5.0, 5.0, 0.0, 9e-13)[i % 4], 1 / 4, 1 / 4),
    ],
)
def test_ties_neither_rise_nor_fall(before, tmp_path, by, rose, fell):
    comparison = compare_runs(before, changed(before, "absdev", shifted(by)))
    table = read_csv(comparison.write(tmp_path / "change.csv")).query("measure == 'absdev'")
    assert table["share above zero"].tolist() == [rose] * 3
    assert table["share below zero"].tolist() == [fell] * 3
    texts = f"{100 * rose:.0f} % of 8 | {100 * fell:.0f} % of 8"
    assert comparison.markdown().count(texts) >= 3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_ties_do_not_depend_on_the_unit(scale):
    def cell(values):
        places = [Value(f"p{i}", {"value": scale * v}, 4) for i, v in enumerate(values)]
        return _cell_of(Result.of(places))

    difference = difference_of("a", "m", cell([1.0, 2.0, 3e-6]), cell([1.0, 2.1, 2e-6]))
    assert (difference.share.value, difference.fall_share) == (1 / 3, 1 / 3)
