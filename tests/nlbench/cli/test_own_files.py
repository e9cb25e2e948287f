"""Files of the user that are only listed, planned or reported don't run."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nlbench.cli.app import app, main

MARK = "from pathlib import Path\nPath({marker!r}).write_text(__name__)\n"
NET = """
import torch
from helpers.layers import Layer

class Net(torch.nn.Module):
    \"\"\"A small network.\"\"\"

    def __init__(self, num_classes=10, width=4):
        super().__init__()
        self.body = torch.nn.Sequential(Layer(3, width), torch.nn.ReLU(), Layer(width, num_classes))

    def forward(self, x):
        return self.body(x)
"""
DATA = "import torch\ndef loader(count=20): return torch.randn(count, 3), torch.arange(count) % 2\n"
FILES = {
    "my_net.py": NET,
    "my_data.py": DATA,
    "helpers/__init__.py": "",
    "helpers/layers.py": "import torch\nLayer = torch.nn.Linear\n",
    "package/__init__.py": "",
    "package/net.py": NET,
}
SUBJECT = ["--model", "my_net.py", "--data", "my_data.py:loader", "--measures", "norm"]


def invoke(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two runs of one's own network."""
    folder = tmp_path_factory.mktemp("own")
    marker = folder / "executed"
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(MARK.format(marker=str(marker)) + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed in (0, 1):
            invoke("run", *SUBJECT, "--seeds", seed, "--out", f"run{seed}", "--no-report")
    assert marker.read_text()  # Measuring runs the files.
    marker.unlink()
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["list", "models", "--model", "my_net.py"],
        ["list", "models", "--model", "*.py:Net"],
        ["list", "models", "--model", "package.net:Net"],
        ["show", "run0"],
        ["run", *SUBJECT, "--out", "other", "--set", "model.width=4", "--dry-run"],
        ["run", *SUBJECT, "--out", "run0", "--seeds", "0,2", "--dry-run"],
        ["run", *SUBJECT, "--model", "package.net:Net", "--set", "data.count=9", "--dry-run"],
        ["run", *SUBJECT, "--out", "run0"],
        ["report", "run0", "run1", "-o", "page.html"],
        ["compare", "run0", "run1"],
        ["cite", "run0"],
        ["merge", "run0", "run1", "--out", "merged"],
    ],
    ids=" ".join,
)
def test_files_do_not_run(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    invoke(*command)
    assert not (folder / "executed").exists(), (folder / "executed").read_text()


def test_changed_files_are_planned_without_running(folder, monkeypatch):
    monkeypatch.chdir(folder)
    file = Path("helpers/layers.py")
    text = file.read_text()
    file.write_text(f"{text}# another version\n")
    try:
        output = invoke("run", *SUBJECT, "--out", "run0", "--dry-run")
    finally:
        file.write_text(text)
    assert "my_net.py:Net has changed since cells were recorded" in output
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "command", [["list", "sites"], ["remove", "--out", "removed"]], ids=" ".join
)
def test_refused_inputs_print_one_line(folder, command, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["nlbench", *command, "--model", "my_net.py"])
    with pytest.raises(SystemExit) as caught:
        main()
    message = capsys.readouterr().err.strip()
    assert caught.value.code == 2
    assert "the layer body.0 (Linear) takes inputs of shape (..., 3)" in message
    assert "\n" not in message
