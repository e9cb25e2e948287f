"""Base class for path measures, which sums over segments and reports the tracing method."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any, ClassVar, Self

import numpy as np
import torch

from nlbench.measure import Measure, MoreMeans, Result, Value
from nlbench.measure.replicates import group_index, leave_groups_out
from nlbench.parsers import unique
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, TracedSegment

_DESCRIPTIONS = {
    "adaptive": "by adaptive steps",
    "sampling": "by sampling",
    "quadrature": "by quadrature",
    "refined": "estimated",
}
_DOUBLE = torch.finfo(torch.float64).eps
ROUNDING_OF_MEAN = 1e-9
"""Fraction of the mean over paths below which a path's value may be rounding."""
_SETTINGS = ("sensitivity", "resolution", "tolerance")


@dataclass(frozen=True)
class Method:
    """Methods by which the segments of a result were observed.

    Parameters
    ----------
    names : tuple of str
        ``exact``, ``refined``, ``adaptive``, ``sampling``, ``quadrature``.
    notes : mapping of str to float
        Notes from the traces: settings, and counts summed over segments.
    is_single_precision : bool
        True if a segment was traced in less than double precision, which can miss short regions.
    """

    names: tuple[str, ...] = ()
    notes: Mapping[str, float] = field(default_factory=dict)
    is_single_precision: bool = False

    def add_segment(self, observation: TracedSegment) -> Method:
        """Add a segment."""
        trace = observation.trace
        notes = dict(self.notes)
        for name, number in trace.notes.items():
            is_count = name not in _SETTINGS
            notes[name] = notes.get(name, 0.0) + number if is_count else number
        is_single = isinstance(trace, SegmentTrace) and trace.precision > _DOUBLE
        names = tuple(unique([*self.names, trace.method]))
        return Method(names, notes, self.is_single_precision or is_single)

    def annotate(self, result: Result) -> Result:
        """Add the method to a result's notes, and to its remark unless all traces were exact."""
        if not self.names:
            return result
        notes = {**result.notes, "method": ", ".join(self.names), **self.notes}
        is_exact = self.names == ("exact",) and not self.is_single_precision
        remark = "" if is_exact or result.status != "ok" else self._remark(result)
        reason = "; ".join(filter(None, (result.reason, remark)))
        return replace(result, reason=reason, notes=notes)

    def _remark(self, result: Result) -> str:
        remark = " and ".join(_DESCRIPTIONS.get(name, name) for name in self.names)
        if self.is_single_precision:
            remark += " in float32"
        missed = int(self.notes.get("shorter_than_sensitivity", 0))
        if missed:
            remark += f", which missed about {missed:,} boundaries"
        remark += _stated_error(result.values)
        short = int(self.notes.get("segments_short_of_tolerance", 0))
        # A segment may fall short in another measure's numbers only.
        if short and not _relative_error(result.values) <= self.notes["tolerance"]:
            target = format_percent(self.notes["tolerance"])
            remark += f", above the target of {target} on {short} of {result.n} segments"
        return remark


def _stated_error(paths: Sequence[Value]) -> str:
    """Describe the largest stated error of paths, relative to their values unless one is 0."""
    relative = _relative_error(paths)
    if math.isfinite(relative):
        return f", relative error ≤ {format_percent(relative)}"
    errors = [error for error, _ in _errors_and_values(paths)]
    return f", error ≤ {_rounded_up(max(errors))}" if errors else ""


def _relative_error(paths: Sequence[Value]) -> float:
    """Return the largest stated error of a path relative to its value, or NaN without values.

    On a path where the function is affine, the value is 0 or rounding: there the error is relative
    to the mean over paths.
    """
    pairs = _errors_and_values(paths)
    mean = sum(value for _, value in pairs) / len(pairs) if pairs else 0.0
    if not mean:
        return math.nan
    return max(
        error / (value if value > ROUNDING_OF_MEAN * mean else mean) for error, value in pairs
    )


def _errors_and_values(paths: Sequence[Value]) -> list[tuple[float, float]]:
    numbers = [path.statistics for path in paths if path.status == "ok"]
    return [(x["numerical_error"], abs(x["value"])) for x in numbers if "numerical_error" in x]


