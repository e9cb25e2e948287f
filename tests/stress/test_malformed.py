"""Malformed requests and files: one clear line each, and nothing overwritten.

Of each flag's values one or two for each way in which they are read; wording is in
``nlbench/cli/test_cli.py`` and ``test_bad_inputs.py``.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hostile import write_plugin
from safetensors.torch import save_file
from torch import nn

import nlbench
from nlbench.errors import RequestError, one_line
from nlbench.request import Request
from nlbench.runner import run
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.weights import load_weights

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
def call(run_command):
    """Run a command, and return its status and what it printed to standard error."""

    def command(*arguments):
        status, _, error = run_command(*arguments)
        return status, error

    return command


def assert_refused(status, error):
    lines = [line for line in error.splitlines() if line.strip()]
    assert status == 2, error
    assert len(lines) == 1, error
    assert lines[0].startswith("nlbench: ")
    assert "Traceback" not in error
    assert 20 < len(lines[0]) < 1000


def state(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


QUICK = ["--measures", "r2", "--model", "mini", "--weights", "init", "--samples", "8"]

LONG = "x" * 100_000
NINES = "9" * 5000
FLAGS = {
    "--measures": ["", "[", "zzz*", LONG, "r2\nr2", "crooked", "r2\x1b[31m"],
    "--model": ["", "nosuch/*", LONG, "ミニ", "timm/", f"torchvision/{LONG}"],
    "--data": ["", "nosuch*", "digits.size=3"],
    "--seeds": ["-1", "1,,x", "²", NINES, "5-1", "1-", "0-999999999"],
    "--samples": ["many", "1.5", "nan", "", NINES, "1_000", "٣"],
    "--split": [LONG],
    "--device": ["", "gpu", "cuda:99", "cuda:²"],
    "--precision": ["float8"],
    "--set": ["x", "r2=1", "r2.nosuch=1", "sites.batch=0", "sites.batch=1e400", f"{LONG}.x=1",
              f"r2.folds={NINES}", f"sites.rows=tokens:{NINES}", "r2.folds=\x1b[2J"],
    "--sites": [f"every:{NINES}", "role:x"],
    "--rerun": ["ALL"],
    "--timeout": ["-3", "nan", "1e300", "1,5"],
    "--memory": ["", "lots", "-4GB", "1e99GB", NINES, "٤GB", "nan"],
    "--executor": ["threads"],
    "--workers": ["0", "2", NINES],
    "--threads": ["-1", "100000"],
    "--address": ["tcp://nowhere:1"],
    "--progress": ["loud"],
    "--weights": ["", "nowhere.pt", "trained", LONG, "a\0b", "*.pt", "/dev/null"],
    "--config": ["nowhere.toml", ".", "/dev/zero", LONG, "a\0b"],
    "--out": ["", LONG, "a\0b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in FLAGS.items() for value in values]
)
def test_malformed_flag_leaves_nothing(finished, call, tmp_path, flag, value):
    arguments = dict(zip(QUICK[::2], QUICK[1::2], strict=True)) | {flag: value}
    status, error = call("run", *(f"{key}={one}" for key, one in arguments.items()))
    assert_refused(status, error)
    assert list(tmp_path.iterdir()) == []


# What reading the file alone finds is in ``nlbench/test_request.py``.
TOML = [
    "\0", "measures = [['r2']]", "[set.r2]\nnosuch = 1", "weights = ['']", f"model = '{LONG}'",
    "x = " + "[" * 5000, "address = 'tcp://x:1'", "'\\u001b[2J' = 1", "config = 'c.toml'",
    "device = 'cuda:77'", "[set]\n'' = 1",
]  # fmt: skip


@pytest.mark.parametrize("text", TOML)
def test_malformed_request_file_prints_one_line(finished, call, tmp_path, text):
    given = "" if "measures" in text else "measures = ['r2']\n"
    (tmp_path / "c.toml").write_text(given + text)
    assert_refused(*call("run", "--config", "c.toml"))
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def damaged(case, path):
    if case == "cut":
        save_file({"a": torch.zeros(64)}, path)
        path.write_bytes(path.read_bytes()[:40])
    elif case == "pickle":
        torch.save({"x": Evil()}, path)
    elif case == "nan":
        from nlbench_hostile import mini

        torch.save({k: v * float("nan") for k, v in mini().state_dict().items()}, path)
    elif case == "other names":
        save_file({"a": torch.zeros(64)}, path)
    elif case == "folder":
        path.mkdir()


# Of each kind one: ``nlbench/subjects/test_refused_weights.py`` has them all.
@pytest.mark.parametrize("case", ["cut", "pickle", "nan", "other names", "folder"])
def test_dangerous_checkpoint_is_refused(finished, call, tmp_path, case):
    damaged(case, tmp_path / "w.bin")
    status, error = call("run", *QUICK[:4], "--samples", 8, "--weights", "w.bin", "--out", "r")
    assert_refused(status, error)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "r").exists()


def spoil(case, folder):
    cell = sorted((folder / "cells").glob("*.json"))[0]
    manifest = folder / "manifest.json"
    if case == "cut":
        cell.write_bytes(cell.read_bytes()[:50])
    elif case == "newer run":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    elif case == "manifest gone":
        manifest.unlink()
    elif case == "changed number":
        cell.write_text(cell.read_text().replace('"value": 0.', '"value": 0.1', 1))
    elif case == "cells is a file":
        shutil.rmtree(folder / "cells")
        (folder / "cells").write_text("")


# Of each kind one: ``nlbench/store/test_run_folder.py`` has them all.
CASES = ["cut", "newer run", "manifest gone", "changed number", "cells is a file"]


@pytest.mark.parametrize("case", CASES)
def test_damaged_run_is_refused_and_unchanged(finished, call, tmp_path, case):
    shutil.copytree(finished, tmp_path / "r")
    spoil(case, tmp_path / "r")
    before = state(tmp_path / "r")
    assert_refused(*call("run", *QUICK, "--out", "r"))
    assert state(tmp_path / "r") == before


COMMANDS = [
    ["list", ""], ["list", "sites", "--model", ""], ["list", "measures", "--model", "mini"],
    ["list", "datasets", "--all"], ["list", "recipes", "--traceable"], ["list", "ops", "extra"],
    ["list", "models", "--model", "zzz*"], ["list", "sites", "--model", "mini", "--data", "nosuch"],
    ["show"], ["show", ""], ["show", LONG], ["show", "a\0b"], ["show", "mini", "--cite"],
    ["show", "crooked"], ["show", f"small/relu-w{NINES}-d2"], ["report"], ["report", "."],
    ["report", LONG], ["merge"], ["merge", ".", "--out", "x"], ["train"],
    ["train", "--model", "mini"], ["train", "--model", "nosuch", "--out", "w.safetensors"],
    ["run", "extra"], ["run", "--samples"], ["run", "--report=maybe"], ["study", ""],
    ["study", LONG], ["check-measure"], ["check-measure", "crooked"],
    ["check-measure", "plain", "r2"], [""], [LONG], ["run", f"--{LONG}"], ["run", f"-{LONG}=3"],
]  # fmt: skip


REMOVE = ["remove", "--model", "mini", "--data", "digits", "--out", "r"]
TRAIN = ["train", "--model", "mini", "--data", "digits", "--out", "w.safetensors"]
LINEARIZE = ["linearize", "--model", "mini", "--data", "digits", "--out", "l"]
STUDY = ["study", "seeds", "--out", "s"]
CHECK = ["check-measure", "plain"]
PLANE = ["plane", "mini", "--data", "digits", "--out", "p.png"]
# Of values that `FLAGS` has for the same kind of flag, one at the most.
LATER_FLAGS = [
    (TRAIN, "--model", ["mini,mini2", "crookednet"]),
    (TRAIN, "--out", [".", "w.pt", "a\0.safetensors", "/dev/null/w.safetensors"]),
    (TRAIN, "--data", ["digits,grid"]),
    (TRAIN, "--recipe", ["*"]),
    (TRAIN, "--weights", ["trained", "/dev/null"]),
    (TRAIN, "--seeds", ["0,1"]),
    (TRAIN, "--epochs", ["1" + "0" * 30]),
    (TRAIN, "--batch-size", [NINES]),
    (TRAIN, "--until-train-accuracy", ["2"]),
    (TRAIN, "--omega", ["nan"]),
    (TRAIN, "--checkpoint-epochs", [",", "1.5"]),
    (TRAIN, "--set", ["plain.x=1", "digits.nosuch=1"]),
    (REMOVE, "--span", ["²", f"1..{NINES}", "2-1"]),
    (REMOVE, "--of", [f"spans:{NINES}", "spans:0"]),
    (REMOVE, "--by", [LONG, "afinity"]),
    (REMOVE, "--share", ["call"]),
    (REMOVE, "--keep", ["2"]),
    (REMOVE, "--data", ["digit"]),
    (LINEARIZE, "--model", [",", "crookednet"]),
    (LINEARIZE, "--out", ["a\0b"]),
    (LINEARIZE, "--weights", ["init"]),
    (LINEARIZE, "--omega", ["", "-1", "1e999", "1,x"]),
    (LINEARIZE, "--seeds", ["4294967296"]),
    (LINEARIZE, "--control", ["randon"]),
    (LINEARIZE, "--base-recipe", ["nosuch"]),
    (LINEARIZE, "--slope-rate", ["nan"]),
    (LINEARIZE, "--set", ["pathlength.nosuch=1"]),
    (STUDY, "--data", ["digits"]),
    (STUDY, "--weights", ["init"]),
    (STUDY, "--measures", ["r2"]),
    (STUDY, "--workers", ["0"]),
    (CHECK, "--set", ["=", "r2.folds=3"]),
    (PLANE, "--samples", ["", "0,1,2,3", "0,999999999"]),
    (PLANE, "--size", ["99999999"]),
    (PLANE, "--margin", ["-1", "nan"]),
    (PLANE, "--memory", ["0"]),
    (PLANE, "--run", ["a\0b"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [(*command, f"{flag}={value}") for command, flag, values in LATER_FLAGS for value in values]
    + COMMANDS,
    ids=lambda arguments: " ".join((arguments[0], *arguments[1:][-3:]))[:60],
)
def test_malformed_command_leaves_nothing(finished, call, tmp_path, arguments):
    assert_refused(*call(*arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "condition", ["", "r2", "> 1", "r2 > 1.2.3", "r2 > ٣", "r2 > 1e999", "r2 > nan", "r3 > 1", LONG]
)
def test_malformed_condition_prints_one_line(finished, call, condition):
    assert_refused(*call("compare", finished, finished, f"--fail-if={condition}"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(
    ("what", "kind"),
    [("config", "pipe"), ("config", "loop"), ("weights", "device"), ("weights", "folder"),
     ("image", "pipe"), ("image", "device")],
)  # fmt: skip
def test_special_file_is_refused_without_waiting(finished, call, tmp_path, what, kind):
    place = tmp_path / "images" / "first" / "one.png" if what == "image" else tmp_path / what
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(place.name)
    if what == "image":
        (tmp_path / "images" / "second").mkdir()
        arguments = ["--data", "images", "--set", "images.folder=images", "--set", "images.side=8"]
        arguments = [*QUICK, *arguments[:4]]
    else:
        given = dict(zip(QUICK[::2], QUICK[1::2], strict=True)) | {f"--{what}": what}
        arguments = [part for pair in given.items() for part in pair]
    assert_refused(*call("run", *arguments, "--out", "r"))
    assert not (tmp_path / "r").exists()


INPUTS = [
    7.5, object(), print, [], (), {}, [None], ["text"], [[]], [{}], ([],), (None,), {7: "x"},
    range(3), iter(()), torch.zeros(4), torch.zeros(0, 4), [torch.zeros(())],
    (torch.zeros(3, 4), torch.ones(3, 4).long()), {"a": torch.zeros(3, 4), "b": torch.zeros(3)},
    [(torch.zeros(3, 4), torch.zeros(2))], [(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))],
    {"x": np.zeros((3, 4))}, pd.DataFrame({"x": [1.0]}), [[1.0, 2.0]], [torch.zeros(3, 4), None],
    nn.Linear(4, 2),
]  # fmt: skip


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda inputs: type(inputs).__name__)
def test_malformed_inputs_print_one_line(inputs):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(RequestError) as caught:
        nlbench.evaluate(model, inputs, ["r2", "nlc"])
    message = str(caught.value)
    assert message.startswith(("inputs", "labels"))
    assert "\n" not in message
    assert len(message) < 400


LAYOUTS = [
    {"state_dict": {}}, {"state_dict": 3}, {"model_state_dict": [1]}, {"model": None}, {}, [], 7,
    {"state_dict": {"a": {"b": torch.zeros(1)}}}, {3: torch.zeros(1)}, {"": torch.zeros(1)},
    {".": torch.zeros(1), "..": torch.zeros(1)}, {"_orig_mod.": torch.zeros(1)},
    {"pytorch-lightning_version": "2", "state_dict": {"loss.weight": torch.ones(1)}},
    {f"{LONG}.weight": torch.zeros(1)}, {"module." * 2000 + "weight": torch.zeros(1)},
    {"x\x1b[2J\ny": torch.zeros(1)},
]  # fmt: skip


@pytest.mark.parametrize("content", LAYOUTS, ids=lambda content: type(content).__name__)
def test_unknown_checkpoint_layout_is_refused(tmp_path, content):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    before = state_hash(model)
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(RequestError) as caught:
        load_weights(model, tmp_path / "w.pt")
    assert len(one_line(str(caught.value))) <= 2000
    assert state_hash(model) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_overwrites_nothing(finished, call, tmp_path, monkeypatch):
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
