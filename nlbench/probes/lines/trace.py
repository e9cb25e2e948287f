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
"""Rounding error of an output, in machine epsilons times its largest magnitude on the segment."""
OUTPUT_TOLERANCE_EPS = 16
"""Minimum rounding error, in epsilons times the largest output, since large terms may cancel."""


@dataclass(frozen=True)
class SegmentTrace:
    """A network restricted to a segment, described by its breakpoints.

    Parameters
    ----------
    t : float64 tensor of shape (n,)
        Breakpoints in [0, 1], increasing, both ends included.
    values : float64 tensor of shape (n, k)
        Network outputs at the breakpoints, to be interpolated linearly in between.
    length : float
        Euclidean length of the segment in input space.
    origins : int64 tensor of shape (n,)
        Site of the unit that causes each breakpoint, as an index into `sites`; -1 for the two
        ends. If units of several sites bend at the same point, the first site in call order.
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
        """Number of breakpoints per site, in call order. They sum to `crossings`.

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

    See `find_breakpoints`. A unit that crosses its boundary where later layers ignore it (it is
    multiplied by 0, or a later unit is off) creates a region without changing the function. The
    count is one less than the number of regions with different slopes.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> _ = network[1].weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    >>> trace = trace_segment(network, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 3.0]))
    >>> trace.crossings, slope_changes(trace)
    (2, 1)
    """
    return len(find_breakpoints(trace)[0]) - 2


def find_breakpoints(trace: SegmentTrace) -> tuple[Tensor, Tensor]:
    """Return the ends of a segment and the breakpoints at which the slope of some output changes.

    A breakpoint changes the slope if an output there differs from the chord between its neighbours.
    This difference, between an output and a convex combination of two others, is accurate to twice
    the output's `rounding`. Breakpoints with smaller differences are dropped, and the others are
    compared again, until no more can be dropped. A region too short for its slope to be determined
    therefore doesn't hide a change of slope across it.

    Raise Undefined if the trace was sampled, so that its breakpoints are only near those of the
    network, or computed in less than double precision, which can't resolve the slopes of short
    regions.
    """
    if trace.method == "sampling":
        raise Undefined("sampled breakpoints are only near those of the network: no slopes")
    if trace.precision > torch.finfo(torch.float64).eps:
        raise Undefined("slopes of short regions are not resolved below double precision")
    t = trace.t
    y = trace.values
    tolerance = 2 * rounding(trace)
    while len(t) > 2:
        weight = ((t[1:-1] - t[:-2]) / (t[2:] - t[:-2]))[:, None]
        chord = torch.lerp(y[:-2], y[2:], weight)
        flat = ((y[1:-1] - chord).abs() <= tolerance).all(1)
        if not bool(flat.any()):
            break
        # Drop every other breakpoint in a flat run, since each was compared with its neighbours.
        index = torch.arange(len(flat), device=flat.device)
        begins = flat.clone()
        begins[1:] &= ~flat[:-1]
        start = torch.where(begins, index, 0).cummax(0).values
        remaining = torch.ones(len(t), dtype=torch.bool, device=t.device)
        remaining[1:-1] = ~(flat & ((index - start) % 2 == 0))
        t = t[remaining]
        y = y[remaining]
    return t, y


def rounding(trace: SegmentTrace | SegmentEstimate) -> Tensor:
    """Return the rounding error of each output, (k,).

    It is 256 machine epsilons (6e-14 in float64) times the output's largest magnitude on the
    segment, and at least 16 epsilons times the largest output.
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
        Points in [0, 1] where the network was evaluated, increasing, both ends included.
    values : float64 tensor of shape (n, k)
        Network outputs at these points, between which the network is not affine.
    length : float
        Euclidean length of the segment in input space.
    above, below : float64 tensor of shape (k,)
        Integrals over t of the positive and negative parts of f - g, both non-negative.
    variation : float64 tensor of shape (k,)
        Total variation of f - g, extrapolated from nested grids; it has no error estimate.
    deviation_error : float64 tensor of shape (k,)
        Estimated error of ``above + below``.
    crossings : float or None
        Estimated number of boundaries between affine pieces; None if the network is not
        piecewise affine, or if they were not counted.
    at_least : int
        Number of boundaries observed, a lower bound.
    error : float
        Estimated error of ``crossings``.
    contributions : mapping of str to float
        Estimated number of boundaries per site; they sum to ``crossings``.
    twice : int
        Number of units observed to cross a boundary twice within a step of the second-finest grid.
    undecided : int
        Number of units whose side of a boundary is unknown at a point, due to rounding.
    evaluations : int
        Number of evaluations of the network.
    tolerance : float
        Requested relative error.
    converged : bool
        True if the stated errors, that of the crossings and that of the deviation, are at most
        ``tolerance`` times the value. For the deviation, 1e-12 of the largest output is enough.
    precision : float
        Machine epsilon of the dtype that the network was computed in.
    method : {"refined", "quadrature"}
        Nested uniform grids, or piecewise polynomials for a smooth network.
    refused : str
        Reason why boundaries were not counted.
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
        """Maximum relative error of the logits' integrals. It is 0 if all integrals are 0."""
        total = self.above + self.below
        known = total > 0
        return float((self.deviation_error[known] / total[known]).max()) if known.any() else 0.0

    @property
    def notes(self) -> Mapping[str, float]:
        """Recorded properties of the estimate."""
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
        Index of the path.
    segment : int
        Index of the segment on its path.
    trace : SegmentTrace or SegmentEstimate
        An estimate if breakpoints were not searched for or don't exist.
    image : SegmentImage, optional
        Images of the segment at the network's sites, with lengths computed on first access.
    """

    path: int
    segment: int
    trace: SegmentTrace | SegmentEstimate
    image: SegmentImage | None = None

    @property
    def place(self) -> str:
        """Name of the path: ``path0``, ``path1``, …."""
        return f"path{self.path}"
