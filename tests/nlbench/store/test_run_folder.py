import json
import math
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import make_site_record as record

from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.reports.manifest import manifest_text
from nlbench.serialization.files import FORMAT
from nlbench.store import run_folder
from nlbench.store.manifest import Manifest, make_manifest
from nlbench.store.run import Run, load_run, merge_runs
from nlbench.store.run_folder import COLUMNS, RunFolder


def test_table_has_documented_columns():
    scores = Run({}, [record()]).scores
    assert list(scores.columns) == list(COLUMNS)
    summary = scores[scores.place == ""].set_index("statistic").value
    assert summary["value"] == 0.5
    assert summary["spread"] == 0.5
    sites = scores[scores.place != ""]
    assert list(sites.place) == ["a", "b"]
    assert list(sites.value) == [0.25, 0.75]
    assert set(scores.n) == {8}


def test_a_manifest_describes_its_records():
    machine = SimpleNamespace(environment={"packages": {"nlbench": "1.2"}}, device="cpu")
    before = datetime.now(UTC).replace(microsecond=0)
    manifest = make_manifest({"measures": ["affinity"]}, machine, command="nlbench run")
    assert before <= datetime.fromisoformat(manifest.created) <= datetime.now(UTC)
    assert make_manifest({}, machine, created="yesterday").created == "yesterday"
    assert (manifest.nlbench, manifest.device, manifest.command) == ("1.2", "cpu", "nlbench run")
    failed = record("cka", "l", Result.missing("failed", "boom"))
    other = replace(failed.machine, dtype="float64", environment={"python": "3.12"})
    same, changed = (
        manifest.describe_records([record(), failed, record("r2", "m"), last])
        for last in (record("nlc", "n"), replace(failed, key="n", machine=other))
    )
    assert same.cells == {"ok": 3, "failed": 1}
    assert changed.cells == {"ok": 2, "failed": 2}
    assert (same.order, same.dtype, changed.dtype) == (tuple("klmn"), "float32", "float32, float64")
    assert list(same.measures) == ["affinity", "cka", "r2", "nlc"]
    assert len(same.subjects) == 1
    assert same.environments == ()
    assert [e["python"] for e in changed.environments] == ["3.11", "3.12"]


def test_a_runs_manifest_is_validated():
    assert isinstance(Run({"device": "cpu"}, []).manifest, Manifest)
    with pytest.raises(RequestError):
        Run({"seconds": "many"}, [])


def test_missing_value_is_a_row_with_reason():
    gone = Value.missing("c", "undefined", "constant output", 8)
    result = Result.of([Value("a", {"value": 0.5}, 8), gone])
    scores = Run({}, [record(result=result)]).scores
    row = scores[scores.place == "c"].iloc[0]
    assert math.isnan(row.value)
    assert (row.status, row.reason, row.statistic) == ("undefined", "constant output", "value")
    failed = Run({}, [record(result=Result.missing("failed", "boom"))]).scores
    assert list(failed.status) == ["failed"]
    assert failed.reason[0] == "boom"


