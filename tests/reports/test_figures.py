"""Figures, and the SVG they become."""

import io
import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as MplPath
from matplotlib.text import Text
from torch import nn

import nlbench
from nlbench.errors import RequestError, one_line
from nlbench.reports.drawing import PAGE_WIDTH, laid_out, to_svg
from nlbench.reports.figures import FigureData, draw_measure
from nlbench.reports.panels import MAX_SERIES
from nlbench.reports.tables import read_run

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run
from made_scores import scores_of

SUBJECT = ("net", "init", "digits", 0)


@pytest.fixture(scope="module")
def made_run():
    return make_run(3, measures=("affinity", "r2", "absdev"))


def ids_of(svg: str) -> list[str]:
    return [element.get("id") for element in ET.fromstring(svg).iter() if element.get("id")]


def marks_of(axes, label):
    (container,) = [c for c in axes.containers if c.get_label() == label]
    return container.lines[0].get_xydata()


def figure_of(table, measures, name):
    source = FigureData(scores_of(table, measures))
    return laid_out(PAGE_WIDTH, "png", lambda figure: draw_measure(source, figure, measure=name))


def signature(scores, details=None):
    about = {"probe": "sites", **(details or {}).get("affinity", {})}
    return figure_of(scores, {"affinity": about}, "affinity")


def one_net(conftest, values, **kwargs):
    return conftest.frame(conftest.cell_rows(SUBJECT, "affinity", values, **kwargs))


def test_signatures_have_one_mark_per_site(conftest, run) -> None:
    (axes,) = signature(run.scores, run.manifest["measures"]).axes
    rows = run.scores.query(
        "model == 'vgg8' and weights == 'trained' and measure == 'affinity'"
        " and place != '' and statistic == 'value'"
    )
    marks = marks_of(axes, "vgg8 · trained")
    np.testing.assert_array_equal(marks[:, 0], np.arange(1, 8))
    np.testing.assert_array_equal(marks[:, 1], rows["value"])


def test_error_bars_are_the_intervals_of_the_places(made_run) -> None:
    scores = read_run(made_run)
    subject = scores.subjects[0]
    figure = made_run.plot("affinity")
    container = figure.axes[0].containers[0]
    (_, _, (bars_drawn,)) = container.lines
    reach = [segment[:, 1].tolist() for segment in bars_drawn.get_segments()]
    cell = scores[subject.label, "affinity"]
    known = [p for p in cell.places if math.isfinite(p.value)]
    expected = [list(place.interval) for place in known]
    assert any(low < high for low, high in expected)
    np.testing.assert_allclose([r for r in reach if math.isfinite(r[0])], expected)


def test_sites_without_value_are_hollow_marks(conftest) -> None:
    scores = one_net(conftest, {"a": 0.5, "b": "constant output", "c": 0.4})
    (axes,) = signature(scores).axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xydata().tolist() for line in hollow] == [[[2.0, 0.0]]]
    assert hollow[0].get_transform() == axes.get_xaxis_transform()


def test_shortened_names_keep_their_legend_entries(conftest) -> None:
    rows = []
    for middle in "xy":
        model = "a" * 60 + middle + "b" * 60
        rows += conftest.cell_rows((model, "init", "d", 0), "affinity", {"x": 0.5})
    figure = signature(conftest.frame(rows))
    assert len(figure.legends[0].get_texts()) == 2


def test_bounded_measures_show_their_whole_range(conftest, run) -> None:
    (axes,) = signature(run.scores, run.manifest["measures"]).axes
    low, high = axes.get_ylim()
    assert -0.1 < low <= 0
    assert 1 <= high < 1.1


def test_narrow_values_are_not_flattened(conftest) -> None:
    details = {"affinity": {"bounds": [0.0, 1.0], "probe": "sites"}}
    (axes,) = signature(one_net(conftest, {"a": 0.99, "b": 0.98}), details).axes
    low, high = axes.get_ylim()
    assert 0.95 < low < 0.98
    assert 0.99 < high < 1.0


def test_few_sites_are_named(conftest) -> None:
    scores = one_net(conftest, {"stem/relu": 0.5, "body.hardswish:1": 0.4, "features.3": 0.3})
    (axes,) = signature(scores).axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["stem/relu", "body.hardswish:1", "features.3"]


