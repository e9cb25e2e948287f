"""The picture of a path: what is drawn, in a form that keeps the page small and whole."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from nlbench.errors import RequestError
from nlbench.reports.embedded import read_page
from nlbench.reports.page import render_page, write_page
from nlbench.reports.paths import _outline, draw_path
from nlbench.store.record import RecordedProbe


def row(numbers):
    return " ".join(f"{number:g}" for number in numbers)


def drawing(sites=("relu", "relu:1"), segments=2, logits=(0, 4), **more):
    x = np.linspace(0, 1, 60)
    random = np.random.default_rng(0)
    return {
        "place": "path0",
        "method": "exact",
        "lengths": [1.0 + i for i in range(segments)],
        "logits": list(logits),
        "curves": [[row(np.sin(5 * (x + i) + j)) for j in logits] for i in range(segments)],
        "crossings": 12,
        "sites": list(sites),
        "breakpoints": [row(random.integers(0, 9, 160)) for _ in sites],
        **more,
    }


def smooth_drawing():
    found = drawing(method="quadrature")
    return {
        name: found[name] for name in found if name not in ("sites", "breakpoints", "crossings")
    }


def record(subject, content, measure="absdev"):
    return SimpleNamespace(
        identity=(*subject, measure),
        probe=RecordedProbe("lines", {}, {"drawing": content} if content else {}),
    )


def run_of(conftest, contents, name="r"):
    rows, records = [], []
    for model, content in contents.items():
        subject = (model, "init", "digits", 0)
        rows += conftest.cell_rows(subject, "absdev", {"path0": 1.0, "path1": 2.0})
        records.append(record(subject, content))
    scores = conftest.frame(rows)
    return conftest.FakeRun(name, None, scores, conftest.manifest_of(scores, ["absdev"]), records)


def curves_of(axes):
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def test_a_panel_has_the_network_and_the_chords_of_its_segments():
    axes = draw_path(drawing()).axes[0]
    found = curves_of(axes)
    network, chords = found["network"], found["chords"]
    assert chords[:, 0].tolist() == [0, 1, 3]
    for x, y in chords:
        assert np.abs(network - [x, y]).sum(1).min() < 1e-4
    assert network[0, 0] == 0
    assert network[-1, 0] == 3


def test_the_area_above_the_chord_is_not_the_area_below():
    colors = {
        tuple(np.round(area.get_facecolor()[0], 2))
        for area in draw_path(drawing()).axes[0].collections
    }
    assert len(colors) == 2


def test_each_site_has_a_row_with_its_name_and_number():
    content = drawing(("features.0", "features.3"))
    axes = draw_path(content).axes[-1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["features.0", "features.3"]
    totals = [f"{sum(map(int, counts.split())):,}" for counts in content["breakpoints"]]
    assert [text.get_text() for text in axes.texts] == totals


def test_a_smooth_network_has_no_rows_of_sites():
    assert len(draw_path(smooth_drawing()).axes) == 2
    assert len(draw_path(drawing()).axes) == 3


@pytest.mark.parametrize("lengths", [[0.0, 0.0], [0.0, 1.0]])
def test_segments_without_length_can_be_drawn(lengths):
    assert draw_path(drawing(lengths=lengths)).axes


@pytest.mark.parametrize(
    "damage",
    [
        {"curves": [["a b"]]},
        {"curves": [[5]]},
        {"curves": [["0 1"]], "lengths": [1.0, 1.0]},
        {"lengths": "x"},
        {"lengths": []},
        {"breakpoints": 3},
        {"breakpoints": [""]},
        {"logits": None},
        {"logits": []},
        {"sites": []},
    ],
)
def test_a_damaged_drawing_is_refused_in_one_line(damage):
    with pytest.raises(RequestError, match="drawing of a path is damaged"):
        draw_path({**drawing(), **damage})


def test_an_outline_is_the_histogram():
    x, y = _outline(np.arange(6.0), np.array([0, 2.0, 2.0, 0, 1.0]))
    assert list(zip(x, y, strict=True)) == [
        (0, 0), (0, 0), (1, 0), (1, 2), (3, 2), (3, 0), (4, 0), (4, 1), (5, 1), (5, 0),
    ]  # fmt: skip


def test_the_page_holds_what_is_drawn(conftest) -> None:
    html = render_page(run_of(conftest, {"vgg8": drawing(), "vit": smooth_drawing()}))
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert [subject["drawing"] for subject in data["subjects"]] == [drawing(), smooth_drawing()]


def test_a_hostile_site_name_stays_text(conftest):
    bad = "</text><script>alert(1)</script>"
    html = render_page(run_of(conftest, {"m": drawing((bad, "relu"))}))
    assert "<script>alert(1)" not in html


def test_a_remark_on_a_number_is_marked_on_the_board(conftest):
    run = run_of(conftest, {"vit": smooth_drawing()})
    rows = run.scores
    rows.loc[rows["place"] == "", "reason"] = "by quadrature to a relative 1e-05"
    html = render_page(run)
    assert "†</sup>" in html
    assert "† absdev by quadrature to a relative 1e-05" in html


def test_what_each_site_contributes_is_on_the_page(conftest, tmp_path):
    run = run_of(conftest, {"m": None})
    subject = ("m", "init", "digits", 0)
    rows = [
        (*subject, "absdev", "", f"site:{n}", v, 8, "ok", "") for n, v in (("a", 30), ("b", 10))
    ]
    run.scores = conftest.frame([*run.scores.itertuples(index=False, name=None), *rows])
    found = read_page(write_page(run, tmp_path / "page.html"))
    parts = found[found["statistic"].str.startswith("site:")]
    assert dict(zip(parts["statistic"], parts["value"], strict=True)) == {
        "site:a": 30,
        "site:b": 10,
    }
