import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import call, running
from hostile import write_plugin

import nlbench
from nlbench import registry, runner
from nlbench.cli import app
from nlbench.cli.common import file_stem, numbered

NLBENCH = Path(sys.executable).with_name("nlbench")
QUICK = ["--set", "lines.number=1", "--set", "lines.anchors=2", "--set", "lines.radius=1"]


def nlbench_run(*arguments, cwd, env=None):
    return subprocess.run(
        [NLBENCH, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **(env or {})},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def assert_one_line(done, status):
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("nlbench: ")
    assert "Traceback" not in done.stdout + done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    done = call(
        "run", "--measures", "affinity,absdev,density", "--model", "vgg8", *QUICK, "--out",
        "runs/first", "--progress", "none", cwd=folder, environment={"COLUMNS": "100"},
    )  # fmt: skip
    return folder, done


def test_first_command_prints_leaderboard_and_writes_report(first):
    folder, done = first
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "model vgg8" in done.stdout
    assert re.search(r"affinity\s+0\.\d+ ± 0\.\d+ · layers 0\.", done.stdout)
    names = {path.name for path in (folder / "runs" / "first").iterdir()}
    assert names == {
        "cells", "manifest.json", "request.toml", "scores.csv", "report.html",
    }  # fmt: skip
    run = nlbench.load_run(folder / "runs" / "first")
    assert {r.result.status for r in run.records} == {"ok"}
    assert run.manifest["command"].startswith("nlbench run --measures")
    assert run.manifest["subjects"][0]["weights"] == "trained"


def test_finished_run_is_taken_up_again_without_measuring(first):
    folder, _ = first
    before = {p: p.stat().st_mtime_ns for p in (folder / "runs/first/cells").iterdir()}
    done = call(
        "run", "--measures", "affinity,absdev,density", *QUICK, "--out", "runs/first", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in (folder / "runs/first/cells").iterdir()} == before


def test_request_file_replays_and_dry_run_only_counts(first, run_command):
    folder, _ = first
    file = folder / "runs/first/request.toml"
    done = run_command("run", "--config", file, "--out", folder / "runs/first", "--dry-run")
    assert done.stdout.startswith("3 cells on cpu: 0 new, 3 recorded, 0 unmeasurable\n")
    done = run_command("run", "--config", file, "--seeds", "1", "--out", "new", "--dry-run")
    assert done.stdout.startswith("3 cells on cpu: 3 new, 0 recorded, 0 unmeasurable\n")
    assert not (folder / "new").exists()


def test_report_writes_one_page_for_several_runs(first, run_command, tmp_path):
    folder, _ = first
    run = folder / "runs" / "first"
    done = run_command("report", run, run, "-o", "out.html")
    assert done.returncode == 0, done.stderr
    assert "vgg8" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_show_prints_a_measure_and_a_manifest(first, run_command):
    folder, _ = first
    shown = run_command("show", "affinity").stdout
    for part in ("bounds    -inf", "affinity.shrinkage = ledoit-wolf", "sites.reduction", "CVPR"):
        assert part in shown
    assert run_command("show", "affinity", "--cite").stdout.startswith("@")
    manifest = json.loads(run_command("show", folder / "runs/first", "--json").stdout)
    assert manifest["cells"] == {"ok": 3}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("resnet18-w8", ["(model)", "base width 8", "recipe    adam", "Fixup"]),
        ("torchvision/resnet18", ["trained   imagenet", "recipe    vanilla", "torchvision"]),
        ("synthetic", ["(dataset)", "option    synthetic.difficulty = 0.7"]),
        ("from-start", ["(recipe)", "setting   omega = 0.003", "Nonlinear Advantage"]),
    ],
)
def test_show_prints_models_datasets_and_recipes(name, parts, run_command):
    shown = run_command("show", name).stdout
    assert [part for part in parts if part not in shown] == []


def test_show_cites_a_model(run_command):
    assert "Deep Residual Learning" in run_command("show", "resnet20", "--cite").stdout


def test_show_suggests_sources_for_unknown_names(run_command):
    said = assert_one_line(run_command("show", "synthetic", "--cite"), 2)
    assert said == "nlbench: dataset 'synthetic' has no source"


