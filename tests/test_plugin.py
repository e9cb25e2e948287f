"""A third party's package, really installed, is used from the command line and from Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NLBENCH = Path(sys.executable).with_name("nlbench")
PLUGIN = Path(__file__).with_name("plugin")


def install(source, target):
    """Install a package into a folder of its own, without an index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
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


def call(*arguments, cwd, paths):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "NO_COLOR": "1"}
    return subprocess.run(
        [NLBENCH, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_its_measures_and_models_are_listed_with_their_description(site, tmp_path):
    rows = json.loads(call("list", "measures", "--json", cwd=tmp_path, paths=[site]).stdout)
    rows = {row["name"]: row for row in rows}
    assert rows["cosine"] == {
        "name": "cosine",
        "description": "Mean cosine between a sample's input and its output.",
        "from": "nlbench-cosine 0.3",
    }
    assert "peak" in rows
    assert "tinynet" in call("list", "models", cwd=tmp_path, paths=[site]).stdout


def test_its_measures_run_on_its_model_beside_the_built_in_ones(site, tmp_path):
    done = call(
        "run", "--measures", "cosine,peak,affinity", "--model", "tinynet", "--samples", "64",
        "--set", "cosine.center=true", "--out", "run", cwd=tmp_path, paths=[site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["measures"]["cosine"]["options"] == {"center": True}
    assert manifest["cells"] == {"ok": 3}
    table = (tmp_path / "run" / "scores.csv").read_text()
    for place in (",cosine,1,value,", ",cosine,1:1,value,", ",peak,1,value,"):
        assert place in table
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Mean cosine between" in page


BROKEN = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "broken-plugin"
version = "1"
[project.entry-points."nlbench.measures"]
broken = "broken_plugin:Measure"
[tool.setuptools]
py-modules = ["broken_plugin"]
"""


def package(tmp_path, name, pyproject, body):
    source = tmp_path / f"source-{name}"
    source.mkdir()
    (source / "pyproject.toml").write_text(pyproject)
    (source / f"{name}.py").write_text(body)
    install(source, tmp_path / f"site-{name}")
    return tmp_path / f"site-{name}"


def test_a_plugin_that_fails_at_import_is_named_and_harms_nothing_else(site, tmp_path):
    bad = package(tmp_path, "broken_plugin", BROKEN, "raise RuntimeError('not today')")
    work = tmp_path / "work"
    work.mkdir()
    assert "broken" in call("list", "measures", cwd=work, paths=[bad, site]).stdout
    done = call("run", "--measures", "broken", cwd=work, paths=[bad, site])
    assert done.returncode == 2
    assert "measure 'broken' (broken-plugin 1" in done.stderr
    assert "not today" in done.stderr
    done = call(
        "run", "--measures", "b*,cosine", "--model", "tinynet", "--samples", "16", "--out", "run",
        cwd=work, paths=[bad, site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr
    assert ",cosine," in (work / "run" / "scores.csv").read_text()


def test_two_plugins_with_one_name_are_both_named(site, tmp_path):
    rival = BROKEN.replace("broken-plugin", "rival").replace("broken_plugin", "rival_plugin")
    rival = rival.replace("broken =", "cosine =")
    other = package(tmp_path, "rival_plugin", rival, "Measure = None")
    work = tmp_path / "work"
    work.mkdir()
    for arguments in (["run", "--measures", "cosine"], ["list", "measures"]):
        done = call(*arguments, cwd=work, paths=[other, site])
        assert done.returncode == 2
        assert "nlbench-cosine 0.3" in done.stderr
        assert "rival 1" in done.stderr
    done = call(
        "run", "--measures", "peak", "--model", "tinynet", "--samples", "16", "--out", "run",
        cwd=work, paths=[other, site],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
