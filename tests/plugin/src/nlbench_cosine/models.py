"""Models by a third party: plain functions."""

from torch import nn

from .hat import hat


def tinynet(in_channels=3, num_classes=10):
    """Build a convolution, a ReLU used twice, and a linear layer."""
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=4),
        relu,
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 1),
        relu,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


class Hat(nn.Module):
    """Calls the operation."""

    def forward(self, x):
        return hat(x)


def hatnet(in_channels=3, num_classes=10, image_size=32):
    """Build two linear layers with hats between them."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * image_size**2, 16), Hat(), nn.Linear(16, num_classes)
    )
