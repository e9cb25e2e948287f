"""Data by a third party: stripes, lying or standing."""

import torch

import nlbench


def stripes():
    """Draw lying and standing stripes of all widths and places, 1 x 8 x 8."""
    items = []
    for width in (1, 2, 3):
        for shift in range(8):
            line = ((torch.arange(8) + shift) // width % 2).float()
            items += [(line.expand(1, 8, 8), 0), (line[:, None].expand(1, 8, 8), 1)]
    return nlbench.Dataset(
        name="stripes",
        train=items,
        test=items,
        shape=(1, 8, 8),
        classes=2,
        mean=(0.5,),
        std=(0.5,),
        preprocessing="0 and 1, scaled to -1 and 1",
    )
