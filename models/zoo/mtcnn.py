"""The three networks of MTCNN: a cascade that finds faces and their landmarks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nlbench.subjects.weights import read_checkpoint

from .catalogue import Member

# Keyed by image side: channels, kernel and max-pooling side (0 for none) of each convolution; width
# of the hidden linear layer (0 for none); features after the convolutions; widths of the heads.
_NETWORKS = {
    12: (((10, 3, 2), (16, 3, 0), (32, 3, 0)), 0, 32, (2, 4)),
    24: (((28, 3, 3), (48, 3, 3), (64, 2, 0)), 128, 576, (2, 4)),
    48: (((32, 3, 3), (64, 3, 3), (64, 3, 2), (128, 2, 0)), 256, 1152, (2, 4, 10)),
}


class CascadeNetwork(nn.Module):
    """Convolutions with PReLUs and max pooling, and linear heads.

    The output concatenates the heads: two logits (no face, face), four corrections of the box and,
    for images of 48x48, five landmarks. Layers are named as in facenet-pytorch.

    Parameters
    ----------
    side : {12, 24, 48}
        Side of the images, for P-Net, R-Net or O-Net.

    Examples
    --------
    >>> CascadeNetwork(12)(torch.zeros(5, 3, 12, 12)).shape
    torch.Size([5, 6])
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        convolutions, hidden, features, heads = _NETWORKS[side]
        trunk: dict[str, nn.Module] = {}
        channels = 3
        depth = 0
        for depth, (width, kernel, pool) in enumerate(convolutions, start=1):
            trunk[f"conv{depth}"] = nn.Conv2d(channels, width, kernel)
            trunk[f"prelu{depth}"] = nn.PReLU(width)
            if pool:
                trunk[f"pool{depth}"] = nn.MaxPool2d(pool, 2, ceil_mode=True)
            channels = width
        trunk["columns_first"] = _ColumnsFirst()
        if hidden:
            depth += 1
            trunk[f"dense{depth}"] = nn.Linear(features, hidden)
            trunk[f"prelu{depth}"] = nn.PReLU(hidden)
        branches = {
            f"dense{depth + 1}_{number}": nn.Linear(hidden or features, width)
            for number, width in enumerate(heads, start=1)
        }
        for name, layer in {**trunk, **branches}.items():
            self.add_module(name, layer)
        self._trunk, self._heads = tuple(trunk), tuple(branches)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 3, side, side) to the concatenated heads."""
        x = images
        for name in self._trunk:
            x = self.get_submodule(name)(x)
        return torch.cat([self.get_submodule(name)(x) for name in self._heads], dim=1)


class _ColumnsFirst(nn.Module):
    """Flatten feature maps column by column, as the published weights expect."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 2, 1).flatten(1)


def build(member: Member) -> CascadeNetwork:
    """Build the network for a member's image size, freshly initialised."""
    side = member.shape[1]
    assert side is not None
    return CascadeNetwork(side)


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict, converting the 1x1 convolutions of P-Net's heads to linear layers."""
    state, _ = read_checkpoint(path)
    return {
        name.replace("conv4_", "dense4_"): tensor.squeeze() if "conv4_" in name else tensor
        for name, tensor in state.items()
    }
