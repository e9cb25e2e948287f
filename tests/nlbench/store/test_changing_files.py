"""What a run is made of is replaced between two calls, or while it goes on."""

import dataclasses
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from distributions import write_distribution
from hostile import install_plugin, request

import nlbench
from nlbench import runner
from nlbench.errors import RequestError
from nlbench.execution import executors, unit_runner
from nlbench.execution.work_units import Unit
from nlbench.plan import make_plan
from nlbench.progress import ProgressMonitor
from nlbench.reports.manifest import manifest_lines
from nlbench.runner import run
from nlbench.serialization.fields import from_plain, to_plain
from nlbench.store.run_folder import RunFolder

PRINTED = """
import nlbench
from nlbench.subjects.data import dataset
from nlbench import registry
from pathlib import Path


@dataset(fingerprint=lambda: Path(__file__).with_name("data.txt").read_text())
def printed():
    return registry.load("datasets", "digits")()
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    # Of another test's folder.
    monkeypatch.delitem(sys.modules, "nlbench_printed", raising=False)
    return install_plugin(tmp_path, monkeypatch)


def cell_key(**changes):
    (cell,) = make_plan(request(**changes), "cpu", print).cells
    return cell.key


def save(file, shift):
    from nlbench_hostile import mini

    torch.manual_seed(0)
    torch.save({name: value + shift for name, value in mini().state_dict().items()}, file)


def distribution(folder, name, body, group, object_):
    """Write the entry point of a module that is there or is written here."""
    write_distribution(folder, name, {group: [f"{object_} = {name}:{object_}"]})
    if body:
        (folder / f"{name}.py").write_text(body)


def test_replaced_checkpoint_of_same_size_is_noticed(plugin, tmp_path):
    file, other = tmp_path / "w.pt", tmp_path / "plugin" / "w.pt"
    save(file, 0.0)
    key = cell_key(weights=str(file))
    state = file.stat()
    save(other, 1.0)
    shutil.copyfile(other, file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_size == state.st_size
    assert cell_key(weights=str(file)) != key


def test_checkpoint_replaced_after_planning_is_not_measured(plugin, tmp_path, monkeypatch):
    file = tmp_path / "w.pt"
    save(file, 0.0)
    load = unit_runner.load_subject

    def replaced(spec, device):
        if spec.model == "mini":
            save(file, 1.0)
        return load(spec, device)

    monkeypatch.setattr(unit_runner, "load_subject", replaced)
    with pytest.raises(RequestError):
        run(request(weights=str(file)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def printed(plugin, monkeypatch):
    """A dataset whose fingerprint is in a file; each loading of it changes the file."""
    distribution(plugin, "nlbench_printed", PRINTED, "datasets", "printed")
    (plugin / "data.txt").write_text("one")
    load = unit_runner.load_subject

    def replaced(spec, device):
        (plugin / "data.txt").write_text("two")
        return load(spec, device)

    monkeypatch.setattr(unit_runner, "load_subject", replaced)
    return request(data=("printed",))


def test_data_replaced_after_planning_are_not_measured(printed, tmp_path):
    with pytest.raises(RequestError, match="printed"):
        run(printed, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_copied_data_may_have_other_times(printed, tmp_path):
    plan = make_plan(printed, "cpu", print)
    here = Unit(plan.cells, "cpu")
    elsewhere = dataclasses.replace(here, planned_at="another machine")
    event, missed = unit_runner.UnitRunner().measure(here, ProgressMonitor())
    assert event == {"unloadable": missed.result.reason}
    (found,) = unit_runner.UnitRunner().measure(
        from_plain(Unit, to_plain(elsewhere), "unit"), ProgressMonitor()
    )
    assert found.result.status == "ok"


def test_cells_with_different_samples_are_not_mixed(plugin, tmp_path, monkeypatch):
    real = executors.execute

    def altered(*arguments, **options):
        for number, record in enumerate(real(*arguments, **options)):
            subject = replace(record.subject, sample_hash=str(number))
            yield replace(record, subject=subject)

    monkeypatch.setattr(runner, "execute", altered)
    result = run(request("plain,r2"), tmp_path / "run")
    assert [r.result.status for r in result.records] == ["ok", "failed"]
    assert "the sample hash differs from that of" in result.records[1].result.reason


def test_dataset_files_are_part_of_the_plan(plugin, tmp_path):
    distribution(plugin, "nlbench_printed", PRINTED, "datasets", "printed")
    (plugin / "data.txt").write_text("one")
    key = cell_key(data=("printed",))
    assert cell_key(data=("printed",)) == key
    (plugin / "data.txt").write_text("two")
    assert cell_key(data=("printed",)) != key


@pytest.mark.parametrize("said", [{"mean": 0.5}, float("nan")])
def test_subject_with_unwritable_records_fails_alone(plugin, tmp_path, monkeypatch, said):
    load = unit_runner.load_subject

    def unspeakable(spec, device):
        subject = load(spec, device)
        if spec.model == "mini":
            subject = replace(subject, facts=replace(subject.facts, preprocessing=said))
        return subject

    monkeypatch.setattr(unit_runner, "load_subject", unspeakable)
    result = run(request(models="mini,mini2"), tmp_path / "run")
    assert [r.result.status for r in result.records] == ["failed", "ok"]
    assert "can't be recorded" in result.records[0].result.reason


def test_folder_with_a_workers_cell_is_kept(plugin, tmp_path):
    result = run(request(), tmp_path / "run")
    RunFolder(result.path).remove()
    assert len(nlbench.load_run(result.path).records) == 1


NET = """
import torch
from layers import Layer

