"""Cross-validated R² against scikit-learn's folds and fits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score as sklearns_r2
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from nlbench.errors import NotFinite, Undefined
from nlbench.measures.r2 import R2, r2_score

from streams import batches_of, read


def normal(seed, n, d):
    return torch.tensor(np.random.default_rng(seed).standard_normal((n, d)))


def layer(seed, n, d, k):
    x = normal(seed, n, d)
    return x, torch.relu(x @ normal(seed + 5000, d, k)) + 0.1 * normal(seed + 6000, n, k)


def sklearns(x, y, folds):
    model = make_pipeline(StandardScaler(), LinearRegression())
    split = PredefinedSplit(np.arange(len(x)) % folds)
    return sklearns_r2(y.numpy(), cross_val_predict(model, x.numpy(), y.numpy(), cv=split))


def score(x, y, folds=5):
    return r2_score(x, y, kind="crossvalidated", folds=folds).item()


def streamed(batches, folds=5):
    return read(R2(kind="crossvalidated", folds=folds), batches)


@given(
    st.integers(0, 999),
    st.integers(6, 40),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(2, 6),
)
def test_agrees_with_scikit_learn(seed, n, d, k, folds):
    # A training set of about as many samples as inputs has a fit of arbitrary size.
    assume(abs(n * (folds - 1) // folds - d) > 2)
    x, y = layer(seed, n, d, k)
    assert score(x, y, folds) == pytest.approx(sklearns(x, y, folds), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize(("n", "d"), [(12, 40), (30, 200)])
def test_few_samples_agree_with_sklearns_least_norm_fit(n, d):
    x, y = layer(1, n, d, 3)
    assert score(x, y) == pytest.approx(sklearns(x, y, 5), abs=1e-9)


@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 50), st.sampled_from([0.0, 3e4]))
def test_batches_are_as_good_as_one(seed, d, size, offset):
    x, y = layer(seed, 60, d, 3)
    found = streamed(batches_of(x + offset, y - offset, size)).summary["value"]
    assert found == pytest.approx(score(x, y), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", [3, 30])
def test_stream_of_fewer_samples_than_inputs_has_value(size):
    x, y = layer(2, 30, 50, 4)
    found = streamed(batches_of(x, y, size))
    assert found.summary["value"] == pytest.approx(score(x, y))
    assert found.values[0].reason == "cross-validated over 5 folds"


def test_an_affine_map_is_predicted_without_error():
    x = normal(3, 40, 5)
    y = 1e-4 * x @ normal(4, 5, 3) + 3e4
    assert score(x, y) == pytest.approx(1, abs=1e-9)
    assert streamed(batches_of(x, y, 7)).summary["value"] == pytest.approx(1, abs=1e-9)


def test_held_out_fit_does_not_predict_noise():
    x, y = normal(5, 40, 30), normal(6, 40, 5)
    assert r2_score(x, y).item() > 0.6
    assert score(x, y) < 0


def test_as_many_folds_as_samples_leave_one_out():
    x, y = layer(7, 9, 2, 2)
    assert score(x, y, folds=9) == pytest.approx(sklearns(x, y, 9))
    assert score(x, y, folds=50) == pytest.approx(score(x, y, folds=9))


def test_dead_inputs_and_units_do_not_change_it():
    x, y = layer(8, 40, 4, 3)
    plain = score(x, y)
    widened = torch.cat([x * torch.tensor([1e-6, 1.0, 1e6, 3.0]).double(), torch.ones(40, 2)], 1)
    assert score(widened, y) == pytest.approx(plain, abs=1e-9)
    assert streamed(batches_of(widened, y, 7)).summary["value"] == pytest.approx(plain, abs=1e-7)


def test_input_varying_in_one_fold_is_handled():
    x, y = layer(9, 25, 3, 2)
    x[:, 0] = 0
    x[5, 0] = 1
    assert score(x, y) == pytest.approx(sklearns(x, y, 5))


def test_constant_output_and_a_single_sample_are_undefined():
    with pytest.raises(Undefined):
        score(normal(0, 9, 2), torch.full((9, 2), 0.1))
    with pytest.raises(Undefined):
        score(normal(0, 1, 2), normal(1, 1, 2))
    constant = streamed(batches_of(normal(0, 30, 2), torch.full((30, 2), 0.1), 7)).values[0]
    assert (constant.status, constant.reason) == ("undefined", "constant output")
    single = streamed([(normal(0, 1, 2), normal(1, 1, 2))]).values[0]
    assert single.status == "undefined"


def test_bad_requests_and_numbers_are_named():
    x, y = layer(0, 12, 2, 2)
    changed = streamed([(x, y), (x[:, :1], y)])
    assert "columns" in changed.reason
    y[0, 0] = math.nan
    assert streamed([(x, y)]).status == "failed"


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-170, 1e170, 1e300])
def test_the_units_of_inputs_do_not_matter(scale):
    x = torch.arange(20, dtype=torch.float64)[:, None]
    assert score(scale * x, x) == pytest.approx(1, abs=1e-9)
    assert score(x, scale * x) == pytest.approx(1, abs=1e-9)


def test_the_smallest_number_is_an_input():
    x = torch.tensor([[0.0], [0.0], [5e-324]], dtype=torch.float64)
    assert score(x, x) <= 1


@pytest.mark.parametrize("kind", ["ordinary", "crossvalidated"])
def test_a_range_beyond_float64_is_refused(kind):
    x = torch.arange(6, dtype=torch.float64)[:, None]
    wide = torch.tensor([-1.7e308, 1.7e308, 0.0, 1.0, 3.0, 0.0], dtype=torch.float64)[:, None]
    for pair in ((wide, x), (x, wide)):
        with pytest.raises(NotFinite):
            r2_score(*pair, kind=kind)
