"""What a run does with what is there already: plan first, resume, repeat, merge."""

import json

import pytest
from hostile import install_plugin, request
from workers import fork_workers

import nlbench
from nlbench.errors import RequestError
from nlbench.execution import unit_runner
from nlbench.request import ExecutionOptions
from nlbench.runner import preview, run
from nlbench.store.run import merge_runs
from nlbench.store.run_folder import RunFolder


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    return install_plugin(tmp_path, monkeypatch)


def cells(result):
    return {p.name: p.stat().st_mtime_ns for p in (result.path / "cells").iterdir()}


def names(cells):
    return [(cell.subject.spec.model, cell.measure.name) for cell in cells]


def test_dry_run_writes_nothing(plugin, tmp_path):
    foreseen = preview(request("plain,r2", "mini,mini2"), tmp_path / "run")
    assert len(foreseen.new) == 4
    assert not (tmp_path / "run").exists()
    run(request("plain"), tmp_path / "run")
    foreseen = preview(request("plain,r2"), tmp_path / "run")
    assert names(foreseen.new) == [("mini", "r2")]
    assert names(foreseen.recorded) == [("mini", "plain")]


def test_impossible_cells_are_skipped_with_the_reason(plugin, tmp_path):
    wanted = request("plain", "mini,vgg8", weights="trained")
    foreseen = preview(wanted, tmp_path / "run")
    assert names(foreseen.impossible) == [("mini", "plain")]
    assert "mini has no checkpoint trained on" in foreseen.impossible[0].subject.impossible
    result = run(wanted, tmp_path / "run")
    assert {r.subject.model: r.result.status for r in result.records} == {
        "mini": "skipped",
        "vgg8": "ok",
    }
    assert not result.failed
    assert names(preview(wanted, tmp_path / "run").recorded) == [
        ("mini", "plain"),
        ("vgg8", "plain"),
    ]


def test_several_weights_are_several_subjects(plugin, tmp_path):
    result = run(request("plain", "vgg8", weights=("init", "trained")), tmp_path / "run")
    assert [r.subject.weights for r in result.records] == ["init", "trained"]


def test_the_same_subject_named_twice_is_measured_once(plugin, tmp_path):
    assert len(preview(request("plain", "vgg8", weights=("auto", "trained")), "x").new) == 1


def test_finished_run_is_unchanged_and_loads_nothing(plugin, tmp_path, monkeypatch):
    wanted = request("plain,r2", "mini,mini2", seeds=(0, 1))
    result = run(wanted, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in result.path.rglob("*")}
    monkeypatch.setattr(unit_runner, "load_subject", lambda *_: 1 / 0)
    assert len(run(wanted, tmp_path / "run").records) == 8
    assert {p: p.stat().st_mtime_ns for p in result.path.rglob("*")} == before


def test_rerun_option_selects_recorded_cells(plugin, tmp_path):
    wanted = request("plain,raising")
    result = run(wanted, tmp_path / "run")
    assert result.manifest["cells"] == {"ok": 1, "failed": 1}
    expected = {"never": [], "failed": ["raising"], "all": ["plain", "raising"]}
    for rerun, again in expected.items():
        foreseen = preview(wanted, tmp_path / "run", execution=ExecutionOptions(rerun=rerun))
        assert [cell.measure.name for cell in foreseen.new] == again
    before = cells(result)
    run(wanted, tmp_path / "run", execution=ExecutionOptions(rerun="never"))
    assert cells(result) == before
    run(request("plain"), tmp_path / "run", execution=ExecutionOptions(rerun="all"))
    assert sum(before[name] != now for name, now in cells(result).items()) == 1


def test_leftovers_of_a_kill_are_removed(plugin, tmp_path):
    folder = tmp_path / "run"
    (folder / "cells").mkdir(parents=True)
    parts = [folder / ".manifest.json.abc_123.part", folder / "cells" / ".k.json.x1.part"]
    for part in parts:
        part.write_text("{")
    result = run(request(), folder)
    assert not any(part.exists() for part in parts)
    assert result.manifest["cells"] == {"ok": 1}


def test_two_processes_do_not_write_to_one_run(plugin, tmp_path):
    result = run(request(), tmp_path / "run")
    with RunFolder(result.path).open(), pytest.raises(RequestError):
        run(request("plain,r2"), result.path)


