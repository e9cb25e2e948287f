"""Histogram entropy against NumPy's histogram, sample by sample."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import NotFinite, Undefined
from nlbench.measures import entropy
from nlbench.measures.entropy import Entropy, histogram_entropy

from streams import batches_of, read


def features(seed, n, d):
    return np.random.default_rng(seed).standard_normal((n, d))


def slow_entropy(sample):
    counts, _ = np.histogram(sample, bins=len(sample), range=(sample.min(), sample.max()))
    shares = counts[counts > 0] / len(sample)
    return -np.sum(shares * np.log(shares))


@given(st.integers(0, 999), st.integers(1, 8), st.integers(2, 60), st.booleans())
def test_entropies_are_those_of_numpys_histograms(seed, n, d, rectified):
    values = features(seed, n, d)
    values = np.maximum(values, 0) if rectified else values
    varying = values[np.ptp(values, axis=1) > 0]
    ours = histogram_entropy(torch.tensor(varying)) if len(varying) else torch.zeros(0)
    np.testing.assert_allclose(ours.numpy(), [slow_entropy(v) for v in varying], atol=1e-12)


@given(st.integers(1, 30), st.floats(-1e300, 1e300))
def test_a_sample_of_equal_features_has_entropy_zero(d, value):
    assert histogram_entropy(torch.full((1, d), value, dtype=torch.float64)).item() == 0


def test_features_spread_evenly_have_the_largest_entropy():
    values = torch.arange(7.0)[None] + 0.5
    assert histogram_entropy(values).item() == pytest.approx(math.log(7))


def test_the_largest_feature_belongs_to_the_last_bin():
    two_and_two = torch.tensor([[0.0, 0.1, 0.9, 1.0]])
    assert histogram_entropy(two_and_two).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("block", [1, 25, 10**6])
def test_the_blocks_do_not_matter(block, monkeypatch):
    values = torch.tensor(features(3, 11, 10))
    expected = histogram_entropy(values)
    monkeypatch.setattr(entropy, "CHUNK_FEATURES", block)
    assert torch.equal(histogram_entropy(values), expected)


@pytest.mark.parametrize("size", [1, 4, 11])
def test_value_is_the_mean_change_whatever_the_batches(size):
    x = features(4, 11, 16)
    y = np.maximum(x, 0)
    result = read(Entropy(), batches_of(torch.tensor(x), torch.tensor(y), size))
    before = np.mean([slow_entropy(v) for v in x])
    after = np.mean([slow_entropy(v) for v in y])
    statistics = result.values[0].statistics
    assert statistics["value"] == pytest.approx(after - before)
    assert statistics["before"] == pytest.approx(before)
    assert statistics["after"] == pytest.approx(after)


def test_a_range_beyond_float64_is_refused():
    with pytest.raises(NotFinite):
        histogram_entropy(torch.tensor([[-1e308, 1e308]], dtype=torch.float64))


def test_a_site_without_features_or_samples_is_undefined():
    with pytest.raises(Undefined):
        histogram_entropy(torch.ones(3, 0))
    assert read(Entropy(), [(torch.ones(3, 0), torch.ones(3, 0))]).values[0].status == "undefined"
    empty = torch.ones(0, 3)
    assert read(Entropy(), [(empty, empty)]).values[0].reason == "no samples"


def test_features_that_differ_by_rounding_have_no_entropy():
    values = torch.sigmoid(1e-7 * torch.tensor(features(0, 5, 16)))
    with pytest.raises(Undefined, match="float32"):
        histogram_entropy(values.float())
    assert (histogram_entropy(values) > 1).all()
    assert (histogram_entropy(torch.full((5, 16), 0.1)) == 0).all()
