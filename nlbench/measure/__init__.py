"""What a measure is, and what it gives: a result.

A measure turns what one probe shows into numbers. There are three ways to write one:
decorate a function of a site's input and output with `site_measure`; derive a class from
`PooledMeasure`, for one number of all batches of a site; derive a class with ``reset``,
``update`` and ``compute`` from `Measure`, for any probe.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nlbench.citation import Source
from nlbench.errors import NotFinite, PluginError, RequestError, Undefined, one_line
from nlbench.options import Option, OptionValue, resolve_options

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.probes.sites.probe import SiteBatch

__all__ = [
    "ENOUGH_PLACES",
    "INVARIANCES",
    "Accumulator",
    "FunctionMeasure",
    "Measure",
    "MetricMeasure",
    "MoreMeans",
    "Parts",
    "PooledMeasure",
    "Result",
    "Source",
    "Status",
    "Value",
    "metric_measure",
    "site_measure",
    "summarize",
]

Status = Literal["ok", "undefined", "skipped", "failed"]
MoreMeans = Literal["more nonlinear", "less nonlinear", "neither"]

INVARIANCES: Mapping[str, str] = {
    "batches": "how samples are cut into batches",
    "order": "the order of the samples within a batch",
    "units": "one factor for input and output",
    "offsets": "a constant added to each channel of input and output",
    "rotations": "one rotation of the channels of input and output",
}
"""What the value of a measure may claim not to depend on, but for rounding."""


# The share of places that must have a value for a summary to speak for all of them: with
# fewer, what most of the network does is not known.
ENOUGH_PLACES = 0.5


Parts = Mapping[str, Sequence[float] | Mapping[str, float]]
"""Numbers that a statistic is made of, by its name: in order, or each by a name of its own."""


def _plain(statistics: Mapping[str, float]) -> dict[str, float]:
    # Measures count with numpy and torch; a record holds plain numbers.
    return {str(name): float(number) for name, number in statistics.items()}


def _plain_parts(parts: Parts) -> dict[str, tuple[float, ...] | dict[str, float]]:
    return {
        str(name): _plain(found) if isinstance(found, Mapping) else tuple(map(float, found))
        for name, found in parts.items()
    }


def _reason(given: object) -> str:
    # It comes from plugins and from files of anybody, and goes to terminals and tables.
    return one_line(given) if given else ""


def _spelled(statistics: Mapping[str, float], parts: Parts) -> dict[str, float]:
    """All numbers by one name each: ``segment0``, ``segment1``, … and ``site:relu``."""
    numbers = dict(statistics)
    for name, found in parts.items():
        if isinstance(found, Mapping):
            numbers |= {f"{name}:{part}": number for part, number in found.items()}
        else:
            numbers |= {f"{name}{index}": number for index, number in enumerate(found)}
    return numbers


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
    parts : mapping of str to sequence, or to mapping of str, of floats
        What a statistic is made of: ``{"segment": [3, 5]}``, in order, or by name
        ``{"site": {"relu": 8}}``. Tables spell them ``segment0``, ``segment1``, ``site:relu``.

    Examples
    --------
    >>> value = Value("path0", {"value": 8}, parts={"segment": [3, 5], "site": {"relu": 8}})
    >>> value.numbers
    {'value': 8.0, 'segment0': 3.0, 'segment1': 5.0, 'site:relu': 8.0}
    """

    place: str
    statistics: Mapping[str, float]
    n: int = 0
    status: Status = "ok"
    reason: str = ""
    parts: Parts = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", _plain(self.statistics))
        object.__setattr__(self, "reason", _reason(self.reason))
        object.__setattr__(self, "parts", _plain_parts(self.parts))

    @property
    def numbers(self) -> dict[str, float]:
        """Statistics and parts, each number by the name that tables give it."""
        return _spelled(self.statistics, self.parts)

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
    parts : mapping of str to sequence, or to mapping of str, of floats
        What statistics of the summary are made of; see `Value`.
    """

    summary: Mapping[str, float]
    values: tuple[Value, ...] = ()
    n: int = 0
    status: Status = "ok"
    reason: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", _plain(self.summary))
        object.__setattr__(self, "reason", _reason(self.reason))
        object.__setattr__(self, "parts", _plain_parts(self.parts))

    @property
    def numbers(self) -> dict[str, float]:
        """Summary and parts, each number by the name that tables give it."""
        return _spelled(self.summary, self.parts)

    @property
    def places(self) -> tuple[int, int]:
        """How many places have a value, and how many were looked at.

        Examples
        --------
        >>> Result.of([Value("a", {"value": 1.0}), Value.missing("b", "undefined", "dead")]).places
        (1, 2)
        """
        return sum(value.status == "ok" for value in self.values), len(self.values)

    def _repr_html_(self) -> str:
        from nlbench import registry

        return str(registry.load("reports", "notebook")(self))

    @classmethod
    def missing(
        cls, status: Status, reason: str, values: tuple[Value, ...] = (), n: int = 0
    ) -> Result:
        """Make a result without a summary, with the reason."""
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
        """Make a result of values per place and summarise it.

        Places that are undefined are listed and left out of the summary, which says of how
        many places it is ("3 of 4 places"); where fewer than the share `ENOUGH_PLACES`
        have a value there is no summary, and the result is undefined. One place that
        failed fails the result: a mean over the rest would be another number than the one
        asked for.

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
        reasons = dict.fromkeys(v.reason for v in entries if v.status != "ok" and v.reason)
        why = "; ".join(reasons)
        if not ok:
            return cls.missing("undefined", why or "no place to measure", entries, n)
        share = f"{len(ok)} of {len(entries)} places"
        if len(ok) < ENOUGH_PLACES * len(entries):
            return cls.missing("undefined", f"{share}: {why}" if why else share, entries, n)
        reason = "" if len(ok) == len(entries) else share
        return cls(dict(summary(ok)), entries, n, reason=reason, notes=dict(notes or {}))


