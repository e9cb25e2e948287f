"""Paths through input space for the probe `lines`, made from data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nlbench.errors import RequestError

__all__ = ["closed_paths", "pair_paths", "translations"]


def translations(anchors: int = 8, radius: float = 4.0) -> list[tuple[int, int]]:
    """Give whole-pixel translations on a circle.

    Anchor k is (radius cos θ, radius sin θ) with θ = 2πk / anchors, each coordinate
    rounded to the nearest whole pixel, halves away from zero: so the set is symmetric
    under change of sign of either coordinate whenever the circle's points are.

    Parameters
    ----------
    anchors : int
    radius : float
        In pixels.

    Returns
    -------
    list of (int, int)
        Right and down, in pixels.

    Examples
    --------
    >>> translations()
    [(4, 0), (3, 3), (0, 4), (-3, 3), (-4, 0), (-3, -3), (0, -4), (3, -3)]
    """
    angles = [2 * math.pi * k / anchors for k in range(anchors)]
    return [(_nearest(radius * math.cos(a)), _nearest(radius * math.sin(a))) for a in angles]


def _nearest(x: float) -> int:
    # 2.5 may come out of the cosine as 2.4999999999999996; it is meant to be a half.
    return int(math.copysign(math.floor(abs(x) + 0.5 + 1e-9), x))


def closed_paths(images: Tensor, anchors: int = 8, radius: float = 4.0) -> Tensor:
    """Make a closed path of each image: the image moved around a small circle.

    Anchors are the image translated by `translations`, with its edges replicated and no
    interpolation between pixels. The first is repeated at the end, so that segments
    between consecutive anchors close the loop.

    Normalisation commutes with translation: either normalise the images before or the
    anchors after, once.

    Parameters
    ----------
    images : tensor of shape (n, channels, height, width)
    anchors : int
        At least 2.
    radius : float
        In pixels, not negative.

    Returns
    -------
    tensor of shape (n, anchors + 1, channels, height, width)

    Raises
    ------
    nlbench.RequestError

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022: 8 anchors at
    4 pixels.

    Examples
    --------
    >>> closed_paths(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 9, 3, 32, 32])
    """
    if images.ndim != 4:
        raise RequestError(
            f"images of shape {tuple(images.shape)}, expected (n, channels, height, width)"
        )
    if anchors < 2:
        raise RequestError(f"{anchors} anchors, expected at least 2")
    if not (radius >= 0 and math.isfinite(radius)):
        raise RequestError(f"a radius of {radius}, expected 0 or more")
    moved = [_translated(images, right, down) for right, down in translations(anchors, radius)]
    return torch.stack([*moved, moved[0]], dim=1)


def _translated(images: Tensor, right: int, down: int) -> Tensor:
    height, width = images.shape[-2:]
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    return images[..., rows[:, None], columns]


def pair_paths(inputs: Tensor) -> Tensor:
    """Join samples in pairs by straight lines: 0 to 1, 2 to 3, and so on.

    An odd sample at the end is left out.

    Parameters
    ----------
    inputs : tensor of shape (n, *input)
        At least two.

    Returns
    -------
    tensor of shape (n // 2, 2, *input)

    Raises
    ------
    nlbench.RequestError

    Examples
    --------
    >>> pair_paths(torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])).tolist()
    [[[1.0], [2.0]], [[3.0], [4.0]]]
    """
    if inputs.ndim < 2 or len(inputs) < 2:
        raise RequestError(
            f"inputs of shape {tuple(inputs.shape)}, expected at least two samples (n, *input)"
        )
    pairs = len(inputs) // 2
    return inputs[: 2 * pairs].reshape(pairs, 2, *inputs.shape[1:])
