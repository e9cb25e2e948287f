"""Studies are ordinary runs with verdicts that follow from recorded cells."""

import dataclasses
import os
import shutil

import pandas as pd
import pytest
import torch
from made_records import with_numbers

import nlbench
from nlbench import registry
from nlbench.request import Request
from nlbench.runner import run
from nlbench.store.run import load_run
from nlbench.studies.framework import Context, Findings, Study, Verdict
from nlbench.studies.framework.page import add_verdicts


@pytest.mark.parametrize("name", list(registry.entries("studies")))
def test_every_study_has_a_question_and_needs(name):
    study = registry.load("studies", name)
    assert issubclass(study, Study)
    assert study.question.endswith("?")
    assert study.needs
    assert 0 < study.quick_minutes <= study.minutes
    assert set(study.takes) <= {"data", "weights", "seeds", "measures"}
    assert not registry.describe(registry.find("studies", name)).endswith("…")


def test_study_is_run_with_verdicts_tables_and_page(run_command, tmp_path):
    status, out, err = run_command("study", "redshift", "--seeds", "0", "--progress", "none")
    assert (status, err) == (0, "")
    assert "tanh, weights × 6, shifted" in out
    folder = tmp_path / "runs" / "studies" / "redshift"
    verdicts = pd.read_csv(folder / "verdicts.csv")
    assert len(verdicts) == 13
    figures = [figure.read_bytes() for figure in folder.glob("*.png")]
    assert [figure[:4] for figure in figures] == [b"\x89PNG"] * 2
    page = (folder / "report.html").read_text()
    assert verdicts.claim[0] in page
    assert "fill: var(--paper, #ffffff)" in page
    assert "fill: #ffffff" not in page
    gathered = pd.read_csv(tmp_path / "runs" / "studies" / "verdicts.csv")
    assert set(gathered.study) == {"redshift"}
    assert set(gathered.version) == {"full --seeds 0"}
    assert gathered.drop(columns=["study", "version"]).equals(verdicts)
    assert "Do larger weights make random networks more nonlinear" in page
    kept = load_run(folder / "run")
    assert len(kept.records) == 8
    # Another time nothing is measured: the cells stay as they are.
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "run" / "cells").iterdir()}
    assert run_command("study", "redshift", "--seeds", "0")[0] == 0
    assert {p.name: p.stat().st_mtime_ns for p in (folder / "run" / "cells").iterdir()} == before
    # A verdict follows from the numbers.
    study = registry.load("studies", "redshift")()
    words = {verdict.word for verdict in study.analyse({"run": kept}).verdicts[:8]}
    assert words == {"needs 3 networks"}
    turned = study.analyse({"run": with_numbers(kept, lambda value: 1 - value)}).verdicts
    assert not any(v.agrees for v in turned[8:])


def test_fixed_settings_are_refused_in_one_line(run_command):
    status, _, err = run_command("study", "redshift", "--data", "digits")
    message = "nlbench: --data: study redshift doesn't accept it, only --seeds\n"
    assert (status, err) == (2, message)
    status, _, err = run_command("study", "redshif")
    assert (status, err) == (2, "nlbench: there is no study 'redshif'; did you mean 'redshift'?\n")


def test_failing_and_skipped_studies_leave_others_theirs(run_command, monkeypatch, tmp_path):
    def measure(self, context):
        raise nlbench.RequestError("a package is missing")

    monkeypatch.setattr(registry.load("studies", "seeds"), "measure", measure)
    noise = registry.load("studies", "noise")
    monkeypatch.setattr(noise, "missing", lambda self: "some-package isn't installed")
    names = "nois[e],seeds,polynomials"
    status, out, err = run_command(
        "study", names, "--quick", "--device", "cpu", "--progress", "none"
    )
    assert status == 2
    assert out.startswith("noise: skipped, some-package isn't installed\n")
    assert err == (
        "\nseeds: a package is missing\nnlbench: 1 of 2 studies failed: seeds (see above)\n"
    )
    assert "polynomials: " in out
    assert (tmp_path / "runs" / "studies" / "polynomials" / "report.html").exists()
    status, _, err = run_command("study", "noise")
    assert (status, err) == (2, "nlbench: study noise: some-package isn't installed\n")


def test_cells_of_another_run_are_reused(tmp_path):
    request = Request("r2", "redshift-mlp", "grid", weights="init", samples=64)
    first = run(request, tmp_path / "first")
    more = dataclasses.replace(request, models=("redshift-mlp", "redshift-mlp-tanh"))
    second = run(more, tmp_path / "second", known=[tmp_path / "first"])
    (there,), here = first.records, {r.key: r for r in second.records}
    assert here[there.key].to_json() == there.to_json()
    assert len(here) == 2
    assert second.scores.equals(run(more, tmp_path / "straight").scores)