def _checked(value: Value) -> Value:
    """Turn a value whose number is not finite into a failed one."""
    if value.status == "ok" and not all(map(math.isfinite, value.numbers.values())):
        return Value.missing(value.place, "failed", "the score is not finite", value.n)
    return value


class Measure(ABC):
    """One way of turning what a probe shows into numbers.

    A subclass states what it is in class attributes and has three methods. One
    instance measures one subject: ``reset`` once, ``update`` with each observation, ``compute``
    once.

    Attributes
    ----------
    name : str
        The registered name; by default the class name in lower case.
    probe : str
        Name of a registered probe: ``sites``, ``lines``, ``graph``, ``function`` or a plugin's.
    bounds : tuple of float
        Smallest and largest possible value.
    more_means : {"more nonlinear", "less nonlinear", "neither"}
    version : str
        Changes whenever the numbers change.
    options : mapping of str to Option
        Options with their defaults; ``self.settings`` has the values in force.
    source : Source
        Or the citation alone, as text.
    invariant_to : tuple of str
        What the value doesn't depend on with default options, among ``batches``, ``order``,
        ``units``, ``offsets``, ``rotations`` (see `INVARIANCES`); ``nlbench check-measure``
        tests it.
    unreduced : mapping of str to callable
        For measures of the probe ``sites`` that need more than the reduced samples:
        functions of an activation's whole tensor (n, ...), batch first, to one number a
        sample (n,). The probe applies them to the input before the call and to the output
        after it, and keeps only the results: ``observation.unreduced[name]`` is the pair of both.
    independent_sites : bool
        Whether sites may be taken in by several threads at once: ``update`` reads and changes
        nothing but what belongs to the site it is given, and draws no random numbers. The batches
        of one site come in order, one at a time, and its first one alone. Each class says so for
        itself, whatever the one that it is derived from says.

    Examples
    --------
    >>> class MeanShift(Measure):
    ...     '''Mean change that an activation makes.'''
    ...     probe, bounds, more_means = "sites", (0.0, float("inf")), "more nonlinear"
    ...     def reset(self): self.shifts = {}
    ...     def update(self, batch):
    ...         self.shifts[batch.place] = (batch.y - batch.x).abs().mean().item()
    ...     def compute(self): return Result.of(self.shifts)
    >>> MeanShift.name
    'meanshift'
    """

    name: ClassVar[str] = ""
    probe: ClassVar[str]
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "1"
    options: ClassVar[Mapping[str, Option]] = {}
    source: ClassVar[Source] = Source("")
    invariant_to: ClassVar[tuple[str, ...]] = ()
    unreduced: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}
    independent_sites: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What a class adds may not be so.
        cls.independent_sites = cls.__dict__.get("independent_sites", False)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if isinstance(cls.source, str):
            cls.source = Source(cls.source)

    def __init__(self, **settings: OptionValue | str) -> None:
        self.settings: Mapping[str, OptionValue] = resolve_options(
            self.options, settings, owner=self.name
        )

    @classmethod
    def bounds_of(cls, options: Mapping[str, OptionValue]) -> tuple[float, float]:
        """Give the smallest and largest possible value under these options.

        Parameters
        ----------
        options : mapping of str to value
            All of `options`, resolved.
        """
        return cls.bounds

    def reset(self) -> None:  # noqa: B027 (a measure without state needs none)
        """Forget everything; called once before the first observation."""

    @abstractmethod
    def update(self, observation: Any) -> None:
        """Take in one observation: one batch of one site, one traced segment."""

    @abstractmethod
    def compute(self) -> Result:
        """Say what was found."""


