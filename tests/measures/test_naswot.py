"""NASWOT against its closed form for two samples, and Hamming distances by SciPy."""

import math

import numpy as np
import pytest
import torch
from drawing import before_drawing
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import nn

import nlbench
from nlbench.errors import Undefined
from nlbench.measures.naswot import naswot_score, pattern_kernel


@given(st.integers(0, 999), st.integers(2, 30), st.data())
def test_two_samples_have_the_closed_form(seed, units, data):
    distance = data.draw(st.integers(1, units - 1))
    x = torch.tensor(np.random.default_rng(seed).standard_normal(units))
    flips = torch.ones(units, dtype=torch.float64)
    flips[:distance] = -1
    score = naswot_score(pattern_kernel(torch.stack([x, x * flips])))
    expected = math.log(units**2 - (units - distance) ** 2)
    assert score.item() == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 999), st.integers(1, 12), st.integers(1, 40))
def test_the_kernel_has_hamming_distances(seed, n, d):
    x = np.random.default_rng(seed).standard_normal((n, d))
    expected = d - d * cdist(x > 0, x > 0, "hamming")
    np.testing.assert_allclose(pattern_kernel(torch.tensor(x)), expected, atol=1e-9)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 2)
    )


@pytest.mark.parametrize(("batch", "samples"), [(5, 128), (12, 128), (5, 7)])
def test_all_units_of_a_network_are_compared(batch, samples):
    model, images = network(), torch.randn(12, 1, 8, 8)
    first = model[0](images)
    second = model[2](first.relu())
    sites = [before.flatten(1)[:samples].detach() for before in (first, second)]
    run = nlbench.evaluate(
        model,
        before_drawing(images),
        "naswot",
        settings={"sites.reduction": "flatten", "sites.batch": batch, "naswot.samples": samples},
    )
    result = run["naswot"]
    codes = (torch.cat(sites, 1) > 0).numpy()
    kernel = codes.shape[1] * (1 - cdist(codes, codes, "hamming"))
    assert result.summary["value"] == pytest.approx(np.linalg.slogdet(kernel)[1], rel=1e-9)
    assert result.n == min(samples, 12)
    for value, site in zip(result.values, sites, strict=True):
        expected = naswot_score(pattern_kernel(site)).item()
        assert value.statistics["value"] == pytest.approx(expected, rel=1e-12)


def test_site_without_distinct_patterns_is_undefined():
    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1), nn.ReLU())
    with torch.no_grad():
        model[2].weight.fill_(1.0)
        model[2].bias.fill_(1.0)
    torch.manual_seed(0)
    result = nlbench.evaluate(model, torch.randn(4, 3), "naswot")["naswot"]
    assert result.status == "ok"
    last = result.values[1]
    assert last.status == "undefined"
    assert last.reason == "n = 4 samples, but different patterns: 1"


def test_too_few_samples_or_units_are_undefined():
    with pytest.raises(Undefined):
        naswot_score(pattern_kernel(torch.ones(1, 3)))
    every_pattern = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    with pytest.raises(Undefined):
        naswot_score(pattern_kernel(every_pattern))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
def test_parts_of_many_units_add_up(dtype, monkeypatch):
    x = torch.randint(-2, 3, (9, 50), generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = ((x > 0)[:, None] == (x > 0)[None]).sum(2).double()
    monkeypatch.setattr("nlbench.measures.naswot.MAX_EXACT_UNITS", 7)
    assert torch.equal(pattern_kernel(x), expected)
