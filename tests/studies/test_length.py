"""The theory of the study `length`, and its networks."""

import math

import numpy as np
import pytest
import torch

from nlbench import registry
from nlbench.studies.length import DEPTH, WIDTH, fits_exponential, layer_factor


@pytest.mark.parametrize("variance", [2.0, 4.0])
def test_factor_of_layer_is_that_of_drawn_layers(variance):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4000, WIDTH, WIDTH, generator=generator) * math.sqrt(variance / WIDTH)
    x, step = torch.randn(2, WIDTH, generator=generator)
    moved = (weight @ step) * (weight @ x > 0)
    factors = (moved.norm(dim=1) / step.norm()).numpy()
    error = factors.std() / math.sqrt(len(factors))
    assert abs(factors.mean() - layer_factor(variance)) < 4 * error


def test_weights_have_the_variance_of_the_name():
    torch.manual_seed(0)
    build = registry.load("models", "ladders/gaussian-4")
    network = build(input_shape=(WIDTH,))
    layers = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [WIDTH] * (DEPTH + 1)
    assert all(layer.bias is None for layer in layers)
    variances = [float(layer.weight.detach().var() * WIDTH) for layer in layers]
    np.testing.assert_allclose(variances, 4, rtol=0.3)


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_growth_by_a_power_is_not_exponential(power):
    layers = np.arange(1, DEPTH + 1)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.01, DEPTH))
    assert fits_exponential(1.4**layers * noise)
    assert not fits_exponential(layers**power * noise)
