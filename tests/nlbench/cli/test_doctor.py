import json

from distributions import write_distribution
from hostile import write_plugin

from nlbench.cli.doctor import diagnose


def test_import_errors_and_conflicts_are_broken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(
        str(write_plugin(tmp_path, "raise RuntimeError('no luck')", ("r2", "crooked"), (), "bad"))
    )
    broken = {f.what: f.detail for f in diagnose() if f.state == "broken"}
    assert "no luck" in broken["measure crooked"]
    assert "is claimed by" in broken["measure r2"]


def test_missing_data_are_optional_with_a_hint(monkeypatch):
    monkeypatch.delenv("NLBENCH_DATA", raising=False)
    found = {finding.what: finding for finding in diagnose()}
    assert found["NLBENCH_DATA"].state == "optional"
    assert found["dataset cifar10"].state == "optional"
    assert "--set cifar10.folder=PATH" in found["dataset cifar10"].detail
    assert not [finding for finding in found.values() if finding.state == "broken"]
    assert found["dataset digits"].state == "ok"
    assert found["torch"].state == "ok"


def test_doctor_prints_json_and_fails_if_broken(run_command, monkeypatch, tmp_path):
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path / "nowhere"))
    status, out, _ = run_command("doctor", "--json")
    states = {finding["what"]: finding["state"] for finding in json.loads(out)}
    assert states["NLBENCH_DATA"] == "broken"
    assert status == 1


def test_manifest_is_shown_in_words_and_as_json(run_command):
    options = ["--measures", "cka", "--samples", "16", "--no-report"]
    assert run_command("run", *options, "--out", "one")[0] == 0
    assert run_command("run", *options, "--seeds", "1", "--out", "two")[0] == 0
    status, out, _ = run_command("merge", "one", "two", "--out", "both")
    assert status == 0
    assert "2 ok" in out
    _, words, _ = run_command("show", "both")
    assert "merged       one, two" in words
    assert "precision native" in words
    _, text, _ = run_command("show", "both", "--json")
    assert json.loads(text)["cells"] == {"ok": 2}


def test_defects_of_plugins_are_broken_with_their_names(tmp_path, monkeypatch):
    for name, text in {
        "crooked": "[nlbench.measures]\nno equals sign\n",
        "bent": "[nlbench.measures]\nodd = a b\n[nlbench.models]\nzoo/* = no_such_module:Zoo\n"
        "[nlbench.datasets]\nlost = no_such_module:lost\n",
    }.items():
        write_distribution(tmp_path, name, text)
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = {f.what: f.detail for f in diagnose() if f.state == "broken"}
    assert "crooked" in broken["entry points"]
    assert "bent 1.0" in broken["measure odd"]
    assert "no_such_module" in broken["model zoo/*"]
    assert "no_such_module" in broken["dataset lost"]
