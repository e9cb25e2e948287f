import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from made_runs import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "made"
    make_run(2, measures=("affinity", "r2")).save(folder)
    return folder


@pytest.fixture
def command(run_command):
    return partial(run_command, "figure")


@pytest.mark.parametrize(
    ("suffix", "begin"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")]
)
def test_suffix_decides_the_format(folder, command, tmp_path, suffix, begin):
    file = tmp_path / "new" / f"strip.{suffix}"
    code, out, error = command(folder, "strip", "-o", file)
    assert (code, out.strip()) == (0, str(file)), error
    assert file.read_bytes().startswith(begin)


def test_two_runs_are_compared(folder, command, tmp_path):
    file = tmp_path / "compare.svg"
    arguments = ("compare", "--with", folder, "--subject", "vgg8", "--width", "5", "-o", file)
    code, _, error = command(folder, *arguments)
    assert code == 0, error
    assert 'width="360pt"' in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stripes",), "expected strip, signature, board, compare, path"),
        (("strip", "-o", "strip.eps"), "--output: expected a name ending in .pdf, .svg or .png"),
        (("strip", "--width", "wide"), "expected column, text or inches"),
        (("strip", "--width", "nan"), "expected column, text or inches"),
        (("strip", "--measure", "afinity"), "did you mean 'affinity'"),
        (("strip", "--subject", "nothing"), "no subject 'nothing'"),
        (("path",), "no path was recorded"),
    ],
)
def test_wrong_request_prints_one_line(folder, command, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = command(folder, *arguments)
    assert code == 2
    assert message in error
    assert error.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())
