"""What the measures of lines have in common: segments gathered to paths, and how they were seen."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from nlbench.measure import Measure, Result, Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, TracedSegment

__all__ = ["Method", "PathMeasure", "with_means"]

_WORDS = {
    "adaptive": "by adaptive steps",
    "sampling": "by sampling",
    "quadrature": "by quadrature",
    "refined": "estimated on nested grids",
}
_DOUBLE = torch.finfo(torch.float64).eps
_SETTINGS = ("sensitivity", "resolution", "tolerance")


@dataclass(frozen=True)
class Method:
    """How the segments of a result were observed.

    Parameters
    ----------
    names : tuple of str
        ``exact``, ``refined``, ``adaptive``, ``sampling``, ``quadrature``.
    notes : mapping of str to float
        What the traces say of themselves: settings as they are, counts summed up.
    is_single : bool
        Whether a segment was traced in less than double precision, in which short regions
        are missed.
    """

    names: tuple[str, ...] = ()
    notes: Mapping[str, float] = field(default_factory=dict)
    is_single: bool = False

    def and_of(self, observation: TracedSegment) -> Method:
        """Add a segment."""
        trace = observation.trace
        notes = dict(self.notes)
        for name, number in trace.notes.items():
            is_count = name not in _SETTINGS
            notes[name] = notes.get(name, 0.0) + number if is_count else number
        is_single = isinstance(trace, SegmentTrace) and trace.precision > _DOUBLE
        names = tuple(dict.fromkeys([*self.names, trace.method]))
        return Method(names, notes, self.is_single or is_single)

    def on(self, result: Result) -> Result:
        """Note the method on a result; one that is not exact is remarked on in the board."""
        said = ", ".join(self.names)
        if not self.names:
            return result
        remark = ""
        if result.status == "ok" and (self.names != ("exact",) or self.is_single):
            remark = " and ".join(_WORDS.get(name, name) for name in self.names)
            if self.is_single:
                remark += " in float32"
            passed = int(self.notes.get("shorter_than_sensitivity", 0))
            if passed:
                remark += f", which passed over some {passed:,} boundaries"
            if "tolerance" in self.notes:
                remark += f" to {self.notes['tolerance']:g} of the value or to rounding"
            short = int(self.notes.get("segments_short_of_tolerance", 0))
            if short:
                remark += f", which {short} of {result.n} segments did not reach"
        notes = {**result.notes, "method": said, **self.notes}
        reason = "; ".join(filter(None, (result.reason, remark)))
        return replace(result, reason=reason, notes=notes)


def with_means(result: Result, names: Iterable[str], parts: Iterable[str] = ()) -> Result:
    """Add to a summary the mean over paths of more statistics, where every path has them.

    Of `parts`, which are by name, those names that every path has.
    """
    if result.status != "ok":
        return result
    paths = [value for value in result.values if value.status == "ok"]
    means = _means([path.statistics for path in paths], names)
    found = {}
    for part in parts:
        named = [numbers for path in paths if isinstance(numbers := path.parts[part], Mapping)]
        found[part] = _means(named, dict.fromkeys(name for one in named for name in one))
    return replace(result, summary={**result.summary, **means}, parts={**result.parts, **found})


def _means(paths: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    return {
        name: statistics.fmean(path[name] for path in paths)
        for name in names
        if paths and all(name in path for path in paths)
    }


class PathMeasure(Measure):
    """A measure that sums up the segments of each path.

    Attributes
    ----------
    means, parts : tuple of str
        Statistics and parts whose means over paths are added to the summary.
    """

    probe = "lines"
    bounds = (0.0, math.inf)
    more_means = "more nonlinear"
    means: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def of(self, trace: SegmentTrace | SegmentEstimate) -> Any:
        """Say of one segment what can be added to that of others."""

    @abstractmethod
    def value_of(self, place: str, path: Any) -> Value:
        """Say of a path what its segments come to."""

    def reset(self) -> None:
        """Forget all paths."""
        self._paths: dict[str, Any] = {}
        self._method = Method()

    def update(self, observation: TracedSegment) -> None:
        """Add one segment to its path."""
        new, old = self.of(observation.trace), self._paths.get(observation.place)
        self._paths[observation.place] = new if old is None else old + new
        self._method = self._method.and_of(observation)

    def compute(self) -> Result:
        """Give the value of each path."""
        values = [self.value_of(place, path) for place, path in self._paths.items()]
        result = Result.of(values, n=sum(value.n for value in values))
        return self._method.on(with_means(result, self.means, self.parts))
