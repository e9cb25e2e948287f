"""A hundred malformed requests and files: one clear line each, and nothing overwritten."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hostile import write_plugin
from safetensors.torch import save_file

from nlbench.cli.app import main
from nlbench.request import Request
from nlbench.runner import run

BROKEN = "raise RuntimeError('no such luck')\n"


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small finished run to be damaged, and plugins of which one can't be imported."""
    place = tmp_path_factory.mktemp("malformed")
    plugin = place / "plugin"
    plugin.mkdir()
    write_plugin(plugin)
    write_plugin(plugin, BROKEN, ("crooked",), ("crookednet",), "broken")
    sys.path.insert(0, str(plugin))
    wanted = Request(("plain", "r2"), ("mini",), ("digits",), weights="init", samples=8)
    run(wanted, place / "run")
    yield place / "run"
    sys.path.remove(str(plugin))


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """The command line in a folder of its own; gives status and what was said."""

    def command(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["nlbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code, capfd.readouterr().err

    return command


def assert_refused(status, error):
    lines = [line for line in error.splitlines() if line.strip()]
    assert status == 2, error
    assert len(lines) == 1, error
    assert lines[0].startswith("nlbench: ")
    assert "Traceback" not in error
    assert len(lines[0]) > 20


def state(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


QUICK = ["--measures", "r2", "--model", "mini", "--weights", "init", "--samples", "8"]

LONG = "x" * 5000
FLAGS = {
    "--measures": ["", ",", "r3", "[", "zzz*", "?", LONG, "r2;rm", "ü", "../r2", "r2\nr2",
                   "crooked"],
    "--model": ["", "mini3", "[!", "nosuch/*", "/", LONG, "vgg*8*9", "ミニ", " "],
    "--data": ["", "digit", "nosuch*", LONG, "digits/"],
    "--seeds": ["-1", "1.5", "one", "1,,x", "9" * 40, "²", "nan"],
    "--samples": ["-1", "many", "1e3", "9" * 30, "nan", ""],
    "--split": ["", "validation", LONG],
    "--device": ["", "gpu", "cuda:99", "cuda:-1", "cuda:²", "cpu:5", "tpu"],
    "--precision": ["", "float8", "double", "TF32"],
    "--set": ["", "x", "=", "r2=1", "r2.=1", ".r2=1", "r2.nosuch=1", "sites.batch=0",
              "sites.batch=nan", "sites.batch=1e400", "lines.number=3", f"{LONG}.x=1"],
    "--rerun": ["", "some", "ALL"],
    "--timeout": ["0", "-3", "nan", "inf", "soon"],
    "--memory": ["", "0", "lots", "-4GB", "1e99GB", "4PB"],
    "--executor": ["", "threads", "process"],
    "--workers": ["0", "-1", "2", "x"],
    "--threads": ["0", "-1", "1.5"],
    "--address": ["tcp://nowhere:1"],
    "--progress": ["", "loud"],
    "--weights": ["", "nowhere.pt", "trained", LONG, "a\0b"],
    "--config": ["nowhere.toml", "."],
    "--out": ["", LONG, "a\0b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in FLAGS.items() for value in values]
)
def test_a_malformed_flag_is_one_line_and_leaves_nothing(finished, call, tmp_path, flag, value):
    arguments = dict(zip(QUICK[::2], QUICK[1::2], strict=True)) | {flag: value}
    status, error = call("run", *(f"{key}={one}" for key, one in arguments.items()))
    assert_refused(status, error)
    assert list(tmp_path.iterdir()) == []


TOML = [
    "measures = [", "=", "measures = r2", "\0", "seeds = 1979-05-27", "samples = nan",
    "samples = 9999999999999999999999", "nosuch = 1", "[run]\nmeasures = 'r2'",
    "measures = [['r2']]", "timeout = -1", "memory = 'lots'", "executor = 'x'", "split = ''",
    "device = 'cuda:77'", "set = []", "[set.r2]\nnosuch = 1", "[set]\n'' = 1", "weights = ['']",
    "measures = ['zzz*']", "out = ''", "precision = 'x'", "model = 7",
]  # fmt: skip


@pytest.mark.parametrize("text", TOML)
def test_a_malformed_file_of_a_request_is_one_line(finished, call, tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    given = "" if "measures" in text else "measures = ['r2']\n"
    (tmp_path / "c.toml").write_text(given + text)
    assert_refused(*call("run", "--config", "c.toml"))
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def damaged(case, path):
    state = {"a": torch.zeros(64)}
    if case.startswith("cut"):
        save_file(state, path)
        path.write_bytes(path.read_bytes()[: int(case[3:])])
    elif case == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif case == "torch pickle":
        torch.save({"x": Evil()}, path)
    elif case == "nan":
        from nlbench_hostile import mini

        torch.save({k: v * float("nan") for k, v in mini().state_dict().items()}, path)
    elif case == "other names":
        save_file(state, path)
    elif case == "folder":
        path.mkdir()
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "text":
        path.write_text("weights go here\n" * 100)
    elif case == "zip":
        path.write_bytes(b"PK\x03\x04" + bytes(200))
    elif case == "header":
        path.write_bytes((2**62).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize(
    "case",
    ["cut1", "cut8", "cut40", "cut100", "pickle", "torch pickle", "nan", "other names", "folder",
     "empty", "text", "zip", "header"],
)  # fmt: skip
def test_a_damaged_or_dangerous_checkpoint_is_refused_and_runs_nothing(
    finished, call, tmp_path, case
):
    damaged(case, tmp_path / "w.bin")
    status, error = call("run", *QUICK[:4], "--samples", 8, "--weights", "w.bin", "--out", "r")
    assert_refused(status, error)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "r").exists()


def spoil(case, folder):
    cell = sorted((folder / "cells").glob("*.json"))[0]
    content = json.loads(cell.read_text())
    manifest = folder / "manifest.json"
    if case.startswith("cut"):
        cell.write_bytes(cell.read_bytes()[: int(case[3:])])
    elif case == "newer record":
        cell.write_text(json.dumps({**content, "format": 99}))
    elif case == "newer run":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    elif case == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:100])
    elif case == "manifest gone":
        manifest.unlink()
    elif case == "manifest is a list":
        manifest.write_text("[]")
    elif case == "not utf-8":
        cell.write_bytes(b"\xff\xfe" + cell.read_bytes())
    elif case == "no reading":
        del content["result"]
        cell.write_text(json.dumps(content))
    elif case == "reading is text":
        cell.write_text(json.dumps({**content, "result": "fine"}))
    elif case == "unknown field":
        cell.write_text(json.dumps({**content, "mood": "good"}))
    elif case == "cells is a file":
        shutil.rmtree(folder / "cells")
        (folder / "cells").write_text("")


CASES = ["cut0", "cut1", "cut50", "cut500", "newer record", "newer run", "manifest cut",
         "manifest gone", "manifest is a list", "not utf-8", "no reading", "reading is text",
         "unknown field", "cells is a file"]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_spoilt_run_is_refused_and_left_as_it_is(finished, call, tmp_path, case):
    shutil.copytree(finished, tmp_path / "r")
    spoil(case, tmp_path / "r")
    before = state(tmp_path / "r")
    assert_refused(*call("run", *QUICK, "--out", "r"))
    assert state(tmp_path / "r") == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_overwrites_nothing(finished, call, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "r")
    before = state(tmp_path / "r")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "fsync", lambda handle: os.write(full, b"x"))
    status, error = call("run", *QUICK, "--seeds", "0,1", "--out", "r")
    assert_refused(status, error)
    assert "No space left" in error
    assert state(tmp_path / "r") == before


def test_names_in_any_script_are_names(finished, call, tmp_path):
    folder = "прогон 走る\u202eﬀ"
    status, error = call("run", *QUICK, "--out", folder, "--no-report")
    assert status == 0, error
    assert (tmp_path / folder / "scores.csv").is_file()
