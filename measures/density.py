"""Density: the number of boundaries of affine regions that a path crosses."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from nlbench.errors import Undefined
from nlbench.measure import Parts, Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, slope_changes

from .papers import traced_regions
from .path_measure import PathMeasure, PathSums


@dataclass(frozen=True)
class _PathCrossings(PathSums):
    """Sums over the segments of a path. `slope_changes` is None if slopes are unknown."""

    crossings: tuple[float, ...]
    length: float
    slope_changes: int | None
    sites: dict[str, float]
    at_least: int
    error: float
    is_estimate: bool

    def statistics(self) -> dict[str, float]:
        total = sum(self.crossings)
        segments = len(self.crossings)
        statistics = {"value": float(total)}
        if self.length > 0:
            statistics["per_length"] = total / self.length
        statistics["per_segment"] = total / segments
        if self.slope_changes is not None:
            statistics["slope_changes"] = float(self.slope_changes)
        if self.is_estimate:
            statistics |= {"at_least": float(self.at_least), "numerical_error": self.error}
        return statistics | {"length": self.length, "segments": float(segments)}

    def components(self) -> Parts:
        return {"segment": self.crossings, "site": self.sites}


class Density(PathMeasure):
    r"""Number of region boundaries that a path crosses.

    The statistics of a path are ``value``, the crossings of all segments, which on a closed path
    counts each region once per visit; ``per_length``, per unit of length, omitted for length 0;
    ``per_segment``, the mean over segments; ``slope_changes``, the crossings at which a logit's
    slope changes; ``segment0``, ``segment1``, …, the crossings of each segment; ``site:NAME``,
    the crossings that each activation call causes, which add up to the value; ``length``;
    ``segments``. For estimated segments the value is the estimate, ``numerical_error`` its stated
    error and ``at_least`` the number of observed crossings; ``slope_changes`` is omitted.

    Definition
    ----------
    .. math::

        \sum_{\text{segments}} (\text{affine regions crossed} - 1)

    Regions are those of the activation pattern: two neighbouring regions may have the same slopes.
    Crossings closer together than 1e-12 of the segment's length count as one.

    Units
    -----
    Crossings per path; ``per_length`` in crossings per unit of input distance.

    Undefined
    ---------
    A network that is not piecewise affine: the reason names the operation. Inputs that can't be
    interpolated.

    Cost
    ----
    About one forward pass per region for exact traces, and 100 to 2,000 per segment for estimates.

    Limits
    ------
    It counts all kinks equally, however small: leaky ReLUs with negative slopes of 0.9 and 0 have
    the same value. It grows with width. ``slope_changes`` excludes boundaries that affect no logit.

    Published code
    --------------
    It steps from boundary to boundary with a sensitivity of 1e-6, which skips shorter regions (1 to
    2 % of those of VGG8) and drifts. The crossings of an in-place ReLU before a hook are lost.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import observe_paths
    >>> density = Density()
    >>> density.reset()
    >>> for observation in observe_paths(torch.nn.ReLU(), torch.tensor([[[-1.0], [1.0], [-1.0]]])):
    ...     density.update(observation)
    >>> density.compute().summary["value"]
    2.0
    """

    name = "density"
    # 4: estimates behind overlapping pooling count crossings at one place once, and in single
    # precision units that agree by chance each.
    version: ClassVar[str] = "4"
    means = ("per_length", "per_segment", "slope_changes", "at_least", "numerical_error")
    parts = ("site",)
    source = traced_regions("section 2.2")

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> _PathCrossings:
        """Count the crossings of one segment."""
        length = trace.length
        sites = dict(trace.contributions)
        if isinstance(trace, SegmentEstimate):
            if trace.crossings is None:
                raise Undefined(trace.refused or "the network is not piecewise affine")
            counts = (trace.crossings,)
            return _PathCrossings(counts, length, None, sites, trace.at_least, trace.error, True)
        count = trace.crossings
        changes = None
        with suppress(Undefined):
            changes = slope_changes(trace)
        return _PathCrossings((float(count),), length, changes, sites, count, 0.0, False)

    def compute_value(self, place: str, path: _PathCrossings) -> Value:
        """Return the number of crossings of a path."""
        return Value(place, path.statistics(), len(path.crossings), parts=path.components())
