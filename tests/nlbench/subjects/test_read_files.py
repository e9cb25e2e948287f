"""Files that the user's code reads, and that a run must notice when they change."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nlbench
from nlbench.introspection.opened_files import _installed_folders, opened_files
from nlbench.serialization.versions import changed_files, describe_files

HEAD = """
import importlib, json, torch
from pathlib import Path
import numpy as np
from safetensors.torch import load_file
HERE = Path(__file__).parent
"""
NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        torch.nn.init.eye_(self.layer.weight)
        torch.nn.init.constant_(self.layer.bias, {shift})
    def forward(self, x):
        return torch.relu(self.layer(x))
"""
SHIFTS = {
    "a module by name": ("importlib.import_module('helper').SHIFT", "helper.py"),
    "a module by a computed name": ("importlib.import_module('hel' + 'per').SHIFT", "helper.py"),
    "a file next to it": ("json.loads((HERE / 'shift.json').read_text())", "shift.json"),
    "a file in a subfolder": ("json.load(open('sub' + f'/{1}.json'))", "sub/1.json"),
    "an array": ("float(np.load('shift.npy'))", "shift.npy"),
    "a checkpoint": ("float(torch.load(HERE / 'shift.pt'))", "shift.pt"),
    "safetensors": ("float(load_file('shift.safetensors')['x'])", "shift.safetensors"),
    "safetensors in a subfolder": (
        "float(load_file(HERE / 'sub' / 'x.safetensors')['x'])",
        "sub/x.safetensors",
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32))
    return tmp_path


def write_shift(file, shift):
    file.parent.mkdir(exist_ok=True)
    match file.suffix:
        case ".py":
            file.write_text(f"SHIFT = {shift}\n")
        case ".json":
            file.write_text(str(shift))
        case ".npy":
            np.save(file, shift)
        case ".pt":
            torch.save(torch.tensor(shift), file)
        case ".safetensors":
            save_file({"x": torch.tensor(shift)}, file)


def measure(measures="affinity", data="x.npy", model="my_net.py:Net"):
    run = nlbench.run(nlbench.Request(measures, [model], [data]), "run")
    return run, [record.result.summary["value"] for record in run.records]


@pytest.mark.parametrize("kind", SHIFTS)
def test_changed_files_of_networks_are_measured_again(folder, kind):
    shift, name = SHIFTS[kind]
    (folder / "my_net.py").write_text(HEAD + NET.format(shift=shift))
    write_shift(folder / name, 0.5)
    _, first = measure()
    assert measure()[1] == first
    write_shift(folder / name, 3.5)
    run, second = measure()
    assert second != first
    assert name in run.manifest["superseded"][0]
    assert len(list((folder / "run" / "superseded").iterdir())) == 1


def test_run_outputs_are_not_inputs(folder):
    names = "NAMES = 'run', 'run/scores.csv', HERE / 'run' / 'manifest.json'\n"
    (folder / "my_net.py").write_text(HEAD + names + NET.format(shift=0.5))
    for _ in range(3):
        run, _ = measure()
    assert not run.manifest.get("superseded")
    assert not (folder / "run" / "superseded").exists()


def test_constants_of_files_are_read_again(folder):
    text = HEAD + "SHIFT = json.loads(Path('shift.json').read_text())\n"
    (folder / "my_net.py").write_text(text + NET.format(shift="SHIFT"))
    write_shift(folder / "shift.json", 0.5)
    _, first = measure()
    write_shift(folder / "shift.json", 3.5)
    assert measure()[1] != first


def test_changed_files_of_items_are_measured_again(folder):
    (folder / "my_net.py").write_text(HEAD + NET.format(shift=0))
    (folder / "my_data.py").write_text(
        HEAD + "class Items(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, index): return torch.tensor(np.load(f'rows/{index}.npy')), 0\n"
    )
    (folder / "rows").mkdir()
    for index, row in enumerate(np.load("x.npy")):
        np.save(f"rows/{index}.npy", row)
    run, first = measure(data="my_data.py:Items")
    assert list(run.records[0].subject.files) == ["rows/"]
    np.save("rows/7.npy", np.full(3, 9.0, np.float32))
    assert measure(data="my_data.py:Items")[1] != first


def test_data_of_equal_size_and_time_are_measured_again(folder):
    (folder / "my_net.py").write_text(HEAD + NET.format(shift=0.5))
    _, first = measure()
    state = Path("x.npy").stat()
    np.save("x.npy", np.load("x.npy") ** 3)
    os.utime("x.npy", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert measure()[1] != first


def test_known_records_of_other_files_are_not_copied(folder):
    (folder / "my_net.py").write_text(HEAD + NET.format(shift=SHIFTS["an array"][0]))
    write_shift(folder / "shift.npy", 0.5)
    _, first = measure()
    write_shift(folder / "shift.npy", 3.5)
    request = nlbench.Request("affinity", ["my_net.py:Net"], ["x.npy"])
    other = nlbench.run(request, "other", known=["run"])
    assert [record.result.summary["value"] for record in other.records] != first


def test_libraries_and_written_files_are_not_inputs(folder):
    with opened_files() as opened:
        (folder / "written.txt").write_text("1")
        (folder / "written.txt").read_text()
        np.load("x.npy")
        Path(np.__file__).read_text()
    assert opened.inputs([]) == {str(folder / "x.npy")}


def test_written_files_are_not_inputs(folder):
    text = HEAD + "Path('my.log').write_text(str(np.random.rand()))\n"
    (folder / "my_net.py").write_text(text + NET.format(shift=0))
    measure()
    (folder / "my.log").unlink()
    again, _ = measure("affinity,r2")
    assert all("my.log" not in (r.subject.files or {}) for r in again.records)
    assert "superseded" not in list(again.manifest)


def test_missing_files_have_changed(folder):
    versions = describe_files([str(folder / "x.npy")])
    assert changed_files(versions) == []
    (folder / "x.npy").unlink()
    assert changed_files(versions) == ["x.npy"]


def test_system_files_and_caches_are_not_inputs(tmp_path, monkeypatch):
    cached = tmp_path / ".cache" / "fonts.json"
    cached.parent.mkdir()
    cached.touch()
    own = tmp_path / "own.json"
    own.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    _installed_folders.cache_clear()
    with opened_files() as opened:
        for file in (cached, own, os.__file__, os.devnull, "/etc/hosts", "/proc/self/status"):
            if os.path.exists(file):  # noqa: PTH110
                Path(file).read_bytes()
    found = opened.inputs([])
    _installed_folders.cache_clear()
    assert found == {str(own)}
