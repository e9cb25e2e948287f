import math

import pytest
import torch
from torch.nn import functional

from nlbench import registry
from nlbench.models.networks.resnet import (
    ResidualNetwork,
    ResNet18,
    plain20,
    resnet18_w16,
    resnet20,
)


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
def test_shortcuts_add_no_parameters(name):
    network = registry.load("models", name)(num_classes=100)
    depth = int(name[-2:])
    assert sum(p.numel() for p in network.parameters()) == expected_count(depth, classes=100)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_output_is_that_of_the_formula_written_out(shortcuts):
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


def test_plain_and_residual_start_from_same_weights():
    torch.manual_seed(3)
    plain = plain20().state_dict()
    torch.manual_seed(3)
    residual = resnet20().state_dict()
    assert plain.keys() == residual.keys()
    assert all(torch.equal(plain[key], residual[key]) for key in plain)


def expected_count_of_resnet18(width, channels=3, classes=10):
    """Weights and biases, layer by layer, from the description in the paper's table 3."""
    total = 9 * channels * width + width
    inputs = width
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        total += 9 * inputs * outputs + outputs + 3 * (9 * outputs * outputs + outputs)
        total += inputs * outputs if inputs != outputs else 0
        inputs = outputs
    return total + inputs * classes + classes


def test_width_16_has_the_published_number_of_parameters():
    # Gamba et al., AISTATS 2022, table 3: 700,042 on CIFAR-10.
    assert (
        sum(p.numel() for p in resnet18_w16().parameters())
        == 700_042
        == expected_count_of_resnet18(16)
    )


@pytest.mark.parametrize("width", [4, 8, 16, 24, 32, 64])
def test_every_registered_width_has_parameters_of_its_layers(width):
    build = registry.load("models", f"resnet18-w{width}")
    network = build(in_channels=1, num_classes=7)
    assert sum(p.numel() for p in network.parameters()) == expected_count_of_resnet18(width, 1, 7)


def test_each_relu_is_called_once_without_normalisation():
    kinds = [type(module).__name__ for module in ResNet18(4).modules()]
    assert "BatchNorm2d" not in kinds
    assert kinds.count("ReLU") == 17


def test_output_of_resnet18_equals_the_formula():
    torch.manual_seed(0)
    network = ResNet18(4).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2)
    named = dict(network.named_parameters())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def convolved(y, name, stride=1):
        weight = named[f"{name}.weight"]
        pad = weight.shape[-1] // 2
        return functional.conv2d(y, weight, named.get(f"{name}.bias"), stride, pad)

    y = convolved(x, "stem").clamp(min=0)
    for block in range(8):
        stride = 2 if block in (2, 4, 6) else 1
        inner = convolved(y, f"blocks.{block}.conv1", stride).clamp(min=0)
        inner = convolved(inner, f"blocks.{block}.conv2")
        skip = convolved(y, f"blocks.{block}.shortcut", stride) if stride == 2 else y
        y = (inner + skip).clamp(min=0)
    expected = y.mean((2, 3)) @ named["classifier.weight"].T + named["classifier.bias"]
    torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)


def test_branches_start_almost_silent_and_biases_zero():
    torch.manual_seed(0)
    network = ResNet18(16)
    for block in network.blocks:
        assert block.conv2.weight.std().item() == pytest.approx(1e-6, rel=0.1)
        fan_in = block.conv1.weight[0].numel()
        spread = math.sqrt(2 / fan_in) / math.sqrt(8)
        assert block.conv1.weight.std().item() == pytest.approx(spread, rel=0.1)
        assert block.conv1.bias.count_nonzero() == block.conv2.bias.count_nonzero() == 0
    assert network.classifier.weight.std().item() == pytest.approx(1e-6, rel=0.1)
    assert network.classifier.weight.count_nonzero() > 0