class Net(torch.nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), Layer(768), torch.nn.Tanh())

    def forward(self, x):
        return self.body(x)
"""
LAYERS = """
import torch

class Layer(torch.nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, 5)
"""
ROWS = "import torch\nrows = torch.randn(40, 768, generator=torch.Generator().manual_seed(0))\n"


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("net.py", NET), ("layers.py", LAYERS), ("rows.py", ROWS)):
        (tmp_path / name).write_text(text)
    torch.save(torch.randn(40, 768), tmp_path / "rows.pt")
    return tmp_path


class Warnings:
    """Keeps the warnings of a run."""

    def __init__(self):
        self.warnings = []

    def begin(self, steps):
        pass

    def step(self, text):
        pass

    def warn(self, message):
        self.warnings.append(message)


def own(measures="norm", data="rows.py:rows", **changes):
    return request(measures, "net.py:Net", data=(data,), **changes)


@pytest.mark.parametrize("changed", ["net.py", "layers.py", "rows.py", "rows.pt"])
def test_cells_of_a_changed_file_are_measured_again(own_files, changed):
    data = "rows.pt" if changed == "rows.pt" else "rows.py:rows"
    first = run(own("norm,r2", data), "run")
    file = own_files / changed
    if changed == "rows.pt":
        torch.save(torch.randn(50, 768), file)
    else:
        file.write_text(file.read_text() + "# another version\n")
    preview = runner.preview(own(data=data), "run")
    name = "net.py:Net" if changed in ("net.py", "layers.py") else data
    assert preview.superseded == (name,)
    assert len(preview.new) == 1
    progress = Warnings()
    second = run(own(data=data), "run", progress=progress)
    (warning,) = progress.warnings
    assert f"{name} changed after 2 cells had been recorded" in warning
    # The cell that isn't asked for again isn't mixed with those of the new version.
    assert [record.measure.name for record in second.records] == ["norm"]
    assert {record.key for record in first.records}.isdisjoint(r.key for r in second.records)
    kept = {file.stem for file in (own_files / "run" / "superseded").iterdir()}
    assert kept == {record.key for record in first.records}
    assert warning in dict(manifest_lines(second.manifest))["superseded"]
    again = Warnings()
    assert run(own(data=data), "run", progress=again).records == second.records
    assert again.warnings == []


def test_other_settings_of_a_changed_file_are_refused(own_files):
    run(own(), "run")
    (own_files / "net.py").write_text(NET + "# another version\n")
    with pytest.raises(RequestError, match="--out"):
        run(own(samples=8), "run")
