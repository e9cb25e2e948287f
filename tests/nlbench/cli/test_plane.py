import re
from pathlib import Path

import matplotlib.image
import pytest

from nlbench.cli import app as cli
from nlbench.reports.page import render_page
from nlbench.request import Request
from nlbench.runner import preview
from nlbench.runner import run as carry_out
from nlbench.store.run import load_run


def run(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nlbench", "plane", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_report_includes_the_runs_planes(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    settings = {"lines.paths": "pairs", "lines.number": 1}
    request = Request(("density",), ("redshift-mlp",), data=("grid",), samples=4, settings=settings)
    carry_out(request, folder)
    arguments = ["redshift-mlp", "--data", "grid", "--size", "8", "--run", str(folder)]
    assert not run(arguments, monkeypatch)
    picture, page = capsys.readouterr().out.split()
    assert matplotlib.image.imread(picture).std() > 0
    caption = "redshift-mlp (init, seed 0) on the plane through samples 0,1,2 of grid"
    for html in (Path(page).read_text("utf-8"), render_page(load_run(folder))):
        assert caption in html
        assert html.count("data:image/png;base64,") == 1
    of_data = ["--data", "synthetic", "--set", "synthetic.image_size=16"]
    assert not run(["resnet18-w4", *of_data, "--size", "2", "--run", str(folder)], monkeypatch)
    html = render_page(load_run(folder))
    assert "of synthetic&#39;s test split, image_size=16, 2 × 2 pixels" in html
    (folder / "planes" / "resnet18-w4-init-0-synthetic-image-size-16-test-0-1-2.png").unlink()
    assert not run_is_measured_again(request, folder)
    # What is no picture is not shown, and said.
    (folder / "planes" / "x.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"x\.png"):
        assert render_page(load_run(folder)).count("data:image/png;base64,") == 1


def run_is_measured_again(request, folder):
    return bool(preview(request, folder).new)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vgg8", "--samples", "0"], "--samples"),
        (["vgg8", "--samples", "0,0,1"], "--samples"),
        (["vgg8", "--samples", "0,x"], "--samples"),
        (["vgg8", "--precision", "half"], "--precision"),
        (["vgg9"], "did you mean"),
        (["vgg8", "--run", "nowhere"], "nowhere"),
        (["vgg8", "--out", __file__], "--out: expected a file's name ending in .png"),
        (["vgg8", "--out", "here"], "here.png already exists"),
        (["vgg8", "--out", ""], "--out: expected a file's name"),
        (["vgg8", "--set", "synthetic.size=9"], "expected digits.OPTION=VALUE"),
        (["vgg8", "--set", "digits.size=9"], "size"),
    ],
)
def test_wrong_request_prints_one_line(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("here.png").write_bytes(b"mine")
    assert run(arguments, monkeypatch) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert Path("here.png").read_bytes() == b"mine"
    assert "\n" not in error


def test_pictures_have_labels_legend_and_sentence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "plane.svg"
    assert not run(["redshift-mlp", "--data", "grid", "--size", "8", "-o", str(path)], monkeypatch)
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text(encoding="utf-8")
    title = r"[\d,]+ region boundaries lie between neighbouring pixels: redshift-mlp"
    assert re.search(title, text)
    for part in ("decision boundary", "along the first two samples", "perpendicular", "sample 2"):
        assert part in text