def test_long_names_do_not_squeeze_the_panel(conftest) -> None:
    plain = signature(one_net(conftest, {f"a{i}": 0.5 for i in range(20)}))
    scores = one_net(conftest, {f"features.{i}.block.0.1.hardswish": 0.5 for i in range(20)})
    named = signature(scores)
    tall, usual = (f.axes[0].get_window_extent().height for f in (named, plain))
    assert tall > 0.9 * usual


def test_wide_ranges_have_a_logarithmic_axis(conftest):
    paths = {f"path{i}": 10.0**i for i in range(-1, 3)}
    scores = conftest.frame(conftest.cell_rows(SUBJECT, "absdev", paths))
    figure = figure_of(scores, conftest.DETAILS, "absdev")
    texts = ET.fromstring(to_svg(figure, prefix="f", title="")).itertext()
    shown = {text.strip() for text in texts}
    assert figure.axes[0].get_xscale() == "log"
    assert {"0.1", "1", "10", "100"} <= shown
    assert not any("$" in text for text in shown)


def test_many_sites_are_numbered(conftest) -> None:
    scores = one_net(conftest, {f"act{i}": 0.5 for i in range(60)})
    (axes,) = signature(scores).axes
    assert axes.get_xlabel() == "activation, in call order"
    assert len(axes.get_xticks()) < 20


def test_curves_state_their_number_of_paths(conftest) -> None:
    paths = {"path0": 1.0, "path1": 3.0, "path2": "softmax at head"}
    scores = conftest.frame(conftest.cell_rows(SUBJECT, "absdev", paths))
    (axes,) = figure_of(scores, conftest.DETAILS, "absdev").axes
    assert [line.get_label() for line in axes.lines] == ["net (2 of 3 paths)"]
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 0.0], [1.0, 0.5], [3.0, 1.0]]
    assert axes.lines[0].get_drawstyle() == "steps-post"


def test_measures_of_other_probes_are_bars(conftest) -> None:
    rows = conftest.cell_rows(SUBJECT, "pathlength", {"out0": 2.0, "out1": 3.5})
    (axes,) = figure_of(conftest.frame(rows), conftest.DETAILS, "pathlength").axes
    assert [patch.get_height() for patch in axes.patches] == [2.0, 3.5]


@pytest.mark.parametrize("probe", ["sites", "lines", "graph"])
def test_a_figure_without_any_number_is_refused(conftest, probe) -> None:
    scores = one_net(conftest, {"a": "constant output"})
    with pytest.raises(RequestError):
        figure_of(scores, {"affinity": {"probe": probe}}, "affinity")


def test_too_many_subjects_to_distinguish_are_refused(conftest) -> None:
    rows = []
    for seed in range(MAX_SERIES + 1):
        rows += conftest.cell_rows(("net", "init", "digits", seed), "affinity", {"a": 0.5})
    with pytest.raises(RequestError):
        signature(conftest.frame(rows))


@pytest.mark.parametrize("name", ["affinity", "absdev", "pathlength"])
def test_the_same_scores_give_the_same_bytes(run, name) -> None:
    details = run.manifest["measures"]
    first, second = (
        to_svg(figure_of(run.scores, details, name), prefix="f", title=name) for _ in range(2)
    )
    assert first == second


def test_a_users_own_matplotlib_settings_change_nothing(run, monkeypatch) -> None:
    details = run.manifest["measures"]
    plain = to_svg(figure_of(run.scores, details, "absdev"), prefix="f", title="")
    for name, value in {"axes.facecolor": "red", "font.size": 22, "svg.hashsalt": "mine"}.items():
        monkeypatch.setitem(rcParams, name, value)
    assert to_svg(figure_of(run.scores, details, "absdev"), prefix="f", title="") == plain
    assert rcParams["font.size"] == 22


def test_two_figures_of_one_page_share_no_id(run) -> None:
    figure = signature(run.scores, run.manifest["measures"])
    first = ids_of(to_svg(figure, prefix="one", title=""))
    second = ids_of(to_svg(figure, prefix="two", title=""))
    assert len(first) == len(set(first)) > 10
    assert not set(first) & set(second)


def test_every_reference_of_a_figure_points_into_it(run) -> None:
    svg = to_svg(signature(run.scores, run.manifest["measures"]), prefix="one", title="")
    targets = {f"#{name}" for name in ids_of(svg)}
    links = [e.get("href") for e in ET.fromstring(svg).iter() if e.get("href")]
    clips = [e.get("clip-path")[4:-1] for e in ET.fromstring(svg).iter() if e.get("clip-path")]
    assert links
    assert clips
    assert set(links) | set(clips) <= targets


