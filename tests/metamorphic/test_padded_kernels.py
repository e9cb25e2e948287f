"""A kernel whose outer taps meet only padding is the cropped kernel, and has the same trace."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from nlbench import evaluate
from nlbench.probes.lines import trace_segment


def cropped(layer, by):
    """Return the convolution without the outer `by` taps at each side of every axis."""
    axes = layer.weight.ndim - 2
    smaller = deepcopy(layer)
    inner = (slice(None), slice(None)) + (slice(by, -by),) * axes
    smaller.weight = nn.Parameter(layer.weight.detach()[inner].clone())
    smaller.kernel_size = tuple(k - 2 * by for k in layer.kernel_size)
    if layer.padding != "same":
        pairs = zip(layer.padding, layer.dilation, strict=True)
        smaller.padding = tuple(p - by * d for p, d in pairs)
    return smaller


def stacks(make_layer, depth, by, channels=8):
    """Return a stack of convolutions with batch norm, and the same with cropped kernels."""
    torch.manual_seed(depth)
    layers, smaller = [], []
    for _ in range(depth):
        layer = make_layer(channels)
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[layer.weight.ndim - 2]
        rest = [norm(channels), nn.ReLU()]
        layers += [layer, *rest]
        smaller += [cropped(layer, by), *deepcopy(rest)]
    return nn.Sequential(*layers).double().train(), nn.Sequential(*smaller).double()


def calibrated(make_layer, depth, by, size, axes):
    """Return the two stacks with batch statistics, after a check that they are one function."""
    network, smaller = stacks(make_layer, depth, by)
    x = torch.randn(64, 8, *[size] * axes, dtype=torch.float64)
    for layer in network:  # Exact statistics of each layer, as after a long training.
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = None
    with torch.no_grad():
        network(x)
    network.eval()
    statistics = {k: v for k, v in network.state_dict().items() if "weight" not in k}
    smaller.load_state_dict(statistics, strict=False)
    smaller.eval()
    with torch.no_grad():
        torch.testing.assert_close(network(x), smaller(x))
    return network, smaller, x


def assert_same_trace(network, smaller, x):
    traces = [trace_segment(net, x[0], x[1]) for net in (network, smaller)]
    assert traces[1].crossings > 3
    assert traces[0].crossings == traces[1].crossings
    torch.testing.assert_close(traces[0].t, traces[1].t, rtol=0, atol=1e-10)


LAYERS = {
    # name: (layer, cropped taps, map's side, axes)
    "wide 1x1": (lambda c: nn.Conv2d(c, c, 7, padding=3), 3, 1, 2),
    "dilated": (lambda c: nn.Conv2d(c, c, 3, padding=2, dilation=2), 1, 2, 2),
    "same": (lambda c: nn.Conv2d(c, c, 3, padding="same", dilation=3), 1, 2, 2),
    "strided": (lambda c: nn.Conv2d(c, c, 3, padding=1, stride=2), 1, 1, 2),
    "grouped": (lambda c: nn.Conv2d(c, c, 5, padding=2, groups=4), 2, 1, 2),
    "line": (lambda c: nn.Conv1d(c, c, 9, padding=4), 3, 2, 1),
    "volume": (lambda c: nn.Conv3d(c, c, 3, padding=1), 1, 1, 3),
    "transposed, 2x2": (lambda c: nn.ConvTranspose2d(c, c, 9, padding=4, groups=2), 3, 2, 2),
    "transposed, strided": (lambda c: nn.ConvTranspose1d(c, c, 5, padding=2, stride=3), 2, 1, 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_taps_that_meet_only_padding_change_no_trace(name):
    make_layer, by, size, axes = LAYERS[name]
    network, smaller, x = calibrated(make_layer, 12, by, size, axes)
    assert_same_trace(network, smaller, x)


def test_kernels_padded_with_zeros_have_the_same_trace():
    network, smaller, x = calibrated(lambda c: nn.Conv2d(c, c, 7, padding=3), 12, 2, 1, 2)
    # The inner 3 × 3 taps are the same function at every size of map if the others are 0.
    with torch.no_grad():
        for layer in network[::3]:
            inner = layer.weight[:, :, 2:-2, 2:-2].clone()
            layer.weight.zero_()
            layer.weight[:, :, 2:-2, 2:-2] = inner
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    assert_same_trace(network, smaller, x)


def test_windows_over_padding_are_the_identity():
    torch.manual_seed(0)
    layers = [[nn.Conv2d(8, 8, 1), nn.ReLU()] for _ in range(10)]
    plain = nn.Sequential(*(layer for block in layers for layer in block)).double()
    pooled = [[nn.AvgPool2d(5, 1, 2, count_include_pad=False), conv, relu] for conv, relu in layers]
    network = nn.Sequential(*(layer for block in pooled for layer in block))
    assert_same_trace(network, plain, torch.randn(2, 8, 1, 1, dtype=torch.float64))


def test_zero_padded_kernels_change_no_measure():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip
    padded = deepcopy(plain)
    for index in (0, 2):
        layer = plain[index]
        wide = nn.Conv2d(layer.in_channels, 4, 5, padding=2)
        inner = (5 - layer.kernel_size[0]) // 2
        wide.weight.data.zero_()
        wide.weight.data[:, :, inner:-inner, inner:-inner] = layer.weight.data
        wide.bias.data = layer.bias.data.clone()
        padded[index] = wide
    x = torch.randn(24, 2, 4, 4)
    settings = {"lines.number": 1, "lines.paths": "pairs"}
    expected, found = (
        evaluate(m, x, "*", labels=torch.arange(24) % 3, settings=settings, errors="none")
        for m in (plain.eval(), padded.eval())
    )
    for record, other in zip(expected.records, found.records, strict=True):
        name = record.measure.name
        assert other.result.status == record.result.status, (name, other.result.reason)
        summary = pytest.approx(record.result.summary, rel=1e-4, abs=1e-6)
        assert other.result.summary == summary, name
