"""Absolute deviation: the distance of a network from its chord, integrated along a segment."""

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
from .path_measure import PathMeasure, PathSums

SCALES = ("none", "range", "chord")


def absolute_deviation(trace: SegmentTrace | SegmentEstimate) -> Tensor:
    r"""Integrate the distance between a network and its chord along a segment.

    For each logit j, the deviation is ``length`` :math:`\int_0^1 |f_j(t) - g_j(t)| dt` with the
    chord :math:`g_j(t) = (1 - t) f_j(0) + t f_j(1)`. It is exact for a traced segment, and within
    the stated error for an estimate.

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
    return deviation_parts(trace).total


def deviation_parts(trace: SegmentTrace | SegmentEstimate) -> ChordParts:
    r"""Integrate the distance of a network above and below its chord along a segment.

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
    >>> parts = deviation_parts(trace)
    >>> float(parts.above), float(parts.below), float(parts.variation)
    (0.0, 0.5, 1.0)
    """
    parts = trace if isinstance(trace, SegmentEstimate) else chord_parts(trace.t, trace.values)
    return ChordParts(trace.length * parts.above, trace.length * parts.below, parts.variation)


def deviation_scale(trace: SegmentTrace | SegmentEstimate, normalize: str) -> Tensor:
    r"""Compute the scale that normalises a segment's deviation, in the same units.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        With k logits. For an estimate, the range is taken over the values at its points.
    normalize : {"none", "range", "chord"}
        ``range``: ``length`` :math:`(\max_t f_j - \min_t f_j)`; ``chord``: ``length``
        :math:`|f_j(1) - f_j(0)|`; ``none``: 1.

    Returns
    -------
    float64 tensor of shape (k,)

    Raises
    ------
    nlbench.RequestError
        If `normalize` is unknown.

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
        raise RequestError(f"normalize: unknown '{normalize}'{nearest(normalize, SCALES)}")
    return torch.ones_like(values[0])


@dataclass(frozen=True)
class _PathDeviation(PathSums):
    """Sums over the segments of a path."""

    parts: ChordParts
    segments: tuple[float, ...]
    length: float
    error: Tensor
    scales: Mapping[str, Tensor]

    def divided(self, divisor: float) -> _PathDeviation:
        above = self.parts.above / divisor
        below = self.parts.below / divisor
        return _PathDeviation(
            ChordParts(above, below, self.parts.variation),
            tuple(segment / divisor for segment in self.segments),
            self.length,
            self.error / divisor,
            {},
        )

    def statistics(self) -> dict[str, float]:
        statistics = {
            "value": _norm(self.parts.total),
            "above": _norm(self.parts.above),
            "below": _norm(self.parts.below),
            "variation": _norm(self.parts.variation),
            "length": self.length,
        }
        if bool(self.error.any()):
            statistics["numerical_error"] = _norm(self.error)
        for name, scale in self.scales.items():
            if divisor := _norm(scale):
                statistics[f"over_{name}"] = statistics["value"] / divisor
        return statistics

    def components(self) -> Parts:
        total = self.parts.total
        above = self.parts.above
        return {"logit": total.tolist(), "above": above.tolist(), "segment": self.segments}


def _norm(logits: Tensor) -> float:
    return float(torch.linalg.vector_norm(logits))


class AbsoluteDeviation(PathMeasure):
    r"""Absolute deviation from linearity along paths.

    The statistics of a path are

    - ``value``: Euclidean norm over logits of the deviations summed over segments.
    - ``logit0``, ``logit1``, …: deviation of each logit, summed over segments.
    - ``above0``, ``above1``, …: the part of this deviation above the chord.
    - ``segment0``, ``segment1``, …: norm over logits of each segment's deviation.
    - ``above``, ``below``: norms over logits of the parts above and below the chord.
    - ``variation``: norm over logits of the total variation of the distance to the chord.
    - ``length``: length of the path.
    - ``numerical_error``: norm over logits of the estimates' error bounds, summed over segments.
    - ``over_range``, ``over_chord``: value divided by the norm over logits of `deviation_scale`,
      summed over segments.

    The last two are dimensionless, and ``over_range`` is at most 1. With ``normalize``, one of them
    becomes the value, and all other statistics except `variation` and `length` are divided by the
    same scale.

    Definition
    ----------
    For logit j on a segment from :math:`x_0` to :math:`x_1`, with the chord :math:`g_j`,

    .. math::

        \|x_1 - x_0\| \int_0^1 |f_j(x(t)) - g_j(t)| \, dt, \qquad
        g_j(t) = (1 - t) f_j(x_0) + t f_j(x_1) .

    The value of a path is the Euclidean norm over logits of the sums over its segments.

    Units
    -----
    Units of the logit times units of the input; none with ``normalize=range`` or ``chord``.

    Undefined
    ---------
    Inputs that can't be interpolated, such as tokens; a stochastic network; with ``normalize``,
    constant logits or level chords.

    Cost
    ----
    About one forward pass per region for exact traces, 50 to 300 per segment for estimates, and 35
    to 500 per segment for quadrature of smooth networks.

    Limits
    ------
    It grows with the size of the logits and the length of the path, so compare networks by
    ``over_range``. On paths of translated images it measures only the response to shifts.
    The mean over two paths is accurate to only about 18 %.

    Published code
    --------------
    It integrates ``|a| + |b| t`` instead of ``|a - b t|``, which is 3.7 to 6.3 times too large on
    segments of VGG8 (study ``published-integral``), and omits the last region of each segment. The
    study ``published-tables`` compares the published tables with both integrals.
    """

    name = "absdev"
    version: ClassVar[str] = "4"
    counts_crossings: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Option]] = {
        "normalize": Option(
            "none",
            "normalisation of a path's deviation; range: length times the range of the logits on "
            "each segment; chord: length times the rise of the chord (neither is in the paper)",
            choices=SCALES,
        )
    }
    means = ("above", "below", "variation", "numerical_error", "over_range", "over_chord")
    source = traced_regions("eq. 4 and appendix D")

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Return the bounds, which are 0 and 1 if the value is divided by the range."""
        return (0.0, 1.0) if options.get("normalize") == "range" else cls.bounds

    @classmethod
    def scale_note(cls, options: Mapping[str, OptionValue]) -> str:
        """Describe how the value depends on units."""
        return "grows with the logits" if options.get("normalize") == "none" else ""

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> _PathDeviation:
        """Integrate one segment."""
        parts = deviation_parts(trace)
        parts = ChordParts(parts.above.cpu(), parts.below.cpu(), parts.variation.cpu())
        error = torch.zeros_like(parts.above)
        if isinstance(trace, SegmentEstimate):
            error = trace.length * trace.deviation_error.cpu()
        scales = {name: deviation_scale(trace, name).cpu() for name in SCALES[1:]}
        return _PathDeviation(parts, (_norm(parts.total),), trace.length, error, scales)

    def compute_value(self, place: str, path: _PathDeviation) -> Value:
        """Return a path's deviation, divided by the path's scale."""
        n = len(path.segments)
        normalize = str(self.settings["normalize"])
        if normalize == "none":
            return Value(place, path.statistics(), n, parts=path.components())
        divisor = _norm(path.scales[normalize])
        if divisor == 0:
            reason = "logits are constant" if normalize == "range" else "chords are level"
            return Value.missing(place, "undefined", f"the path's {reason}", n)
        divided = path.divided(divisor)
        statistics = {**path.statistics(), **divided.statistics()}
        return Value(place, statistics, n, parts=divided.components())
