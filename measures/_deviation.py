"""How a network strays from the chord of a segment: above it, below it, back and forth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.probes.lines.lines import SegmentTrace
from nlbench.probes.lines import SegmentEstimate

__all__ = ["Deviation", "deviation_of"]


@dataclass(frozen=True)
class Deviation:
    r"""What lies between a network f and the chord g of a segment, a number a logit.

    Parameters
    ----------
    above, below : float64 tensor of shape (k,)
        The segment's length times :math:`\int_0^1 \max(f_j - g_j, 0)\,dt`, and times
        :math:`\int_0^1 \max(g_j - f_j, 0)\,dt`: neither is negative. In units of the logit
        times units of the input.
    variation : float64 tensor of shape (k,)
        Total variation of :math:`f_j - g_j`, which is :math:`\sum |\Delta (f_j - g_j)|` over
        the regions of a piecewise-affine network. In units of the logit.
    """

    above: Tensor
    below: Tensor
    variation: Tensor

    @property
    def total(self) -> Tensor:
        """Absolute deviation: above and below together."""
        return self.above + self.below

    def __add__(self, other: Deviation) -> Deviation:
        """Of two segments together."""
        return Deviation(
            self.above + other.above,
            self.below + other.below,
            self.variation + other.variation,
        )


def deviation_of(trace: SegmentTrace | SegmentEstimate) -> Deviation:
    """Integrate the distance between a network and the chord of a segment, by its sign.

    Exact on a traced segment: the distance is affine between breakpoints, so a region's
    share is a trapezium, or two triangles where the distance changes sign. Of a network that
    has no breakpoints it is as close as its trace says.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([1.0]))
    >>> found = deviation_of(trace)
    >>> float(found.above), float(found.below), float(found.variation)
    (0.0, 0.5, 1.0)
    """
    if isinstance(trace, SegmentEstimate):
        length = trace.length
        return Deviation(length * trace.above, length * trace.below, trace.variation)
    t, f = trace.t[:, None], trace.values
    distance = f - ((1 - t) * f[:1] + t * f[-1:])
    width, steps = trace.length * t.diff(dim=0), distance.diff(dim=0).abs().sum(0)
    return Deviation(_positive_part(distance, width), _positive_part(-distance, width), steps)


def _positive_part(distance: Tensor, width: Tensor) -> Tensor:
    """Integrate the positive part of a function that is affine between its values (n, k)."""
    left, right = distance[:-1].clamp(min=0), distance[1:].clamp(min=0)
    high = left + right
    fall = (distance[1:] - distance[:-1]).abs()
    crossed = (distance[:-1].sign() * distance[1:].sign()) < 0
    # One of left and right is 0 where it is crossed: a triangle, narrower by high / fall.
    share = torch.where(crossed, high / torch.where(crossed, fall, 1.0), 1.0)
    return (width * high * share).sum(0) / 2
