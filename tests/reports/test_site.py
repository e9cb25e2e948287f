"""Many runs: one page for all, or a site with a page each."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from nlbench import registry
from nlbench.cli.app import app
from nlbench.errors import RequestError
from nlbench.reports.page import write_site
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.subjects.facts import SubjectFacts

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for number in (1, 2):
        make_run(number, measures=("affinity", "pathlength")).save(folder / f"run {number}")
    return folder


def nlbench(*arguments):
    """Exit status, output and error of a command, in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, done.exception


def test_folders_of_runs_become_an_index_and_pages(runs, tmp_path):
    status, out, _ = nlbench("report", runs, "-o", tmp_path / "site")
    assert status == 0
    assert out.strip() == str(tmp_path / "site" / "index.html")
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="([^"]+)"', index)
    assert sorted(links) == ["run-1.html", "run-2.html"]
    assert all((tmp_path / "site" / link).is_file() for link in links)
    assert "2 ok" in index


def test_runs_of_one_name_have_own_pages(tmp_path):
    write_site([make_run(1, measures=("affinity",)) for _ in range(2)], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "run.html", "run--2.html"}


def test_existing_file_at_output_raises(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(RequestError):
        write_site(make_run(1, measures=("affinity",)), tmp_path / "x")


def test_a_folder_of_runs_on_one_page(runs, tmp_path):
    status, out, _ = nlbench("report", runs, "-o", tmp_path / "both.html")
    assert status == 0
    assert "run 1 · trained" in Path(out.strip()).read_text(encoding="utf-8")


def test_citations_of_all_that_a_run_used(runs):
    status, out, _ = nlbench("cite", runs / "run 1", runs / "run 2")
    assert status == 0
    assert out.startswith("@software{nlbench,")
    assert out.count("@software{") == 1
    assert out.count("@article{affinity,") == 1
    assert out.count("@article{pathlength,") == 1


@pytest.mark.parametrize("output", ["page.html", "site"])
def test_report_opens_its_page(runs, tmp_path, monkeypatch, output):
    opened = Mock(return_value=True)
    monkeypatch.setattr("webbrowser.open", opened)
    status, out, _ = nlbench("report", runs / "run 1", "-o", tmp_path / output, "--open")
    assert status == 0
    assert opened.call_args.args == (Path(out.strip()).resolve().as_uri(),)
    assert Path(out.strip()).is_file()


def test_citation_without_runs_is_nlbench():
    status, out, _ = nlbench("cite")
    assert status == 0
    assert out.count("@") == 1
    assert "author = {{the nlbench authors}}" in out


def test_compare_fails_where_it_is_told_to(runs):
    same = nlbench("compare", runs / "run 1", runs / "run 1", "--fail-if", "affinity > 0")
    assert same[0] == 0
    assert "pathlength" in same[1]
    other = nlbench("compare", runs / "run 1", runs / "run 2", "--fail-if", "affinity > 0.01%")
    assert other[0] == 1
    assert "failed: affinity, vgg8" in other[1]
    wrong = nlbench("compare", runs / "run 1", runs / "run 1", "--fail-if", "afinity > 0")
    assert isinstance(wrong[2], RequestError)
    assert "did you mean 'affinity'" in str(wrong[2])


def test_an_index_of_another_program_is_kept(runs, tmp_path):
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    status, _, error = nlbench("report", runs, "-o", tmp_path)
    assert status == 2 or isinstance(error, RequestError)
    assert (tmp_path / "index.html").read_text() == "<h1>mine</h1>"
    assert list(tmp_path.iterdir()) == [tmp_path / "index.html"]


def test_a_site_replaces_its_own_index(runs, tmp_path):
    for _ in range(2):
        assert nlbench("report", runs, "-o", tmp_path / "site")[0] == 0


@pytest.mark.parametrize("name", ["notes.txt", "run-1.html", "cells", "manifest.json"])
def test_sites_are_not_written_among_other_files(runs, tmp_path, name):
    (tmp_path / name).write_text("mine")
    error = nlbench("report", runs, "-o", tmp_path)[2]
    assert isinstance(error, RequestError)
    assert "choose another folder" in str(error)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_an_interrupted_site_is_written_again(runs, tmp_path):
    assert nlbench("report", runs, "-o", tmp_path / "site")[0] == 0
    (tmp_path / "site" / "index.html").unlink()
    assert nlbench("report", runs, "-o", tmp_path / "site")[0] == 0


@pytest.mark.parametrize("name", ["", "merged.html"])
def test_a_merged_run_needs_a_folder(runs, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    error = nlbench("merge", runs / "run 1", f"--out={name}")[2]
    assert str(error) == f"--out: expected a folder's name, got '{name}'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["model", "data", "recipe"])
def test_citing_opens_nothing_that_a_manifest_names(tmp_path, monkeypatch, group):
    run = make_run(1, measures=("affinity",))
    (record,) = run.records
    (tmp_path / "mine.txt").write_text("mine " * 99)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    names = [f"{family}/{tmp_path}{end}" for family in ("text", "hf", "folder")
             for end in ("", "/**", "/mine.txt")]  # fmt: skip
    fields = SubjectFacts.__dataclass_fields__
    for name in (*names, "text/*", "hf/*", "text/", "nothing/x", "../x"):
        change = {group: name} if group in fields else {"weights_metadata": {group: name}}
        other = replace(record, subject=replace(record.subject, **change))
        folder = tmp_path / "runs" / str(len(list(tmp_path.glob("runs/*"))))
        Run({**run.manifest, **Manifest().describe_records([other])}, [other]).save(folder)
        with monkeypatch.context() as patch:
            patch.setattr("nlbench.registry.load", opened := Mock(wraps=registry.load))
            status, _, error = nlbench("cite", folder)
        assert (status, error) == (0, None)
        assert all(name not in call.args for call in opened.call_args_list)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("notes.html", "not written by nlbench"), ("kept.safetensors", "expected a name ending in")],
)
def test_pages_replace_no_file_of_others(runs, tmp_path, name, reason):
    (tmp_path / name).write_text("mine")
    error = nlbench("report", runs / "run 1", "-o", tmp_path / name)[2]
    assert reason in str(error)
    assert (tmp_path / name).read_text() == "mine"
    for _ in range(2):
        assert nlbench("report", runs / "run 1", "-o", tmp_path / "own.html")[0] == 0


def test_pages_are_written_without_matplotlib():
    # It takes longer than all else that a page needs.
    script = "import nlbench.reports.page, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
