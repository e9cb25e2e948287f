"""The networks of the benchmark's ladders have the properties in their names."""

import pytest
import torch
from torch import nn

from nlbench import registry
from nlbench.studies.networks.planted import DEPTHS, SLOPES, TWINS


def built(name, seed=0, **given):
    torch.manual_seed(seed)
    return registry.load("models", f"ladders/{name}")(**given).eval()


def test_leaky_networks_share_weights_and_end_affine():
    inputs = torch.rand(3, 3, 32, 32)
    networks = {slope: built(f"cnn-slope{slope:g}") for slope in SLOPES}
    states = [network.state_dict() for network in networks.values()]
    assert all(torch.equal(states[0][n], state[n]) for state in states for n in states[0])
    affine = networks[1].double()
    a, b, c = affine(inputs.double())
    middle = affine(inputs[:1].double() - inputs[1:2].double() + inputs[2:].double())[0]
    torch.testing.assert_close(middle, a - b + c, rtol=0, atol=1e-10)
    relus = [m for m in networks[0].modules() if isinstance(m, nn.ReLU)]
    leaky = [m for m in networks[0.25].modules() if isinstance(m, nn.LeakyReLU)]
    assert len(relus) == len(leaky) == 5
    assert {m.negative_slope for m in leaky} == {0.25}


def test_leaky_network_without_slope_is_plain():
    inputs = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(built("cnn")(inputs), built("cnn-slope0")(inputs))


@pytest.mark.parametrize("depth", DEPTHS)
def test_random_perceptrons_have_their_gain_and_depth(depth):
    plain = built(f"mlp-tanh-gain1-depth{depth}")
    bold = built(f"mlp-tanh-gain3-depth{depth}")
    assert sum(isinstance(layer, nn.Tanh) for layer in bold) == depth
    torch.testing.assert_close(bold[0].weight, 3 * plain[0].weight)
    assert torch.equal(bold[0].bias, plain[0].bias)


@pytest.mark.parametrize("twin", TWINS)
def test_twins_are_one_function(twin):
    inputs = torch.randn(5, 8)
    plain, other = built("twin-plain")(inputs), built(f"twin-{twin}")(inputs)
    if twin == "outputs-scaled":
        other = other / 3.7
    elif twin == "outputs-moved":
        other = other - torch.linspace(-2, 3, 10)
    elif twin == "outputs-rotated":
        # All that a rotation leaves.
        plain, other = plain @ plain.T, other @ other.T
    torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)
    assert built("twin-doubled")[0].out_features == 2 * built("twin-plain")[0].out_features
