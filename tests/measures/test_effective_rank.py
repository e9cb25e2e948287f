"""Effective rank against isotropic samples, known spectra and NumPy's singular values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy
from torch import nn

import nlbench
from nlbench.errors import Undefined
from nlbench.measures.effective_rank import EffectiveRank, effective_rank

from streams import batches_of, read


@pytest.mark.parametrize("d", [1, 2, 7, 20])
def test_isotropic_samples_have_their_dimension(d):
    # The vertices of a cross-polytope: centred, with equal singular values.
    axes = torch.eye(d, dtype=torch.float64)
    assert effective_rank(torch.cat([axes, -axes]) + 3).item() == pytest.approx(d, rel=1e-12)


def test_normal_samples_approach_their_dimension():
    x = np.random.default_rng(0).standard_normal((200_000, 5))
    assert effective_rank(torch.tensor(x)).item() == pytest.approx(5, rel=1e-4)


def test_a_known_spectrum():
    axes = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    expected = math.exp(entropy([0.75, 0.25]))
    assert effective_rank(torch.cat([axes, -axes])).item() == pytest.approx(expected)


@given(st.integers(0, 999), st.integers(2, 30), st.integers(1, 12), st.integers(1, 12))
def test_equals_entropy_of_singular_values(seed, n, d, rank):
    random = np.random.default_rng(seed)
    y = random.standard_normal((n, rank)) @ random.standard_normal((rank, d)) + 5
    spectrum = np.linalg.svd(y - y.mean(0), compute_uv=False)
    value = effective_rank(torch.tensor(y)).item()
    assert value == pytest.approx(math.exp(entropy(spectrum)), rel=1e-6)
    assert 1 - 1e-9 <= value <= min(n - 1, d, rank) + 1e-6


@pytest.mark.parametrize("n", [5, 300])
def test_small_and_large_batches_equal_the_function(n):
    torch.manual_seed(0)
    x = 100 + torch.randn(n, 8, dtype=torch.float64) * torch.logspace(-3, 3, 8)
    options = {"sites.batch": 4}
    run = nlbench.evaluate(nn.ReLU(), x, "effective-rank", settings=options)
    expected = effective_rank(x.relu()).item()
    assert run["effective-rank"].summary["value"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("y", "reason"),
    [(torch.ones(4, 2), "constant output"), (torch.ones(1, 2), "n = 1: at least 2 samples")],
)
def test_rank_without_spread_is_undefined(y, reason):
    with pytest.raises(Undefined):
        effective_rank(y)
    found = read(EffectiveRank(), [(y, y)]).values[0]
    assert found.status == "undefined"
    assert found.reason.startswith(reason)


def test_a_site_without_samples_has_no_rank():
    y = torch.ones(0, 2)
    found = read(EffectiveRank(), [(y, y)]).values[0]
    assert found.reason == "n = 0: at least 2 samples are needed"


def test_many_constant_samples_have_no_rank():
    y = torch.ones(40, 2)
    assert read(EffectiveRank(), batches_of(y, y, 10)).values[0].reason == "constant output"
