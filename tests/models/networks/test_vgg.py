import math

import pytest
import torch
from torch.nn import functional

from nlbench.errors import RequestError
from nlbench.models.networks.vgg import vgg8, vgg11, vgg13, vgg16, vgg19
from nlbench.subjects.model import model_info


def parameter_count(network):
    return sum(p.numel() for p in network.parameters())


def layer_plan(network):
    plan = []
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            plan.append((*module.kernel_size, module.in_channels, module.out_channels))
        elif isinstance(module, torch.nn.Linear):
            plan.append((module.in_features, module.out_features))
        elif isinstance(module, (torch.nn.ReLU, torch.nn.AvgPool2d)):
            plan.append(type(module).__name__)
    return plan


def test_parameter_count_equals_published():
    # Gamba et al., AISTATS 2022, table 3: 174,116 on CIFAR-10.
    assert parameter_count(vgg8()) == 174_116


@pytest.mark.parametrize(("channels", "classes"), [(1, 10), (3, 100), (4, 2)])
def test_the_count_follows_channels_and_classes(channels, classes):
    expected = 174_116 + 9 * 6 * (channels - 3) + 121 * (classes - 10)
    assert parameter_count(vgg8(in_channels=channels, num_classes=classes)) == expected


def test_the_layers_are_those_of_the_paper():
    stages = [
        stage
        for a, b in ((3, 6), (6, 16), (16, 64))
        for stage in ((3, 3, a, b), "ReLU", (3, 3, b, b), "ReLU", "AvgPool2d")
    ]
    assert layer_plan(vgg8()) == [*stages, (1024, 120), "ReLU", (120, 10)]


def test_output_is_that_of_the_formula_written_out():
    network = vgg8().double()
    weights = list(network.parameters())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = x
    for layer in range(6):
        weight, bias = weights[2 * layer : 2 * layer + 2]
        expected = functional.conv2d(expected, weight, bias, padding=1).clamp(min=0)
        if layer % 2:
            n, c, h, w = expected.shape
            expected = expected.reshape(n, c, h // 2, 2, w // 2, 2).mean(dim=(3, 5))
    hidden = (expected.reshape(2, -1) @ weights[12].T + weights[13]).clamp(min=0)
    expected = hidden @ weights[14].T + weights[15]
    torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)


def test_initial_weights_follow_he_and_biases_are_zero():
    torch.manual_seed(0)
    for module in vgg8().modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
            weight = module.weight.detach().flatten()
            n, fan_in = len(weight), weight.numel() // len(module.weight)
            spread = math.sqrt(2 / fan_in)
            # Five standard errors of a normal sample's mean, deviation and kurtosis.
            assert abs(weight.mean()) < 5 * spread / math.sqrt(n)
            assert abs(weight.std() / spread - 1) < 5 / math.sqrt(2 * n)
            assert abs((weight / weight.std()).pow(4).mean() - 3) < 5 * math.sqrt(24 / n) + 0.1
            assert module.bias.count_nonzero() == 0


def test_the_global_seed_decides_the_weights():
    def first_weights(seed):
        torch.manual_seed(seed)
        return vgg8().features[0].weight

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


def test_checkpoint_ships_for_digits_and_source_is_named():
    info = model_info(vgg8)
    assert info.trained["digits"].is_file()
    assert "Linear Regions" in info.source.citation


# Convolutions a stage: Simonyan and Zisserman, ICLR 2015, table 1, columns A, B, D, E.
STAGES = {vgg11: "11222", vgg13: "22222", vgg16: "22333", vgg19: "22444"}


@pytest.mark.parametrize("build", STAGES)
def test_deep_networks_have_the_original_convolutions(build):
    expected, inputs = [], 3
    for channels, count in zip((64, 128, 256, 512, 512), STAGES[build], strict=True):
        for _ in range(int(count)):
            expected += [(3, 3, inputs, channels), "ReLU"]
            inputs = channels
        expected.append("AvgPool2d")
    head = [(512, 512), "ReLU", (512, 512), "ReLU", (512, 10)]
    plan = layer_plan(build())
    assert plan == expected + head
    assert sum(isinstance(layer, tuple) for layer in plan) == int(build.__name__[3:])


@pytest.mark.parametrize("build", STAGES)
def test_deep_networks_have_parameters_of_their_layers(build):
    total, inputs = 2 * (512 * 512 + 512) + 512 * 100 + 100, 1
    for channels, count in zip((64, 128, 256, 512, 512), STAGES[build], strict=True):
        for _ in range(int(count)):
            total += 9 * inputs * channels + channels
            inputs = channels
    assert parameter_count(build(in_channels=1, num_classes=100)) == total


def test_deep_network_maps_images_to_logits():
    assert vgg11(num_classes=5)(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("build", [vgg8, *STAGES])
def test_images_of_another_size_are_refused(build):
    with pytest.raises(RequestError):
        build(image_size=28)