def test_reused_cells_have_the_requested_names(tmp_path):
    network = registry.load("models", "redshift-mlp")()
    torch.save(network.state_dict(), tmp_path / "one.pt")
    shutil.copy(tmp_path / "one.pt", tmp_path / "other.pt")
    runs = [
        run(
            Request("r2", "redshift-mlp", "grid", weights=str(tmp_path / f"{name}.pt"), samples=64),
            tmp_path / name,
            known=[tmp_path / "one"][:known],
        )
        for known, name in enumerate(("one", "other"))
    ]
    (first,), (second,) = (each.records for each in runs)
    assert first.key == second.key
    assert first.result == second.result
    assert (first.subject.weights, second.subject.weights) == ("one.pt", "other.pt")


def test_networks_are_trained_once_before_the_run(tmp_path):
    model, data = "ladders/mlp-relu-gain2-depth3", "curves"

    def asked(study, epochs=1):
        context = Context(tmp_path, study)
        start = context.request_training(model, data, "adam", 3, epochs=epochs)
        more = {"name": "on", "weights": str(start), "epochs": 1}
        return context, start, context.request_training(model, data, "adam", 3, **more)

    context, start, after = asked("one")
    assert not start.exists()
    request = Request("norm", model, data, weights=(str(start), str(after)), samples=16)
    assert context.run(request).manifest["cells"] == {"ok": 2}
    stamp = start.stat().st_mtime_ns
    other, again, _ = asked("two")
    other.train_pending()
    assert (again, start.stat().st_mtime_ns) == (start, stamp)
    with pytest.raises(nlbench.RequestError):
        asked("two")[0].request_training(model, data, "adam", 3, epochs=2)
    with pytest.raises(nlbench.RequestError):
        asked("two", epochs=2)[0].train_pending()


@pytest.mark.parametrize(
    ("flags", "name", "workers"),
    [([], "noise", 4), ([], "redshift", None), (["--quick"], "activations", None),
     (["--workers", "3"], "redshift", 3), (["--workers", "1"], "noise", None)],
)  # fmt: skip
def test_long_studies_use_all_cores(run_command, monkeypatch, flags, name, workers):
    seen = []

    def measure(self, context):
        seen.append(context.execution)
        raise nlbench.RequestError("enough")

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(registry.load("studies", name), "measure", measure)
    assert run_command("study", name, "--device", "cpu", *flags)[0] == 2
    (execution,) = seen
    assert (execution.workers, execution.threads) == (workers, 1)
    assert execution.executor == ("processes" if workers else "serial")


def test_evaluate_replaces_the_previous_cells(tmp_path):
    context = Context(tmp_path, "mine")
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.randn(32, 3)
    first = context.evaluate(model, x, ["r2", "norm"], "part")
    again = context.evaluate(model, 2 * x, ["r2"], "part")
    assert again["r2"].summary["value"] != first["r2"].summary["value"]
    kept = load_run(tmp_path / "mine" / "part")
    assert [record.to_json() for record in kept.records] == [r.to_json() for r in again.records]


def test_verdicts_of_all_studies_are_in_one_file(tmp_path):
    file = tmp_path / "verdicts.csv"
    one, other = (Findings([Verdict(claim, "", "1", True)]) for claim in ("first", "second"))
    for name, version, findings in [
        ("b", "full", one), ("a", "quick", one), ("b", "quick", one), ("b", "full", other),
    ]:  # fmt: skip
        add_verdicts(file, name, version, findings)
    kept = pd.read_csv(file)
    found = list(zip(kept.study, kept.version, kept.claim, strict=True))
    assert found == [("a", "quick", "first"), ("b", "full", "second"), ("b", "quick", "first")]


@pytest.mark.parametrize("text", ["", "hello\n", "study,claim\na,b\n", 'a,"b\nc', "a\nb,c,d\n"])
def test_foreign_verdicts_are_refused_before_measuring(run_command, tmp_path, text):
    (tmp_path / "verdicts.csv").write_text(text)
    status, _, error = run_command("study", "redshift", "--seeds", "0", "--out", ".")
    assert status == 2
    assert "verdicts.csv is not a table of verdicts" in error
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("verdicts.csv", text)
    ]


def test_versions_have_separate_folders(tmp_path):
    request = Request("r2", "redshift-mlp", "grid", weights="init", samples=64)
    runs = [
        Context(tmp_path, "one", **chosen).run(request)
        for chosen in ({}, {"quick": True}, {"data": "grid"}, {"quick": True, "data": "grid"})
    ]
    assert len({run.path for run in runs}) == 4
    assert len({run.scores.to_csv() for run in runs}) == 1
