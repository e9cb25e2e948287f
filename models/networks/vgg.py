"""VGG-style networks for 32×32 images, with average pooling, as in the linear-regions paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.subjects.model import model

__all__ = ["VGG", "VGG8", "check_numbers", "vgg8", "vgg11", "vgg13", "vgg16", "vgg19"]


LINEAR_REGIONS = Source(
    citation=(
        "M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman. "
        "Are All Linear Regions Created Equal? AISTATS, 2022."
    ),
    equation="appendix B, table 3",
)

SIMONYAN = Source(
    citation=(
        "K. Simonyan, A. Zisserman. Very Deep Convolutional Networks for Large-Scale Image "
        "Recognition. ICLR, 2015."
    ),
    equation="table 1, configurations A, B, D and E",
)

CONVOLUTIONS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
"""From the number of layers with weights to the convolutions of each of the five stages."""


class VGG8(nn.Module):
    """Six convolutions and two linear layers, with average pooling and ReLU.

    3×3 convolutions of 6, 6, 16, 16, 64 and 64 channels with biases, a 2×2 average
    pooling after every second one, then linear layers 1024 → 120 → classes; a ReLU
    after each layer but the last. Average pooling keeps the pooling linear, so that
    every nonlinearity is a ReLU. Initialised after He et al.: weights normal with
    variance 2 / fan-in, biases zero.

    Parameters
    ----------
    in_channels : int
        Channels of the input image.
    num_classes : int
        Number of logits.

    Examples
    --------
    >>> network = VGG8()
    >>> sum(p.numel() for p in network.parameters())
    174116
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_stage(in_channels, 6), *_stage(6, 16), *_stage(16, 64), nn.Flatten()
        )
        self.classifier = nn.Sequential(
            nn.Linear(1024, 120), nn.ReLU(), nn.Linear(120, num_classes)
        )
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) of images of shape (batch, channels, 32, 32)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


class VGG(nn.Module):
    """VGG11, 13, 16 or 19 for 32×32 images, with average pooling.

    The 3×3 convolutions of Simonyan and Zisserman, with biases and without batch norm:
    five stages of 64, 128, 256, 512 and 512 channels, each ended by a 2×2 average
    pooling, which leaves one pixel; then linear layers 512 → 512 → 512 → classes, so that
    the number of layers is the one in the name; a ReLU after each layer but the last.
    Average in place of max pooling, as in the linear-regions paper, keeps every
    nonlinearity a ReLU. Initialised after He et al., biases zero.

    Parameters
    ----------
    depth : {11, 13, 16, 19}
        Layers with weights.
    in_channels, num_classes : int

    Examples
    --------
    >>> sum(p.numel() for p in VGG(16).parameters())
    15245130
    """

    def __init__(self, depth: int, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = in_channels
        for outputs, count in zip((64, 128, 256, 512, 512), CONVOLUTIONS[depth], strict=True):
            layers += _stage(inputs, outputs, count)
            inputs = outputs
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) of images of shape (batch, channels, 32, 32)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def _stage(inputs: int, outputs: int, count: int = 2) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for index in range(count):
        layers += [nn.Conv2d(outputs if index else inputs, outputs, 3, padding=1), nn.ReLU()]
    return [*layers, nn.AvgPool2d(2)]


def _initialize(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_numbers(name: str, **numbers: int) -> None:
    """Refuse a number of channels or classes below 1.

    Raises
    ------
    nlbench.RequestError
    """
    for key, number in numbers.items():
        if number < 1:
            raise RequestError(f"{name}: {key} is {number}, expected at least 1")


def _check_size(name: str, image_size: int) -> None:
    if image_size != 32:
        raise RequestError(
            f"{name} takes images of 32x32 pixels, these are {image_size}x{image_size}"
        )


@model(
    trained={"digits": Path(__file__).parent / "checkpoints" / "vgg8-digits.safetensors"},
    source=LINEAR_REGIONS,
)
def vgg8(in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> VGG8:
    """VGG8 of the linear-regions paper, for 32×32 images.

    Parameters
    ----------
    in_channels : int
        Channels of the input image, at least 1.
    num_classes : int
        Number of logits, at least 1.
    image_size : int
        32; anything else is refused.

    Returns
    -------
    VGG8
        174,116 parameters for 3 channels and 10 classes, freshly initialised from
        PyTorch's global random generator.

    Raises
    ------
    nlbench.RequestError
        If a number isn't positive, or the images aren't 32×32.

    Examples
    --------
    >>> import torch
    >>> vgg8(num_classes=5)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """
    check_numbers("vgg8", in_channels=in_channels, num_classes=num_classes)
    _check_size("vgg8", image_size)
    return VGG8(in_channels, num_classes)


def _registered(depth: int) -> Callable[..., VGG]:
    def build(in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> VGG:
        check_numbers(f"vgg{depth}", in_channels=in_channels, num_classes=num_classes)
        _check_size(f"vgg{depth}", image_size)
        return VGG(depth, in_channels, num_classes)

    build.__name__ = build.__qualname__ = f"vgg{depth}"
    build.__doc__ = f"VGG{depth} for 32×32 images, with average pooling."
    return model(source=SIMONYAN)(build)


vgg11 = _registered(11)
"""VGG11 for 32×32 images, with average pooling."""

vgg13 = _registered(13)
"""VGG13 for 32×32 images, with average pooling."""

vgg16 = _registered(16)
"""VGG16 for 32×32 images, with average pooling."""

vgg19 = _registered(19)
"""VGG19 for 32×32 images, with average pooling."""
