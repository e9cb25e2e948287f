"""The picture of a path: what is drawn, in a form that keeps the page small and whole."""

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from nlbench.errors import RequestError
from nlbench.reports.layout import NamedRun
from nlbench.reports.page import render_page
from nlbench.reports.paths import _outline, _with_short_paths, draw_path, path_pictures


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
        identity=(*subject, measure), probe={"name": "lines", "drawing": content} if content else {}
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


def points_of(path):
    """Where a path goes, in absolute coordinates."""
    found, x, y = [], 0.0, 0.0
    for command, text in re.findall(r"([MLlhvz])([^MLlhvz]*)", path):
        numbers = [float(n) for n in re.findall(r"-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?", text)]
        if command in "ML":
            x, y = numbers
        elif command == "l":
            x, y = x + numbers[0], y + numbers[1]
        elif command == "h":
            x += numbers[0]
        elif command == "v":
            y += numbers[0]
        found.append((command == "z", x, y))
    return found


def test_shortened_paths_go_where_the_long_ones_went():
    points = np.random.default_rng(0).normal(100, 40, (500, 2))
    points[::7, 1] = points[6::7, 1][0]
    long = "M" + " \nL ".join(f" {x:.6f} {y:.6f}" for x, y in points) + " \nz"
    short = re.search(r'd="(.*)"', _with_short_paths(f'<path d="{long}" />'))[1]
    assert len(short) < len(long) / 2
    np.testing.assert_allclose(points_of(short), points_of(long), atol=0.051)


def test_paths_with_curves_are_left_as_they_are():
    svg = '<path d="M 0 0 C 1 1 2 2 3 3.123456" />'
    assert _with_short_paths(svg) == svg


def test_each_subject_has_a_picture_under_its_label(conftest):
    run = run_of(conftest, {"vgg8": drawing(), "plain": None, "vit": smooth_drawing()})
    drawings = {one.identity[:4]: one.probe["drawing"] for one in run.records if one.probe}
    found = path_pictures([NamedRun("r", run.scores, run.manifest, drawings)], run.scores)
    assert [picture.label for picture in found] == ["vgg8", "vit"]
    assert "12 breakpoints" in found[0].caption
    assert "no breakpoints" in found[1].caption


def test_the_page_shows_the_pictures(conftest):
    html = render_page(run_of(conftest, {"vgg8": drawing(), "vit": smooth_drawing()}))
    assert html.count("A look at a path") == 1
    assert "path0 of vgg8" in html
    assert "path0 of vit" in html


def test_a_page_without_drawings_does_not_speak_of_them(conftest):
    assert "A look at a path" not in render_page(run_of(conftest, {"vgg8": None}))


def test_pictures_of_two_runs_share_no_id(conftest):
    runs = [run_of(conftest, {"vgg8": drawing()}, name) for name in ("a", "b")]
    html = render_page(runs)
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert html.count("<svg") == 3


def test_a_picture_of_a_deep_network_is_light_and_sound(conftest):
    sites = [f"features.denseblock{i}.denselayer{i}.relu … relu{i}" for i in range(24)]
    content = drawing(sites, segments=8, logits=(1, 2, 3))
    run = run_of(conftest, {"deep": content})
    named = NamedRun("r", run.scores, run.manifest, {run.records[0].identity[:4]: content})
    (picture,) = path_pictures([named], run.scores)
    assert len(picture.svg) < 100_000
    assert ET.fromstring(picture.svg).tag.endswith("svg")


def test_a_hostile_site_name_stays_text(conftest):
    bad = "</text><script>alert(1)</script>"
    html = render_page(run_of(conftest, {"m": drawing((bad, "relu"))}))
    assert html.count("<script>") == 1


def test_a_remark_on_a_number_is_marked_on_the_board(conftest):
    run = run_of(conftest, {"vit": smooth_drawing()})
    rows = run.scores
    rows.loc[rows["place"] == "", "reason"] = "by quadrature to a relative 1e-05"
    html = render_page(run)
    assert " †" in html
    assert "† absdev by quadrature to a relative 1e-05." in html


def test_what_each_site_contributes_has_a_table_of_its_own(conftest):
    run = run_of(conftest, {"m": None})
    subject = ("m", "init", "digits", 0)
    rows = [
        (*subject, "absdev", "", f"site:{n}", v, 8, "ok", "") for n, v in (("a", 30), ("b", 10))
    ]
    run.scores = conftest.frame([*run.scores.itertuples(index=False, name=None), *rows])
    html = render_page(run)
    assert "m: all 2 sites" in html
    assert "75.0 %" in html
    assert "site:a" not in html