@pytest.mark.parametrize("name", ["<b>&\"'", "_hidden", "$x_1$", "tab\tand \x1b bell", "\ud800"])
def test_any_name_comes_out_as_well_formed_text(conftest, name) -> None:
    rows = conftest.cell_rows((name, "init", "digits", 0), "affinity", {name: 0.5, "b": 0.4})
    figure = signature(conftest.frame(rows))
    root = ET.fromstring(to_svg(figure, prefix="f", title=name))
    texts = ["".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("text")]
    shown = one_line(name) or "�"
    assert texts.count(shown) == 2  # in the legend and below the axis


FORMS = ("strip", "signature", "board")


@pytest.mark.parametrize(("width", "inches"), [("column", 3.25), ("text", 6.75), (5.5, 5.5)])
@pytest.mark.parametrize("form", FORMS)
def test_figures_have_their_width_and_whole_text(made_run, form, width, inches) -> None:
    figure = made_run.figure(form, width=width)
    assert figure.get_figwidth() == inches
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    assert texts
    assert {text.get_fontsize() for text in texts} == {8}
    figure.format = "png"
    picture = matplotlib.image.imread(io.BytesIO(figure.to_bytes()))
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    assert all((edge == 1).all() for edge in edges)
    assert picture.std() > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_panels_of_figures_have_axis_titles(made_run, form) -> None:
    assert all(axes.get_xlabel() for axes in made_run.figure(form).axes)


def test_saved_formats_match_their_names(made_run, tmp_path) -> None:
    begins = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
    for name, begin in begins.items():
        figure = made_run.figure("strip", format=name)
        assert figure.to_bytes().startswith(begin)
        assert figure.to_bytes() == made_run.figure("strip", format=name).to_bytes()
    figure.savefig(tmp_path / "strip.pdf")
    content = (tmp_path / "strip.pdf").read_bytes()
    size = re.search(rb"/MediaBox *\[ *0 0 ([\d.]+)", content)
    assert float(size[1]) == 3.25 * 72
    assert b"Type3" not in content  # publishers refuse bitmap fonts


def test_the_fields_of_a_strip_are_its_activations(made_run) -> None:
    figure = made_run.figure("strip")
    rows = made_run.scores.query("measure == 'affinity' and place != '' and statistic == 'value'")
    fields = [patch for patch in figure.axes[0].patches if isinstance(patch, PathPatch)]
    drawn = sum(int((patch.get_path().codes == MplPath.MOVETO).sum()) for patch in fields)
    assert drawn == len(rows)


def test_two_networks_are_compared_place_by_place(made_run) -> None:
    first, second = made_run.scores["model"].unique()[:2]
    figure = made_run.figure("compare", subject=[first, second])
    differences = [text.get_text() for text in figure.axes[0].texts]
    assert len(differences) == len(figure.axes[0].get_yticklabels())
    for order in ([first, second], [second, first]):
        figure = made_run.figure("compare", subject=order)
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert [label.split(" · ")[0] for label in legend] == order
    with pytest.raises(RequestError):
        made_run.figure("compare")
    with_itself = made_run.figure("compare", subject=first, other=made_run, measure="r2")
    assert {text.get_text()[:3] for text in with_itself.axes[0].texts} <= {"0.0", "0", "+0.", "0 ±"}


def test_a_path_is_drawn_with_its_chords(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    settings = {"lines.number": 1, "lines.anchors": 3}
    run = nlbench.evaluate(model, torch.randn(16, 2), ["absdev"], settings=settings)
    figure = run.figure("path")
    *logits, breakpoints = figure.axes
    assert [axes.get_ylabel() for axes in logits] == ["output 0", "output 1"]
    assert breakpoints.get_xlabel() == "distance along path0, in input units"
    with pytest.raises(RequestError):
        nlbench.evaluate(model, torch.randn(16, 2), ["r2"]).figure("path")


def test_plots_are_drawn_into_given_axes(made_run) -> None:
    figure = Figure()
    upper, lower = figure.subplots(2)
    assert made_run.plot("affinity", ax=upper) is figure
    assert made_run.fingerprint(ax=lower) is figure
    assert upper.get_ylabel().startswith("affinity")
    assert lower.get_xlabel() == "input → output"
