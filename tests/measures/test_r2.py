"""R² against scikit-learn, in one piece and streamed."""

import math
from operator import itemgetter

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.linear_model import LinearRegression

from nlbench.errors import Undefined
from nlbench.measures.r2 import R2, r2_score

import published
from streams import batches_of, read, site_batch


def normal(seed, n, d):
    r = np.random.default_rng(seed)
    return torch.tensor(r.standard_normal((n, d)) @ (np.eye(d) + 0.3 * r.standard_normal((d, d))))


def sklearn_r2(x, y):
    """Uniform average over the columns that vary, by scikit-learn on centred data."""
    x, y = (np.asarray(v, dtype=np.float64) for v in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    y = y[:, np.abs(y).max(0) > 0]
    residuals = y - LinearRegression().fit(x, y).predict(x)
    return 1 - ((residuals**2).sum(0) / (y**2).sum(0)).mean()


def result(batches, **settings):
    return read(R2(**settings), batches)


@pytest.mark.parametrize(
    "case", [case for case in published.CASES if case["n"] > case["d"] + 1], ids=itemgetter("seed")
)
def test_the_reference_values_are_met(case):
    x, y = published.samples(case)
    assert r2_score(x, y).item() == pytest.approx(case["r2"], abs=1e-5)
    streamed = result(batches_of(x, y, 50)).summary["value"]
    assert streamed == pytest.approx(case["r2"], abs=1e-5)


@given(st.integers(0, 999), st.integers(1, 8), st.integers(1, 5), st.integers(3, 40))
def test_agrees_with_scikit_learn(seed, d, k, extra):
    x = normal(seed, d + extra, d)
    y = torch.relu(x @ normal(seed + 5000, d, k)) + 0.1 * normal(seed + 6000, d + extra, k)
    assert r2_score(x, y).item() == pytest.approx(sklearn_r2(x, y), abs=1e-9)


def test_relu_of_a_normal_has_its_closed_form():
    x = torch.tensor(norm.ppf((np.arange(100_000) + 0.5) / 100_000))[:, None]
    for weighting in ("uniform", "variance"):
        assert r2_score(x, x.relu(), weighting=weighting).item() == pytest.approx(
            0.25 / (0.5 - 0.5 / math.pi), abs=1e-4
        )


@given(
    st.integers(0, 999),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from([1.0, 1e-180, 1e150]),
    st.integers(5, 60),
)
def test_weighted_by_variance_it_is_scikit_learns(seed, d, k, scale, size):
    x = normal(seed, 60, d)
    scales = torch.tensor(10.0 ** np.random.default_rng(seed).uniform(-2, 2, k))
    y = (torch.relu(x @ normal(seed + 5000, d, k)) + 0.1 * normal(seed + 6000, 60, k)) * scales
    fitted = LinearRegression().fit(x, y).predict(x)
    expected = sklearn.metrics.r2_score(y, fitted, multioutput="variance_weighted")
    assert r2_score(x, scale * y, weighting="variance").item() == pytest.approx(expected, abs=1e-9)
    streamed = result(batches_of(x, scale * y, size), weighting="variance").summary["value"]
    assert streamed == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("size", [7, 80], ids=["moments", "rows"])
def test_held_out_weighted_value_agrees_with_sklearn(size):
    x = normal(3, 80, 40 if size == 80 else 4)
    y = torch.relu(x[:, :3]) * torch.tensor([0.01, 1.0, 10.0])
    folds = np.arange(80) % 5
    predicted = np.empty((80, 3))
    for fold in range(5):
        fit = LinearRegression().fit(x[folds != fold], y[folds != fold])
        predicted[folds == fold] = fit.predict(x[folds == fold])
    expected = sklearn.metrics.r2_score(y, predicted, multioutput="variance_weighted")
    settings = {"kind": "crossvalidated", "weighting": "variance"}
    assert r2_score(x, y, **settings).item() == pytest.approx(expected, abs=1e-9)
    streamed = result(batches_of(x, y, size), **settings).summary["value"]
    assert streamed == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 60), st.sampled_from([0.0, 3e4]))
def test_pooled_batches_are_as_good_as_one(seed, d, size, offset):
    x = normal(seed, 60, d)
    y = 1e-4 * torch.relu(x) + offset
    x = x + offset
    streamed = result(batches_of(x, y, size)).summary["value"]
    assert streamed == pytest.approx(r2_score(x, y).item(), abs=1e-9)


@given(st.integers(0, 999), st.integers(2, 40), st.integers(1, 12))
def test_value_lies_between_zero_and_one(seed, n, d):
    x, y = normal(seed, n + d, d) ** 3, normal(seed + 5000, n + d, d).abs()
    assert 0 <= r2_score(x, y).item() <= 1


@pytest.mark.parametrize(
    ("scale", "offset"), [(1e-4, 3e4), (1e-4, 0.0), (1.0, 3e4), (1e-100, 0.0), (1e100, 0.0)]
)
def test_small_targets_and_offsets_do_not_matter(scale, offset):
    x = normal(0, 200, 5)
    y = torch.relu(x)
    moved = r2_score(x + offset, scale * y + offset).item()
    assert moved == pytest.approx(sklearn_r2(x, y), abs=1e-6)