@pytest.mark.parametrize("name", ["mine", "runs/mine"])
def test_show_refuses_a_folder_without_a_run(name, run_command, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    said = assert_one_line(run_command("show", name), 2)
    assert said == f"nlbench: {name} is not a run: it has no manifest.json"


def test_show_searches_all_groups_for_unknown_members(run_command):
    said = assert_one_line(run_command("show", "tochvision/resnet18"), 2)
    assert "there is no measure, model, dataset or recipe 'tochvision/resnet18'" in said


@pytest.mark.parametrize("what", ["measures", "models", "datasets", "studies", "recipes"])
def test_lists_are_tables_and_json(what, run_command):
    assert run_command("list", what).returncode == 0
    rows = json.loads(run_command("list", what, "--json").stdout)
    assert isinstance(rows, list)
    if what == "measures":
        assert {"name", "description", "larger", "probe", "cost", "from"} == set(rows[0])


def test_the_sites_of_a_model_are_listed(run_command):
    rows = json.loads(run_command("list", "sites", "--model", "vgg8", "--json").stdout)
    assert [row["site"] for row in rows][:2] == ["features.1", "features.3"]
    assert len(rows) == 7


BAD_INPUTS = [
    ("run --model vg8", "there is no model 'vg8'; did you mean 'vgg8'?"),
    ("run --measures afinity", "did you mean 'affinity'?"),
    ("run --measures ,", "--measures: expected names, got"),
    ("run --data digit", "there is no dataset 'digit'; did you mean 'digits'?"),
    ("run --set affinity.shrinkage", "--set: expected OWNER.OPTION=VALUE"),
    ("run --set affinity.shrinkage=non", "did you mean 'none'?"),
    ("run --set affinity.rigde=1", "did you mean 'ridge'"),
    ("run --set afinity.ridge=1", "did you mean 'affinity'"),
    ("run --set ridge=1", "setting 'ridge': expected MEASURE.OPTION"),
    ("run --set sites.reduction=spacial", "did you mean 'spatial'"),
    ("run --split validation", "unknown 'validation'"),
    ("run --model vgg13 --weights trained", "vgg13 has no checkpoint trained on digits"),
    ("run --set lines.number=1e99", "out of bounds"),
    ("run --weights=", "--weights: expected trained, init, auto"),
    ("run --out=", "--out: expected a folder's name"),
    ("run --samples 2 --set lines.number=5", "need 5 samples, there are 2"),
    ("run --timeout soon", "--timeout: expected a number, got 'soon'"),
    ("list measures --model vgg8", "has no option --model"),
    ("list measure", "unknown 'measure'; available: 'measures'"),
    ("show afinity", "did you mean 'affinity'?"),
    ("train --model vgg8 --out x.safetensors --epochs 0", "--epochs: expected at least 1"),
    ("new-measure affinity", "there is already a measure 'affinity'"),
    ("new-measure sites", "there is already a probe 'sites'"),
    ("new-measure ../up", "can't be a measure's name"),
    ("check-measure r2 --set r2.kind=none", "unknown 'none'"),
    # An invalid command names its own help.
    ("rum", "(see nlbench --help)"),
    ("--nosuch", "(see nlbench --help)"),
    ("run --nosuch", "(see nlbench run --help)"),
    ("train --model vgg8", "(see nlbench train --help)"),
    ("list sights", "(see nlbench list --help)"),
    ("study noise --workers 0", "(see nlbench study --help)"),
]


@pytest.mark.parametrize(("command", "says"), BAD_INPUTS)
def test_bad_input_prints_one_line_with_status_2(run_command, tmp_path, command, says):
    line = assert_one_line(run_command(*command.split()), 2)
    assert says in line
    # Not in the words of a library.
    assert "Input should" not in line
    assert "Value error" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unreadable_folder_prints_one_line(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    done = nlbench_run("run", "--out", "closed/run", cwd=tmp_path)
    assert "can't write" in assert_one_line(done, 2)


def test_broken_pipe_ends_quietly_with_everything_written(tmp_path):
    options = ("--measures", "r2", "--samples", "32", "--out", "r", "--progress", "none")
    done = call("run", *options, cwd=tmp_path, is_read=False)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "r" / "report.html").is_file()


@pytest.mark.parametrize("command", ["list measures", "compare runs/first runs/first", "--help"])
def test_closed_output_ends_quietly_with_status_141(command, first):
    done = call(*command.split(), cwd=first[0], is_read=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_sigpipe_stays_ignored(run_command):
    before = signal.getsignal(signal.SIGPIPE)
    assert run_command("--version").returncode == 0
    assert signal.getsignal(signal.SIGPIPE) is before is signal.SIG_IGN


def test_ascii_terminal_gets_its_leaderboard(tmp_path):
    done = call(
        "run", "--measures", "r2", "--samples", "32", "--out", "r", "--no-report", cwd=tmp_path,
        environment={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "vgg8" in done.stdout


def test_training_writes_a_checkpoint_that_a_run_takes(run_command, tmp_path):
    done = run_command(
        "train", "--model", "vgg8", "--epochs", "1", "--label-noise", "0.4", "--out",
        "w/noisy.safetensors",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    options = ("--measures", "r2", "--samples", "32", "--no-report")
    done = run_command("run", *options, "--weights", "w/noisy.safetensors", "--out", "r")
    assert done.returncode == 0, done.stderr
    (subject,) = nlbench.load_run(tmp_path / "r").manifest["subjects"]
    assert subject["weights"] == "noisy.safetensors"
    assert subject["weights_metadata"]["label_noise"] == "0.4"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_sigterm_before_the_run_is_an_interruption(run_command, monkeypatch, number):
    def interrupted(group, names):
        # More than once, as a terminal's group or a scheduler asks.
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(registry, "expand", interrupted)
    assert assert_one_line(run_command("run", "--model", "vgg8"), 130) == "nlbench: interrupted"


END = (
    "import atexit, os, signal, sys\n"
    "from nlbench.cli import main\n"
    "number = int(sys.argv.pop(1))\n"
    "atexit.register(os.kill, os.getpid(), number)\n"
    "sys.argv[0] = 'nlbench'\n"
    "main()\n"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_after_the_last_line_is_ignored(number):
    command = [sys.executable, "-c", END, str(int(number)), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_interruption_of_the_page_is_status_130(
    run_command, tmp_path, monkeypatch, is_swallowed
):
    from nlbench.reports import page

    def interrupted(run):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not is_swallowed:
                raise
        return "<html></html>"

    monkeypatch.setattr(page, "render_page", interrupted)
    done = run_command(
        "run", "--measures", "r2", "--data", "digits", "--samples", "32", "--out", "r"
    )
    assert done.returncode == 130, done.stderr
    assert "nlbench: interrupted; finished cells are in r" in done.stderr
    (record,) = nlbench.load_run(tmp_path / "r").records
    assert record.result.status == "ok"
    assert (tmp_path / "r" / "scores.csv").is_file()


def test_interrupted_import_prints_one_line(tmp_path):
    code = (
        "import os, signal, sys\n"
        "class Asked:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Asked())\n"
        "from nlbench.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert assert_one_line(done, 130) == "nlbench: interrupted"


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_interrupted_destructor_prints_one_line(tmp_path, is_interrupted):
    code = (
        "import os, signal, sys\n"
        "class Owner:\n"
        "    def __del__(self):\n"
        "        if sys.argv.pop() == 'True': os.kill(os.getpid(), signal.SIGINT)\n"
        "        raise ValueError('of the destructor')\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': Owner()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from nlbench.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "--version", str(is_interrupted)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if is_interrupted:
        assert assert_one_line(done, 130) == "nlbench: interrupted"
    else:
        assert done.returncode == 0
        assert "ValueError: of the destructor" in done.stderr


def test_interruption_while_planning_names_no_folder(run_command, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    said = run_command("run", "--out", "r")
    assert said.returncode == 130
    assert said.stderr.splitlines()[0] == "nlbench: interrupted; nothing measured yet"


def test_interruption_keeps_cells_and_prints_the_command(tmp_path):
    (tmp_path / "plugin").mkdir()
    command = ("run", "--measures", "waiting", "--model", "mini,mini2", "--data", "digits")
    command = (*command, "--weights", "init", "--out", "r")
    said = {"out": tmp_path / "out", "error": tmp_path / "error"}
    paths = [write_plugin(tmp_path / "plugin")]
    with running(*command, cwd=tmp_path, paths=paths, **said) as process:
        cells = tmp_path / "r" / "cells"
        while not list(cells.glob("*.json")):
            assert process.is_alive(), said["error"].read_text()
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        process.join()
    error = (tmp_path / "error").read_text()
    assert process.exitcode == 130
    assert "finished cells are in r" in error
    assert f"nlbench {' '.join(command)}" in error
    run = nlbench.load_run(tmp_path / "r")
    assert [r.subject.model for r in run.records] == ["mini"]
    assert run.records[0].result.status == "ok"


def test_version_is_printed(run_command):
    from importlib.metadata import version

    done = run_command("--version")
    assert (done.returncode, done.stdout) == (0, f"nlbench {version('nlbench')}\n")


def test_names_are_completed_in_the_shell(tmp_path):
    completed = {
        "nlbench ru": {"run"},
        "nlbench run --measures affini": {"affinity"},
        "nlbench run --measures cka,affini": {"cka,affinity"},
        "nlbench run --models vgg1": {"vgg11", "vgg13", "vgg16", "vgg19"},
        "nlbench run --data dig": {"digits"},
        "nlbench list me": {"measures"},
    }
    # In a process of its own, whose name counts: one for all.
    code = (
        "import os, sys; from nlbench.cli.app import main\n"
        "lines, sys.argv = sys.argv[1:], ['nlbench']\n"
        "os.environ['_NLBENCH_COMPLETE'] = 'complete_bash'\n"
        "for words in lines:\n"
        "    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))\n"
        "    try: main()\n"
        "    except SystemExit: print(end='\\0')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *completed],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [set(part.split()) for part in done.stdout.split("\0")[:-1]]
    assert dict(zip(completed, said, strict=True)) == completed, done.stderr


def test_names_as_people_type_them_are_understood(run_command, tmp_path):
    done = run_command(
        "run", "--measure", "r2", "--models", "vgg8", "--dataset", "digits", "--seed", "0-2,1",
        "--samples", "8", "--out", ".", "--dry-run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 cells on cpu: 3 new")
    assert f"run {tmp_path}\n" in done.stdout


def test_current_folder_can_be_run_folder(run_command, tmp_path):
    arguments = ("run", "--measures", "r2", "--samples", "8", "--out", ".", "--no-report")
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "manifest.json").is_file()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "manifest.json").unlink()
    assert "is not a run" in assert_one_line(run_command(*arguments), 2)


def test_a_dry_run_loads_no_subject(run_command):
    done = run_command(
        "run", "--measures", "density", "--model", "redshift-mlp", "--data", "digits",
        "--weights", "init", "--seeds", "0-1", "--dry-run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 cells on cpu: 2 new, 0 recorded, 0 unmeasurable\n")
    assert "can't be loaded" not in done.stdout


def test_interrupted_thread_start_keeps_exit_status(monkeypatch):
    threads = [threading.main_thread(), threading.Thread(target=print)]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    with pytest.raises(SystemExit) as raised:
        app._exit(130)
    assert raised.value.code == 130


def test_a_run_without_arguments_shows_what_to_run(run_command):
    line = assert_one_line(run_command("run"), 2)
    assert line.count("nlbench run --model") == 2
    assert "my_net.py:Net" in line
    assert "nlbench list models" in line


OWN_NETWORK = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, width: int = 4):
        super().__init__(nn.Flatten(), nn.Linear(3072, width), nn.ReLU())
"""


def test_sites_of_network_in_file_are_listed(run_command, tmp_path):
    (tmp_path / "my_net.py").write_text(OWN_NETWORK)
    command = "list sites --model my_net.py --set model."
    result = run_command(*f"{command}width=6".split())
    assert result.returncode == 0
    assert "activation  6  axis 1" in result.stdout
    assert "no argument 'depth'" in assert_one_line(run_command(*f"{command}depth=6".split()), 2)


def test_an_own_network_is_trained_and_measured(run_command, tmp_path):
    network = OWN_NETWORK.replace("3072, width", "3072, 10 * width")
    (tmp_path / "my_net.py").write_text(network)
    subject = "--model my_net.py --set model.width=1 --progress none"
    assert run_command(*f"train {subject} --out net.safetensors --epochs 1".split()).returncode == 0
    measured = run_command(*f"run --measures r2 {subject} --weights net.safetensors".split())
    assert "my_net.py:Net" in measured.stdout


@pytest.mark.parametrize("model", ["vgg8", "zoo/a-0.5b", "/home/me/net.py:Net", "../net.py:Net"])
def test_result_names_begin_plainly_and_end_with_number(tmp_path, model):
    folder = tmp_path / f"{file_stem(model)}-removed"
    folder.mkdir()
    assert folder.parent == tmp_path
    assert folder.name[0].isalnum()
    assert numbered(folder) == tmp_path / f"{folder.name}-2"
