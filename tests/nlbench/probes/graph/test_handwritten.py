"""Modules that write out an activation or a norm are followed as a whole."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.probes.graph.graph_observation import channel_graph


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + 1e-6))


class Squares(nn.Module):
    def forward(self, x):
        return x.pow(2).sum(-1, keepdim=True) * x


def _network(activation: nn.Module, norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), norm, activation, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)
    return nn.Sequential(*layers)


def test_the_graph_is_that_of_pytorchs_own_modules():
    written = channel_graph(_network(NewGELU(), Norm(6)), torch.zeros(1, 4))
    own = channel_graph(_network(nn.GELU(), nn.RMSNorm(6)), torch.zeros(1, 4))
    assert [(unit.site, unit.size) for unit in written.units] == [("2", 6), ("4", 5)]
    assert [(unit.site, unit.size) for unit in own.units] == [("2", 6), ("4", 5)]
    x = torch.randn(16, 4)
    for measure in ("pathlength", "linear-units"):
        values = [
            nlbench.evaluate(network, x, [measure])[measure].summary["value"]
            for network in (_network(NewGELU(), Norm(6)), _network(nn.GELU(), nn.RMSNorm(6)))
        ]
        assert values[0] == values[1]


def test_unsupported_functions_raise():
    with pytest.raises(nlbench.UnsupportedOperation):
        channel_graph(_network(nn.ReLU(), Squares()), torch.zeros(1, 4))