def test_outdated_table_is_rewritten(plugin, tmp_path):
    result = run(request("plain,r2"), tmp_path / "run")
    complete = (result.path / "scores.csv").read_bytes()
    manifest = json.loads((result.path / "manifest.json").read_text())
    (result.path / "manifest.json").write_text(json.dumps({**manifest, "unfinished": True}))
    (result.path / "scores.csv").write_text("behind")
    run(request("plain,r2"), result.path)
    assert (result.path / "scores.csv").read_bytes() == complete


def test_other_samples_under_the_same_key_are_refused(plugin, tmp_path):
    result = run(request("plain"), tmp_path / "run")
    (file,) = (result.path / "cells").iterdir()
    record = json.loads(file.read_text())
    record["subject"]["sample_hash"] = "another"
    del record["checksum"]
    file.write_text(json.dumps(record))
    with pytest.raises(RequestError):
        run(request("plain,r2"), tmp_path / "run")


def test_cells_are_independent_of_other_measures(plugin, tmp_path):
    def drawn(result):
        return result.scores[result.scores.measure == "drawing"].value.tolist()

    alone = run(request("drawing"), tmp_path / "alone")
    beside = run(request("plain,drawing,r2", "mini2,mini"), tmp_path / "beside")
    subset = beside.scores[beside.scores.model == "mini"]
    assert subset[subset.measure == "drawing"].value.tolist() == drawn(alone)
    assert len(set(drawn(beside))) > 1


def test_merge_keeps_good_cells_over_failed_ones(plugin, tmp_path):
    one = run(request("plain,raising"), tmp_path / "one")
    two = run(request("plain,r2", "mini,mini2"), tmp_path / "two")
    merged = merge_runs([one.path, two.path], tmp_path / "both")
    assert merged.manifest["cells"] == {"ok": 4, "failed": 1}
    assert nlbench.load_run(tmp_path / "both").scores.shape == merged.scores.shape
    assert len(merged.manifest["calls"]) == 2
    extended = run(request("plain,r2", "mini,mini2", seeds=(0, 1)), tmp_path / "both")
    assert extended.manifest["merged"]["from"] == [str(one.path), str(two.path)]
    with pytest.raises(RequestError):
        merge_runs([one.path], two.path)


@pytest.mark.parametrize(
    "changes", [{"settings": {"sites.batch": 4}}, {"samples": 8}, {"settings": {"r2.kind": "x"}}]
)
def test_conflicting_runs_are_not_merged(plugin, tmp_path, changes):
    run(request("plain"), tmp_path / "one")
    if "r2.kind" in changes.get("settings", {}):
        file = next((tmp_path / "one" / "cells").iterdir())
        record = json.loads(file.read_text())
        record["result"]["summary"]["value"] += 1
        del record["checksum"]
        run(request("plain"), tmp_path / "two")
        file.write_text(json.dumps(record))
        name = "plain of mini"
    else:
        run(request("plain", **changes), tmp_path / "two")
        name = "merged"
    with pytest.raises(RequestError, match=name):
        merge_runs([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_run_records_time_and_memory_of_its_cells(plugin, tmp_path):
    (record,) = run(request(), tmp_path / "run").records
    assert record.costs["wall_seconds"] > 0
    assert record.costs["load_seconds"] > 0
    assert record.costs["peak_memory"] > 10**7
    assert nlbench.load_run(tmp_path / "run").records[0].costs == record.costs


@pytest.mark.parametrize("precision", ["tf32", "float64"])
def test_precision_is_recorded_and_part_of_key(plugin, tmp_path, precision):
    native = run(request("cka", "vgg8"), tmp_path / "native")
    other = run(request("cka", "vgg8", precision=precision), tmp_path / "other")
    environment = other.manifest["environment"]
    assert environment["precision"] == precision
    assert environment["tf32"] == (precision == "tf32")
    assert native.manifest["environment"]["tf32"] is False
    assert native.records[0].key != other.records[0].key
    same = native["cka"].summary["value"] == pytest.approx(other["cka"].summary["value"], abs=1e-9)
    assert same == (precision == "tf32")  # which no CPU has
