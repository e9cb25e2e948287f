"""``new-measure`` writes a package that works, ``check-measure`` checks what is installed."""

import json
import subprocess
import sys

import pytest
from commands import call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A new package, and the folder that it is installed in."""
    folder = tmp_path_factory.mktemp("new")
    written = call("new-measure", "bent", cwd=folder)
    assert written.returncode == 0, written.stderr
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet"]
    command += ["--no-index", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--target", site, folder / "nlbench-bent"],
        check=True,
        capture_output=True,
        text=True,
    )
    return folder / "nlbench-bent", site


@pytest.mark.slow
def test_the_new_packages_own_tests_pass(made, tmp_path):
    folder, site = made
    script = tmp_path / "script.py"
    script.write_text("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))")
    options = ("-q", "-p", "no:cacheprovider")
    tested = call(*options, folder / "tests", cwd=folder, paths=[site], script=str(script))
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout


def test_new_measure_is_registered_and_keeps_the_contract(made, tmp_path):
    _, site = made
    checked = call("check-measure", "bent", "--json", cwd=tmp_path, paths=[site])
    assert checked.returncode == 0, checked.stderr
    rows = {row["check"]: row["outcome"] for row in json.loads(checked.stdout)}
    assert rows["direction"] == rows["invariant to rotations"] == "kept"
    table = call("check-measure", "bent", cwd=tmp_path, paths=[site]).stdout
    assert "repeatable" in table


def test_a_folder_that_exists_is_not_overwritten(made):
    folder, _ = made
    again = call("new-measure", "bent", cwd=folder.parent)
    assert again.returncode == 2
    assert f"{folder.name} already exists" in again.stderr
    assert again.stderr.count("\n") == 1


def test_broken_measure_has_status_1_and_is_named(made, tmp_path):
    _, site = made
    module = site / "nlbench_bent" / "__init__.py"
    text = module.read_text()
    module.write_text(text.replace("less nonlinear", "more nonlinear"))
    try:
        checked = call("check-measure", "bent", cwd=tmp_path, paths=[site])
    finally:
        module.write_text(text)
    assert checked.returncode == 1
    assert "measure 'bent' fails: direction" in checked.stderr
