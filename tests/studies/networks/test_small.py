"""Small perceptrons by name."""

import pytest
import torch

from nlbench import registry
from nlbench.probes.lines import trace_segment
from nlbench.studies.networks.small import ACTIVATIONS, Small


@pytest.mark.parametrize("shape", [(2,), (40,), (3, 32, 32)])
def test_name_decides_width_depth_and_activation(shape):
    build = registry.load("models", "small/tanh-w5-d3")
    model = build(num_classes=7, input_shape=shape)
    inputs = torch.randn(4, *shape)
    assert model(inputs).shape == (4, 7)
    linear = [module for module in model if isinstance(module, torch.nn.Linear)]
    assert [layer.out_features for layer in linear] == [5, 5, 5, 7]
    assert linear[0].in_features == (192 if len(shape) == 3 else shape[0])
    assert sum(isinstance(module, torch.nn.Tanh) for module in model) == 3


def test_regions_of_one_layer_are_bounded_by_units():
    torch.manual_seed(0)
    model = Small().load("relu-w6-d1")(num_classes=2, input_shape=(2,))
    assert trace_segment(model, torch.tensor([-9.0, -9.0]), torch.tensor([9.0, 9.0])).regions <= 7


def test_names_are_described():
    assert Small().describe("gelu-w8-d2") == "2 hidden layers of 8 units, gelu"
    assert {name.split("-")[0] for name in Small().names()} == set(ACTIVATIONS)
