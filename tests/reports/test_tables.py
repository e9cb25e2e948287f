"""The tidy table, read once."""

from dataclasses import replace

import pandas as pd
import pytest
from made_runs import make_run

from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports.tables import Scores, TableCell, labelled, replicates_by_cell
from nlbench.store.run import Run


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


def test_labels_say_only_what_differs(run) -> None:
    assert set(labelled(run.scores)["subject"]) >= {"vgg8 · init", "vgg8 · trained"}
    one = run.scores[(run.scores["model"] == "vgg8") & (run.scores["weights"] == "init")]
    assert set(labelled(one)["subject"]) == {"vgg8"}


def test_subjects_whose_names_run_together_keep_labels_of_their_own(conftest) -> None:
    rows = conftest.cell_rows(("a · b", "c", "digits", 0), "m", {"relu": 0.1})
    rows += conftest.cell_rows(("a", "b · c", "digits", 0), "m", {"relu": 0.9})
    scores = Scores(conftest.frame(rows))
    assert [one.label for one in scores.subjects] == ["a · b · c", "a · b · c (2)"]
    assert [scores[one.label, "m"].places[0].value for one in scores.subjects] == [0.1, 0.9]


def test_places_keep_the_order_of_call(conftest) -> None:
    names = ["layer10", "layer2", "layer2:1", "alpha"]
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", dict.fromkeys(names, 0.5), std=0.1)
    cell = Scores(conftest.frame(rows))["a", "m"]
    assert [place.name for place in cell.places] == names
    assert cell.places[0].statistics == {"value": 0.5, "std": 0.1, "batches": 4.0}


def test_records_are_indexed_as_their_tidy_table_is() -> None:
    records = make_run(5, seeds=2, paths=3).records
    records[0] = replace(records[0], result=Result.missing("undefined", "constant output", n=4))
    values = [Value("a", {"value": 1.0}), Value.missing("b", "undefined", "dead")]
    records[1] = replace(records[1], result=Result.of(values, n=3))
    parts = {"segment": [3, 5], "site": {"relu": 8}}
    records[2] = replace(records[2], result=Result({"value": 8.0}, n=2, parts=parts))
    del records[3]
    table = Scores(Run({}, records).scores, ["r2"], replicates_by_cell(records))
    direct = Scores.of_records(records, ["r2"])
    assert direct.subjects == table.subjects
    assert direct.measures == table.measures
    for subject in table.subjects:
        for measure in table.measures:
            assert direct[subject.label, measure] == table[subject.label, measure]


def test_records_of_one_cell_and_places_of_one_name_are_refused() -> None:
    records = make_run(1).records
    with pytest.raises(RequestError, match="two records for vgg8, affinity"):
        Scores.of_records([*records, records[0]])
    result = Result({"value": 1.0}, (Value("a", {"value": 1.0}),) * 2)
    with pytest.raises(RequestError, match="the record for vgg8, affinity contains a place twice"):
        Scores.of_records([replace(records[0], result=result)])
