"""A network with many units and little computation: 10^5 regions on a segment in a minute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZE, CHANNELS, LAYERS = 64, 4, 8


def network() -> nn.Module:
    """Return eight 3×3 convolutions of four channels on 64×64 pixels, with 131,072 ReLUs."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(LAYERS):
        layers += [nn.Conv2d(CHANNELS if i else 3, CHANNELS, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 10))
    for module in net:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.normal_(module.bias, 0, 0.1)
    return net.double().eval()


def segment() -> tuple[Tensor, Tensor]:
    """Return two noise images between which most units change sign."""
    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=generator)
    middle, half = (start + end) / 2, (end - start) / 2
    return middle - 1.5 * half, middle + 1.5 * half
