import json
import sys

import pytest
from hostile import write_plugin

from nlbench.cli.app import main
from nlbench.cli.doctor import diagnose


@pytest.fixture
def call(monkeypatch, capfd):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["nlbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, capfd.readouterr().out

    return command


def test_a_plugin_that_cannot_be_imported_and_a_conflict_are_broken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(
        str(write_plugin(tmp_path, "raise RuntimeError('no luck')", ("r2", "crooked"), (), "bad"))
    )
    broken = {f.what: f.detail for f in diagnose() if f.state == "broken"}
    assert "no luck" in broken["measure crooked"]
    assert "is claimed by" in broken["measure r2"]


def test_missing_data_folders_are_said_with_what_to_do(monkeypatch):
    monkeypatch.delenv("NLBENCH_DATA", raising=False)
    found = {finding.what: finding for finding in diagnose()}
    assert found["NLBENCH_DATA"].state == "missing"
    assert found["dataset digits"].state == "ok"
    assert found["torch"].state == "ok"


def test_the_doctor_prints_json_and_fails_only_for_what_is_broken(call, monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path / "nowhere"))
    status, out = call("doctor", "--json")
    states = {finding["what"]: finding["state"] for finding in json.loads(out)}
    assert states["NLBENCH_DATA"] == "broken"
    assert status == 1


def test_a_manifest_is_shown_in_words_and_as_json(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--measures", "cka", "--samples", "16", "--no-report"]
    assert call("run", *options, "--out", "one")[0] == 0
    assert call("run", *options, "--seeds", "1", "--out", "two")[0] == 0
    status, out = call("merge", "one", "two", "--out", "both")
    assert status == 0
    assert "2 ok" in out
    _, words = call("show", "both")
    assert "merged       one, two" in words
    assert "precision native" in words
    _, text = call("show", "both", "--json")
    assert json.loads(text)["cells"] == {"ok": 2}
