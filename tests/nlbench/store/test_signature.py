"""Signatures: taken from a reading, summed up, compared, drawn and written."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

import nlbench
from nlbench import RequestError, Result, Signature, Undefined, Value
from nlbench.store.signature import dtw_distances

signatures = st.lists(st.floats(-1, 1), min_size=1, max_size=7)


def of_values(*values, name=""):
    sites = tuple(f"site{i}" for i in range(len(values)))
    status = tuple("undefined" if math.isnan(v) else "ok" for v in values)
    return Signature(sites, ("",) * len(values), values, status, name)


@pytest.fixture
def gappy():
    return of_values(0.25, math.nan, 1.0, name="net")


def slow_dtw(a, b):
    """The textbook's recursion."""
    best = np.full((len(a) + 1, len(b) + 1), np.inf)
    best[0, 0] = 0
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            before = min(best[i, j], best[i, j + 1], best[i + 1, j])
            best[i + 1, j + 1] = (one - other) ** 2 + before
    return math.sqrt(best[-1, -1])


def test_signature_lists_sites_in_call_order():
    missing = Value.missing("b", "undefined", "constant output")
    result = Result.of([Value("a", {"value": 0.5}), missing, Value("c", {"value": 0.75})])
    signature = Signature.of(result, kinds={"a": "relu"}, name="net")
    assert signature.sites == ("a", "b", "c")
    assert signature.kinds == ("relu", "", "")
    assert signature.status == ("ok", "undefined", "ok")
    assert signature.defined == (0.5, 0.75)
    assert math.isnan(signature.values[1])
    assert len(signature) == 3


def test_evaluated_networks_signature_has_its_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    result = nlbench.evaluate(model, torch.randn(64, 4), "affinity")["affinity"]
    statistics = Signature.of(result).statistics
    assert statistics["mean"] == result.summary["value"]
    assert {k: statistics[k] for k in ("std", "min", "max", "median", "spread")} == {
        k: v for k, v in result.summary.items() if k != "value"
    }


def test_statistics_leave_out_sites_without_a_value(gappy):
    assert gappy.statistics["mean"] == pytest.approx(0.625)
    with pytest.raises(Undefined):
        _ = of_values(math.nan).statistics


@given(signatures, signatures)
def test_the_distance_is_the_textbooks(a, b):
    one, other = of_values(*a), of_values(*b)
    assert one.dtw(other) == pytest.approx(slow_dtw(a, b), abs=1e-12)
    assert one.dtw(other) == pytest.approx(other.dtw(one), abs=1e-12)
    assert one.dtw(one) == 0


@given(st.lists(signatures, min_size=2, max_size=5))
def test_distances_of_pairs_are_the_textbooks(given):
    found = dtw_distances(given)
    expected = [[slow_dtw(a, b) if i != j else 0 for j, b in enumerate(given)]
                for i, a in enumerate(given)]  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_distance_leaves_out_sites_without_a_value(gappy):
    assert gappy.dtw(of_values(0.25, 1.0)) == 0
    with pytest.raises(Undefined):
        gappy.dtw(of_values(math.nan))


def test_plot_has_gap_where_there_is_no_value(gappy):
    (line,) = gappy.plot().get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
    np.testing.assert_array_equal(line.get_ydata(), [0.25, math.nan, 1.0])


def test_several_signatures_share_one_plot(gappy):
    axes = Figure().add_subplot()
    assert gappy.plot(axes) is axes
    of_values(0.5, 0.5, name="other").plot(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["net", "other"]


def test_exports_keep_every_site(gappy, tmp_path):
    assert json.loads(json.dumps(gappy.to_dict()))["value"] == [0.25, None, 1.0]
    table = pd.read_csv(gappy.to_csv(tmp_path / "signature.csv"))
    assert list(table.columns) == ["site", "kind", "value", "status"]
    assert table["status"].tolist() == ["ok", "undefined", "ok"]
    assert table["value"].isna().tolist() == [False, True, False]


def test_a_reading_without_sites_has_no_signature():
    with pytest.raises(Undefined):
        Signature.of(Result.missing("undefined", "the model calls nothing"))


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(RequestError):
        Signature(("a", "b"), ("",), (1.0, 2.0), ("ok", "ok"))


def test_runs_signature_knows_site_kinds_after_saving(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU())
    run = nlbench.evaluate(model, torch.randn(32, 4), "affinity,r2", name="net")
    run.save(tmp_path / "run")
    for one in (run, nlbench.load_run(tmp_path / "run")):
        signature = one.signature(measure="r2")
        assert (signature.sites, signature.kinds) == (("1", "3"), ("relu", "gelu"))
        assert signature.name == "net"
        assert signature.statistics["mean"] == one["r2"].summary["value"]
    with pytest.raises(RequestError):
        run.signature(measure="cka")


def test_standalone_plot_displays_in_notebooks(gappy):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    axes = gappy.plot()
    try:
        assert axes.figure.number not in before
        assert pyplot.figure(axes.figure.number) is axes.figure
    finally:
        pyplot.close(axes.figure)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.act, self.inner = nn.Tanh(), Inner()

    def forward(self, x):
        x = self.act(self.act(self.body(x)))
        return torch.relu(self.inner(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.gelu(nn.functional.gelu(self.linear(x)))


def test_every_site_leads_to_its_module():
    model = Calls()
    run = nlbench.evaluate(model, torch.randn(32, 3), "r2")
    expected = {
        "body.1": model.body[1], "act": model.act, "act:1": model.act,
        "inner/gelu": model.inner, "inner/gelu:1": model.inner, "relu": model,
    }  # fmt: skip
    sites = run.signature(measure="r2").sites
    assert {site: nlbench.module_of(model, site) for site in sites} == expected
    with pytest.raises(RequestError):
        nlbench.module_of(model, "body.7")


def test_run_displays_as_line_and_notebook_table():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    run = nlbench.evaluate(model, torch.randn(32, 4), "affinity,absdev,cka", name="<b>net</b>")
    names = ("affinity", "cka", "absdev")
    values = [f"{name} ({run[name].summary['value']:.4g})" for name in names]
    assert repr(run) == f"<Run: <b>net</b> by {', '.join(values)}: 3 ok>"
    assert repr(run.signature(measure="cka")).startswith("<Signature: <b>net</b>, 1 sites, 0.")
    shown = run._repr_html_()
    assert "<b>net</b>" not in shown
    assert "&lt;b&gt;net" in shown
    for measure in ("affinity", "absdev", "cka"):
        assert measure in shown
    empty = nlbench.evaluate(nn.Linear(4, 2), torch.randn(8, 4), "r2")
    assert "undefined" in empty._repr_html_()
    assert repr(nlbench.Run({}, [])) == "<Run: no cells>"
    assert "no scores have been recorded" in nlbench.Run({}, [])._repr_html_()


def test_formula_like_site_name_is_text(tmp_path):
    from nlbench.serialization.files import spreadsheet_text

    sites = ("=1+1", "@SUM(A1)", "'quoted", "plain")
    signature = Signature(sites, ("",) * 4, (0.5,) * 4, ("ok",) * 4)
    table = pd.read_csv(signature.to_csv(tmp_path / "s.csv"))
    assert [site[0] for site in table["site"]] == ["'", "'", "'", "p"]
    assert tuple(map(spreadsheet_text, table["site"])) == sites
