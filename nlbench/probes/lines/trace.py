"""A network restricted to a straight segment: its trace, or an estimate without breakpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nlbench.errors import Undefined

if TYPE_CHECKING:
    from .segment_image import SegmentImage

SLOPE_TOLERANCE_EPS = 256
"""Rounding error of an output, in machine epsilons of its largest magnitude on the segment."""
OUTPUT_TOLERANCE_EPS = 16
"""Minimum of that error, in epsilons of the largest output: terms may be larger than outputs."""


@dataclass(frozen=True)
class SegmentTrace:
    """A network restricted to a segment, described by its breakpoints.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Breakpoints in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        The network's output at each; between neighbours it is the linear interpolation.
    length : float
        Euclidean length of the segment in input space.
    origins : int64 tensor of shape (n,)
        Site of the unit that causes each breakpoint, as an index into `sites`; -1 for the two
        ends. Where units of several sites bend at one point, the first site in order of call.
    sites : tuple of str
        Names of the network's activation calls.
    method : {"exact", "adaptive", "sampling"}
        Method that found the breakpoints. Only ``exact`` finds all of them.
    notes : mapping of str to float
        Properties of the method, such as its ``sensitivity`` and the number of regions
        ``shorter_than_sensitivity`` that it skipped.
    precision : float
        Machine epsilon of the dtype that the values were computed in.
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
        """Number of breakpoints by site, in order of call; their sum is `crossings`.

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


def slope_changes(trace: SegmentTrace) -> int:
    """Count the breakpoints at which the slope of some output changes.

    A unit that crosses its boundary where later layers ignore it (it is multiplied by 0,
    or a later unit is off) creates a region without changing the function.

    Returns
    -------
    int
        Between 0 and ``trace.crossings``; the number of regions with different slopes
        is one more. See `bends`.

    Raises
    ------
    nlbench.Undefined
        As `bends`.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> _ = network[1].weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    >>> trace = trace_segment(network, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 3.0]))
    >>> trace.crossings, slope_changes(trace)
    (2, 1)
    """
    return len(bends(trace)[0]) - 2


def bends(trace: SegmentTrace) -> tuple[Tensor, Tensor]:
    """Return the ends of a segment and the breakpoints at which the slope of some output changes.

    A breakpoint changes the slope if the output there lies off the chord between its neighbours.
    Such a distance, the difference of an output and a convex combination of two, is known to twice
    an output's `rounding`. Breakpoints within that distance of the chord are dropped and their
    neighbours joined until none is left. So a region too short to determine its own slope hides no
    change across it.

    Returns
    -------
    t : tensor of shape (m,), float64
    values : tensor of shape (m, k), float64

    Raises
    ------
    nlbench.Undefined
        For a trace by sampling, whose breakpoints are only near those of the network, or below
        double precision, which does not resolve the slopes of short regions.
    """
    if trace.method == "sampling":
        raise Undefined("sampled breakpoints are only near those of the network: no slopes")
    if trace.precision > torch.finfo(torch.float64).eps:
        raise Undefined("slopes of short regions are not resolved below double precision")
    t, y = trace.t, trace.values
    tolerance = 2 * rounding(trace)
    while len(t) > 2:
        weight = ((t[1:-1] - t[:-2]) / (t[2:] - t[:-2]))[:, None]
        chord = torch.lerp(y[:-2], y[2:], weight)
        flat = ((y[1:-1] - chord).abs() <= tolerance).all(1)
        if not bool(flat.any()):
            break
        # Drop every other breakpoint of a flat run, as each was compared with its neighbours.
        index = torch.arange(len(flat), device=flat.device)
        begins = flat.clone()
        begins[1:] &= ~flat[:-1]
        start = torch.where(begins, index, 0).cummax(0).values
        remaining = torch.ones(len(t), dtype=torch.bool, device=t.device)
        remaining[1:-1] = ~(flat & ((index - start) % 2 == 0))
        t, y = t[remaining], y[remaining]
    return t, y


def rounding(trace: SegmentTrace | SegmentEstimate) -> Tensor:
    """Return the rounding error of each output, (k,).

    It is 256 machine epsilons of an output's largest magnitude on the segment, 6e-14 in float64,
    and at least 16 epsilons of the largest output.
    """
    size = trace.values.abs()
    units = torch.maximum(SLOPE_TOLERANCE_EPS * size.amax(0), OUTPUT_TOLERANCE_EPS * size.max())
    return trace.precision * units


@dataclass(frozen=True)
class SegmentEstimate:
    """A network restricted to a segment, estimated without its breakpoints.

    f is the network and g the chord, the straight line between its values at the ends.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Where the network was evaluated, in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        The network's output at each. It is not affine between them.
    length : float
        Euclidean length of the segment in input space.
    above, below : float64 tensor of shape (k,)
        Integrals over t of the positive and of the negative part of f - g, both positive.
    variation : float64 tensor of shape (k,)
        Total variation of f - g at the nodes; it has no error estimate.
    deviation_error : float64 tensor of shape (k,)
        Estimated error of ``above + below``.
    crossings : float or None
        Estimated number of boundaries between affine pieces; None if the network is not
        piecewise affine.
    at_least : int
        Number of observed boundaries: a lower bound.
    error : float
        Estimated error of ``crossings``.
    contributions : mapping of str to float
        Estimated number of boundaries by site; their sum is ``crossings``.
    twice : int
        Units observed to cross a boundary twice within a step of the last grid but one.
    undecided : int
        Units within rounding of a boundary at a point, whose side is unknown.
    evaluations : int
        Number of evaluations of the network.
    tolerance : float
        Requested relative error.
    converged : bool
        True if the errors are within the tolerance, or within rounding.
    precision : float
        Machine epsilon of the dtype that the network was computed in.
    method : {"refined", "quadrature"}
        Nested uniform grids, or polynomials on intervals for a smooth network.
    refused : str
        Reason why there are no boundaries.
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
        """Largest relative error of a logit's integral; 0 if all integrals are 0."""
        total = self.above + self.below
        known = total > 0
        return float((self.deviation_error[known] / total[known]).max()) if known.any() else 0.0

    @property
    def notes(self) -> Mapping[str, float]:
        """Properties of the estimate that are recorded."""
        notes = {
            "tolerance": self.tolerance,
            "evaluations": float(self.evaluations),
            "segments_short_of_tolerance": float(not self.converged),
        }
        if self.crossings is not None:
            notes |= {"at_least": float(self.at_least), "undecided_units": float(self.undecided)}
        return notes


@dataclass(frozen=True)
class TracedSegment:
    """The observation of the probe `lines`: one traced segment of one path.

    Parameters
    ----------
    path : int
        Number of the path.
    segment : int
        Number of the segment on its path.
    trace : SegmentTrace or SegmentEstimate
        The latter where breakpoints were not searched for, or there are none.
    image : SegmentImage, optional
        Lengths of its images at the network's sites, computed on first access.
    """

    path: int
    segment: int
    trace: SegmentTrace | SegmentEstimate
    image: SegmentImage | None = None

    @property
    def place(self) -> str:
        """Name of the path: ``path0``, ``path1``, …."""
        return f"path{self.path}"
