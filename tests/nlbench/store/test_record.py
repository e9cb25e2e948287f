import json
import math
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import make_site_record as record

from nlbench.errors import RequestError
from nlbench.measure import Measure, Result, Value
from nlbench.measure.replicates import standard_error
from nlbench.store.record import Record, RecordedMeasure, reading_problem
from nlbench.store.run import Run, load_run

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
def test_record_read_back_is_same_to_last_bit(result):
    original = record(result=result)
    assert Record.from_json(original.to_json(), "here") == original


@given(st.integers(0, 400))
def test_truncated_record_is_refused(cut):
    whole = record().to_json().rstrip()
    with pytest.raises(RequestError):
        Record.from_json(whole[: min(cut, len(whole) - 1)], "cell.json")


def test_optional_fields_of_a_record_are_empty():
    content = json.loads(record().to_json())
    for name in ("seconds", "finished", "checksum"):
        del content[name]
    parsed = Record.from_json(json.dumps(content), "here")
    assert (parsed.seconds, parsed.finished, parsed.traceback) == (0.0, "", "")
    assert parsed.costs == {}


def test_a_measure_is_recorded_with_its_finite_bounds():
    class Half(Measure):
        """Half of a number.

        And more.
        """

        probe, bounds, more_means, version = "function", (-1.5, math.inf), "more nonlinear", "7"

    recorded = RecordedMeasure.of(Half, {"a": 1})
    assert (recorded.name, recorded.description) == ("half", "Half of a number.")
    assert (recorded.probe, recorded.bounds) == ("function", (-1.5, None))
    assert (recorded.more_means, recorded.version) == ("more nonlinear", "7")
    assert (recorded.options, recorded.source) == ({"a": 1}, Half.source)


def test_a_record_beyond_the_limit_is_refused_unread(tmp_path):
    Run({}, [record()]).save(tmp_path / "run")
    file = tmp_path / "run" / "cells" / "k.json"
    with file.open("r+b") as content:
        content.truncate(2**26 + 1)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            load_run(tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_result_beyond_the_limit_is_not_readable(monkeypatch):
    monkeypatch.setattr("nlbench.store.record.MAX_RECORD_BYTES", 2000)
    many = record(result=Result.of({f"place{i}": 0.1 for i in range(100)}, n=8))
    assert "more than 2000" in reading_problem(many)
    assert reading_problem(record(result=Result.of({"place": 0.1}))) == ""


def test_replicates_are_recorded():
    values = [Value("a", {"value": 0.5}, replicates=(1 / 3, 0.5)), Value("b", {"value": 0.5})]
    result = Result(summary={"value": 0.5}, values=values, replicates=(0.4, 0.5))
    read = Record.from_json(record(result=result).to_json(), "r.json").result
    assert read.replicates == (0.4, 0.5)
    assert [value.replicates for value in read.values] == [(0.333333333, 0.5), ()]


def test_errors_by_other_methods_are_not_read():
    result = Result(summary={"value": 0.5, "error": 0.1}, replicates=(0.4, 0.5))
    read = Record.from_json(record(result=result).to_json(), "r.json").result
    assert read.numbers["error"] == pytest.approx(standard_error((0.4, 0.5)))
    without = Record.from_json(record(result=replace(result, replicates=())).to_json(), "r.json")
    assert "error" not in without.result.numbers


def test_records_of_format_1_have_no_standard_error():
    content = json.loads(record(result=Result.of({"path0": 2.0})).to_json())
    content["probe"]["name"] = "lines"
    del content["checksum"], content["result"]["replicates"]
    del content["result"]["values"][0]["replicates"]
    content["result"]["values"][0]["statistics"]["error"] = 0.1
    content["result"]["summary"]["error"] = 0.1
    read = Record.from_json(json.dumps(content | {"format": 1}), "r.json").result
    assert read.replicates == ()
    assert "error" not in read.numbers
    assert read.values[0].numbers == {"value": 2.0, "numerical_error": 0.1}


@pytest.mark.parametrize(
    "drawing", [True, {"place": "path0"}, {"curves": [["0 1", True]]}], ids=str
)
def test_record_with_damaged_drawing_is_refused(drawing):
    made = record()
    facts = {"drawing": drawing}
    text = replace(made, probe=replace(made.probe, facts=facts)).to_json()
    with pytest.raises(RequestError, match="drawing"):
        Record.from_json(text, "a.json")