def test_small_float32_targets_on_offset_keep_their_noise():
    # A sum of squares without centring, in float32, is off by orders of magnitude here.
    x = normal(1, 400, 4).float()
    y = (1e-2 * torch.relu(x) + 100).float()
    assert r2_score(x, y).item() == pytest.approx(sklearn_r2(x, y), abs=1e-9)
    streamed = result(batches_of(x, y, 64)).summary["value"]
    assert streamed == pytest.approx(sklearn_r2(x, y), abs=1e-9)


def test_dead_and_duplicate_inputs_do_not_change_it():
    x = normal(2, 100, 4)
    y = torch.relu(x)
    wider = torch.cat([x, x[:, :2], torch.full((100, 1), 0.1), x[:, :1] + x[:, 1:2]], 1)
    expected = r2_score(x, y).item()
    assert r2_score(wider, y).item() == pytest.approx(expected, abs=1e-12)
    for kind in ("ordinary", "adjusted"):
        streamed = result(batches_of(wider, y, 30), kind=kind).summary["value"]
        assert streamed == pytest.approx(r2_score(x, y, kind=kind).item(), abs=1e-9)


@settings(max_examples=10)
@given(
    st.integers(0, 999),
    st.integers(1, 6),
    st.integers(2, 40),
    st.sampled_from([0.0, 3.0, -100.0]),
    st.sampled_from(["ordinary", "adjusted", "crossvalidated"]),
)
def test_dependent_float32_inputs_count_once(seed, rank, d, offset, kind):
    # A layer of few inputs, whose rounding spans as many directions as it has outputs.
    d, n = d + rank, 3 * (d + rank)
    few = normal(seed, n, rank).float() + offset
    weights = normal(seed + 1, rank, d).float()
    x = few @ weights
    y = torch.relu(x - x.mean(0))
    # The layer's own inputs span what its outputs do, and are no more than they are.
    expected = r2_score(few.double(), y, kind=kind).item()
    if kind == "ordinary":
        assert expected == pytest.approx(sklearn_r2(few, y), abs=1e-9)
    assert r2_score(x, y, kind=kind).item() == pytest.approx(expected, abs=2e-4)
    streamed = result(batches_of(x, y, 16), kind=kind).summary["value"]
    assert streamed == pytest.approx(expected, abs=2e-4)


def test_weak_float32_direction_is_not_rounding():
    # A ten-thousandth of the others, on an offset: a thousand times what rounding could be.
    x = normal(3, 200, 6).float()
    x[:, 5] = x[:, 4] + 1e-4 * x[:, 5]
    x[:, :4] += 10
    y = torch.relu(x - x.mean(0)).double() + 1e4 * (x[:, 5:] - x[:, 4:5])
    assert r2_score(x, y).item() == pytest.approx(sklearn_r2(x, y), abs=1e-9)
    streamed = result(batches_of(x, y, 30)).summary["value"]
    assert streamed == pytest.approx(sklearn_r2(x, y), abs=1e-6)


def test_the_units_of_single_inputs_do_not_matter():
    x = normal(3, 100, 4)
    y = torch.relu(x)
    scaled = x * torch.tensor([1e-9, 1.0, 1e6, 1e9])
    assert r2_score(scaled, y).item() == pytest.approx(sklearn_r2(x, y), abs=1e-9)
    streamed = result(batches_of(scaled, y, 30)).summary["value"]
    assert streamed == pytest.approx(sklearn_r2(x, y), abs=1e-9)


def test_constant_outputs_are_left_out_of_the_average():
    x = normal(4, 50, 3)
    y = torch.relu(x)
    padded = torch.cat([y, torch.full((50, 2), 7.7)], 1)
    assert r2_score(x, padded).item() == pytest.approx(r2_score(x, y).item(), abs=1e-14)
    streamed = result(batches_of(x, padded, 20)).summary["value"]
    assert streamed == pytest.approx(r2_score(x, y).item(), abs=1e-9)


def test_constant_inputs_have_r2_zero():
    x, y = torch.full((50, 2), 0.1), normal(5, 50, 2)
    for kind in ("ordinary", "adjusted"):
        assert r2_score(x, y, kind=kind).item() == pytest.approx(0, abs=1e-12)
        assert result(batches_of(x, y, 20), kind=kind).summary["value"] == pytest.approx(
            0, abs=1e-12
        )


def test_adjusted_value_is_textbooks_and_can_be_negative():
    x, y = normal(8, 12, 6), normal(9, 12, 2)
    plain = sklearn_r2(x, y)
    expected = 1 - (1 - plain) * 11 / 5
    assert r2_score(x, y, kind="adjusted").item() == pytest.approx(expected, abs=1e-12)
    streamed = result(batches_of(x, y, 5), kind="adjusted").summary["value"]
    assert streamed == pytest.approx(expected, abs=1e-9)
    noise = [r2_score(normal(s, 12, 6), normal(s + 99, 12, 2), kind="adjusted") for s in range(40)]
    assert min(noise) < 0
    assert abs(sum(noise) / 40) < 0.15


