"""VGG8: the small VGG-style network of the linear-regions paper."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.model import model

__all__ = ["VGG8", "vgg8"]

LINEAR_REGIONS = Source(
    citation=(
        "M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman. "
        "Are All Linear Regions Created Equal? AISTATS, 2022."
    ),
    equation="appendix B, table 3",
)


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
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes) of images of shape (batch, channels, 32, 32)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
    ]


@model(
    trained={"digits": Path(__file__).parent / "checkpoints" / "vgg8-digits.safetensors"},
    source=LINEAR_REGIONS,
)
def vgg8(in_channels: int = 3, num_classes: int = 10) -> VGG8:
    """VGG8 of the linear-regions paper, for 32×32 images.

    Parameters
    ----------
    in_channels : int
        Channels of the input image, at least 1.
    num_classes : int
        Number of logits, at least 1.

    Returns
    -------
    VGG8
        174,116 parameters for 3 channels and 10 classes, freshly initialised from
        PyTorch's global random generator.

    Raises
    ------
    nlbench.RequestError
        If a number isn't positive.

    Examples
    --------
    >>> import torch
    >>> vgg8(num_classes=5)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """
    for name, number in (("in_channels", in_channels), ("num_classes", num_classes)):
        if number < 1:
            raise RequestError(f"vgg8: {name} is {number}, expected at least 1")
    return VGG8(in_channels, num_classes)
