"""Absolute deviation: how far a network strays from the straight line along a segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.errors import RequestError, nearest
from nlbench.measure import Parts, Value
from nlbench.options import Option, OptionValue
from nlbench.probes.lines import ChordParts, SegmentEstimate, SegmentTrace, chord_parts

from .papers import traced_regions
from .path_measure import PathMeasure

__all__ = ["AbsoluteDeviation", "absolute_deviation", "deviation_of", "deviation_scale"]

NORMALIZE = ("none", "range", "chord")


def deviation_of(trace: SegmentTrace | SegmentEstimate) -> ChordParts:
    r"""Integrate the distance between a network and the chord of a segment, by its sign.

    Exact on a traced segment; an estimate brings its own integrals.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits.

    Returns
    -------
    ChordParts
        ``above`` and ``below`` (k,) are the segment's length times
        :math:`\int_0^1 \max(\pm(f_j - g_j), 0)\,dt`, in units of the logit times units of the
        input; ``variation`` (k,) is in units of the logit.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([1.0]))
    >>> found = deviation_of(trace)
    >>> float(found.above), float(found.below), float(found.variation)
    (0.0, 0.5, 1.0)
    """
    found = trace if isinstance(trace, SegmentEstimate) else chord_parts(trace.t, trace.values)
    return ChordParts(trace.length * found.above, trace.length * found.below, found.variation)


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


def deviation_scale(trace: SegmentTrace | SegmentEstimate, normalize: str) -> Tensor:
    r"""Give what a segment's deviation is divided by, in the same units.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits. Of an estimate the range is that of the values at its points.
    normalize : {"none", "range", "chord"}
        ``range``: ``length`` :math:`(\max_t f_j - \min_t f_j)`; ``chord``: ``length``
        :math:`|f_j(1) - f_j(0)|`; ``none``: 1.

    Returns
    -------
    float64 tensor of shape (k,)

    Raises
    ------
    nlbench.RequestError
        If it is none of those.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.ReLU(), torch.tensor([-1.0]), torch.tensor([1.0]))
    >>> float(absolute_deviation(trace) / deviation_scale(trace, "range"))
    0.25
    """
    values = trace.values
    if normalize == "range":
        return trace.length * (values.amax(0) - values.amin(0))
    if normalize == "chord":
        return trace.length * (values[-1] - values[0]).abs()
    if normalize != "none":
        raise RequestError(f"normalize: unknown '{normalize}'{nearest(normalize, NORMALIZE)}")
    return torch.ones_like(values[0])


@dataclass(frozen=True)
class _Sum:
    """What is known of one path so far."""

    deviation: ChordParts
    segments: tuple[float, ...]
    length: float
    error: Tensor
    scales: Mapping[str, Tensor]

    @classmethod
    def of(cls, trace: SegmentTrace | SegmentEstimate) -> _Sum:
        found = deviation_of(trace)
        found = ChordParts(found.above.cpu(), found.below.cpu(), found.variation.cpu())
        error = torch.zeros_like(found.above)
        if isinstance(trace, SegmentEstimate):
            error = trace.length * trace.deviation_error.cpu()
        scales = {name: deviation_scale(trace, name).cpu() for name in NORMALIZE[1:]}
        return cls(found, (_norm(found.total),), trace.length, error, scales)

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.deviation + other.deviation,
            self.segments + other.segments,
            self.length + other.length,
            self.error + other.error,
            {name: scale + other.scales[name] for name, scale in self.scales.items()},
        )

    def value(self, place: str, normalize: str) -> Value:
        """What is said of the path; all of the deviation is divided by one number."""
        n = len(self.segments)
        if normalize == "none":
            return Value(place, self.statistics(), n, parts=self.parts())
        divisor = _norm(self.scales[normalize])
        if divisor == 0:
            what = "logits are constant" if normalize == "range" else "chords are level"
            return Value.missing(place, "undefined", f"the path's {what}", n)
        path = self._divided(divisor)
        return Value(place, {**self.statistics(), **path.statistics()}, n, parts=path.parts())

    def _divided(self, divisor: float) -> _Sum:
        found = self.deviation
        return _Sum(
            ChordParts(found.above / divisor, found.below / divisor, found.variation),
            tuple(segment / divisor for segment in self.segments),
            self.length,
            self.error / divisor,
            {},
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
        for name, scale in self.scales.items():
            if divisor := _norm(scale):
                found[f"over_{name}"] = found["value"] / divisor
        return found

    def parts(self) -> Parts:
        total, above = self.deviation.total, self.deviation.above
        return {"logit": total.tolist(), "above": above.tolist(), "segment": self.segments}


def _norm(logits: Tensor) -> float:
    return float(torch.linalg.vector_norm(logits))


class AbsoluteDeviation(PathMeasure):
    """Absolute deviation from linearity along paths.

    Of each path: ``value``, the Euclidean norm over logits of the deviations summed over
    its segments; ``logit0``, ``logit1``, …, those sums; ``above0``, ``above1``, …, the part
    of each where the logit lies above the chord (the rest is below); ``segment0``,
    ``segment1``, …, the norm of each segment by itself; ``above`` and ``below``, the norms
    of the two parts; ``variation``, the norm of the total variation of the distance to the
    chord; ``length``, the path's length; ``error``, of estimates, the norm over logits of
    their errors, summed over segments; ``over_range`` and ``over_chord``, the value divided by
    the norm over logits of `deviation_scale` summed over the path's segments.

    These two depend on no unit of inputs or logits, and ``over_range`` is at most 1. With
    ``normalize`` one of them is the value, and all else but `variation` and `length` is divided
    by the same.
    """

    name = "absdev"
    options: ClassVar[Mapping[str, Option]] = {
        "normalize": Option(
            "none",
            "what a path's deviation is divided by: range: length times the range of the logits "
            "on each segment; chord: length times what the chord rises (both ours)",
            choices=NORMALIZE,
        )
    }
    means = ("above", "below", "variation", "error", "over_range", "over_chord")
    source = traced_regions("eq. 4 and appendix D")

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """From 0; up to 1 where it is divided by the range."""
        return (0.0, 1.0) if options.get("normalize") == "range" else cls.bounds

    def of(self, trace: SegmentTrace | SegmentEstimate) -> _Sum:
        """Integrate one segment."""
        return _Sum.of(trace)

    def value_of(self, place: str, path: _Sum) -> Value:
        """Give a path's deviation."""
        return path.value(place, str(self.settings["normalize"]))
