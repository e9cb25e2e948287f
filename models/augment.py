"""Images moved and mirrored at random, as a network sees them in training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nlbench.errors import RequestError

__all__ = ["augment"]


def augment(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Move and mirror each image on its own.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
        Before normalisation; what moves in from outside is 0, black.
    shift : int
        Most pixels along either axis; each whole number of -shift … shift is equally likely.
    flip : bool
        Mirror left to right with probability one half.
    generator : torch.Generator
        Of the CPU; decides everything.

    Returns
    -------
    tensor of the same shape
        A copy.

    Raises
    ------
    nlbench.RequestError
        If these are not images.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 2, 2] = 1
    >>> moved = augment(image, 2, True, torch.Generator().manual_seed(0))
    >>> moved.shape, moved.sum().item()
    (torch.Size([1, 1, 5, 5]), 1.0)
    """
    if images.ndim != 4:
        raise RequestError(
            f"augmentation needs images of shape (n, channels, height, width), "
            f"got {tuple(images.shape)}"
        )
    n, _, height, width = images.shape
    if shift:
        moves = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
        rows, columns = (moves + torch.arange(size) for size in (height, width))
        padded = functional.pad(images, (shift,) * 4)
        which = torch.arange(n)[:, None, None]
        images = padded[which, :, rows[0, :, :, None], columns[1, :, None, :]].permute(0, 3, 1, 2)
    if flip:
        mirrored = torch.rand(n, generator=generator) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    return images.contiguous()
