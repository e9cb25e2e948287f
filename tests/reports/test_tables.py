"""The tidy table, read once."""

import pandas as pd
import pytest

from nlbench.errors import RequestError
from nlbench.reports.tables import Scores, TableCell, labelled, per_place


def one(conftest, value=0.5):
    return conftest.frame(conftest.cell_rows(("m0", "init", "digits", 0), "affinity", {"a": value}))


def test_a_number_that_is_there_twice_is_refused(conftest) -> None:
    with pytest.raises(RequestError, match="two values for m0, init, digits, 0, affinity"):
        Scores(pd.concat([one(conftest), one(conftest)]))


def test_a_cell_without_rows_is_absent(conftest) -> None:
    expected = TableCell({}, 0, "absent", "nothing is recorded")
    scores = Scores(one(conftest), ["r2"])
    assert scores["m0", "r2"] == scores["m1", "affinity"] == expected


@pytest.mark.parametrize("statistics", [("std", "value"), ("value", "std"), ("min", "std")])
def test_a_cells_samples_and_status_are_those_of_its_value(conftest, statistics) -> None:
    rows = [
        ("m0", "init", "digits", 0, "affinity", place, name, 0.5, n, status, status)
        for place in ("", "relu")
        for name, n, status in zip(statistics, (3, 5), ("ok", "undefined"), strict=True)
    ]
    cell = Scores(conftest.frame(rows))["m0", "affinity"]
    expected = (5, "undefined") if statistics[1] == "value" else (3, "ok")
    assert [(part.n, part.status) for part in (cell, *cell.places)] == [expected] * 2
    assert cell.statistics == {statistics[0]: 0.5}


def test_a_missing_column_is_named(conftest) -> None:
    with pytest.raises(RequestError, match="lacks the columns status, reason"):
        Scores(one(conftest).drop(columns=["status", "reason"]))


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


def test_a_subjects_text_and_numbers_are_kept_apart(conftest) -> None:
    scores = one(conftest)
    scores["model"] = pd.Series([True] * len(scores), dtype=object)
    assert Scores(scores).subjects[0].model == "True"