class Accumulator(ABC):
    """All batches of one site, taken in one after another; see `PooledMeasure`."""

    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch: x (n, d), y (n, k).

        Raises
        ------
        nlbench.Undefined, nlbench.NotFinite, nlbench.RequestError
            If the site has no value, whatever comes later.
        """

    @abstractmethod
    def statistics(self) -> Mapping[str, float]:
        """Give the numbers of all batches together, among them ``value``.

        Raises
        ------
        nlbench.Undefined
            If there is none, with the reason.
        """

    def remark(self) -> str:
        """Say what a reader of the number has to know; by default nothing."""
        return ""


class PooledMeasure(Measure):
    """A site measure whose value is one number of all batches of a site together.

    A subclass says what accumulates the batches of one site.

    Examples
    --------
    >>> class Sums(Accumulator):
    ...     def __init__(self): self.before = self.after = 0.0
    ...     def add(self, x, y):
    ...         self.before += x.double().square().sum().item()
    ...         self.after += y.double().square().sum().item()
    ...     def statistics(self):
    ...         if self.before == 0:
    ...             raise Undefined("zero input")
    ...         return {"value": self.after / self.before}
    >>> class Energy(PooledMeasure):
    ...     '''Share of the input's energy that an activation lets through.'''
    ...     bounds = (0.0, math.inf)
    ...     def accumulator(self): return Sums()
    >>> import nlbench, torch
    >>> x = torch.tensor([[1.0, -1.0], [-2.0, 2.0]])
    >>> nlbench.evaluate(torch.nn.ReLU(), x, [Energy])["energy"].summary["value"]
    0.5
    """

    probe: ClassVar[str] = "sites"

    @abstractmethod
    def accumulator(self) -> Accumulator:
        """Make what takes in the batches of one site."""

    def samples(self, observation: SiteBatch) -> tuple[Any, Any]:
        """Choose what an accumulator is given of a batch: by default the reduced samples."""
        return observation.x, observation.y

    def take(self, accumulator: Any, observation: SiteBatch) -> None:
        """Have an accumulator take in one batch: by default `add` what `samples` chooses."""
        accumulator.add(*self.samples(observation))

    def reset(self) -> None:
        """Forget all sites."""
        self._accumulators: dict[str, Accumulator] = {}
        self._counts: dict[str, int] = {}
        self._missing: dict[str, tuple[Status, str]] = {}

    def update(self, observation: SiteBatch) -> None:
        """Take in one batch of one site."""
        place = observation.place
        if place not in self._accumulators:
            self._accumulators[place] = self.accumulator()
        self._counts[place] = self._counts.get(place, 0) + len(observation.x)
        if place in self._missing:
            return
        try:
            self.take(self._accumulators[place], observation)
        except Undefined as error:
            self._missing[place] = ("undefined", str(error))
        except (NotFinite, RequestError) as error:
            self._missing[place] = ("failed", str(error))

    def compute(self) -> Result:
        """One value per site, in the order of the first call."""
        return Result.of(self._value(place) for place in self._accumulators)

    def _value(self, place: str) -> Value:
        n, accumulator = self._counts[place], self._accumulators[place]
        if place in self._missing:
            return Value.missing(place, *self._missing[place], n)
        try:
            return Value(place, accumulator.statistics(), n, reason=accumulator.remark())
        except Undefined as error:
            return Value.missing(place, "undefined", str(error), n)
        except (NotFinite, RequestError) as error:
            return Value.missing(place, "failed", str(error), n)


class FunctionMeasure(PooledMeasure):
    """A site measure made of a function of ``(x, y)``; see `site_measure`.

    The function is called for each batch of each site; the value of a site is the
    mean over batches, with the standard deviation beside it.
    """

    function: ClassVar[Callable[..., float | Tensor]]

    def accumulator(self) -> Accumulator:
        """Make what keeps the scores of one site's batches."""
        return _Scores(lambda x, y: self._number(type(self).function(x, y, **self.settings)))

    def take(self, accumulator: _Scores, observation: SiteBatch) -> None:
        """Score one batch of one site; one without a score is left out."""
        try:
            super().take(accumulator, observation)
        except Undefined as error:
            accumulator.undefined = accumulator.undefined or str(error)

    def _number(self, given: object) -> float:
        """One number of what the function returned; else say what to return."""
        size = getattr(given, "numel", getattr(given, "size", 1))
        size = size() if callable(size) else size
        if given is None or size != 1:
            what = "None" if given is None else f"a {type(given).__name__} of {size} numbers"
            mend = "end it with `return`" if given is None else "return its mean()"
            raise PluginError(
                f"measure '{self.name}': the function returned {what}, expected one number; {mend}"
            )
        try:
            return float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise PluginError(
                f"measure '{self.name}': the function returned a {type(given).__name__}, "
                "expected one number"
            ) from None


