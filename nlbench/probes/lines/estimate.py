"""A network restricted to a straight segment, as far as a number of its values tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["ChordParts", "SegmentEstimate", "chord_parts"]


@dataclass(frozen=True)
class ChordParts:
    """Integrals of what lies between functions f and the chord g of [0, 1].

    Parameters
    ----------
    above, below : float64 tensor of shape (..., k)
        Of the positive and of the negative part of f - g over t, both positive.
    variation : float64 tensor of shape (..., k)
        Total variation of f - g.
    """

    above: Tensor
    below: Tensor
    variation: Tensor


def chord_parts(t: Tensor, values: Tensor) -> ChordParts:
    """Integrate what lies between a function that is affine between its values, and its chord.

    A share of the integral is a trapezium, or two triangles where the distance changes sign.

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
    share = t[:, None]
    first, last = values[..., :1, :], values[..., -1:, :]
    distance = values - ((1 - share) * first + share * last)
    width = share.diff(dim=0)
    return ChordParts(
        _positive_part(distance, width),
        _positive_part(-distance, width),
        distance.diff(dim=-2).abs().sum(-2),
    )


def _positive_part(distance: Tensor, width: Tensor) -> Tensor:
    """Integrate the positive part of a function that is affine between its values (..., n, k)."""
    left, right = distance[..., :-1, :], distance[..., 1:, :]
    high = left.clamp(min=0) + right.clamp(min=0)
    fall = (right - left).abs()
    crossed = (left.sign() * right.sign()) < 0
    # One of left and right is 0 where it is crossed: a triangle, narrower by high / fall.
    share = torch.where(crossed, high / torch.where(crossed, fall, 1.0), 1.0)
    return (width * high * share).sum(-2) / 2


@dataclass(frozen=True)
class SegmentEstimate:
    """A network restricted to a segment, without its breakpoints.

    f is the network and g the chord, the straight line between its values at the ends.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Where the network was evaluated, in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        The network's output at each. What lies between is not the linear interpolation.
    length : float
        Euclidean length of the segment in input space.
    above, below : float64 tensor of shape (k,)
        Integrals over t of the positive and of the negative part of f - g, both positive.
    variation : float64 tensor of shape (k,)
        Total variation of f - g as far as it was seen; no error speaks of it.
    deviation_error : float64 tensor of shape (k,)
        Estimated error of ``above + below``.
    crossings : float or None
        Estimated number of boundaries between affine pieces; None of a network that is not
        piecewise affine.
    at_least : int
        Boundaries that were seen: so many there are.
    error : float
        Estimated error of ``crossings``.
    contributions : mapping of str to float
        Estimated number of boundaries that each site makes; their sum is ``crossings``.
    twice : int
        Units seen to cross a boundary twice within a step of the last grid but one.
    undecided : int
        Units within rounding of a boundary at a point, where either side could be meant.
    evaluations : int
        How often the network was evaluated.
    tolerance : float
        What was asked for: errors relative to what they are of.
    converged : bool
        Whether the errors are within the tolerance, or within what rounding leaves.
    precision : float
        Machine epsilon of the numbers that the network was computed in.
    method : {"refined", "quadrature"}
        Nested uniform grids; or polynomials on intervals, of a network that is smooth.
    refused : str
        Why there are no boundaries.
    """

    t: Tensor
    values: Tensor
    length: float
    above: Tensor
    below: Tensor
    variation: Tensor
    deviation_error: Tensor
    crossings: float | None = None
    at_least: int = 0
    error: float = 0.0
    contributions: Mapping[str, float] = field(default_factory=dict)
    twice: int = 0
    undecided: int = 0
    evaluations: int = 0
    tolerance: float = 0.0
    converged: bool = True
    precision: float = torch.finfo(torch.float64).eps
    method: str = "refined"
    refused: str = ""

    @property
    def relative_error(self) -> float:
        """Largest estimated error of a logit's integral, relative to it; 0 where there is none."""
        total = self.above + self.below
        known = total > 0
        return float((self.deviation_error[known] / total[known]).max()) if known.any() else 0.0

    @property
    def notes(self) -> Mapping[str, float]:
        """How the estimate was made."""
        found = {
            "tolerance": self.tolerance,
            "evaluations": float(self.evaluations),
            "segments_short_of_tolerance": float(not self.converged),
        }
        if self.crossings is not None:
            found |= {"at_least": float(self.at_least), "undecided_units": float(self.undecided)}
        return found
