"""The leaderboard in a terminal."""

import io

import pytest
from rich.console import Console

from nlbench.reports.terminal import print_leaderboard


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


def test_a_wide_window_shows_every_number_with_its_ranks(run) -> None:
    text = printed(run, 200)
    for value in ("0.610 (1)", "7.03 (1–2)", "12.75 (2–3)"):
        assert value in text
    assert "↓ more nonlinear" in text
    assert "↑ more nonlinear" in text
    assert "not shown" not in text


def test_a_narrow_window_says_what_it_leaves_out_and_where_that_is(run) -> None:
    text = printed(run, 60)
    assert "not shown: absdev, pathlength" in text
    assert "the page and scores.csv show everything" in text


def test_of_many_subjects_the_two_ends_are_shown(conftest) -> None:
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


def test_a_number_with_a_remark_has_a_line_that_says_it(run) -> None:
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


def test_output_that_is_not_a_terminal_has_no_escape_codes(run) -> None:
    assert "\x1b" not in printed(run)


def test_a_single_network_has_a_standard_error(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "d", 0), "affinity", {"x": 3.0, "y": 5.0, "z": 7.0})
    run = conftest.FakeRun(
        scores=conftest.frame(rows), manifest={"measures": {"affinity": {"probe": "sites"}}}
    )
    assert "5.0 ± 1.2" in printed(run)  # sqrt(4 / 3)
    assert "± is the standard error" in printed(run)


def test_a_run_on_several_models_of_gpu_says_so(conftest) -> None:
    scores = conftest.frame(conftest.cell_rows(("m", "init", "d", 0), "affinity", {"a": 0.5}))
    gpus = [{"device_name": name, "capability": "9.0"} for name in ("H100", "H200", "H100")]

    def said(environments):
        manifest = conftest.manifest_of(scores, ["affinity"])
        manifest |= {"environment": environments[0], "environments": environments}
        return printed(conftest.FakeRun("r", None, scores, manifest))

    assert "measured on GPUs whose rounding may differ: H100, H200" in said(gpus)
    assert "GPUs" not in said(gpus[::2])
