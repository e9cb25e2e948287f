import matplotlib.image
import pytest

from nlbench.cli import app as cli


def run(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nlbench", "plane", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_a_plane_is_drawn_into_the_named_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "plane.png"
    assert not run(["redshift-mlp", "--data", "grid", "--size", "12", "-o", str(path)], monkeypatch)
    assert capsys.readouterr().out.strip() == str(path)
    assert matplotlib.image.imread(path).std() > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vgg8", "--samples", "0"], "--samples"),
        (["vgg8", "--samples", "0,0,1"], "--samples"),
        (["vgg8", "--samples", "0,x"], "--samples"),
        (["vgg8", "--precision", "half"], "--precision"),
        (["vgg9"], "did you mean"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, said, monkeypatch, capsys):
    assert run(arguments, monkeypatch) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
