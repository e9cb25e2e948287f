"""The tidy table, read once."""

import math
from dataclasses import replace

import pytest
from made_runs import make_run
from made_scores import scores_of

from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports.tables import MeasureInfo, NamedRun, Scores
from nlbench.store.run import Run


def one(conftest, value=0.5):
    return conftest.frame(conftest.cell_rows(("m0", "init", "digits", 0), "affinity", {"a": value}))


def test_a_cell_without_rows_is_absent(conftest) -> None:
    scores = scores_of(one(conftest), ["r2"])
    for score in (scores["m0", "r2"], scores["m1", "affinity"]):
        assert (score.status, score.n, score.places, score.statistics) == ("absent", 0, (), {})
        assert math.isnan(score.value)


def test_labels_say_only_what_differs(run) -> None:
    labels = {subject.label for subject in scores_of(run.scores).subjects}
    assert labels >= {"vgg8 · init", "vgg8 · trained"}
    single = run.scores[(run.scores["model"] == "vgg8") & (run.scores["weights"] == "init")]
    assert [subject.label for subject in scores_of(single).subjects] == ["vgg8"]


def test_subjects_with_similar_names_keep_own_labels(conftest) -> None:
    rows = conftest.cell_rows(("a · b", "c", "digits", 0), "m", {"relu": 0.1})
    rows += conftest.cell_rows(("a", "b · c", "digits", 0), "m", {"relu": 0.9})
    scores = scores_of(conftest.frame(rows))
    assert [one.label for one in scores.subjects] == ["a · b · c", "a · b · c (2)"]
    assert [scores[one.label, "m"].places[0].value for one in scores.subjects] == [0.1, 0.9]


def test_places_keep_the_order_of_call(conftest) -> None:
    names = ["layer10", "layer2", "layer2:1", "alpha"]
    rows = conftest.cell_rows(("a", "init", "digits", 0), "m", dict.fromkeys(names, 0.5), std=0.1)
    cell = scores_of(conftest.frame(rows))["a", "m"]
    assert [place.name for place in cell.places] == names
    assert cell.places[0].statistics == {"value": 0.5, "std": 0.1, "batches": 4.0}


def test_scores_hold_the_numbers_of_the_tidy_table() -> None:
    records = make_run(5, seeds=2, paths=3).records
    records[0] = replace(records[0], result=Result.missing("undefined", "constant output", n=4))
    values = [Value("a", {"value": 1.0}), Value.missing("b", "undefined", "dead")]
    records[1] = replace(records[1], result=Result.of(values, n=3))
    parts = {"segment": [3, 5], "site": {"relu": 8}}
    records[2] = replace(records[2], result=Result({"value": 8.0}, n=2, parts=parts))
    del records[3]
    scores = Scores({"": records}, {"r2": MeasureInfo()})
    found = {}
    for subject, measure, score in scores.cells():
        for part in (score, *score.places):
            for name, value in part.statistics.items():
                found[(*subject.identity, measure, part.name, name)] = (value, part.n)
    table = Run({}, records).scores.query("status == 'ok'")
    keys = ["model", "weights", "data", "seed", "measure", "place", "statistic"]
    expected = table.set_index(keys)[["value", "n"]].apply(tuple, axis=1).to_dict()
    assert found == expected
    assert next(iter(scores.measures)) == "r2"


def test_repeated_cells_and_places_are_refused() -> None:
    records = make_run(1).records
    with pytest.raises(RequestError):
        Scores({"": [*records, records[0]]})
    result = Result({"value": 1.0}, (Value("a", {"value": 1.0}),) * 2)
    with pytest.raises(RequestError):
        Scores({"": [replace(records[0], result=result)]})


DRAWING = {"place": "path0", "method": "exact", "lengths": [1.0], "logits": [0, 2]}
CURVES = [["0 1", "2 3"]]


@pytest.mark.parametrize(
    "change",
    [
        {"curves": []},
        {"curves": [["0 1"]]},
        {"curves": [["0 1", "2"]]},
        {"curves": [["0 1", "x y"]]},
        {"curves": [["", ""]]},
        {"lengths": [1.0, 2.0]},
        {"breakpoints": ["0 1"]},
        {"sites": ["relu"]},
        {"sites": ["relu"], "breakpoints": ["x"]},
    ],
    ids=str,
)
def test_damaged_drawing_of_a_path_is_refused(change) -> None:
    def drawings(drawing):
        record = make_run(1).records[0]
        facts = {**record.probe.facts, "drawing": drawing}
        probe = replace(record.probe, facts=facts)
        return NamedRun("mine", {}, (replace(record, probe=probe),)).drawings

    intact = {**DRAWING, "curves": CURVES}
    assert list(drawings(intact).values()) == [intact]
    with pytest.raises(RequestError, match="mine"):
        drawings({**intact, **change})
