"""A convolutional network for one-dimensional signals, such as MNIST-1D's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.subjects.model import model

from .perceptrons import vector_length

if TYPE_CHECKING:
    from torch import nn

# Number of channels and stride of each convolution.
LAYERS = ((24, 1), (24, 1), (32, 2), (32, 1), (32, 1), (48, 2), (48, 1), (64, 2), (64, 1))


@model(recipe="vanilla")
def signal_cnn(input_shape: tuple[int, ...] = (40,), num_classes: int = 10) -> nn.Sequential:
    """Convolutional network for signals: nine convolutions, a hidden layer, ten ReLUs.

    Parameters
    ----------
    input_shape : tuple of int
        (length,), the length of the signals.

    Examples
    --------
    >>> import torch
    >>> signal_cnn()(torch.zeros(2, 40)).shape
    torch.Size([2, 10])
    """
    from torch import nn

    layers: list[nn.Module] = [nn.Unflatten(1, (1, vector_length(input_shape)))]
    before = 1
    for channels, stride in LAYERS:
        layers += [
            nn.Conv1d(before, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
        ]
        before = channels
    layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(before, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, num_classes))
