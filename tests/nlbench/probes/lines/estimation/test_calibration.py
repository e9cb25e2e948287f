"""Estimates of random networks, of kinds that did not serve to choose any constant."""

import functools
import itertools
import statistics

import pytest
import torch
from torch import nn

from nlbench.probes.lines import estimate_segment, trace_segment

POOLS = {
    "max 3, 2, 1": functools.partial(nn.MaxPool2d, 3, 2, 1),
    "max 3, 1, 1": functools.partial(nn.MaxPool2d, 3, 1, 1),
    "max 2, 1": functools.partial(nn.MaxPool2d, 2, 1),
    "max 3 by 2, 2 by 1": functools.partial(nn.MaxPool2d, (3, 2), (2, 1)),
    "max dilated": functools.partial(nn.MaxPool2d, 3, 2, 1, dilation=2),
    "max adaptive": functools.partial(nn.AdaptiveMaxPool2d, 7),
    "average 3, 2, 1": functools.partial(nn.AvgPool2d, 3, 2, 1),
    "none": nn.Identity,
}
ACTIVATIONS = {"relu": nn.ReLU, "leaky": nn.LeakyReLU, "hardtanh": nn.Hardtanh}


def random_case(pool, activation, seed, size):
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        activation(),
        pool(),
        nn.Conv2d(6, 8, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.LazyLinear(4),
    ).eval()
    start, end = 2 * torch.rand(2, 2, size, size)
    network(start[None])
    return network, start, end


@functools.cache
def calibration():
    results = []
    for i, pool in enumerate(POOLS.values()):
        for j, activation in enumerate(ACTIVATIONS.values()):
            network, *segment = random_case(pool, activation, 100 * i + j, 10)
            exact = trace_segment(network, *segment).crossings
            results.append((exact, estimate_segment(network, *segment)))
    return results


def test_estimates_of_unseen_networks_are_unbiased():
    off = [estimate.crossings - exact for exact, estimate in calibration()]
    errors = [estimate.error for _, estimate in calibration()]
    assert all(abs(x) <= error for x, error in zip(off, errors, strict=True))
    assert abs(statistics.fmean(off)) <= statistics.fmean(errors) / 10


def test_bounds_of_unseen_networks_hold():
    for exact, estimate in calibration():
        assert estimate.at_least <= exact
        assert estimate.at_least <= estimate.crossings + estimate.error


def test_estimates_converge_within_the_tolerance():
    for _, estimate in calibration():
        deviation = torch.linalg.vector_norm(estimate.above + estimate.below)
        error = torch.linalg.vector_norm(estimate.deviation_error)
        is_close = estimate.error <= estimate.tolerance * estimate.crossings
        assert estimate.converged == (is_close and bool(error <= estimate.tolerance * deviation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_crossings_behind_overlapping_windows_are_estimated_without_bias(activation):
    off, errors = [], []
    for seed in range(3):
        pool, act = POOLS["max 3, 2, 1"], ACTIVATIONS[activation]
        network, *segment = random_case(pool, act, seed, 20)
        exact = trace_segment(network, *segment).crossings
        estimate = estimate_segment(network, *segment, dtype=torch.float64)
        off.append((estimate.crossings - exact) / exact)
        errors.append(estimate.error / exact)
    assert abs(statistics.fmean(off)) <= statistics.fmean(errors) / 10


def test_tolerance_is_that_of_the_stated_error():
    network, *segment = random_case(POOLS["none"], nn.ReLU, 5, 20)
    estimate = estimate_segment(network, *segment, tolerance=5e-3)
    assert estimate.converged
    assert estimate.error <= 5e-3 * estimate.crossings


def nearly_constant_case(seed, scale, width=100, depth=4):
    """Return an MLP whose units vary by a few roundings of the largest, and cross zero there."""
    torch.manual_seed(seed)
    sizes = [16] + [width] * depth
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    start, end = torch.randn(2, 16, dtype=torch.float64)
    x = torch.stack([start, end])
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.double()
            layer.weight *= scale if i else 1.0
            low, high = layer(x)
            layer.bias -= low + (high - low) * (1.4 * torch.rand(width) - 0.2)
            # A tenth of the units are large, which sets the limit of resolution.
            layer.bias += 1.0 * (torch.rand(width) < 0.1)
            x = layer(x).relu()
    parts = [module for layer in layers for module in (layer, nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 3).double()).float().eval(), start, end


@pytest.mark.parametrize(("seed", "scale"), list(enumerate([0.1, 0.05, 0.02])))
def test_errors_in_single_precision_cover_units_within_rounding(scale, seed):
    network, start, end = nearly_constant_case(seed, scale)
    segment = start.float(), end.float()
    exact = trace_segment(network, *segment).crossings
    estimate = estimate_segment(network, *segment, dtype=torch.float32)
    assert exact > 100
    assert abs(estimate.crossings - exact) <= estimate.error
    assert estimate.at_least <= exact
