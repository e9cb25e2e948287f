"""What a measure is, and what a reading is.

A measure turns what one probe shows into numbers. There are two ways to write
one: decorate a function of a site's input and output with `site_measure`, or derive
a class with ``start``, ``update`` and ``finish`` from `Measure`.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nlbench.errors import NotFinite, Undefined
from nlbench.options import Option, OptionValue, resolve_options

if TYPE_CHECKING:
    import torch

    from nlbench.probes.sites.sites import SiteBatch

__all__ = [
    "FunctionMeasure",
    "Measure",
    "MoreMeans",
    "ProbeName",
    "Result",
    "Source",
    "Status",
    "Value",
    "site_measure",
    "summarize",
]

Status = Literal["ok", "undefined", "skipped", "failed"]
ProbeName = Literal["sites", "lines", "graph", "function"]
MoreMeans = Literal["more nonlinear", "less nonlinear", "neither"]


@dataclass(frozen=True)
class Source:
    """Where a definition comes from.

    Parameters
    ----------
    citation : str
        Authors, title, venue, year.
    equation : str
        Which equation or section.
    bibtex : str
        The entry to paste into a paper.
    """

    citation: str
    equation: str = ""
    bibtex: str = ""


def _plain(statistics: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(number) for name, number in statistics.items()}


@dataclass(frozen=True)
class Value:
    """What a measure says of one place: a site, a path or a layer.

    Parameters
    ----------
    place : str
        The site's name, ``path0``, or a layer's name.
    statistics : mapping of str to float
        ``value`` is the number itself; ``std`` its spread over batches; more as the
        measure likes. Empty unless the status is ``ok``.
    n : int
        Number of samples behind it.
    status : {"ok", "undefined", "skipped", "failed"}
    reason : str
        Why there is no value.
    """

    place: str
    statistics: Mapping[str, float]
    n: int = 0
    status: Status = "ok"
    reason: str = ""

    def __post_init__(self) -> None:
        # Measures count with numpy and torch; a record holds plain numbers.
        object.__setattr__(self, "statistics", _plain(self.statistics))

    @classmethod
    def missing(cls, place: str, status: Status, reason: str, n: int = 0) -> Value:
        """Make a value that is not there, with the reason."""
        return cls(place, {}, n, status, reason)


def summarize(values: Iterable[float]) -> dict[str, float]:
    """Statistics over places: the statistics of a non-linearity signature.

    Parameters
    ----------
    values : iterable of float
        At least one finite number.

    Returns
    -------
    dict of str to float
        ``value`` (the mean), ``std`` (population), ``min``, ``max``, ``median``,
        ``spread`` (max - min).

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
class Result:
    """What one measure says of one subject.

    Parameters
    ----------
    summary : mapping of str to float
        The statistics of the subject as a whole; ``value`` is what a board shows.
    values : tuple of Value
        The same per site, path or layer.
    n : int
        Number of samples (sites) or segments (lines) behind it.
    status : {"ok", "undefined", "skipped", "failed"}
    reason : str
        One line: why there is no value; empty, or a remark, when ``ok``.
    notes : mapping
        What a reader has to know about how the number was made, such as the method.
    """

    summary: Mapping[str, float]
    values: tuple[Value, ...] = ()
    n: int = 0
    status: Status = "ok"
    reason: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", _plain(self.summary))

    def _repr_html_(self) -> str:
        from nlbench import registry

        return str(registry.load("reports", "notebook")(self))

    @classmethod
    def missing(
        cls, status: Status, reason: str, values: tuple[Value, ...] = (), n: int = 0
    ) -> Result:
        """Make a reading without a summary, with the reason."""
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
        """Make a reading of values per place and summarise it.

        Places that are undefined are listed and left out of the summary. One place
        that failed fails the reading: a mean over the rest would be another number
        than the one asked for.

        Parameters
        ----------
        values : mapping of str to float, or iterable of Value
            One number a place, or values ready made.
        n : int
            Number of samples; by default the largest that a value states.
        notes : mapping, optional
        summary : callable
            From the numbers of the places that have one to the summary's statistics.

        Examples
        --------
        >>> Result.of({"features.0": 0.5, "features.1": 1.0}).summary["value"]
        0.75
        """
        if isinstance(values, Mapping):
            entries = tuple(_checked(Value(p, {"value": float(v)}, n)) for p, v in values.items())
        else:
            entries = tuple(_checked(v) for v in values)
        n = n or max((v.n for v in entries), default=0)
        ok = [v.statistics["value"] for v in entries if v.status == "ok"]
        failed = [v for v in entries if v.status == "failed"]
        if failed:
            reason = f"{failed[0].place}: {failed[0].reason}"
            if len(failed) > 1:
                reason += f" (and {len(failed) - 1} more places)"
            return cls.missing("failed", reason, entries, n)
        if not ok:
            reasons = list(dict.fromkeys(v.reason for v in entries if v.reason))
            return cls.missing("undefined", "; ".join(reasons) or "no place to measure", entries, n)
        return cls(dict(summary(ok)), entries, n, notes=dict(notes or {}))


def _checked(value: Value) -> Value:
    """Turn a value whose number is not finite into a failed one."""
    if value.status == "ok" and not all(math.isfinite(v) for v in value.statistics.values()):
        return Value.missing(value.place, "failed", "the score is not finite", value.n)
    return value


