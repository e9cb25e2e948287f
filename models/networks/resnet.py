"""Residual networks for 32×32 images, and the same networks without their shortcuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.citation import Source
from nlbench.subjects.model import model

from .vgg import LINEAR_REGIONS, check_numbers, initialize

HE = Source(
    "K. He, X. Zhang, S. Ren, J. Sun. Deep Residual Learning for Image Recognition. CVPR, 2016.",
    "section 4.2",
)


class OptionABlock(nn.Module):
    """Two 3×3 convolutions with batch norm, and an optional shortcut.

    If the shape changes, the shortcut takes every second pixel and pads the channels with zeros on
    both sides (option A, without parameters).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, *, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut = shortcut
        self.stride = stride
        self.added_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.shortcut:
            y = y + self._shortcut(x)
        return self.relu2(y)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.added_channels:
            before = self.added_channels // 2
            x = functional.pad(x, (0, 0, 0, 0, before, self.added_channels - before))
        return x


class ResidualNetwork(nn.Module):
    """A 3×3 stem and three stages of blocks with 16, 32 and 64 channels.

    It has 6n + 2 layers with weights for n blocks per stage, and as many parameters without
    `shortcuts`, as the plain network. Batch norm follows every convolution;
    average pooling and a linear layer follow the last stage. Convolutions are initialised as in He
    et al. (Gaussian, variance 2 / fan-in), other layers with PyTorch's defaults.

    Examples
    --------
    >>> sum(p.numel() for p in ResidualNetwork(20).parameters())
    269722
    """

    def __init__(
        self, depth: int, in_channels: int = 3, num_classes: int = 10, *, shortcuts: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        blocks: list[nn.Module] = []
        inputs = 16
        for outputs in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                stride = 1 if inputs == outputs else 2
                blocks.append(OptionABlock(inputs, outputs, stride, shortcut=shortcuts))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) for images of shape (batch, channels, h, w)."""
        features = self.pool(self.blocks(self.relu(self.bn(self.stem(images)))))
        return self.classifier(torch.flatten(features, 1))


def _declare(
    name: str, network: Callable[[int, int], nn.Module], source: Source, recipe: str = "vanilla"
) -> Callable[..., nn.Module]:
    """Return the function that builds a network for numbers of channels and classes."""

    def build(in_channels: int = 3, num_classes: int = 10) -> nn.Module:
        numbers = {"in_channels": in_channels, "num_classes": num_classes}
        check_numbers(name.replace("_", "-"), **numbers)
        return network(in_channels, num_classes)

    build.__name__ = build.__qualname__ = name
    return model(source=source, recipe=recipe)(build)


resnet20 = _declare("resnet20", partial(ResidualNetwork, 20), HE)
"""ResNet20 for 32×32 images, with batch norm and parameter-free shortcuts."""

resnet56 = _declare("resnet56", partial(ResidualNetwork, 56), HE)
"""ResNet56 for 32×32 images, with batch norm and parameter-free shortcuts."""

plain20 = _declare("plain20", partial(ResidualNetwork, 20, shortcuts=False), HE)
"""ResNet20 without its shortcuts, with the same number of layers and parameters."""

plain56 = _declare("plain56", partial(ResidualNetwork, 56, shortcuts=False), HE)
"""ResNet56 without its shortcuts, with the same number of layers and parameters."""


FIXUP_STD = 1e-6
"""Standard deviation of the weights that Fixup sets to zero."""

FIXUP = Source(
    f"{LINEAR_REGIONS.citation} Initialisation after H. Zhang, Y. N. Dauphin, T. Ma. "
    "Fixup Initialization: Residual Learning Without Normalization. ICLR, 2019.",
    "appendix B, table 3",
)


class FixupBlock(nn.Module):
    """Two 3×3 convolutions with biases and a shortcut: ReLU(conv(ReLU(conv(x))) + shortcut(x)).

    The shortcut is the identity, or a 1×1 convolution without bias if the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        keeps_shape = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = (
            nn.Identity() if keeps_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        return self.relu2(self.conv2(self.relu1(self.conv1(x))) + self.shortcut(x))


class ResNet18(nn.Module):
    """Eight residual blocks with base width w, without normalisation.

    It has a 3×3 stem of w channels, four stages of two blocks with w, 2w, 4w and 8w channels,
    average pooling, and a linear layer. The stages after the first halve the resolution. All 3×3
    convolutions have biases.

    The initialisation is Fixup's without the extra scalars. All biases are zero. With L = 8
    residual branches of m = 2 layers, the first layer of each branch is initialised as in He et
    al., scaled by L^(-1 / (2m - 2)). The last layer of each branch and the linear layer, which
    Fixup sets to zero, are Gaussian with standard deviation 1e-6. Stem and shortcuts are
    initialised as in He et al. (Gaussian, variance 2 / fan-in).

    Examples
    --------
    >>> sum(p.numel() for p in ResNet18(16).parameters())
    700042
    """

    def __init__(self, width: int, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1)
        self.relu = nn.ReLU()
        blocks: list[FixupBlock] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [
                FixupBlock(inputs, outputs, 2 if stage else 1),
                FixupBlock(outputs, outputs, 1),
            ]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)
        initialize(self)
        with torch.no_grad():
            for block in blocks:
                block.conv1.weight.mul_(1 / math.sqrt(len(blocks)))
                block.conv2.weight.normal_(std=FIXUP_STD)
            self.classifier.weight.normal_(std=FIXUP_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) for images of shape (batch, channels, h, w)."""
        features = self.pool(self.blocks(self.relu(self.stem(images))))
        return self.classifier(torch.flatten(features, 1))


resnet18_w4 = _declare("resnet18_w4", partial(ResNet18, 4), FIXUP, "adam")
"""ResNet18 of base width 4 from the linear-regions paper, no batch norm."""

resnet18_w8 = _declare("resnet18_w8", partial(ResNet18, 8), FIXUP, "adam")
"""ResNet18 of base width 8 from the linear-regions paper, no batch norm."""

resnet18_w16 = _declare("resnet18_w16", partial(ResNet18, 16), FIXUP, "adam")
"""ResNet18 of base width 16 from the linear-regions paper, no batch norm."""

resnet18_w24 = _declare("resnet18_w24", partial(ResNet18, 24), FIXUP, "adam")
"""ResNet18 of base width 24 from the linear-regions paper, no batch norm."""

resnet18_w32 = _declare("resnet18_w32", partial(ResNet18, 32), FIXUP, "adam")
"""ResNet18 of base width 32 from the linear-regions paper, no batch norm."""

resnet18_w64 = _declare("resnet18_w64", partial(ResNet18, 64), FIXUP, "adam")
"""ResNet18 of base width 64 from the linear-regions paper, no batch norm."""