@pytest.mark.parametrize("kind", ["ordinary", "adjusted"])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (5, 4), (4, 9)])
def test_too_few_samples_are_undefined_not_one(n, d, kind):
    x, y = normal(0, n, d), normal(1, n, d)
    with pytest.raises(Undefined):
        r2_score(x, y, kind=kind)
    found = result([(x, y)], kind=kind)
    assert found.status == "undefined"
    assert f"n = {n}" in found.reason


def test_a_constant_output_is_undefined():
    assert result([(normal(0, 9, 2), torch.full((9, 2), 0.1))]).reason == "constant output"


def test_reading_lists_sites_with_sample_counts():
    measure = R2()
    measure.reset()
    x = normal(0, 40, 3)
    for batch in x.split(15):
        for place, activation in (("b", torch.relu), ("a", torch.tanh), ("dead", torch.zeros_like)):
            measure.update(site_batch(place, batch, activation(batch)))
    found = measure.compute()
    assert [v.place for v in found.values] == ["b", "a", "dead"]
    assert [v.status for v in found.values] == ["ok", "ok", "undefined"]
    assert found.values[1].statistics["value"] == pytest.approx(sklearn_r2(x, x.tanh()), abs=1e-9)
    assert {v.n for v in found.values} == {40}
    measure.reset()
    assert measure.compute().values == ()


def test_bad_batch_fails_its_site_with_reason():
    x = normal(0, 20, 2)
    bad = x.clone()
    bad[3, 0] = math.inf
    found = result([(x, x), (x, bad), (x, x)])
    assert found.status == "failed"
    assert "y: 1 of 40 entries are not finite" in found.reason
    assert found.values[0].n == 60
    assert "columns" in result([(x, x), (x[:, :1], x)]).reason


def test_a_batch_that_is_overwritten_later_was_copied():
    x = normal(0, 60, 3)
    y = torch.relu(x)
    measure = R2()
    measure.reset()
    for a, b in batches_of(x, y, 2):
        a, b = a.clone(), b.clone()
        measure.update(site_batch("act", a, b))
        a.zero_()
        b.zero_()
    assert measure.compute().summary["value"] == pytest.approx(sklearn_r2(x, y), abs=1e-9)


def test_outputs_that_differ_by_rounding_are_constant():
    x = 1e-7 * normal(0, 512, 8).float()
    y = torch.sigmoid(x)
    with pytest.raises(Undefined, match="float32"):
        r2_score(x, y)
    assert "float32" in result([(x[:99], y[:99]), (x[99:], y[99:])]).reason
    assert r2_score(x.double(), torch.sigmoid(x.double())).item() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["ordinary", "adjusted", "crossvalidated"])
@pytest.mark.parametrize("strength", [1e-4, 1e-6, 1e-9])
def test_streams_fit_no_direction_that_rounding_may_fill(kind, strength):
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    almost = x.sum(1, keepdim=True) + strength * torch.randn(40, 1, dtype=torch.float64)
    y = torch.randn(40, 2, dtype=torch.float64)
    expected = torch.cat([x, almost], 1) if strength > 1e-5 else x
    value = result([(torch.cat([x, almost], 1), y)], kind=kind).summary["value"]
    if kind == "crossvalidated":
        # Predictions have the smallest coefficients, which depend on copies of inputs.
        assert math.isfinite(value)
        rounded = torch.cat([x, almost], 1) + 1e-8 * torch.randn(40, 4, dtype=torch.float64)
        assert result([(rounded, y)], kind=kind).summary["value"] == pytest.approx(value, abs=1e-3)
    else:
        assert value == pytest.approx(r2_score(expected, y, kind=kind).item(), abs=1e-6)


@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4, 1e-9])
def test_normal_equations_and_decomposition_agree(smallest, monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    x[:, 5] = x[:, 4] + smallest * x[:, 5]
    y = torch.cat([x.relu(), 3 * x[:, :2] + 1], 1)
    expected = r2_score(x, y, kind="adjusted").item()
    monkeypatch.setattr("nlbench.measures.r2.MIN_CHOLESKY_SPREAD", math.inf)
    assert r2_score(x, y, kind="adjusted").item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("unit", [1e-120, 1e-30, 1e30, 1e120])
def test_extreme_columns_count_as_much_as_others(unit):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(100, 4, generator=generator, dtype=torch.float64)
    expected = r2_score(x, x.abs()).item()
    units = torch.tensor([1.0, unit, 1.0, 1.0], dtype=torch.float64)
    assert r2_score(x * units, x.abs() * units).item() == pytest.approx(expected, rel=1e-9)


def test_copies_are_counted_where_one_column_repeats():
    x = torch.arange(12.0).repeat_interleave(2)[:, None] % 3
    x = torch.cat([x, torch.arange(24.0)[:, None]], 1)
    assert r2_score(x, x**2, kind="adjusted") < r2_score(x, x**2)
    with pytest.raises(Undefined):
        r2_score(x[:3].repeat(8, 1), x[:3].repeat(8, 1) ** 2)