class Measure(ABC):
    """One way of turning what a probe shows into numbers.

    A subclass states what it is in class attributes and has three methods. One
    instance measures one subject: ``start`` once, ``update`` with each look, ``finish``
    once.

    Attributes
    ----------
    name : str
        The registered name; by default the class name in lower case.
    probe : {"sites", "lines", "graph", "function"}
    bounds : tuple of float
        Smallest and largest possible value.
    more_means : {"more nonlinear", "less nonlinear", "neither"}
    version : str
        Changes whenever the numbers change.
    options : mapping of str to Option
        Options with their defaults; ``self.settings`` has the values in force.
    source : Source
        Or the citation alone, as text.
    unreduced : mapping of str to callable
        For measures of the probe ``sites`` that need more than the reduced samples:
        functions of an activation's whole tensor (n, ...), batch first, to one number a
        sample (n,). The probe applies them to the input before the call and to the output
        after it, and keeps only the results: ``observation.unreduced[name]`` is the pair of both.

    Examples
    --------
    >>> class MeanShift(Measure):
    ...     '''Mean change that an activation makes.'''
    ...     probe, bounds, more_means = "sites", (0.0, float("inf")), "more nonlinear"
    ...     def reset(self): self.shifts = {}
    ...     def update(self, observation): self.shifts[observation.place] = (observation.y - observation.x).abs().mean().item()
    ...     def compute(self): return Result.of(self.shifts)
    >>> MeanShift.name
    'meanshift'
    """

    name: ClassVar[str] = ""
    probe: ClassVar[ProbeName]
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "1"
    options: ClassVar[Mapping[str, Option]] = {}
    source: ClassVar[Source] = Source("")
    unreduced: ClassVar[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if isinstance(cls.source, str):
            cls.source = Source(cls.source)

    def __init__(self, **settings: OptionValue | str) -> None:
        self.settings: Mapping[str, OptionValue] = resolve_options(
            self.options, settings, owner=self.name
        )

    def reset(self) -> None:  # noqa: B027 (a measure without state needs none)
        """Forget everything; called once before the first look."""

    @abstractmethod
    def update(self, observation: Any) -> None:
        """Take in one look: one batch of one site, one traced segment."""

    @abstractmethod
    def compute(self) -> Result:
        """Say what was found."""


class FunctionMeasure(Measure):
    """A site measure made of a function of ``(x, y)``; see `site_measure`.

    The function is called for each batch of each site; the value of a site is the
    mean over batches, with the standard deviation beside it.
    """

    function: ClassVar[Callable[..., float | torch.Tensor]]

    def reset(self) -> None:
        """Forget all batches."""
        self._scores: dict[str, list[float]] = {}
        self._missing: dict[str, tuple[Status, str]] = {}
        self._n: dict[str, int] = {}

    def update(self, observation: SiteBatch) -> None:
        """Score one batch of one site."""
        place = observation.place
        self._scores.setdefault(place, [])
        self._n[place] = self._n.get(place, 0) + len(observation.x)
        try:
            score = float(type(self).function(observation.x, observation.y, **self.settings))
            if not math.isfinite(score):
                raise NotFinite(f"the score is {score}")
        except Undefined as error:
            self._missing.setdefault(place, ("undefined", str(error)))
        except NotFinite as error:
            self._missing[place] = ("failed", str(error))
        else:
            self._scores[place].append(score)

    def compute(self) -> Result:
        """Mean and standard deviation over batches, per site."""
        return Result.of(self._value(place) for place in self._scores)

    def _value(self, place: str) -> Value:
        scores, n = self._scores[place], self._n[place]
        status, reason = self._missing.get(place, ("ok", ""))
        if status == "failed" or not scores:
            return Value.missing(place, status, reason, n)
        spread = statistics.pstdev(scores)
        summary = {"value": statistics.fmean(scores), "std": spread, "batches": float(len(scores))}
        return Value(place, summary, n, reason=f"in some batches: {reason}" if reason else "")


def site_measure(
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    more_means: MoreMeans = "neither",
    version: str = "1",
    options: Mapping[str, Option] | None = None,
    source: Source | str = "",
) -> Callable[[Callable[..., float | torch.Tensor]], type[FunctionMeasure]]:
    """Make a site measure of a function.

    Parameters
    ----------
    bounds : tuple of float
        Smallest and largest possible value.
    more_means : {"more nonlinear", "less nonlinear", "neither"}
    version : str
        Change it whenever the numbers change.
    options : mapping of str to Option, optional
        Keyword arguments of the function that a user may set.
    source : Source or str
        Where the definition comes from.

    Returns
    -------
    callable
        A decorator: from ``f(x, y, **options)`` with x, y of shape (n, d) to a measure
        named like the function. The function may raise `nlbench.Undefined` with the
        reason where there is nothing to measure.

    Examples
    --------
    >>> @site_measure(bounds=(-1, 1), more_means="less nonlinear")
    ... def cosine(x, y):
    ...     '''Mean cosine between a sample's input and its output.'''
    ...     import torch
    ...     return torch.cosine_similarity(x, y).mean()
    >>> cosine.name, cosine.probe
    ('cosine', 'sites')
    """

    def decorate(function: Callable[..., float | torch.Tensor]) -> type[FunctionMeasure]:
        attributes = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "name": function.__name__,
            "probe": "sites",
            "bounds": bounds,
            "more_means": more_means,
            "version": version,
            "options": dict(options or {}),
            "source": source,
            "function": staticmethod(function),
        }
        return type(function.__name__, (FunctionMeasure,), attributes)

    return decorate
