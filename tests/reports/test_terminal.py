"""The leaderboard in a terminal."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from nlbench.measure import Result
from nlbench.reports.terminal import print_leaderboard
from nlbench.reports.text import plus_minus
from nlbench.store.run import Run

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run


def printed(run, width=80):
    stream = io.StringIO()
    print_leaderboard(run, Console(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_fits_the_width(run, width) -> None:
    lines = printed(run, width).splitlines()
    begin = next(i for i, line in enumerate(lines) if set(line) == {"─"})
    table = [line for line in lines[: begin + 7] if "subjects" not in line and "data" not in line]
    assert max(map(len, table)) <= max(width, 44)


def test_wide_windows_show_numbers_errors_and_ranks() -> None:
    run = make_run(4, measures=("affinity", "absdev"))
    text = printed(run, 200)
    cells = [r.result for r in run.records if r.measure.name == "affinity"]
    for result in cells:
        assert f"{plus_minus(result.summary['value'], result.error)} (" in text
    assert "↓ more nonlinear" in text
    assert "grows with the logits" in text
    assert "not shown" not in text


def test_narrow_windows_say_what_they_leave_out(run) -> None:
    text = printed(run, 60)
    assert "not shown: absdev, pathlength" in text
    assert "the page and scores.csv show everything" in text


def test_many_subjects_show_both_ends(conftest) -> None:
    rows = []
    for number in range(60):
        rows += conftest.cell_rows((f"m{number}", "init", "d", 0), "affinity", {"a": number / 60})
    scores = conftest.frame(rows)
    text = printed(conftest.FakeRun("r", None, scores, conftest.manifest_of(scores, ["affinity"])))
    shown = [line.split()[0] for line in text.splitlines() if line.startswith(" m")]
    assert shown == ["model", *(f"m{i}" for i in range(30)), *(f"m{i}" for i in range(50, 60))]
    assert "not shown: 20 subjects in the middle" in text


def test_each_reason_has_one_unbroken_line(run) -> None:
    lines = printed(run, 40).splitlines()
    reason = "undefined: hardswish at features.0.2: not piecewise affine"
    assert sum(line.endswith(reason) for line in lines) == 1
    assert "pathlength, mobilenet_v3_small · init: failed: out of memory" in lines


def test_remarks_of_numbers_have_a_line(run) -> None:
    rows = (run.scores["measure"] == "absdev") & (run.scores["place"] == "")
    mine = rows & (run.scores["model"] == "vgg8") & (run.scores["weights"] == "init")
    run.scores.loc[mine, "reason"] = "by quadrature"
    lines = printed(run, 40).splitlines()
    assert lines.count("absdev, vgg8 · init: by quadrature") == 1
    assert sum("by quadrature" in line for line in lines) == 1


def test_names_are_printed_as_they_are_but_harmless(conftest) -> None:
    subject = ("[red]x[/red]", "init", "digits", 0)
    rows = conftest.missing_row(subject, "[b]", "failed", "line one\nline two \x1b[2J")
    run = conftest.FakeRun(scores=conftest.frame(rows), manifest={"measures": {"[b]": {}}})
    text = printed(run)
    assert "[red]x[/red]" in text
    assert "failed: line one line two [2J" in text
    assert "\x1b" not in text


def test_a_run_without_scores_says_so(conftest) -> None:
    assert "no scores have been recorded" in printed(conftest.FakeRun())


def test_escape_codes_go_to_terminals_only(run) -> None:
    assert "\x1b" not in printed(run)


def test_errors_and_ranges_are_explained() -> None:
    run = make_run(1, measures=("affinity", "absdev"))
    text = printed(run)
    for record in run.records:
        result = record.result
        expected = plus_minus(result.summary["value"], result.error)
        assert re.search(rf"{record.measure.name} +{re.escape(expected)} · (layers|paths) ", text)
    assert "± is how much a value would change with other samples" in text
    assert "grows with the logits" in text


def test_several_seeds_have_an_error_over_seeds() -> None:
    text = printed(make_run(1, measures=("affinity",), seeds=3))
    assert re.search(r"affinity +0\.\d+ ± 0\.\d+ \(3 seeds\) · seeds 0", text)
    assert "± is how much a value would change with other seeds" in text


def test_exact_values_say_so() -> None:
    run = make_run(1, measures=("pathlength",))
    [record] = run.records
    measure = replace(record.measure, exact=True)
    exact = replace(record, measure=measure, result=Result({"value": 8.0}))
    assert "8 (exact)" in printed(Run(run.manifest, [exact]))


def test_values_without_replicates_have_no_error(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "d", 0), "affinity", {"x": 3.0, "y": 5.0, "z": 7.0})
    run = conftest.FakeRun(
        scores=conftest.frame(rows), manifest={"measures": {"affinity": {"probe": "sites"}}}
    )
    text = printed(run)
    assert "5 · layers 3–7" in text
    assert "where ± is missing, the error is unknown: affinity" in text


def test_runs_on_several_gpu_models_say_so(conftest) -> None:
    scores = conftest.frame(conftest.cell_rows(("m", "init", "d", 0), "affinity", {"a": 0.5}))
    gpus = [{"device_name": name, "capability": "9.0"} for name in ("H100", "H200", "H100")]

    def said(environments):
        manifest = conftest.manifest_of(scores, ["affinity"])
        manifest |= {"environment": environments[0], "environments": environments}
        return printed(conftest.FakeRun("r", None, scores, manifest))

    assert "measured on GPUs whose rounding may differ: H100, H200" in said(gpus)
    assert "GPUs" not in said(gpus[::2])


def test_functional_calls_of_one_network_have_a_line() -> None:
    run = make_run(networks=1)
    where = {"relu:1": "my_net.py:11, after conv1"}
    records = [
        replace(r, probe=replace(r.probe, facts={**r.probe.facts, "where": where}))
        for r in run.records
    ]
    text = printed(Run(run.manifest, records, run.path), 200)
    assert text.count("functional calls: relu:1 at my_net.py:11, after conv1") == 1
