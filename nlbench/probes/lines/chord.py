"""Integrals of the distance between a function and its chord."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChordParts:
    """Integrals of the distance between functions f and their chords g on a segment."""

    # above, below: float64 (..., k): integrals of the positive and negative parts of f - g, both
    # non-negative
    above: Tensor
    below: Tensor
    # float64 (..., k): total variation of f - g; for a piecewise-affine f, the sum of its absolute
    # changes over regions.
    variation: Tensor

    @property
    def total(self) -> Tensor:
        """Absolute deviation: the sum of above and below."""
        return self.above + self.below

    def __add__(self, other: ChordParts) -> ChordParts:
        """Add the parts of two segments."""
        return ChordParts(
            self.above + other.above, self.below + other.below, self.variation + other.variation
        )


def chord_parts(t: Tensor, values: Tensor) -> ChordParts:
    """Integrate the distance between a piecewise-linear function and its chord.

    Each interval contributes a trapezium, or two triangles where the distance changes sign.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Increasing, from 0 to 1.
    values : float64 tensor of shape (..., n, k)

    Examples
    --------
    >>> t = torch.tensor([0.0, 0.5, 1.0])
    >>> parts = chord_parts(t, torch.tensor([[0.0], [0.0], [1.0]]))
    >>> float(parts.above), float(parts.below), float(parts.variation)
    (0.0, 0.25, 1.0)
    """
    weight = t[:, None]
    first, last = values[..., :1, :], values[..., -1:, :]
    distance = values - ((1 - weight) * first + weight * last)
    width = weight.diff(dim=0)
    return ChordParts(
        _positive_part(distance, width),
        _positive_part(-distance, width),
        distance.diff(dim=-2).abs().sum(-2),
    )


def _positive_part(distance: Tensor, width: Tensor) -> Tensor:
    """Integrate the positive part of a piecewise-linear function, given by values (..., n, k)."""
    left, right = distance[..., :-1, :], distance[..., 1:, :]
    high = left.clamp(min=0) + right.clamp(min=0)
    fall = (right - left).abs()
    crossed = (left.sign() * right.sign()) < 0
    # Where the distance changes sign, the trapezium becomes a triangle, narrower by high / fall.
    fraction = torch.where(crossed, high / torch.where(crossed, fall, 1.0), 1.0)
    return (width * high * fraction).sum(-2) / 2
