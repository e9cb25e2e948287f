import pytest
import torch
from torch.nn import functional

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.models.networks.resnet import ResidualNetwork, plain20, resnet20


def expected_count(depth, channels=3, classes=10):
    """Convolutions without biases, two numbers a channel and batch norm, a linear layer."""
    blocks = (depth - 2) // 6
    total = 9 * channels * 16 + 2 * 16
    inputs = 16
    for outputs in (16, 32, 64):
        total += 9 * inputs * outputs + 9 * outputs * outputs * (2 * blocks - 1)
        total += 2 * outputs * 2 * blocks
        inputs = outputs
    return total + 64 * classes + classes


@pytest.mark.parametrize("name", ["resnet20", "plain20", "resnet56", "plain56"])
def test_the_parameters_are_those_of_the_layers_with_or_without_shortcuts(name):
    network = registry.load("models", name)(num_classes=100)
    depth = int(name[-2:])
    assert sum(p.numel() for p in network.parameters()) == expected_count(depth, classes=100)


def test_the_sizes_round_to_those_of_the_paper():
    # He et al., CVPR 2016, table 6: 0.27 M and 0.85 M.
    assert round(expected_count(20) / 1e6, 2) == 0.27
    assert round(expected_count(56) / 1e6, 2) == 0.85


@pytest.mark.parametrize("depth", [20, 56])
def test_there_are_as_many_layers_with_weights_as_the_name_says(depth):
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    layers = [m for m in ResidualNetwork(depth).modules() if isinstance(m, kinds)]
    assert len(layers) == depth


@pytest.mark.parametrize("shortcuts", [True, False])
def test_the_output_is_that_of_the_formula_written_out(shortcuts):
    torch.manual_seed(0)
    network = ResidualNetwork(20, shortcuts=shortcuts).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = functional.conv2d(x, network.stem.weight, padding=1)
    # Fresh batch norm in evaluation divides by sqrt(1 + eps) and does nothing else.
    scale = (1 + 1e-5) ** -0.5
    y = (y * scale).clamp(min=0)
    for index, block in enumerate(network.blocks):
        stride = 2 if index in (3, 6) else 1
        inner = functional.conv2d(y, block.conv1.weight, stride=stride, padding=1) * scale
        inner = functional.conv2d(inner.clamp(min=0), block.conv2.weight, padding=1) * scale
        if shortcuts:
            skip = torch.zeros_like(inner)
            grown = inner.shape[1] - y.shape[1]
            skip[:, grown // 2 : grown // 2 + y.shape[1]] = y[:, :, ::stride, ::stride]
            inner = inner + skip
        y = inner.clamp(min=0)
    expected = y.mean((2, 3)) @ network.classifier.weight.T + network.classifier.bias
    torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)


def test_plain_and_residual_start_from_the_same_weights_for_the_same_seed():
    torch.manual_seed(3)
    plain = plain20().state_dict()
    torch.manual_seed(3)
    residual = resnet20().state_dict()
    assert plain.keys() == residual.keys()
    assert all(torch.equal(plain[key], residual[key]) for key in plain)


def test_a_number_below_one_is_refused_by_name():
    with pytest.raises(RequestError, match="resnet20: in_channels is 0, expected at least 1"):
        resnet20(in_channels=0)
