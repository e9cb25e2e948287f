"""How a network strays from the chord of a segment: above it, below it, back and forth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nlbench.probes.lines import SegmentEstimate, SegmentTrace, chord_parts

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
    share is a trapezium, or two triangles where the distance changes sign. An estimate brings
    its own integrals.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([1.0]))
    >>> found = deviation_of(trace)
    >>> float(found.above), float(found.below), float(found.variation)
    (0.0, 0.5, 1.0)
    """
    found = trace if isinstance(trace, SegmentEstimate) else chord_parts(trace.t, trace.values)
    return Deviation(trace.length * found.above, trace.length * found.below, found.variation)
