"""The board as a table and in a terminal."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nlbench.errors import RequestError
from nlbench.reports.board import board, cell_texts, missing_cells, print_boards
from nlbench.reports.tables import labelled, per_place
from nlbench.store.run_folder import COLUMNS

SUBJECT = ("net", "init", "digits", 0)


def scores_of(conftest, values, measure="affinity"):
    rows = []
    for index, value in enumerate(values):
        rows += conftest.cell_rows((f"m{index}", "init", "digits", 0), measure, {"relu": value})
    return conftest.frame(rows)


def printed(run, width=80):
    stream = io.StringIO()
    print_boards(run, Console(file=stream, width=width))
    return stream.getvalue()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.booleans())
def test_the_most_nonlinear_subject_comes_first(conftest, values, more_is_more) -> None:
    details = {"m": {"more_means": "more nonlinear" if more_is_more else "less nonlinear"}}
    table = board(scores_of(conftest, values, "m"), details)
    expected = np.sort(values)[::-1] if more_is_more else np.sort(values)
    np.testing.assert_array_equal(table["m", "value"], expected)


def test_a_first_measure_without_direction_leaves_the_order_of_the_run(conftest) -> None:
    table = board(scores_of(conftest, [0.2, 0.9, 0.1], "m"), {"m": {"more_means": "neither"}})
    assert table["m", "value"].tolist() == [0.2, 0.9, 0.1]


@pytest.mark.parametrize("more_means", ["more nonlinear", "less nonlinear"])
def test_subjects_without_a_number_come_last(conftest, more_means) -> None:
    scores = scores_of(conftest, ["constant output", 0.5, 0.7], "m")
    table = board(scores, {"m": {"more_means": more_means}})
    assert table["m", "status"].tolist() == ["ok", "ok", "undefined"]
    assert math.isnan(table["m", "value"].iloc[-1])


def test_columns_follow_the_order_of_the_measures(run, conftest) -> None:
    details = {name: conftest.DETAILS[name] for name in ("pathlength", "affinity", "absdev")}
    table = board(run.scores, details)
    assert list(table.columns.unique("measure")) == ["pathlength", "affinity", "absdev"]


def test_every_summary_of_the_scores_is_on_the_board(run) -> None:
    table = board(run.scores, run.manifest["measures"])
    summaries = run.scores.query("place == '' and statistic == 'value' and status == 'ok'")
    assert len(summaries) == 15
    for row in summaries.itertuples():
        subject = table.query("model == @row.model and weights == @row.weights")
        assert subject[row.measure, "value"].tolist() == [row.value]


def test_seeds_are_subjects_of_their_own(conftest) -> None:
    run = conftest.realistic_run(seeds=(0, 1, 2))
    table = board(run.scores, run.manifest["measures"])
    assert len(table) == 3 * 2 * 3
    assert "vgg8 · init · seed 2" in table.index.get_level_values("subject")


def test_a_spread_over_one_place_is_not_shown(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", {"output": 3.0})
    rows += conftest.cell_rows(("b", "init", "digits", 0), "m", {"x": 3.0, "y": 3.0})
    table = board(conftest.frame(rows), {"m": {}})
    assert math.isnan(table["m", "std"].iloc[0])
    assert table["m", "std"].iloc[1] == 0.0


def test_a_whole_mean_does_not_hide_the_digits_of_its_spread(conftest) -> None:
    scores = conftest.frame(conftest.cell_rows(SUBJECT, "m", {"x": 3.0, "y": 5.0, "z": 7.0}))
    assert cell_texts(board(scores, {"m": {}}), "m") == ["5.000 ± 1.633"]  # sqrt(8 / 3)


def test_a_cell_that_was_never_recorded_is_told_from_an_undefined_one(conftest) -> None:
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", {"relu": 0.5})
    rows += conftest.cell_rows(("b", "init", "digits", 0), "other", {"relu": "constant output"})
    found = missing_cells(board(conftest.frame(rows), {"m": {}, "other": {}}))
    assert [(cell.subject, cell.measure, cell.status) for cell in found] == [
        ("a", "other", "absent"),
        ("b", "m", "absent"),
        ("b", "other", "undefined"),
    ]


def test_a_number_that_is_there_twice_is_refused(conftest) -> None:
    scores = scores_of(conftest, [0.5])
    with pytest.raises(RequestError, match="two values for m0, init, digits, 0, affinity"):
        board(pd.concat([scores, scores]), {})


def test_a_missing_column_is_named(conftest) -> None:
    with pytest.raises(RequestError, match="lacks the columns status, reason"):
        board(scores_of(conftest, [0.5]).drop(columns=["status", "reason"]), {})


def test_a_table_that_went_through_csv_gives_the_same_board(run) -> None:
    again = pd.read_csv(io.StringIO(run.scores.to_csv(index=False)))
    details = run.manifest["measures"]
    pd.testing.assert_frame_equal(board(again, details), board(run.scores, details))


def test_labels_say_only_what_differs(run) -> None:
    assert set(labelled(run.scores)["subject"]) >= {"vgg8 · init", "vgg8 · trained"}
    one = run.scores[(run.scores["model"] == "vgg8") & (run.scores["weights"] == "init")]
    assert set(labelled(one)["subject"]) == {"vgg8"}


def test_subjects_whose_names_run_together_keep_labels_of_their_own(conftest) -> None:
    rows = conftest.cell_rows(("a · b", "c", "digits", 0), "m", {"relu": 0.1})
    rows += conftest.cell_rows(("a", "b · c", "digits", 0), "m", {"relu": 0.9})
    series = per_place(conftest.frame(rows), "m")
    assert [one.label for one in series] == ["a · b · c", "a · b · c (2)"]
    assert [one.places[0].value for one in series] == [0.1, 0.9]


def test_places_keep_the_order_of_call(conftest) -> None:
    names = ["layer10", "layer2", "layer2:1", "alpha"]
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", dict.fromkeys(names, 0.5), std=0.1)
    (series,) = per_place(conftest.frame(rows), "m")
    assert [place.name for place in series.places] == names
    assert series.places[0].statistics == {"value": 0.5, "std": 0.1, "batches": 4.0}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_printed_board_fits_the_width_and_keeps_every_number(run, width) -> None:
    text = printed(run, width)
    lines = [line for line in text.splitlines() if "undefined: " not in line]
    assert max(map(len, lines)) <= width
    for value in ("0.6103 ± 0.0758", "7.033 ± 2.753", "12.75"):
        assert value in text
    assert "↓ more nonlinear" in text
    assert "↑ more nonlinear" in text


def test_each_reason_has_one_unbroken_line(run) -> None:
    lines = printed(run, 40).splitlines()
    assert (
        "absdev, mobilenet_v3_small · init: undefined: "
        "hardswish at features.0.2: not piecewise affine"
    ) in lines
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
    assert "failed: line one line two �[2J" in text
    assert "\x1b" not in text


def test_a_run_without_scores_says_so(conftest) -> None:
    assert "no scores are recorded" in printed(conftest.FakeRun())


def test_output_that_is_not_a_terminal_has_no_escape_codes(run) -> None:
    assert "\x1b" not in printed(run)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_name_is_broken_at_usual_widths(width):
    names = [f"measure{i}" for i in range(6)]
    measures = {name: {"more_means": "less nonlinear"} for name in names}
    rows = [
        (*SUBJECT, name, place, statistic, 0.123456, 64, "ok", "")
        for name in names
        for place, statistic in (("", "value"), ("", "std"), ("a", "value"), ("b", "value"))
    ]
    run = SimpleNamespace(
        name="run",
        scores=pd.DataFrame(rows, columns=list(COLUMNS)),
        manifest={"measures": measures},
    )
    out = io.StringIO()
    print_boards(run, Console(file=out, width=width))
    words = out.getvalue().split()
    assert set(names) <= set(words)
    assert words.count("model") == words.count(SUBJECT[0]) >= 1