def format_percent(fraction: float) -> str:
    """Format a bound in percent, rounded up to two digits.

    Examples
    --------
    >>> format_percent(0.001), format_percent(0.00191), format_percent(1e-7)
    ('0.1 %', '0.2 %', '1e-05 %')
    """
    return f"{_rounded_up(100 * fraction)} %"


def _rounded_up(number: float) -> str:
    """Format a number with two significant digits, rounded up.

    The smallest increases are taken for rounding errors: 100 times 0.001 is a little above 0.1.
    """
    with localcontext(prec=2, rounding=ROUND_CEILING):
        return f"{float(+Decimal(f'{number:.12g}')):g}"


def add_means(result: Result, names: Iterable[str], parts: Iterable[str] = ()) -> Result:
    """Add further statistics, averaged over paths, to a summary if every path has them.

    For each of `parts`, the entries common to all paths are averaged.
    """
    if result.status != "ok":
        return result
    paths = [value for value in result.values if value.status == "ok"]
    means = _means([path.statistics for path in paths], names)
    mean_parts = {}
    for part in parts:
        named = [numbers for path in paths if isinstance(numbers := path.parts[part], Mapping)]
        mean_parts[part] = _means(
            named, dict.fromkeys(name for numbers in named for name in numbers)
        )
    summary = {**result.summary, **means}
    return replace(result, summary=summary, parts={**result.parts, **mean_parts})


def _means(paths: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    means: dict[str, float] = {}
    if not paths:
        return means
    for name in names:
        if all(name in path for path in paths):
            means[name] = statistics.fmean(path[name] for path in paths)
    return means


def _leave_paths_out(result: Result) -> tuple[float, ...]:
    """Compute the replicates of the mean over paths, with each path in a group of its own if few.

    Paths without a value are in groups, too, so that networks measured on the same paths have the
    same groups.
    """
    numbers = np.array([path.statistics.get("value", math.nan) for path in result.values])
    if np.isnan(numbers).any():
        return ()
    groups = group_index(np.arange(len(numbers)))
    return leave_groups_out(groups, lambda kept: float(numbers[kept].mean()))


class PathSums:
    """Base class for the numbers of a segment, which are added field by field over a path."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(_added, vars(self).values(), vars(other).values()))


def _added(first: Any, second: Any) -> Any:
    """Add two values of a field. One that is unknown makes the sum unknown."""
    if first is None or second is None:
        return None
    if isinstance(first, Mapping):
        common = {
            name: _added(value, first[name]) for name, value in second.items() if name in first
        }
        return {**first, **second, **common}
    return first or second if isinstance(first, bool) else first + second


class PathMeasure(Measure):
    """A measure of paths that sums over their segments.

    Attributes
    ----------
    means, parts : tuple of str
        Statistics and parts whose means over paths are in the summary.
    """

    probe = "lines"
    bounds = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    means: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> Any:
        """Measure one segment. Results are summed with ``+``."""

    def measure_observation(self, observation: TracedSegment) -> Any:
        """Measure one segment from its observation. By default, only its trace is used."""
        return self.measure_segment(observation.trace)

    @abstractmethod
    def compute_value(self, place: str, path: Any) -> Value:
        """Convert a path's sum to its value."""

    def reset(self) -> None:
        """Discard all paths."""
        self._paths: dict[str, Any] = {}
        self._method = Method()

    def update(self, observation: TracedSegment) -> None:
        """Add one segment to its path."""
        segment = self.measure_observation(observation)
        path = self._paths.get(observation.place)
        self._paths[observation.place] = segment if path is None else path + segment
        self._method = self._method.add_segment(observation)

    def compute(self) -> Result:
        """Return the value of each path."""
        values = [self.compute_value(place, path) for place, path in self._paths.items()]
        result = Result.of(values, n=sum(value.n for value in values))
        if self.replicated:
            result = replace(result, replicates=_leave_paths_out(result))
        return self._method.annotate(add_means(result, self.means, self.parts))
