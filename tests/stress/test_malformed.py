"""Three hundred malformed requests and files: one clear line each, and nothing overwritten."""

import json
import os
import pickle
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
from nlbench.cli.app import main
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
    assert 20 < len(lines[0]) < 1000


def state(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


QUICK = ["--measures", "r2", "--model", "mini", "--weights", "init", "--samples", "8"]

LONG = "x" * 100_000
NINES = "9" * 5000
FLAGS = {
    "--measures": ["", ",", "r3", "[", "zzz*", "?", LONG, "r2;rm", "ü", "../r2", "r2\nr2",
                   "crooked", "r2\x1b[31m", "absdev,nosuch", "ci[fa"],
    "--model": ["", "mini3", "[!", "nosuch/*", "/", LONG, "vgg*8*9", "ミニ", " ",
                "mini/", "timm/", "torchvision/resnet1", f"torchvision/{LONG}"],
    "--data": ["", "digit", "nosuch*", LONG, "digits/", "digits.size=3"],
    "--seeds": ["-1", "1.5", "one", "1,,x", "9" * 40, "²", "nan", NINES, "5-1", "1-",
                "0-999999999", "1-2-3", "0x1", "", ",", "-", "a-b", "1 2"],
    "--samples": ["-1", "many", "1.5", "9" * 30, "nan", "", NINES, "1_000", "٣"],
    "--split": ["", "validation", LONG],
    "--device": ["", "gpu", "cuda:99", "cuda:-1", "cuda:²", "cpu:5", "tpu"],
    "--precision": ["", "float8", "double", "TF32"],
    "--set": ["", "x", "=", "r2=1", "r2.=1", ".r2=1", "r2.nosuch=1", "sites.batch=0",
              "sites.batch=nan", "sites.batch=1e400", "lines.number=3", f"{LONG}.x=1",
              f"r2.folds={NINES}", f"r2.folds={LONG}", "r2..folds=3",
              "sites.rows=tokens:²", f"sites.rows=tokens:{NINES}", f"sites.of=spans:{NINES}",
              "sites.attention=maybe", "r2.folds=\x1b[2J", "=x", "sites=1"],
    "--sites": ["every:²", f"every:{NINES}", "every:0", "role:x", "knd:relu"],
    "--rerun": ["", "some", "ALL"],
    "--timeout": ["0", "-3", "nan", "inf", "soon", "1e300", NINES, "", "1,5"],
    "--memory": ["", "0", "lots", "-4GB", "1e99GB", "4PB", NINES, "4 GBs", "٤GB", "GB",
                 "1e3", "1.2.3", "nan"],
    "--executor": ["", "threads", "process"],
    "--workers": ["0", "-1", "2", "x", "100000", NINES],
    "--threads": ["0", "-1", "1.5", "100000", NINES, ""],
    "--address": ["tcp://nowhere:1"],
    "--progress": ["", "loud"],
    "--weights": ["", "nowhere.pt", "trained", LONG, "a\0b", "*.pt",
                  "nowhere/*.pt", "[", "/dev/null"],
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


TOML = [
    "measures = [", "=", "measures = r2", "\0", "seeds = 1979-05-27", "samples = nan",
    "samples = 9999999999999999999999", "nosuch = 1", "[run]\nmeasures = 'r2'",
    "measures = [['r2']]", "timeout = -1", "memory = 'lots'", "executor = 'x'", "split = ''",
    "device = 'cuda:77'", "set = []", "[set.r2]\nnosuch = 1", "[set]\n'' = 1", "weights = ['']",
    "measures = ['zzz*']", "out = ''", "precision = 'x'", "model = 7",
    f"samples = {NINES}", f"model = '{LONG}'", "set." + "a." * 5000 + "b = 1", "x = " + "[" * 5000,
    "x = " + "{a=" * 5000, "threads = 100000", "workers = 0", "measures = 'r2'\nmeasure = 'r2'",
    "[set]\n'a.b' = 1\na.b = 2", "[set.r2]\nfolds = [1]", "[set]\nr2 = 3", "report = 'perhaps'",
    "seeds = '5-1'", "seeds = []", "seeds = [1.5]", "seeds = {a = 1}", "timeout = inf",
    "timeout = nan", "memory = true", "memory = 0", "data = {}", "sites = true", "rerun = 3",
    "address = 'tcp://x:1'", "progress = 'loud'", "split = ['test']", "device = ''", "\x1b = 1",
    "'\\u001b[2J' = 1", "dry_run = true", "config = 'c.toml'", "samples = -1", "samples = 1.5",
    "weights = [1]", "weights = []", "model = ['a', ['b']]", "measures = [{a = 1}]",
]  # fmt: skip


@pytest.mark.parametrize("text", TOML)
def test_malformed_file_of_a_request_is_one_line(finished, call, tmp_path, text):
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
def test_dangerous_checkpoint_is_refused(finished, call, tmp_path, case):
    damaged(case, tmp_path / "w.bin")
    status, error = call("run", *QUICK[:4], "--samples", 8, "--weights", "w.bin", "--out", "r")
    assert_refused(status, error)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "r").exists()


def spoil(case, folder):
    cell = sorted((folder / "cells").glob("*.json"))[0]
    content = json.loads(cell.read_text())
    del content["checksum"]
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
    elif case == "changed number":
        cell.write_text(cell.read_text().replace('"value": 0.', '"value": 0.1', 1))
    elif case == "cells is a file":
        shutil.rmtree(folder / "cells")
        (folder / "cells").write_text("")


CASES = ["cut0", "cut1", "cut50", "cut500", "newer record", "newer run", "manifest cut",
         "manifest gone", "manifest is a list", "not utf-8", "no reading", "reading is text",
         "unknown field", "changed number", "cells is a file"]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_damaged_run_is_refused_and_unchanged(finished, call, tmp_path, case):
    shutil.copytree(finished, tmp_path / "r")
    spoil(case, tmp_path / "r")
    before = state(tmp_path / "r")
    assert_refused(*call("run", *QUICK, "--out", "r"))
    assert state(tmp_path / "r") == before


COMMANDS = [
    ["list"], ["list", "nonsense"], ["list", ""], ["list", "sites"],
    ["list", "sites", "--model", ""],
    ["list", "sites", "--model", "nosuch"], ["list", "measures", "--model", "mini"],
    ["show", f"small/relu-w{NINES}-d2"],
    ["list", "datasets", "--all"], ["list", "recipes", "--traceable"], ["list", "ops", "extra"],
    ["list", "models", "--model", "zzz*"], ["list", "models", "--model", ","],
    ["list", "sites", "--model", "mini", "--data", "nosuch"],
    ["show"], ["show", ""], ["show", "afinity"], ["show", LONG], ["show", "a\0b"], ["show", "."],
    ["show", "mini", "--cite"], ["show", "crooked"], ["show", "torchvision/nosuch"],
    ["report"], ["report", "nowhere"], ["report", "."], ["report", LONG],
    ["merge"], ["merge", "nowhere", "--out", "x"], ["merge", ".", "--out", "x"],
    ["train"], ["train", "--model", "mini"], ["train", "--model", "mini", "--out", "w.bin"],
    ["train", "--model", "nosuch", "--out", "w.safetensors"],
    ["train", "--model", "mini", "--out", "w.safetensors", "--epochs", "x"],
    ["train", "--model", "mini", "--out", "w.safetensors", "--epochs", "0"],
    ["train", "--model", "mini", "--out", "w.safetensors", "--seeds", "5-1"],
    ["train", "--model", "mini", "--out", "w.safetensors", "--set", "x"],
    ["train", "--model", "mini", "--out", "w.safetensors", "--label-noise", "2"],
    ["run", "--nosuch"], ["run", "extra"], ["run", "--samples"], ["run", "--report=maybe"],
    ["study"], ["study", ""], ["study", ","], ["study", "nosuch"], ["study", LONG],
    ["check-measure"], ["check-measure", ""], ["check-measure", "nosuch"],
    ["check-measure", "crooked"], ["check-measure", LONG], ["check-measure", "plain", "r2"],
    ["nosuch"], ["--nosuch"], [""], [LONG], [f"--{LONG}"], ["run", f"--{LONG}"],
    ["run", f"-{LONG}=3"], ["rum"], ["lst"],
]  # fmt: skip


REMOVE = ["remove", "--model", "mini", "--data", "digits", "--out", "r"]
TRAIN = ["train", "--model", "mini", "--data", "digits", "--out", "w.safetensors"]
LINEARIZE = ["linearize", "--model", "mini", "--data", "digits", "--out", "l"]
STUDY = ["study", "seeds", "--out", "s"]
CHECK = ["check-measure", "plain"]
PLANE = ["plane", "mini", "--data", "digits", "--out", "p.png"]
# Of values that `FLAGS` has for the same kind of flag, one or two.
LATER_FLAGS = [
    (TRAIN, "--model", ["", "mini,mini2", "*", LONG, "m\0i", "crookednet", "torchvision/"]),
    (TRAIN, "--out", ["", ".", "w", "w.pt", "a\0.safetensors", "/dev/null/w.safetensors"]),
    (TRAIN, "--data", ["", "digits,grid", LONG]),
    (TRAIN, "--recipe", ["", "nosuch", "*"]),
    (TRAIN, "--weights", ["", "trained", "nowhere.pt", "a\0b", "*.pt", "/dev/null"]),
    (TRAIN, "--seed", ["-1", "1.5"]),
    (TRAIN, "--seeds", ["", "0-999999999", "0,1"]),
    (TRAIN, "--label-noise", ["nan", "-1", "x"]),
    (TRAIN, "--epochs", ["-1", "1.5", "1" + "0" * 30]),
    (TRAIN, "--optimizer", ["", "sdg"]),
    (TRAIN, "--learning-rate", ["0", "nan"]),
    (TRAIN, "--batch-size", ["0", NINES]),
    (TRAIN, "--until-train-accuracy", ["2", "nan"]),
    (TRAIN, "--omega", ["1", "nan"]),
    (TRAIN, "--checkpoint-every", ["-1", "x"]),
    (TRAIN, "--checkpoint-epochs", [",", "0", "1.5"]),
    (TRAIN, "--set", ["", "=", "plain.x=1", "digits.nosuch=1"]),
    (TRAIN, "--device", ["cuda:99", LONG]),
    (TRAIN, "--progress", ["loud", LONG]),
    (REMOVE, "--span", ["", "²", NINES, f"1..{NINES}", "2-1"]),
    (REMOVE, "--of", ["", LONG, f"spans:{NINES}", "spans:0"]),
    (REMOVE, "--by", ["", "nosuch", LONG]),
    (LINEARIZE, "--model", [",", "nosuch", "crookednet"]),
    (LINEARIZE, "--out", ["", "a\0b"]),
    (LINEARIZE, "--weights", ["init", "nowhere.pt"]),
    (LINEARIZE, "--omega", ["", ",", "-1", "1e999"]),
    (LINEARIZE, "--seeds", ["x", "0-999999999"]),
    (LINEARIZE, "--control", ["randon"]),
    (LINEARIZE, "--base-recipe", ["", "nosuch"]),
    (LINEARIZE, "--epochs", ["0"]),
    (LINEARIZE, "--learning-rate", ["-1"]),
    (LINEARIZE, "--slope-rate", ["nan"]),
    (LINEARIZE, "--set", ["nosuch.x=1", "digits.nosuch=1", "pathlength.nosuch=1"]),
    (LINEARIZE, "--device", ["gpu"]),
    (STUDY, "--data", ["digit", "digits"]),
    (STUDY, "--weights", ["init"]),
    (STUDY, "--seeds", ["", "0-999999999"]),
    (STUDY, "--measures", ["", "nosuch", "r2"]),
    (STUDY, "--workers", ["0", "100000"]),
    (CHECK, "--set", ["=", "plain.nosuch=1", "r2.folds=3", "nosuch.x=1"]),
    (PLANE, "--samples", ["", "0,0", "0,1,2,3", "-1,0", "0,x", "0,999999999"]),
    (PLANE, "--size", ["1", "99999999"]),
    (PLANE, "--margin", ["-1", "nan"]),
    (PLANE, "--precision", ["half"]),
    (PLANE, "--memory", ["0"]),
    (PLANE, "--seed", ["-1"]),
    (PLANE, "--split", ["validation"]),
    (PLANE, "--run", ["nowhere", "a\0b"]),
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
    "condition",
    [
        "",
        "r2",
        "r2 >",
        "> 1",
        "r2 > x",
        "r2 > 1.2.3",
        "r2 > .",
        "r2 > ٣",
        "r2 > 1e999",
        "r2 > nan",
        "r3 > 1",
        LONG,
    ],
)
def test_a_malformed_condition_is_one_line(finished, call, condition):
    assert_refused(*call("compare", finished, finished, f"--fail-if={condition}"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize("what", ["config", "weights", "image"])
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


class Odd(dict):
    """A mapping that can't be gone through."""

    def __iter__(self):
        raise RuntimeError("no such luck")


INPUTS = [
    None, 7, 7.5, "text", b"bytes", object(), print, [], (), {}, [None], [7], ["text"], [[]], [()],
    [{}], ({},), ([],), (None,), {"x": None}, {"x": [1.0]}, {7: "x"}, range(3), iter(()), {"a"},
    torch.zeros(()), torch.zeros(4), torch.zeros(0, 4), [torch.zeros(4)], [torch.zeros(())],
    (torch.zeros(3, 4), torch.zeros(2, 4)), (torch.zeros(3, 4), torch.zeros(3, 4)),
    (torch.zeros(3, 4), torch.ones(3, 4).long()), {"a": torch.zeros(3, 4), "b": torch.zeros(3)},
    [torch.zeros(3, 4), torch.zeros(3, 5)], [(torch.zeros(3, 4), torch.zeros(2))],
    [(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))], np.zeros((3, 4)), [np.zeros((3, 4))],
    (np.zeros((3, 4)),), {"x": np.zeros((3, 4))},
    pd.DataFrame({"x": [1.0]}), [[1.0, 2.0]], [torch.zeros(3, 4), None], nn.Linear(4, 2),
]  # fmt: skip


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda inputs: type(inputs).__name__)
def test_malformed_inputs_are_one_line(inputs):
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
