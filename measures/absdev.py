"""Absolute deviation: how far a network strays from the straight line along a segment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nlbench.measure import Measure, Reading, Value
from nlbench.probes.lines import LineLook, SegmentTrace

from ._sources import traced_regions

__all__ = ["AbsoluteDeviation", "absolute_deviation"]


def absolute_deviation(trace: SegmentTrace) -> Tensor:
    r"""Integrate the distance between a network and the chord of a segment.

    For each logit j, ``length`` :math:`\int_0^1 |f_j(t) - g_j(t)| dt` with
    :math:`g_j(t) = (1 - t) f_j(0) + t f_j(1)`. The difference is affine between
    breakpoints, so each region's share is exact: a trapezium, or two triangles where
    the difference changes sign.

    Parameters
    ----------
    trace : SegmentTrace
        With n breakpoints and k logits.

    Returns
    -------
    float64 tensor of shape (k,)
        In units of the logit times units of the input.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022, eq. 4 and
    appendix D.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([1.0]))
    >>> absolute_deviation(trace)
    tensor([0.5000], dtype=torch.float64)
    """
    t, f = trace.t[:, None], trace.values
    distance = f - ((1 - t) * f[:1] + t * f[-1:])
    left, right = distance[:-1], distance[1:]
    total = left.abs() + right.abs()
    crossed = (left.sign() * right.sign()) < 0
    # Where nothing is crossed the quotient isn't used; 1 keeps it from being 0/0.
    triangles = (left.square() + right.square()) / torch.where(crossed, total, 1.0)
    mean = torch.where(crossed, triangles, total) / 2
    return trace.length * (t.diff(dim=0) * mean).sum(0)


class AbsoluteDeviation(Measure):
    """Absolute deviation from linearity along paths, exact.

    Of each path: ``value``, the Euclidean norm over logits of the deviations summed over
    its segments; ``logit0``, ``logit1``, …, those sums; ``length``, the path's length.
    """

    name = "absdev"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    source = traced_regions("eq. 4 and appendix D")

    def start(self) -> None:
        """Forget all paths."""
        self._sums: dict[str, Tensor] = {}
        self._lengths: dict[str, float] = {}
        self._segments: dict[str, int] = {}

    def update(self, look: LineLook) -> None:
        """Add one segment to its path."""
        place, deviation = look.place, absolute_deviation(look.trace).cpu()
        self._sums[place] = self._sums.get(place, torch.zeros_like(deviation)) + deviation
        self._lengths[place] = self._lengths.get(place, 0.0) + look.trace.length
        self._segments[place] = self._segments.get(place, 0) + 1

    def finish(self) -> Reading:
        """Give the deviation of each path."""
        values = []
        for place, logits in self._sums.items():
            statistics = {
                "value": float(torch.linalg.vector_norm(logits)),
                **{f"logit{j}": v for j, v in enumerate(logits.tolist())},
                "length": self._lengths[place],
            }
            values.append(Value(place, statistics, self._segments[place]))
        return Reading.of(values, n=sum(self._segments.values()), notes={"method": "exact"})
