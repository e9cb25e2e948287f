"""What a run gives from Python."""

import io
import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest
from matplotlib.figure import Figure

from nlbench.errors import RequestError
from nlbench.measure import Result
from nlbench.reports.population import FILE
from nlbench.store.run import Run

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from made_runs import make_run


@pytest.fixture(scope="module")
def run():
    return make_run(4, measures=("affinity", "r2", "absdev"), seeds=2)


def test_the_leaderboard_is_a_frame_with_ranks(run):
    frame = run.leaderboard()
    assert len(frame) == 4
    assert list(frame.columns.unique("measure")) == ["affinity", "r2", "absdev"]
    values = frame["affinity", "value"].tolist()
    assert values == sorted(values)
    assert list(frame.columns.unique("field")) == ["value", "error", "low", "high", "rank"]
    full = run.leaderboard(full=True)
    assert (full["affinity", "best"] <= full["affinity", "worst"]).all()
    assert full.index.get_level_values("subject").tolist() == frame.index.tolist()
    assert len(run.leaderboard(seeds="apart")) == 8
    assert list(run.leaderboard(["absdev"]).columns.unique("measure")) == ["absdev"]


def test_the_leaderboard_places_values_among_the_reference_networks(run):
    reference = json.loads(FILE.read_text(encoding="utf-8"))
    measures = {
        name: {**about, **{k: reference[name][k] for k in ("version", "options")}}
        for name, about in run.manifest["measures"].items()
        if name in ("affinity", "absdev")
    }
    records = [
        replace(r, result=Result({"value": 9.0, "over_range": 0.2}))
        if r.measure.name == "absdev"
        else r
        for r in run.records
    ]
    manifest = {**run.manifest, "measures": {**run.manifest["measures"], **measures}}
    frame = Run(manifest, records).leaderboard(reference=True)
    others = list(reference["affinity"]["values"].values())
    for row in frame.index:
        share = sum(v > frame["affinity", "value"][row] for v in others) / len(others)
        assert frame["affinity", "reference"][row] == pytest.approx(share)
    ranges = list(reference["absdev"]["values"].values())
    share = sum(v < 0.2 for v in ranges) / len(ranges)
    assert frame["absdev", "reference"].isna().all()  # it grows with the logits
    assert frame["absdev.relative", "reference"].tolist() == pytest.approx([share] * len(frame))
    assert frame["r2", "reference"].isna().all()  # another version
    fields = ["value", "error", "low", "high", "rank", "reference"]
    assert [field for name, field in frame.columns if name == "r2"] == fields


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda run: run.leaderboard(["afinity"]), "'affinity'"),
        (lambda run: run.leaderboard(seeds="mean"), "'together'"),
        (lambda run: run.signature("vgg9"), "'vgg8"),
        (lambda run: run.signature("vgg8"), "'vgg8'"),
        (lambda run: run.plot("absdef"), "'absdev'"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(run, call, nearest):
    with pytest.raises(RequestError, match=nearest):
        call(run)


def test_signatures_are_in_order_of_call(run):
    found = run.signature("torchvision/convnext8 · seed 1", "affinity")
    rows = run.scores.query(
        "model == 'torchvision/convnext8' and seed == 1 and measure == 'affinity'"
        " and place != '' and statistic == 'value'"
    )
    assert list(found.values) == rows["value"].tolist()
    assert set(found.kinds) == {"relu", "gelu"}


def test_the_fingerprint_has_a_strip_a_network(run):
    figure = run.fingerprint()
    assert isinstance(figure, Figure)
    axes = figure.axes[0]
    assert len(axes.get_yticklabels()) == 4


def test_a_measure_is_drawn_as_suits_its_probe(run):
    assert run.plot("affinity").axes[0].get_xlabel() == "activation, in call order"
    assert run.plot("absdev").axes[0].get_ylabel() == "fraction of paths"


def test_agreement_is_a_tidy_frame(run):
    frame = run.agreement()
    assert set(frame["coefficient"]) == {"spearman", "kendall", "pearson"}
    assert frame["value"].dropna().between(-1, 1).all()


def test_parquet_gives_the_scores_back(run, tmp_path):
    pytest.importorskip("pyarrow")
    again = pd.read_parquet(run.to_parquet(tmp_path / "scores.parquet"))
    assert again["value"].tolist() == pytest.approx(run.scores["value"].tolist(), nan_ok=True)
    assert again["model"].tolist() == run.scores["model"].tolist()


class Cells(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_notebooks_escape_the_names_of_runs(run):
    first, *rest = run.records
    named = replace(first.subject, model="<script>alert(1)</script>")
    shown = Cells(Run(run.manifest, [replace(first, subject=named), *rest])._repr_html_())
    assert "script" not in shown.tags
    assert shown.tags.count("i") > 7  # the strip
    assert any("<script>alert(1)</script>" in text for text in shown.texts)
    result = Cells(first.result._repr_html_())
    assert "layer0.0.act1" in result.texts
    missing = next(r.result for r in make_run(4).records if r.result.status == "undefined")
    assert missing.reason in "".join(Cells(missing._repr_html_()).texts)


@pytest.mark.parametrize("draw", [lambda run: run.fingerprint(), lambda run: run.plot("absdev")])
def test_a_notebook_shows_the_picture(run, draw):
    # As IPython asks for it, without pyplot.
    picture = matplotlib.image.imread(io.BytesIO(draw(run)._repr_png_()))
    assert min(picture.shape[:2]) > 50
    assert picture.std() > 0.01
