"""VGG networks for 32×32 images with average pooling, as in the linear-regions paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.subjects.model import model

LINEAR_REGIONS = Source(
    "M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman. "
    "Are All Linear Regions Created Equal? AISTATS, 2022.",
    "appendix B, table 3",
)

SIMONYAN = Source(
    "K. Simonyan, A. Zisserman. Very Deep Convolutional Networks for Large-Scale Image "
    "Recognition. ICLR, 2015.",
    "table 1, configurations A, B, D and E",
)

SHAPES: Mapping[int, tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = {
    8: (((6, 2), (16, 2), (64, 2)), (120,)),
    11: (((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)), (512, 512)),
    13: (((64, 2), (128, 2), (256, 2), (512, 2), (512, 2)), (512, 512)),
    16: (((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), (512, 512)),
    19: (((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), (512, 512)),
}
"""Channels and number of convolutions of each stage, and widths of the hidden linear layers, keyed
by depth."""


class VGG(nn.Module):
    """VGG8, 11, 13, 16 or 19 for 32×32 images, with average pooling.

    Stages of 3×3 convolutions with biases and without batch norm, each ending in 2×2 average
    pooling, are followed by linear layers. Each layer but the last has a ReLU. VGG8 is from the
    linear-regions paper: two convolutions each of 6, 16 and 64 channels, and linear layers
    1024 → 120 → classes. The others have the convolutions of Simonyan and Zisserman, five stages
    of 64, 128, 256, 512 and 512 channels that leave one pixel, and linear layers
    512 → 512 → 512 → classes. As in the linear-regions paper, average pooling replaces max
    pooling, so ReLU is the only nonlinearity. Initialised by `initialize`.

    Examples
    --------
    >>> [sum(p.numel() for p in VGG(depth).parameters()) for depth in (8, 16)]
    [174116, 15245130]
    """

    def __init__(self, depth: int, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        stages, hidden = SHAPES[depth]
        layers: list[nn.Module] = []
        inputs = in_channels
        for outputs, count in stages:
            for _ in range(count):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.AvgPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        layers = []
        inputs *= (32 >> len(stages)) ** 2
        for outputs in hidden:
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            inputs = outputs
        self.classifier = nn.Sequential(*layers, nn.Linear(inputs, num_classes))
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) for images (batch, channels, 32, 32)."""
        return self.classifier(self.features(images))


def initialize(network: nn.Module) -> None:
    """Initialise as in He et al.: Gaussian weights with variance 2 / fan-in, zero biases."""
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_numbers(name: str, **numbers: int) -> None:
    """Raise `nlbench.RequestError` if a number of channels or classes is below 1."""
    for key, number in numbers.items():
        if number < 1:
            raise RequestError(f"{name}: {key} is {number}, expected at least 1")


def _declare(
    depth: int, source: Source, trained: Mapping[str, Path] | None = None
) -> Callable[..., VGG]:
    name = f"vgg{depth}"

    def build(in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> VGG:
        check_numbers(name, in_channels=in_channels, num_classes=num_classes)
        if image_size != 32:
            raise RequestError(
                f"{name} takes images of 32x32 pixels, not {image_size}x{image_size}"
            )
        return VGG(depth, in_channels, num_classes)

    build.__name__ = build.__qualname__ = name
    return model(trained=trained, source=source)(build)


vgg8 = _declare(
    8, LINEAR_REGIONS, {"digits": Path(__file__).parent / "checkpoints" / "vgg8-digits.safetensors"}
)
"""VGG8 of the linear-regions paper, for 32×32 images: 174,116 parameters."""

vgg11 = _declare(11, SIMONYAN)
"""VGG11 for 32×32 images, with average pooling."""

vgg13 = _declare(13, SIMONYAN)
"""VGG13 for 32×32 images, with average pooling."""

vgg16 = _declare(16, SIMONYAN)
"""VGG16 for 32×32 images, with average pooling."""

vgg19 = _declare(19, SIMONYAN)
"""VGG19 for 32×32 images, with average pooling."""
