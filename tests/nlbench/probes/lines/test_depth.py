"""Crossings of deep networks, and of weights of any size, against extended precision."""

import numpy as np
import pytest
import torch
from extended import Affine, Layers, Maxout, Relu, boundaries
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines import trace_segment


def affine(rows, columns, seed, scale=1.0, bias=False, by="linear"):
    generator = torch.Generator().manual_seed(seed)
    bound = scale / columns**0.5
    weight = (2 * torch.rand(rows, columns, generator=generator).double() - 1) * bound
    offset = (2 * torch.rand(rows, generator=generator).double() - 1) * bound if bias else None
    return Affine(weight, offset, by)


def ends(width, seed=0):
    return torch.randn(2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_crossings(layers, start, end, min_crossings=1, **options):
    expected = boundaries(layers, start, end)
    trace = trace_segment(Layers(layers).double(), start, end, **options)
    assert len(expected) >= min_crossings
    assert trace.crossings == len(expected)
    distance = np.abs(trace.t[1:-1].numpy()[:, None] - expected.astype(np.float64)).min(0)
    assert distance.max() < 1e-9


@pytest.mark.parametrize(
    ("depth", "method"), [(1, "exact"), (12, "adaptive"), (16, "exact"), (64, "exact")]
)
def test_a_chain_of_affine_layers_loses_no_crossing(depth, method):
    layers = [affine(64, 64, seed) for seed in range(depth)]
    layers += [Relu(), affine(3, 64, 99)]
    options = {"method": method, "sensitivity": 1e-10} if method == "adaptive" else {}
    assert_crossings(layers, *ends(64), min_crossings=10, **options)


@pytest.mark.parametrize("by", ["relu", "maximum", "clamp", "pool", "leaky"])
def test_twenty_layers_lose_no_crossing(by):
    layers = []
    slope = 0.1 if by == "leaky" else 0.0
    for seed in range(20):
        layers += [affine(32, 32, seed, scale=6**0.5, bias=True), Relu(by, slope)]
    assert_crossings([*layers, affine(2, 32, 99)], *ends(32), min_crossings=50)


@pytest.mark.parametrize(("by", "members"), [("maximum", 2), ("pool", 2), ("pool", 4), ("amax", 3)])
def test_maxout_and_stacked_pooling_lose_no_crossing(by, members):
    layers = []
    for seed in range(8):
        layers += [affine(16 * members, 16, seed, scale=2.0), Maxout(members, by)]
    assert_crossings([*layers, affine(2, 16, 99)], *ends(16), min_crossings=20)


@pytest.mark.parametrize(
    ("by", "scale"),
    [("linear", 1e-30), ("linear", 1e30), ("matmul", 1e14), ("matmul", 1e-30), ("conv", 1e-14),
     ("conv", 1e30), ("conv_transpose", 1e-30), ("conv_transpose", 1e14)],
)  # fmt: skip
def test_weights_of_any_size_lose_no_crossing(by, scale):
    layers = []
    for seed in range(4):
        layers += [affine(8, 8, seed, scale=3 * scale, by=by), Relu()]
    assert_crossings([*layers, affine(2, 8, 99)], *ends(8), min_crossings=5)


@pytest.mark.parametrize("depth", [50, 200])
def test_narrow_networks_may_have_two_hundred_layers(depth):
    layers = []
    for seed in range(depth):
        layers += [affine(6, 6, seed, scale=2.4, bias=seed % 10 == 0), Relu("leaky", 0.5)]
    assert_crossings([*layers, affine(2, 6, 999)], *ends(6), min_crossings=10)


def test_average_pooling_between_convolutions_loses_no_crossing():
    # The body is linear, so a unit crosses where its values at the two ends differ in sign.
    torch.manual_seed(0)
    parts = []
    for _ in range(6):
        parts += [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.AvgPool2d(3, 1, 1)]
    body = nn.Sequential(*parts).double()
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 3)).double()
    start, end = torch.randn(2, 4, 8, 8).double()
    with torch.no_grad():
        left, right = body(start[None]), body(end[None])
    expected = int((left * right < 0).sum())
    trace = trace_segment(nn.Sequential(body, nn.ReLU(), head), start, end)
    assert expected > 50
    assert trace.crossings == expected


def test_values_lost_to_rounding_are_refused_by_layer():
    class Drowned(nn.Module):
        def forward(self, x):
            return torch.relu((x + 1e13) - 1e13)

    net = nn.Sequential(nn.Linear(4, 4), Drowned(), nn.Linear(4, 2)).double()
    with pytest.raises(UnsupportedOperation, match="relu at 1"):
        trace_segment(net, *ends(4))
