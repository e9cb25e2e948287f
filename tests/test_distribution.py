"""What a wheel and a source distribution contain."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("nlbench", "measures", "models", "reports", "studies")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "MANIFEST.in")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def sources():
    """Return the names of all files that nlbench needs, as an installation has them."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    names = {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}
    return {name if name.startswith("nlbench/") else f"nlbench/{name}" for name in names}


def build(kind, folder, out):
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build a source distribution from a copy, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Build a wheel as pip does: from the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", next(folder.iterdir()), tmp_path_factory.mktemp("wheel"))


def test_wheel_has_every_source(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources()


def test_wheel_names_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(n).name: n for n in archive.namelist() if ".dist-info/" in n}
        metadata = message_from_string(archive.read(texts["METADATA"]).decode())
        licence = archive.read(texts["LICENSE"]).decode()
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Author"] == "the nlbench authors"
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_source_distribution_has_no_tests(sdist):
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert not {"tests", "docs", "benchmarks"} & tops
    assert set(FILES) <= tops


def test_citation_has_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = project.partition('\nversion = "')[2].partition('"')[0]
    assert f"\nversion: {version}\n" in citation
