"""A third party's package, really installed, is used from the command line and from Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call
from hostile import write_plugin

NLBENCH = Path(sys.executable).with_name("nlbench")
PLUGIN = Path(__file__).with_name("plugin")


def install(source, target):
    """Install a package into a folder of its own, without an index."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet"]
    command += ["--no-index", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--target", target, source],
        check=True,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(PLUGIN, source)
    target = tmp_path_factory.mktemp("site")
    install(source, target)
    return target


def test_plugin_measures_and_models_are_listed(site, tmp_path):
    # In a process that starts as a user's does.
    said = subprocess.run(
        [NLBENCH, "list", "measures", "--json"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = {row["name"]: row for row in json.loads(said)}
    assert rows["cosine"] == {
        "name": "cosine",
        "description": "Mean cosine between a sample's input and its output.",
        "from": "nlbench-cosine 0.3",
        "larger": "less nonlinear",
        "probe": "sites",
        "cost": "",
    }
    assert "peak" in rows
    assert "tinynet" in call("list", "models", cwd=tmp_path, paths=[site]).stdout


def test_plugin_measures_run_on_plugin_model(site, tmp_path):
    done = call(
        "run", "--measures", "cosine,peak,affinity,correlation", "--model", "tinynet",
        "--samples", "64", "--set", "cosine.center=true", "--out", "run", cwd=tmp_path,
        paths=[site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["measures"]["cosine"]["options"] == {"center": True}
    assert manifest["cells"] == {"ok": 4}
    table = (tmp_path / "run" / "scores.csv").read_text()
    for place in (",cosine,1,value,", ",cosine,1:1,value,", ",peak,1,value,"):
        assert place in table
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Mean cosine between" in page
    # A metric of torchmetrics, registered by a factory.
    assert manifest["measures"]["correlation"]["version"].startswith("torchmetrics ")
    assert "torchmetrics" in call("show", "correlation", cwd=tmp_path, paths=[site]).stdout


def test_plugin_probe_is_planned_recorded_and_shown(site, tmp_path):
    done = call(
        "run", "--measures", "stable-rank,r2", "--model", "tinynet", "--data", "stripes",
        "--samples", "32", "--set", "parameters.smallest=3", "--out", "run",
        cwd=tmp_path, paths=[site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["probes"]["parameters"] == {"smallest": 3}
    assert manifest["measures"]["stable-rank"]["probe"] == "parameters"
    table = (tmp_path / "run" / "scores.csv").read_text()
    # The last layer has two rows, one a class.
    assert [place for place in ("0", "3", "7") if f",stable-rank,{place},value," in table] == [
        "0",
        "3",
    ]
    cells = [json.loads(path.read_text()) for path in (tmp_path / "run" / "cells").iterdir()]
    (cell,) = (cell for cell in cells if cell["measure"]["name"] == "stable-rank")
    assert (cell["probe"]["name"], cell["probe"]["matrices"]) == ("parameters", 2)
    assert "Stable rank of the weights" in (tmp_path / "run" / "report.html").read_text("utf-8")
    wrong = call(
        "run", "--measures", "stable-rank", "--model", "tinynet",
        "--set", "parameters.smallest=20000", cwd=tmp_path, paths=[site],
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "parameters.smallest: no layer has as many rows" in wrong.stderr


def test_plugin_probe_is_usable_from_python(site, tmp_path):
    script = tmp_path / "use.py"
    script.write_text(
        "import torch, nlbench\n"
        "from nlbench_cosine.probe import StableRank\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())\n"
        "torch.nn.init.eye_(model[0].weight)\n"
        "run = nlbench.evaluate(model, torch.randn(8, 4), [StableRank])\n"
        "print(run['stable-rank'].summary['value'])\n"
    )
    done = call(cwd=tmp_path, paths=[site], script=str(script))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(3.0)
    checked = call("check-measure", "stable-rank", "--json", cwd=tmp_path, paths=[site])
    assert checked.returncode == 0, checked.stderr
    rows = {row["check"]: row for row in json.loads(checked.stdout)}
    assert rows["invariant to batches"]["outcome"] == "not checked"
    assert "doesn't depend on the samples" in rows["non-finite inputs"]["detail"]


def test_plugin_operation_is_a_site_and_traced(site, tmp_path):
    done = call(
        "run", "--measures", "density,r2", "--model", "hatnet", "--data", "stripes",
        "--samples", "40", "--set", "lines.paths=pairs", "--set", "lines.number=2", "--out", "run",
        "--no-report", cwd=tmp_path, paths=[site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "run" / "scores.csv").read_text()
    assert ",r2,2/hat,value," in table
    assert ",density,path0,value," in table


def test_plugin_failing_at_import_is_named(site, tmp_path):
    bad, work = tmp_path / "bad", tmp_path / "work"
    bad.mkdir()
    work.mkdir()
    write_plugin(bad, "raise RuntimeError('not today')", ("broken",), (), "broken")
    assert "broken" in call("list", "measures", cwd=work, paths=[bad, site]).stdout
    done = call("run", "--measures", "broken", cwd=work, paths=[bad, site])
    assert done.returncode == 2
    assert "measure 'broken' (nlbench-broken 1" in done.stderr
    assert "not today" in done.stderr
    done = call(
        "run", "--measures", "b*,cosine", "--model", "tinynet", "--samples", "16", "--out", "run",
        "--no-report", cwd=work, paths=[bad, site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stderr
    assert ",cosine," in (work / "run" / "scores.csv").read_text()


def test_two_plugins_with_one_name_are_both_named(site, tmp_path):
    other, work = tmp_path / "other", tmp_path / "work"
    other.mkdir()
    work.mkdir()
    write_plugin(other, "cosine = None", ("cosine",), (), "rival")
    for arguments in (["run", "--measures", "cosine"], ["list", "measures"]):
        done = call(*arguments, cwd=work, paths=[other, site])
        assert done.returncode == 2
        assert "nlbench-cosine 0.3" in done.stderr
        assert "nlbench-rival 1" in done.stderr
    done = call(
        "run", "--measures", "peak", "--model", "tinynet", "--samples", "16", "--out", "run",
        "--no-report", cwd=work, paths=[other, site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
