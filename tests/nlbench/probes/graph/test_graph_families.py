"""Path lengths of torchvision's networks, compared with values derived by hand."""

import math
from fractions import Fraction
from functools import cache

import pytest
import torch
import torchvision
from torch.overrides import TorchFunctionMode

from nlbench.probes.graph.channel_graph import counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph


class WithoutWeights(TorchFunctionMode):
    """Builds networks whose parameters take no memory and no time."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@cache
def graph_of(name):
    with WithoutWeights():
        model = torchvision.models.get_model(name, weights=None)
    size = 299 if name == "inception_v3" else 224
    return channel_graph(model, torch.empty(1, 3, size, size, device="meta"))


def googlenet():
    # Widths of the four branches, of one, two, two and one convolutions (table 1 of the paper).
    blocks = [
        (64, 128, 32, 32), (128, 192, 96, 64), (192, 208, 48, 64), (160, 224, 64, 64),
        (128, 256, 64, 64), (112, 288, 64, 64), (256, 320, 128, 128), (256, 320, 128, 128),
        (384, 384, 128, 128),
    ]  # fmt: skip
    return 3 + sum(Fraction(a + 2 * b + 2 * c + d, a + b + c + d) for a, b, c, d in blocks)


def inception_v3():
    # Per block: width and number of convolutions of each branch; 0 where only a pooling is.
    blocks = [
        [(64, 1), (64, 2), (96, 3), (32, 1)],
        *[[(64, 1), (64, 2), (96, 3), (64, 1)]] * 2,
        [(384, 1), (96, 3), (288, 0)],
        *[[(192, 1), (192, 3), (192, 5), (192, 1)]] * 4,
        [(320, 2), (192, 4), (768, 0)],
        *[[(320, 1), (768, 2), (768, 3), (192, 1)]] * 2,
    ]
    return 5 + sum(
        Fraction(sum(width * length for width, length in block), sum(width for width, _ in block))
        for block in blocks
    )


def mean(numbers):
    return sum(numbers) / len(numbers)


def densenet121():
    channels = [Fraction(1)] * 64
    for number, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            channels += [mean(channels) + 2] * 32
        if number < 3:
            channels = [mean(channels) + 1] * (len(channels) // 2)
    return mean(channels) + 1


def shufflenet_v2_x0_5():
    def shuffled(channels):
        half = len(channels) // 2
        return [c for pair in zip(channels[:half], channels[half:], strict=True) for c in pair]

    channels = [Fraction(1)] * 24
    for width, blocks in ((48, 4), (96, 8), (192, 4)):
        first, second = mean(channels) + 1, mean(channels) + 2
        channels = shuffled([first] * (width // 2) + [second] * (width // 2))
        for _ in range(blocks - 1):
            kept, changed = channels[: width // 2], channels[width // 2 :]
            channels = shuffled(kept + [mean(changed) + 2] * (width // 2))
    return mean(channels) + 1


# A squeeze-and-excitation gate has two units and merges with what it multiplies: one more. A
# residual block with f units on its branch adds f / 2, and what follows the addition.
VALUES = {
    "alexnet": 7,
    "vgg11": 8 + 2,
    "resnet18": 1 + 8 * 2 - 4,  # per basic block: 1/2, then the unit after the addition
    "resnet50": 1 + 16 * 2,
    "squeezenet1_1": 1 + 8 * 2 + 1,
    "mobilenet_v2": 1 + 1 + 6 * 2 + 10 * 1 + 1,
    # Inverted residuals of which 6 change the shape, and 4 + 5 of the others have a gate.
    "mobilenet_v3_small": 1 + 2 + 2 + 1 + 3 + 2 * 1.5 + 3 + 1.5 + 3 + 2 * 1.5 + 1 + 1,
    "mnasnet0_5": 2 + 6 * 2 + (2 + 2 + 2 + 1 + 3) * 1 + 1,
    # Blocks per stage 1, 2, 2, 3, 3, 4, 1: the first of each has no residual.
    "efficientnet_b0": 1 + 2 + 6 * 3 + (1 + 1 + 2 + 2 + 3) * 1.5 + 1,
    "regnet_y_400mf": 1 + 16 * 2.5,
    "convnext_tiny": 18 * 0.5,
    "vit_b_32": 12 * 0.5,
    "swin_t": 12 * 0.5,
    "swin_v2_t": 12 * 0.5,
    # A gated inverted residual, then two attention blocks with one unit each; a tanh at the end.
    "maxvit_t": 1 + 11 * (1.5 + 2 * 0.5) + 1,
    "googlenet": googlenet(),
    "inception_v3": inception_v3(),
    "densenet121": densenet121(),
    "shufflenet_v2_x0_5": shufflenet_v2_x0_5(),
}


@pytest.mark.parametrize("name", VALUES)
def test_walked_lengths_equal_lengths_by_hand(name):
    assert walked_length(graph_of(name)) == pytest.approx(float(VALUES[name]), abs=1e-12)


def test_the_paths_of_a_resnet18_are_counted():
    # Paths and units met per channel, in whole numbers: layers of equal channels.
    n, s, width = 3, 0, 64
    s += n
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            first_n, first_s = width * n, width * s + width * n
            branch_n, branch_s = channels * first_n, channels * first_s
            is_new = stage > 0 and block == 0
            kept_n, kept_s = (width * n, width * s) if is_new else (n, s)
            n, s, width = branch_n + kept_n, branch_s + kept_s, channels
            s += n
    lengths = counted_lengths(graph_of("resnet18"))
    assert lengths.mean == pytest.approx(float(Fraction(s, n)), rel=1e-12)
    assert lengths.log10_paths == pytest.approx(math.log10(1000 * 512 * n))


def test_the_paths_of_a_densenet121_are_counted():
    def mixed(channels, units, copies):
        n, s = sum(n for n, _ in channels), sum(s for _, s in channels)
        return [(n, s + units * n)] * copies

    channels = [(3, 3)] * 64
    for number, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            one = mixed([(n, s + n) for n, s in channels], 1, 128)
            channels = channels + mixed(one, 0, 32)
        if number < 3:
            channels = mixed([(n, s + n) for n, s in channels], 0, len(channels) // 2)
    n, s = mixed([(n, s + n) for n, s in channels], 0, 1)[0]
    assert counted_lengths(graph_of("densenet121")).mean == pytest.approx(
        float(Fraction(s, n)), rel=1e-12
    )


def test_plain_networks_have_one_path_length():
    for name, depth in (("alexnet", 7), ("vgg11", 10), ("squeezenet1_1", 18)):
        assert counted_lengths(graph_of(name)).mean == pytest.approx(depth, rel=1e-12)
