"""Blended networks lie between a network without activations and the original."""

import pytest
import torch
from torch import nn

from nlbench.studies.networks.blends import BLENDED, blend


class GELUActivation(nn.Module):
    """Known by its name, as that of transformers."""

    def forward(self, x):
        return nn.functional.gelu(x)


ACTIVATIONS = (*BLENDED, nn.PReLU, GELUActivation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ends_are_the_identity_and_the_original(activation):
    network = nn.Sequential(nn.Linear(3, 8), nn.Sequential(activation()), nn.Linear(8, 2))
    state = network.state_dict()
    x = 9 * torch.randn(64, 3)
    affine = network[2](network[0](x))
    for amount in (0.0, 0.25, 1.0):
        expected = (1 - amount) * affine + amount * network(x)
        blended = blend(network, amount=amount)
        torch.testing.assert_close(blended(x), expected)
        blended.load_state_dict(state)
        torch.testing.assert_close(blended(x), expected)
    assert isinstance(network[1][0], activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivative_is_that_of_the_blend(activation):
    x = torch.tensor([-7.0, -0.5, 0.5, 7.0], dtype=torch.float64, requires_grad=True)
    network = nn.Sequential(activation()).double()
    (slope,) = torch.autograd.grad(network(x).sum(), x)
    (blended,) = torch.autograd.grad(blend(network, amount=0.25)(x).sum(), x)
    torch.testing.assert_close(blended, 0.75 + 0.25 * slope)
