"""``nlbench weight-linearity``: its table is a new file, written whole."""

import os
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from typer.testing import CliRunner

from nlbench.cli.app import app
from nlbench.errors import RequestError
from nlbench.store import run as runs

TABLE = pd.DataFrame({"weights": ["b"], "value": [0.5], "reason": [""]})


@pytest.fixture
def invoke(monkeypatch):
    """Call the command on a run whose table is known."""
    loaded = SimpleNamespace(weight_linearity=lambda **_: TABLE)
    monkeypatch.setattr(runs, "load_run", lambda _: loaded)
    return lambda file: CliRunner().invoke(app, ["weight-linearity", "run", "-o", str(file)])


def test_table_is_written_into_a_new_folder(invoke, tmp_path):
    file = tmp_path / "new" / "table.csv"
    assert invoke(file).exit_code == 0
    assert pd.read_csv(file, keep_default_na=False).equals(TABLE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_leaves_no_partial_table(invoke, tmp_path, monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "fsync", lambda handle: os.write(full, b"x"))
    assert isinstance(invoke(tmp_path / "table.csv").exception, RequestError)
    assert list(tmp_path.iterdir()) == []