class _Scores(Accumulator):
    """The scores of a site's batches, and why there is none of some."""

    def __init__(self, score: Callable[[Any, Any], float]) -> None:
        self._score = score
        self._scores: list[float] = []
        self.undefined = ""

    def add(self, x: Any, y: Any) -> None:
        """Score one batch."""
        score = self._score(x, y)
        if not math.isfinite(score):
            raise NotFinite(f"the score is {score}")
        self._scores.append(score)

    def statistics(self) -> Mapping[str, float]:
        """Mean and standard deviation over batches."""
        scores = self._scores
        if not scores:
            raise Undefined(self.undefined)
        value, spread = statistics.fmean(scores), statistics.pstdev(scores)
        return {"value": value, "std": spread, "batches": float(len(scores))}

    def remark(self) -> str:
        """Say why some batches have no score."""
        return f"in some batches: {self.undefined}" if self.undefined else ""


def site_measure(
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    more_means: MoreMeans = "neither",
    version: str = "1",
    options: Mapping[str, Option] | None = None,
    source: Source | str = "",
    invariant_to: tuple[str, ...] = (),
    independent_sites: bool = False,
) -> Callable[[Callable[..., float | Tensor]], type[FunctionMeasure]]:
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
    invariant_to : tuple of str
        What the value doesn't depend on; see `Measure`.
    independent_sites : bool
        Whether several threads may call the function at once: it keeps nothing between calls and
        draws no random numbers.

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

    def decorate(function: Callable[..., float | Tensor]) -> type[FunctionMeasure]:
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
            "invariant_to": invariant_to,
            "independent_sites": independent_sites,
            "function": staticmethod(function),
        }
        return type(function.__name__, (FunctionMeasure,), attributes)

    return decorate


class MetricMeasure(PooledMeasure):
    """A site measure that shows a ``torchmetrics.Metric`` the site's input and output.

    See `metric_measure`.
    """

    metric: ClassVar[Any]

    def accumulator(self) -> Accumulator:
        """Make a metric of one site."""
        return _MetricOfSite(self.metric)


