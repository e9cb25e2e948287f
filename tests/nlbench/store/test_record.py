import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import RequestError
from nlbench.files import locked
from nlbench.measure import Result, Value
from nlbench.store.record import COLUMNS, FORMAT, Record, Run, load_run


def record(measure="affinity", key="k", result=None, model="vgg8", seed=0):
    return Record(
        key=key,
        subject={"model": model, "weights": "init", "data": "digits", "seed": seed},
        measure={"name": measure, "version": "1", "options": {}},
        probe={"name": "sites", "options": {}},
        machine={"device": "cpu", "dtype": "float32", "environment": {"python": "3.11"}},
        result=result or Result.of({"a": 0.25, "b": 0.75}, n=8),
        seconds=0.5,
        finished="2026-01-01T00:00:00+00:00",
    )


text = st.text(max_size=30)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.builds(
    Value,
    place=text,
    statistics=st.dictionaries(text, numbers, max_size=3),
    n=st.integers(0, 10**9),
    status=st.sampled_from(["ok", "undefined", "skipped", "failed"]),
    reason=text,
)
results = st.builds(
    Result,
    summary=st.dictionaries(text, numbers, max_size=3),
    values=st.lists(values, max_size=4).map(tuple),
    n=st.integers(0, 10**9),
    status=st.sampled_from(["ok", "undefined", "skipped", "failed"]),
    reason=text,
    notes=st.dictionaries(text, numbers | text, max_size=2),
)


@given(results)
def test_a_record_read_back_is_the_same_to_the_last_bit(result):
    original = record(result=result)
    assert Record.from_json(original.to_json(), "here") == original


def test_the_table_has_one_number_a_row_and_the_columns_of_the_design():
    scores = Run({}, [record()]).scores
    assert list(scores.columns) == list(COLUMNS)
    summary = scores[scores.place == ""].set_index("statistic").value
    assert summary["value"] == 0.5
    assert summary["spread"] == 0.5
    sites = scores[scores.place != ""]
    assert list(sites.place) == ["a", "b"]
    assert list(sites.value) == [0.25, 0.75]
    assert set(scores.n) == {8}


def test_what_is_missing_is_a_row_with_its_reason():
    gone = Value.missing("c", "undefined", "constant output", 8)
    result = Result.of([Value("a", {"value": 0.5}, 8), gone])
    scores = Run({}, [record(result=result)]).scores
    row = scores[scores.place == "c"].iloc[0]
    assert math.isnan(row.value)
    assert (row.status, row.reason, row.statistic) == ("undefined", "constant output", "value")
    failed = Run({}, [record(result=Result.missing("failed", "boom"))]).scores
    assert list(failed.status) == ["failed"]
    assert failed.reason[0] == "boom"


def test_a_saved_run_is_loaded_with_the_same_table(tmp_path):
    first = Run({"order": ["k2", "k1"]}, [record(key="k1"), record("r2", key="k2")])
    first.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert [r.key for r in loaded.records] == ["k2", "k1"]
    by = ["measure", "place", "statistic"]
    left = loaded.scores.sort_values(by, ignore_index=True)
    assert left.equals(first.scores.sort_values(by, ignore_index=True))
    assert (tmp_path / "run" / "scores.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert loaded.name == "run"


def test_a_reading_is_found_by_its_measure_where_there_is_one_subject():
    run = Run({}, [record(), record("r2")])
    assert run["r2"].summary["value"] == 0.5
    with pytest.raises(KeyError, match="0 readings of 'cka'"):
        run["cka"]


def test_failures_are_told_from_what_is_merely_undefined():
    run = Run(
        {},
        [
            record(result=Result.missing("failed", "boom")),
            record(result=Result.missing("undefined", "constant output")),
        ],
    )
    assert [r.result.reason for r in run.failed] == ["boom"]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"is not a run: it has no manifest.json"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is damaged"),
        ("[]", "was not written by nlbench"),
        ('{"format": 1}', "is not a record"),
        (json.dumps({"format": FORMAT + 1}), "from a newer nlbench"),
        ('{"format": 1, "result": {"values": [3]}}', "is not a record"),
        ('{"format": 1, "result": null}', "is not a record"),
    ],
)
def test_a_damaged_record_is_one_line_that_names_the_file(tmp_path, content, says):
    Run({"order": []}, [record()]).save(tmp_path / "run")
    (tmp_path / "run" / "cells" / "k.json").write_text(content)
    with pytest.raises(RequestError, match=says) as caught:
        load_run(tmp_path / "run")
    assert "k.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 400))
def test_a_record_cut_anywhere_is_refused_and_never_half_read(cut):
    whole = record().to_json().rstrip()
    with pytest.raises(RequestError):
        Record.from_json(whole[: min(cut, len(whole) - 1)], "cell.json")


@pytest.fixture
def half(tmp_path, monkeypatch):
    """A folder in which saving two cells was cut short."""
    with monkeypatch.context() as patched:
        patched.setattr(Run, "write_tables", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Run({}, [record(key="k1"), record("r2", key="k2")]).save(tmp_path / "run")
    return tmp_path / "run"


def test_a_run_whose_saving_was_cut_short_is_not_taken_for_one(half):
    assert len(list((half / "cells").iterdir())) == 2
    with pytest.raises(RequestError, match="saving one there was cut short") as caught:
        load_run(half)
    assert "\n" not in str(caught.value)


def test_where_saving_was_cut_short_another_run_can_be_saved(half):
    Run({}, [record(key="k3")]).save(half)
    assert [r.key for r in load_run(half).records] == ["k3"]


def test_a_run_that_is_saved_to_its_own_folder_again_is_there_all_the_time(tmp_path, monkeypatch):
    run = Run({}, [record()])
    run.save(tmp_path / "run")
    monkeypatch.setattr(Run, "write_tables", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.save(tmp_path / "run")
    assert len(load_run(tmp_path / "run").records) == 1


def test_two_do_not_save_to_one_folder_at_a_time(tmp_path):
    (tmp_path / "run" / "cells").mkdir(parents=True)
    with locked(tmp_path / "run"), pytest.raises(RequestError, match="another nlbench is writing"):
        Run({}, [record()]).save(tmp_path / "run")
