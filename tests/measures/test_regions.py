"""Regions against networks whose regions are known by construction, and gradients by autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.errors import Undefined
from nlbench.measures.regions import RegionCounts, count_regions
from nlbench.probes.lines import trace_segment


class Formula(nn.Module):
    """A function of the first input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def counts(function, start=0.0, end=1.0):
    ends = (torch.tensor([x], dtype=torch.float64) for x in (start, end))
    return count_regions(trace_segment(Formula(function).double(), *ends))


def tent(x):
    return 2 * x.relu() - 4 * (x - 0.5).relu()


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_telgarskys_tents_have_a_region_for_each_slope(depth):
    def folded(x):
        for _ in range(depth):
            x = tent(x)
        return x

    # Lines of equal slope lie next to each other, none twice.
    assert counts(folded, 1e-3, 1 - 1e-3) == RegionCounts(2**depth, 2**depth, 2**depth)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_plateau_that_returns_is_one_affine_region(steps):
    def waves(x):
        return sum((x - 3 * i - k).relu() * s for i in range(steps) for k, s in ROOF)

    # Between the roofs the function is 0 again; each roof has a way up and a way down.
    expected = RegionCounts(1 + 3 * steps, 1 + 3 * steps, 1 + 2 * steps)
    assert counts(waves, -1.0, 3.0 * steps) == expected


ROOF = ((0, 1.0), (1, -2.0), (2, 1.0))


def test_cancelled_or_ignored_units_make_activation_regions_only():
    assert counts(lambda x: x.relu() - (-x).relu(), -1.0, 1.0) == RegionCounts(2, 1, 1)
    merged = counts(lambda x: ((x - 0.3).relu() + (x - 0.6).relu() - 5).relu(), 0.0, 1.0)
    assert merged == RegionCounts(3, 1, 1)


def test_an_affine_network_has_one_region():
    assert counts(lambda x: 3 * x - 1) == RegionCounts(1, 1, 1)


@given(st.integers(0, 9999), st.integers(1, 12), st.sampled_from([1, 3]))
def test_regions_of_layer_are_those_of_its_hyperplanes(seed, width, outputs):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, outputs)).double()
    start, end = torch.randn(2, 3, dtype=torch.float64)
    crossed = (network[0](start) > 0) != (network[0](end) > 0)
    regions = 1 + int(crossed.sum())
    found = count_regions(trace_segment(network, start, end))
    assert found == RegionCounts(regions, regions, regions)


@settings(max_examples=15)
@given(st.integers(0, 9999))
def test_affine_maps_equal_gradients_inside_regions(seed):
    generator = np.random.default_rng(seed)
    corners = torch.tensor(generator.integers(-3, 4, (8, 2)).astype(float))

    def function(x):
        # Integer slopes and corners: equal maps are equal exactly.
        return sum(s * (x - k / 4).relu() for k, s in corners)

    trace = trace_segment(Formula(function), *torch.tensor([[-1.1], [1.1]], dtype=torch.float64))
    middle = (-1.1 + 2.2 * (trace.t[1:] + trace.t[:-1]) / 2)[:, None].requires_grad_()
    values = function(middle)
    (slopes,) = torch.autograd.grad(values.sum(), middle)
    offsets = values - slopes * middle
    maps = torch.cat([slopes, offsets], 1).detach().mul(4).round()
    found = count_regions(trace)
    assert found.affine == len(torch.unique(maps, dim=0))
    assert found.connected == 1 + int((maps.diff(dim=0) != 0).any(1).sum())
    assert found.activation == trace.regions


def test_adjacent_segments_share_a_region():
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
        model[0].bias.zero_()
    run = nlbench.evaluate(
        model,
        torch.tensor([[-1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 1.0]]),
        "regions",
        settings={"lines.paths": "pairs"},
    )
    values = [value.statistics for value in run["regions"].values]
    assert [value["value"] for value in values] == [2, 1]
    assert RegionCounts(3, 2, 2) + RegionCounts(4, 3, 1) == RegionCounts(6, 4, 2)


def test_smooth_networks_and_estimates_are_undefined():
    x = torch.randn(4, 3)
    smooth = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    paths = {"lines.paths": "pairs"}
    result = nlbench.evaluate(smooth, x, "regions", settings=paths)["regions"]
    assert result.status == "undefined"
    assert "gelu" in result.reason
    ramp = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    refined = {**paths, "lines.method": "refined"}
    result = nlbench.evaluate(ramp, x, "regions", settings=refined)["regions"]
    assert result.status == "undefined"
    assert "lines.method=exact" in result.reason
    ends = torch.zeros(3), torch.ones(3)
    with pytest.raises(Undefined):
        count_regions(trace_segment(ramp, *ends, dtype=torch.float32))
