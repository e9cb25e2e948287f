"""Results: the numbers that one measure computes for one subject.

Standard errors, intervals and ranks are computed from the replicates of values; see
`nlbench.measure.replicates`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nlbench.errors import one_line
from nlbench.lazy import load_reports

from .replicates import combine, standard_error

Status = Literal["ok", "undefined", "skipped", "failed"]

MIN_DEFINED_FRACTION = 0.5
"""Minimum fraction of places with a value for a result to have a summary."""

LIMIT_TOLERANCE = 1e-5
"""Spread of replicates, relative to their distance from the value, up to which they are equal."""

Parts = Mapping[str, Sequence[float] | Mapping[str, float]]
"""Components of each statistic, in order or by name."""


def _plain(statistics: Mapping[str, float]) -> dict[str, float]:
    # Measures return NumPy and PyTorch scalars; records contain Python floats.
    return {str(name): float(number) for name, number in statistics.items()}


def _valid_replicates(replicates: Iterable[float], value: float | None) -> tuple[float, ...]:
    """Round replicates to nine significant digits, enough to tell apart numbers of 32 bits.

    If one isn't finite, there are none. Nor are there if they agree with each other but not with
    the value, as those of a measure that is at its limit with fewer samples: any two samples have a
    CKA of 1.
    """
    numbers = tuple(map(float, replicates))
    if not numbers or not all(map(math.isfinite, numbers)):
        return ()
    if value is not None and abs(numbers[0] - value) > LIMIT_TOLERANCE * abs(value):
        spread = max(numbers) - min(numbers)
        if spread < LIMIT_TOLERANCE * abs(numbers[0] - value):
            return ()
    return tuple(float(f"{number:.9g}") for number in numbers)


def _plain_parts(parts: Parts) -> dict[str, tuple[float, ...] | dict[str, float]]:
    return {
        str(name): _plain(numbers) if isinstance(numbers, Mapping) else tuple(map(float, numbers))
        for name, numbers in parts.items()
    }


class _Numbers:
    """Normalisation and standard error of the statistics in the field `_field`."""

    _field = ""
    reason: str
    parts: Parts
    replicates: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = _plain(getattr(self, self._field))
        object.__setattr__(self, self._field, numbers)
        object.__setattr__(self, "reason", one_line(self.reason) if self.reason else "")
        object.__setattr__(self, "parts", _plain_parts(self.parts))
        replicates = _valid_replicates(self.replicates, numbers.get("value"))
        object.__setattr__(self, "replicates", replicates)

    @property
    def numbers(self) -> dict[str, float]:
        """Statistics, standard error (``error``) and parts, keyed by their names in tables.

        Parts are ``segment0``, ``segment1``, … and ``site:relu``.
        """
        flat = dict(getattr(self, self._field))
        # Records of earlier versions have errors by other methods.
        flat.pop("error", None)
        if self.error is not None:
            flat["error"] = self.error
        for name, numbers in self.parts.items():
            if isinstance(numbers, Mapping):
                flat |= {f"{name}:{part}": number for part, number in numbers.items()}
            else:
                flat |= {f"{name}{index}": number for index, number in enumerate(numbers)}
        return flat

    @property
    def error(self) -> float | None:
        """Standard error of the value, or None if it is unknown."""
        return standard_error(self.replicates)


@dataclass(frozen=True)
class Value(_Numbers):
    """Score at one place: a site, a path or a layer.

    Parameters
    ----------
    place : str
        The site's name, ``path0``, or a layer's name.
    statistics : mapping of str to float
        ``value`` is the score; ``std`` its standard deviation over batches. A measure may add
        others. Empty unless the status is ``ok``.
    n : int
        Number of samples.
    status : {"ok", "undefined", "skipped", "failed"}
    reason : str
        Reason why there is no value.
    parts : mapping of str to sequence, or to mapping of str, of floats
        Components of a statistic, in order, ``{"segment": [3, 5]}``, or by name,
        ``{"site": {"relu": 8}}``. Tables list them as ``segment0``, ``segment1``, ``site:relu``.
    replicates : tuple of float
        The score without each group of samples in turn, rounded to single precision; see
        `nlbench.measure.replicates`. Empty if its error is unknown.

    Examples
    --------
    >>> value = Value("path0", {"value": 8}, parts={"segment": [3, 5], "site": {"relu": 8}})
    >>> value.numbers
    {'value': 8.0, 'segment0': 3.0, 'segment1': 5.0, 'site:relu': 8.0}
    """

    _field = "statistics"
    place: str
    statistics: Mapping[str, float]
    n: int = 0
    status: Status = "ok"
    reason: str = ""
    parts: Parts = field(default_factory=dict)
    replicates: tuple[float, ...] = ()

    @classmethod
    def missing(cls, place: str, status: Status, reason: str, n: int = 0) -> Value:
        """Create a value without statistics."""
        return cls(place, {}, n, status, reason)


def summarize(values: Iterable[float]) -> dict[str, float]:
    """Compute the mean, population std, min, max, median and spread (max - min) over places.

    Examples
    --------
    >>> summarize([1.0, 2.0, 6.0])["value"], summarize([1.0, 2.0, 6.0])["spread"]
    (3.0, 5.0)
    """
    numbers = list(values)
    return {
        "value": statistics.fmean(numbers),
        "std": statistics.pstdev(numbers),
        "min": min(numbers),
        "max": max(numbers),
        "median": statistics.median(numbers),
        "spread": max(numbers) - min(numbers),
    }


@dataclass(frozen=True)
class Result(_Numbers):
    """Result of one measure for one subject.

    Parameters
    ----------
    summary : mapping of str to float
        Statistics for the whole subject; ``value`` is the score on the leaderboard.
    values : tuple of Value
        Scores per site, path or layer.
    n : int
        Number of samples (sites) or segments (lines).
    status : {"ok", "undefined", "skipped", "failed"}
    reason : str
        One-line reason why there is no value; empty or a remark if the status is ``ok``.
    notes : mapping
        Details on how the value was computed, such as the method.
    parts : mapping of str to sequence, or to mapping of str, of floats
        Components of the statistics in the summary; see `Value`.
    replicates : tuple of float
        The summary's ``value`` without each group of samples in turn; see `Value`.
    """

    _field = "summary"
    summary: Mapping[str, float]
    values: tuple[Value, ...] = ()
    n: int = 0
    status: Status = "ok"
    reason: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    replicates: tuple[float, ...] = ()

    @property
    def places(self) -> tuple[int, int]:
        """Number of places with a value, and total number of places.

        Examples
        --------
        >>> Result.of([Value("a", {"value": 1.0}), Value.missing("b", "undefined", "dead")]).places
        (1, 2)
        """
        return sum(value.status == "ok" for value in self.values), len(self.values)

    def _repr_html_(self) -> str:
        return load_reports().render_html(self)

    @classmethod
    def missing(
        cls, status: Status, reason: str, values: tuple[Value, ...] = (), n: int = 0
    ) -> Result:
        """Create a result without a summary."""
        return cls({}, values, n, status, reason)

    @classmethod
    def of(
        cls,
        values: Mapping[str, float] | Iterable[Value],
        *,
        n: int = 0,
        notes: Mapping[str, Any] | None = None,
        summary: Callable[[Iterable[float]], Mapping[str, float]] = summarize,
    ) -> Result:
        """Create a result with a summary from the values at all places.

        Undefined places are listed but not summarized; the reason states how many places the
        summary covers ("mean of 3 of 4 places"). If less than `MIN_DEFINED_FRACTION` of the places
        have a value, the result is undefined. If any place has failed, the result is failed,
        since a mean over the others would be a different quantity.

        Parameters
        ----------
        values : mapping of str to float, or iterable of Value
            One number per place, or complete values.
        n : int
            Number of samples; by default the maximum ``n`` of the values.
        summary : callable
            Function that maps the numbers at defined places to the summary's statistics.

        Examples
        --------
        >>> Result.of({"features.0": 0.5, "features.1": 1.0}).summary["value"]
        0.75
        """
        if isinstance(values, Mapping):
            values = [Value(p, {"value": float(v)}, n) for p, v in values.items()]
        entries = tuple(map(_failed_if_not_finite, values))
        n = n or max((v.n for v in entries), default=0)
        scores = [v.statistics["value"] for v in entries if v.status == "ok"]
        failed = [v for v in entries if v.status == "failed"]
        if failed:
            reason = f"{failed[0].place}: {failed[0].reason}"
            if len(failed) > 1:
                reason += f" (and {len(failed) - 1} more places)"
            return cls.missing("failed", reason, entries, n)
        reasons = _join_reasons(entries)
        if not scores:
            return cls.missing("undefined", reasons or "no place to measure", entries, n)
        missing = len(entries) - len(scores)
        covered = f"{len(scores)} of {len(entries)} places"
        if len(scores) < MIN_DEFINED_FRACTION * len(entries):
            reason = f"{covered}: {reasons}" if reasons else covered
            return cls.missing("undefined", reason, entries, n)
        reason = f"mean of {covered} ({missing} undefined)" if missing else ""
        replicates = combine(
            lambda *numbers: summary(numbers)["value"],
            *(v.replicates for v in entries if v.status == "ok"),
        )
        return cls(
            dict(summary(scores)),
            entries,
            n,
            reason=reason,
            notes=dict(notes or {}),
            replicates=replicates,
        )


def _join_reasons(values: Iterable[Value]) -> str:
    """Join the reasons of undefined values, with one for those that differ in numbers only."""
    groups: dict[str, list[str]] = {}
    for value in values:
        if value.status != "ok" and value.reason:
            form = re.sub(r"\d[\d.,]*", "#", value.reason)
            if value.reason not in groups.setdefault(form, []):
                groups[form].append(value.reason)
    joined = []
    for first, *others in groups.values():
        more = f" (and {len(others)} alike with other numbers)" if others else ""
        joined.append(f"{first}{more}")
    return "; ".join(joined)


def _failed_if_not_finite(value: Value) -> Value:
    if value.status == "ok" and not all(map(math.isfinite, value.numbers.values())):
        return Value.missing(value.place, "failed", "the score is not finite", value.n)
    return value
