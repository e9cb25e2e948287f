"""Absolute deviation: how far a network strays from the straight line along a segment."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.measure import Measure, Parts, Result, Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, TracedSegment

from ._deviation import Deviation, deviation_of
from ._path_results import Method, with_means
from ._sources import traced_regions

__all__ = ["AbsoluteDeviation", "absolute_deviation"]


def absolute_deviation(trace: SegmentTrace | SegmentEstimate) -> Tensor:
    r"""Integrate the distance between a network and the chord of a segment.

    For each logit j, ``length`` :math:`\int_0^1 |f_j(t) - g_j(t)| dt` with
    :math:`g_j(t) = (1 - t) f_j(0) + t f_j(1)`. Exact on a traced segment; an
    estimate is as close as it says.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits.

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
    return deviation_of(trace).total


@dataclass(frozen=True)
class _Sum:
    """What is known of one path so far."""

    deviation: Deviation
    segments: tuple[float, ...]
    length: float
    error: Tensor

    @classmethod
    def of(cls, trace: SegmentTrace | SegmentEstimate) -> _Sum:
        found = deviation_of(trace)
        found = Deviation(found.above.cpu(), found.below.cpu(), found.variation.cpu())
        error = torch.zeros_like(found.above)
        if isinstance(trace, SegmentEstimate):
            error = trace.length * trace.deviation_error.cpu()
        return cls(found, (_norm(found.total),), trace.length, error)

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.deviation + other.deviation,
            self.segments + other.segments,
            self.length + other.length,
            self.error + other.error,
        )

    def statistics(self) -> dict[str, float]:
        total, above = self.deviation.total, self.deviation.above
        found = {
            "value": _norm(total),
            "above": _norm(above),
            "below": _norm(self.deviation.below),
            "variation": _norm(self.deviation.variation),
            "length": self.length,
        }
        if bool(self.error.any()):
            found["error"] = _norm(self.error)
        return found

    def parts(self) -> Parts:
        total, above = self.deviation.total, self.deviation.above
        return {"logit": total.tolist(), "above": above.tolist(), "segment": self.segments}


def _norm(logits: Tensor) -> float:
    return float(torch.linalg.vector_norm(logits))


class AbsoluteDeviation(Measure):
    """Absolute deviation from linearity along paths.

    Of each path: ``value``, the Euclidean norm over logits of the deviations summed over
    its segments; ``logit0``, ``logit1``, …, those sums; ``above0``, ``above1``, …, the part
    of each where the logit lies above the chord (the rest is below); ``segment0``,
    ``segment1``, …, the norm of each segment by itself; ``above`` and ``below``, the norms
    of the two parts; ``variation``, the norm of the total variation of the distance to the
    chord; ``length``, the path's length; ``error``, of estimates, the norm over logits of
    their errors, summed over segments.
    """

    name = "absdev"
    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    source = traced_regions("eq. 4 and appendix D")

    def reset(self) -> None:
        """Forget all paths."""
        self._sums: dict[str, _Sum] = {}
        self._method = Method()

    def update(self, observation: TracedSegment) -> None:
        """Add one segment to its path."""
        new, old = _Sum.of(observation.trace), self._sums.get(observation.place)
        self._sums[observation.place] = new if old is None else old + new
        self._method = self._method.and_of(observation)

    def compute(self) -> Result:
        """Give the deviation of each path."""
        values = [
            Value(place, path.statistics(), len(path.segments), parts=path.parts())
            for place, path in self._sums.items()
        ]
        result = Result.of(values, n=sum(value.n for value in values))
        return self._method.on(with_means(result, ("above", "below", "variation", "error")))