def test_saved_run_is_loaded_with_the_same_table(tmp_path):
    first = Run({"order": ["k2", "k1"]}, [record(key="k1"), record("r2", key="k2")])
    first.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert [r.key for r in loaded.records] == ["k2", "k1"]
    by = ["measure", "place", "statistic"]
    left = loaded.scores.sort_values(by, ignore_index=True)
    assert left.equals(first.scores.sort_values(by, ignore_index=True))
    assert (tmp_path / "run" / "scores.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert loaded.name == "run"


def test_equal_subjects_are_loaded_as_one_object(tmp_path):
    other = record("r2", key="k2")
    records = [
        record(key="k1"),
        other,
        replace(record("cka", key="k3"), subject=replace(other.subject, samples=9)),
    ]
    Run({"order": ["k1", "k2", "k3"]}, records).save(tmp_path / "run")
    first, second, third = load_run(tmp_path / "run").records
    assert first.subject is second.subject
    assert third.subject.samples == 9
    assert first.machine is second.machine is third.machine
    assert [first, second, third] == records


def test_measure_alone_selects_result_of_single_subject():
    run = Run({}, [record(), record("r2")])
    assert run["r2"].summary["value"] == 0.5
    with pytest.raises(KeyError):
        run["cka"]


def test_failed_excludes_undefined_cells():
    run = Run(
        {},
        [
            record(result=Result.missing("failed", "boom")),
            record(result=Result.missing("undefined", "constant output")),
        ],
    )
    assert [r.result.reason for r in run.failed] == ["boom"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "seconds": "many"}'])
def test_folder_with_an_unreadable_manifest_is_not_overwritten(tmp_path, content):
    (tmp_path / "cells").mkdir()
    for file in (tmp_path / "manifest.json", tmp_path / "cells" / "k.json"):
        file.write_text(content)
    with pytest.raises(RequestError):
        Run({}, [record()]).save(tmp_path)
    assert (tmp_path / "cells" / "k.json").read_text() == content


def test_a_manifest_may_hold_any_number(tmp_path):
    Run({"device": "cpu", "someones": {"loss": math.inf}}, [record()]).save(tmp_path / "run")
    assert load_run(tmp_path / "run").manifest["someones"] == {"loss": math.inf}


def test_manifest_of_a_hundred_thousand_subjects_is_read(tmp_path):
    run = Run({}, [record()])
    run.save(tmp_path / "r")
    file = tmp_path / "r" / "manifest.json"
    file.write_text(file.read_text() + " " * 100 * 2**20)
    assert load_run(tmp_path / "r").manifest == run.manifest


def test_non_run_folder_raises(tmp_path):
    with pytest.raises(RequestError):
        load_run(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 1}',
        json.dumps({"format": FORMAT + 1}),
        '{"format": 1, "result": {"values": [3]}}',
        '{"format": 1, "result": null}',
    ],
)
def test_damaged_record_raises_in_one_line(tmp_path, content):
    Run({"order": []}, [record()]).save(tmp_path / "run")
    (tmp_path / "run" / "cells" / "k.json").write_text(content)
    with pytest.raises(RequestError, match=r"k\.json") as caught:
        load_run(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_record_whose_numbers_were_changed_is_refused(tmp_path):
    Run({"order": []}, [record()]).save(tmp_path / "run")
    file = tmp_path / "run" / "cells" / "k.json"
    text = file.read_text()
    for changed in (text.replace("0.25", "0.35", 1), json.dumps(json.loads(text))):
        file.write_text(changed)
        with pytest.raises(RequestError, match=r"k\.json"):
            load_run(tmp_path / "run")


@pytest.fixture
def half(tmp_path, monkeypatch):
    """A folder in which saving two cells was cut short."""
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "table_text", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Run({}, [record(key="k1"), record("r2", key="k2")]).save(tmp_path / "run")
    return tmp_path / "run"


def test_interrupted_save_is_not_a_run(half):
    assert len(list((half / "cells").iterdir())) == 2
    with pytest.raises(RequestError) as caught:
        load_run(half)
    assert "\n" not in str(caught.value)


def test_interrupted_save_can_be_repeated(half):
    Run({}, [record(key="k3")]).save(half)
    assert [r.key for r in load_run(half).records] == ["k3"]


def test_saving_again_to_own_folder_keeps_run_readable(tmp_path, monkeypatch):
    run = Run({}, [record()])
    run.save(tmp_path / "run")
    monkeypatch.setattr(run_folder, "table_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.save(tmp_path / "run")
    assert len(load_run(tmp_path / "run").records) == 1


def test_saves_to_one_folder_are_exclusive(tmp_path):
    (tmp_path / "run" / "cells").mkdir(parents=True)
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RequestError):
        Run({}, [record()]).save(tmp_path / "run")


def spoiled(folder, change):
    """A run of one cell, changed in its folder."""
    Run({}, [record()]).save(folder)
    cell = folder / "cells" / "k.json"
    content = json.loads(cell.read_text())
    del content["checksum"]
    change(folder, cell, content)
    return folder


def rewrite(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("key", ["../../owned", "/tmp/owned", "a/b", "", ".", "other", "k\0", 7])
def test_record_key_must_equal_its_file_name(tmp_path, key):
    folder = spoiled(tmp_path / "run", lambda _, cell, c: rewrite(cell, {**c, "key": key}))
    with pytest.raises(RequestError, match=r"k\.json") as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        RunFolder(folder).record_file("../owned")


def fifo(folder, cell, content):
    cell.unlink()
    os.mkfifo(cell)


def device(folder, cell, content):
    cell.unlink()
    cell.symlink_to("/dev/zero")


def cells_is_a_file(folder, cell, content):
    cell.unlink()
    cell.parent.rmdir()
    cell.parent.write_text("")


def manifest_is_a_fifo(folder, cell, content):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def nested(folder, cell, content):
    rewrite(cell, "[" * 100_000)


def nested_notes(folder, cell, content):
    deep = '"notes": ' + '{"a":' * 50 + "1" + "}" * 50
    rewrite(cell, json.dumps(content).replace('"notes": {}', deep))


def long_number(folder, cell, content):
    rewrite(cell, json.dumps(content).replace('"n": 8', '"n": ' + "9" * 5000))


def number_beyond_float64(folder, cell, content):
    rewrite(cell, json.dumps(content).replace("0.25", "2.5e999"))


def half_a_character(folder, cell, content):
    rewrite(cell, json.dumps(content).replace("vgg8", "\\ud800"))


def not_a_number(folder, cell, content):
    rewrite(cell, json.dumps(content).replace("0.25", "NaN"))


def kinds_are_no_texts(folder, cell, content):
    rewrite(cell, content | {"probe": content["probe"] | {"kinds": {"relu": {"a": 1}}}})


def unseen_is_no_text(folder, cell, content):
    rewrite(cell, content | {"probe": content["probe"] | {"unseen": [1]}})


def parameters_are_a_text(folder, cell, content):
    rewrite(cell, content | {"subject": content["subject"] | {"parameters": "many"}})


def manifests_bounds_are_texts(folder, cell, content):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["measures"] = {"r2": {"bounds": ["0", None]}}
    rewrite(folder / "manifest.json", manifest)


def unknown_field(folder, cell, content):
    rewrite(cell, content | {"mood": "good"})


def result_is_a_text(folder, cell, content):
    rewrite(cell, content | {"result": "fine"})


def not_utf_8(folder, cell, content):
    cell.write_bytes(b"\xff\xfe" + cell.read_bytes())


def manifest_is_a_list(folder, cell, content):
    rewrite(folder / "manifest.json", [])


def old(folder, cell, content):
    rewrite(cell, {("reading" if name == "result" else name): v for name, v in content.items()})


@pytest.mark.parametrize(
    "change",
    [fifo, device, cells_is_a_file, manifest_is_a_fifo, nested, nested_notes, long_number,
     number_beyond_float64, half_a_character, not_a_number, kinds_are_no_texts, unseen_is_no_text,
     parameters_are_a_text, manifests_bounds_are_texts, unknown_field, result_is_a_text, not_utf_8,
     manifest_is_a_list, old],
)  # fmt: skip
def test_crafted_run_raises_in_one_line(tmp_path, change):
    folder = spoiled(tmp_path / "run", change)
    with pytest.raises(RequestError, match=str(tmp_path / "run")) as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def paths_of(content, path=()):
    yield path
    if isinstance(content, dict | list):
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        for name, value in entries:
            yield from paths_of(value, (*path, name))


def replaced(content, path, value):
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    if value is None and isinstance(copy, dict) and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["../x", "ok", "failed", "a\nb"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=150)
@given(st.data())
def test_untrusted_run_is_read_or_refused(tmp_path, data):
    folder, out = tmp_path / "run", tmp_path / "out"
    if not folder.exists():
        Run(Manifest(order=("k",)).describe_records([record()]), [record()]).save(folder)
    file = data.draw(st.sampled_from([folder / "manifest.json", folder / "cells" / "k.json"]))
    before = file.read_text()
    content = json.loads(before)
    content.pop("checksum", None)
    path = data.draw(st.sampled_from(list(paths_of(content))))
    file.write_text(json.dumps(replaced(content, path, data.draw(anything))))
    said = f"{folder}: nothing"
    try:
        run = load_run(folder)
        assert [r.key for r in run.records] == ["k"]
        assert len(run.scores)
        assert isinstance(manifest_text(run.manifest), str)
        merge_runs([folder], out)
        assert [r.key for r in load_run(out).records] == ["k"]
    except RequestError as error:
        said = str(error)
    finally:
        file.write_text(before)
        shutil.rmtree(out, ignore_errors=True)
    assert "\n" not in said
    assert str(folder) in said
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_replaced_folder_is_not_written_to(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.open():
        folder.begin(Manifest(), [])
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(RequestError):
            folder.add(record())
        (tmp_path / "run" / "cells").mkdir(parents=True)
        with pytest.raises(RequestError):
            folder.add(record())
    assert not list((tmp_path / "run" / "cells").iterdir())


def test_cells_behind_a_link_are_not_written_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    Run({}, []).save(tmp_path / "run")
    (tmp_path / "run" / "cells").rmdir()
    (tmp_path / "run" / "cells").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError):  # noqa: SIM117
        with RunFolder(tmp_path / "run").open():
            pass
    assert not list((tmp_path / "elsewhere").iterdir())


def test_only_requested_failures_are_dropped(tmp_path):
    failed = Result.missing("failed", "boom")
    records = {
        "requested again": record(key="1", result=failed),
        "requested with other options": record(key="2", result=failed, seed=1),
        "another request's": record(key="3", result=failed, model="resnet18"),
        "done": record(key="4", seed=2),
    }
    folder = RunFolder(tmp_path / "run")
    with folder.open({}):
        folder.begin(Manifest(), [])
        for each in records.values():
            folder.add(each)
        requested = [records["requested again"], records["requested with other options"]]
        folder.forget_failures({"1", "5"}, {each.identity for each in (*requested, record(seed=2))})
        assert set(folder.records) == {"1", "3", "4"}
    assert {file.stem for file in (tmp_path / "run" / "cells").iterdir()} == {"1", "3", "4"}
