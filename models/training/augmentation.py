"""Random shifts and flips of images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nlbench.errors import RequestError


def augment(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift and flip each image independently.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
        Before normalisation. Pixels shifted in from outside are 0 (black).
    shift : int
        Maximum shift in pixels along either axis. All integers from -shift to shift are equally
        likely.
    flip : bool
        Flip horizontally with probability 0.5.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 2, 2] = 1
    >>> shifted = augment(image, 2, True, torch.Generator().manual_seed(0))
    >>> shifted.shape, shifted.sum().item()
    (torch.Size([1, 1, 5, 5]), 1.0)
    """
    if images.ndim != 4:
        raise RequestError(
            f"augmentation requires images of shape (n, channels, height, width), "
            f"got {tuple(images.shape)}"
        )
    n, _, height, width = images.shape
    if shift:
        shifts = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
        rows, columns = (shifts + torch.arange(size) for size in (height, width))
        padded = functional.pad(images, (shift,) * 4)
        image = torch.arange(n)[:, None, None]
        images = padded[image, :, rows[0, :, :, None], columns[1, :, None, :]].permute(0, 3, 1, 2)
    if flip:
        is_flipped = torch.rand(n, generator=generator) < 0.5
        images = torch.where(is_flipped[:, None, None, None], images.flip(3), images)
    return images.contiguous()