def metric_measure(metric: Any, name: str | None = None) -> type[MetricMeasure]:
    """Make a site measure of a ``torchmetrics.Metric`` that takes two tensors.

    Each site has a metric of its own, which is shown every batch as
    ``metric.update(x, y)``: the input is where torchmetrics says ``preds``, the output is
    the ``target``. The work is done in float64. A metric for one output (``num_outputs`` of
    1) that takes no matrix has one number a column, the value is their mean; columns of which
    it gives NaN, such as constant ones, are left out of it and counted in the remark.

    What torchmetrics states as bounds is where a plot begins and ends, so none are declared;
    nor is a direction: to be alike is not to be linear.

    Parameters
    ----------
    metric : torchmetrics.Metric
        Copied for each site, itself left alone.
    name : str, optional
        By default the class's name in lower case.

    Examples
    --------
    >>> import torch, torchmetrics
    >>> r2 = metric_measure(torchmetrics.R2Score())
    >>> r2.name, r2.version.partition(",")[0] == f"torchmetrics {torchmetrics.__version__}"
    ('r2score', True)
    """
    kind = type(metric)
    name = name or kind.__name__.lower()
    citation = f"torchmetrics, {kind.__name__}"
    attributes = {
        "__doc__": f"{kind.__name__} of torchmetrics, between a site's input and output.",
        "__module__": kind.__module__,
        "name": name,
        "version": _metric_version(metric),
        "source": Source(citation),
        "metric": metric,
    }
    return type(name, (MetricMeasure,), attributes)


def _metric_version(metric: Any) -> str:
    """What decides a metric's numbers: torchmetrics' version, and how the metric is set."""
    import torchmetrics

    class Bare(torchmetrics.Metric):
        def update(self) -> None: ...
        def compute(self) -> None: ...

    known = {*vars(Bare()), *metric._defaults}
    plain = (bool, int, float, str, type(None), tuple)
    settings = [
        f", {name}={value!r}"
        for name, value in sorted(vars(metric).items())
        if name not in known and isinstance(value, plain)
    ]
    return f"torchmetrics {torchmetrics.__version__}{''.join(settings)}"


class _MetricOfSite(Accumulator):
    """A metric of one site: of all columns together, or else one a column."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._metrics: list[Any] = []
        self._is_whole = True
        self._measured = self._columns = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Update the metric; what it can't take is the site's failure."""
        x, y = (_finite_doubles(values, role) for values, role in ((x, "input"), (y, "output")))
        try:
            if not self._metrics:
                self._begin(x, y)
            if self._is_whole:
                self._metrics[0].update(x, y)
            else:
                for metric, column, target in zip(self._metrics, x.T, y.T, strict=True):
                    metric.update(column, target)
        except (ValueError, RuntimeError, IndexError) as error:
            raise RequestError(f"{self._kind}: {one_line(error)}") from error

    def _begin(self, x: Tensor, y: Tensor) -> None:
        try:
            self._fresh(x).update(x, y)
        except (ValueError, RuntimeError):
            if getattr(self._metric, "num_outputs", None) != 1 or x.shape != y.shape:
                raise
            self._is_whole = False
        self._metrics = [self._fresh(x) for _ in range(1 if self._is_whole else x.shape[1])]

    def _fresh(self, like: Tensor) -> Any:
        metric = self._metric.clone()
        metric.reset()
        return metric.set_dtype(like.dtype).to(like.device)

    @property
    def _kind(self) -> str:
        return type(self._metric).__name__

    def statistics(self) -> Mapping[str, float]:
        """Compute the metric; the mean over columns where it gives several numbers."""
        import torch

        try:
            found = [metric.compute() for metric in self._metrics]
        except (ValueError, RuntimeError) as error:
            raise RequestError(f"{self._kind}: {one_line(error)}") from error
        if not all(isinstance(one, torch.Tensor) for one in found):
            raise PluginError(f"{self._kind} gives a {type(found[0]).__name__}, expected a tensor")
        numbers = torch.cat([one.double().flatten() for one in found])
        defined = numbers[~numbers.isnan()]
        self._measured, self._columns = len(defined), len(numbers)
        if not len(defined):
            raise Undefined(f"{self._kind} gives no number")
        return {"value": float(defined.mean())}

    def remark(self) -> str:
        """Say of how many columns the value is, where some have none."""
        if self._measured == self._columns:
            return ""
        return f"of {self._measured} of {self._columns} columns, the others have no number"


def _finite_doubles(values: Tensor, role: str) -> Tensor:
    import torch

    values = values.detach()
    values = (values.cpu() if values.device.type == "mps" else values).to(torch.float64)
    if not torch.isfinite(values).all():
        raise NotFinite(f"the {role} has entries that are not finite")
    return values
