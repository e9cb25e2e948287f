"""A network restricted to a straight segment: what a trace of it gives, and what an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nlbench.errors import Undefined

__all__ = [
    "ChordParts",
    "SegmentEstimate",
    "SegmentTrace",
    "chord_parts",
    "distance",
    "points_at",
    "slope_changes",
]


RESOLVED = 256
"""Rounding errors of an output, in units of its precision, that count as none."""
ROUNDED = 16
"""The same in units of the largest output's: one may be what is left of larger terms."""


@dataclass(frozen=True)
class SegmentTrace:
    """A network restricted to a segment: all that there is to know of it.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Breakpoints in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        The network's output at each; between neighbours it is the linear interpolation.
    length : float
        Euclidean length of the segment in input space.
    origins : int64 tensor of shape (n,)
        Whose unit makes each breakpoint, as an index into `sites`; -1 for the two ends.
        Where units of several sites bend at one place, the first in order of call.
    sites : tuple of str
        Names of the network's activation calls.
    method : {"exact", "adaptive", "sampling"}
        How the breakpoints were found. All of them are there only if it is ``exact``.
    notes : mapping of str to float
        What the method has to say of itself, such as its ``sensitivity`` and how many
        regions ``shorter_than_sensitivity`` it passed over.
    precision : float
        Machine epsilon of the numbers that the values were computed in.
    """

    t: Tensor
    values: Tensor
    length: float
    origins: Tensor
    sites: tuple[str, ...]
    method: str = "exact"
    notes: Mapping[str, float] = field(default_factory=dict)
    precision: float = torch.finfo(torch.float64).eps

    @property
    def regions(self) -> int:
        """Number of affine pieces."""
        return len(self.t) - 1

    @property
    def crossings(self) -> int:
        """Number of boundaries between affine pieces."""
        return self.regions - 1

    @property
    def contributions(self) -> dict[str, int]:
        """Number of breakpoints that each site makes, in order of call; their sum is `crossings`.

        Examples
        --------
        >>> from nlbench.probes.lines import trace_segment
        >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Hardtanh())
        >>> ends = torch.tensor([-1.0]), torch.tensor([3.0])
        >>> trace_segment(network, *ends).contributions
        {'0': 1, '1': 1}
        """
        counts = torch.bincount(self.origins[1:-1], minlength=len(self.sites)).tolist()
        return dict(zip(self.sites, counts, strict=True))


def distance(start: Tensor, end: Tensor) -> float:
    """Give the Euclidean length of a segment, also where squares would vanish or overflow.

    Examples
    --------
    >>> start, end = torch.tensor([[3e-200, 0], [0, 4e-200]], dtype=torch.float64)
    >>> distance(start, end)
    5e-200
    """
    start, end = start.double(), end.double()
    size = max(float(start.abs().amax()), float(end.abs().amax())) if start.numel() else 0.0
    return size * float(torch.linalg.vector_norm(end / size - start / size)) if size else 0.0


def points_at(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Give the points (m, *input) of a segment at places t (m,).

    Examples
    --------
    >>> points_at(torch.zeros(1), torch.ones(1), torch.tensor([0.0, 0.5])).tolist()
    [[0.0], [0.5]]
    """
    return torch.lerp(start, end, t.to(start.dtype).reshape(-1, *[1] * start.ndim))


def slope_changes(trace: SegmentTrace) -> int:
    """Count the breakpoints at which the slope of some output really changes.

    A unit that crosses its boundary where what follows ignores it (it is multiplied by 0,
    or a later unit is off) makes a region without changing the function.

    A breakpoint changes the slope where the output there lies off the chord between its
    neighbours. An output is known to its rounding error r; such a distance, the difference
    of an output and a convex combination of two, is known to 2r. A breakpoint within 2r of
    the chord is left out and its neighbours are joined, until all that are left lie off: so
    a region too short to tell its own slope hides no change from its left to its right. r
    is taken as 256 machine epsilons of the output's largest magnitude on the segment,
    6e-14 in float64, and at least 16 of that of the largest output.

    Parameters
    ----------
    trace : SegmentTrace

    Returns
    -------
    int
        Between 0 and ``trace.crossings``; the number of regions with a slope of their own
        is one more.

    Raises
    ------
    nlbench.Undefined
        Of a trace made by sampling, whose breakpoints are only near those of the network,
        or in less than double precision, which can't tell slopes of short regions apart.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> _ = network[1].weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    >>> trace = trace_segment(network, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 3.0]))
    >>> trace.crossings, slope_changes(trace)
    (2, 1)
    """
    if trace.method == "sampling":
        raise Undefined("sampled breakpoints lie beside those of the network: no slopes")
    if trace.precision > torch.finfo(torch.float64).eps:
        raise Undefined("slopes of short regions can't be told apart below double precision")
    t, y = trace.t, trace.values
    size = y.abs()
    tolerance = 2 * trace.precision * torch.maximum(RESOLVED * size.amax(0), ROUNDED * size.max())
    while len(t) > 2:
        share = ((t[1:-1] - t[:-2]) / (t[2:] - t[:-2]))[:, None]
        chord = torch.lerp(y[:-2], y[2:], share)
        flat = ((y[1:-1] - chord).abs() <= tolerance).all(1)
        if not bool(flat.any()):
            break
        # Of a run of flat ones every other, the first included, as each was compared
        # with its neighbours.
        index = torch.arange(len(flat), device=flat.device)
        begins = flat.clone()
        begins[1:] &= ~flat[:-1]
        start = torch.where(begins, index, 0).cummax(0).values
        kept = torch.ones(len(t), dtype=torch.bool, device=t.device)
        kept[1:-1] = ~(flat & ((index - start) % 2 == 0))
        t, y = t[kept], y[kept]
    return len(t) - 2


@dataclass(frozen=True)
class ChordParts:
    """What lies between functions f and the chord g of a segment.

    Parameters
    ----------
    above, below : float64 tensor of shape (..., k)
        Integrals of the positive and of the negative part of f - g, both positive.
    variation : float64 tensor of shape (..., k)
        Total variation of f - g, which is the sum of its changes over the regions of a
        piecewise-affine function.
    """

    above: Tensor
    below: Tensor
    variation: Tensor

    @property
    def total(self) -> Tensor:
        """Absolute deviation: above and below together."""
        return self.above + self.below

    def __add__(self, other: ChordParts) -> ChordParts:
        """Of two segments together."""
        return ChordParts(
            self.above + other.above, self.below + other.below, self.variation + other.variation
        )


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
