"""Site measures defined by an accumulator or by a function of input and output."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, overload

from nlbench.citation import Source
from nlbench.errors import NotFinite, PluginError, RequestError, Undefined
from nlbench.options import Option, OptionValue

from .base import Measure, MoreMeans
from .left_out import LeftOut, LeftOutAccumulators, SiteReplicates
from .result import Result, Status, Value

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.probes.sites import SiteBatch

ROW_LIMIT = 1024
"""Maximum number of token rows per batch that are passed to a function."""


class Accumulator(ABC):
    """State of one site, updated batch by batch. See `PooledMeasure`."""

    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> None:
        """Add one batch: x (n, d), y (n, k).

        Raises
        ------
        nlbench.Undefined, nlbench.NotFinite, nlbench.RequestError
            If the site has no value; later batches are skipped.
        """

    @abstractmethod
    def statistics(self) -> Mapping[str, float]:
        """Return the statistics over all batches, including ``value``.

        Raises
        ------
        nlbench.Undefined
            If there is no value; the message is the reason.
        """

    def remark(self) -> str:
        """Return a remark on the value, empty by default."""
        return ""

    def merged(self, other: Any) -> Accumulator:
        """Return the accumulator of the batches of both. Neither is changed.

        Optional: with it, replicates cost one more pass over the samples instead of seven.
        """
        raise NotImplementedError

    @property
    def moment_bytes(self) -> int:
        """Size in bytes of a state that grows with the square of the number of columns."""
        return 0

    @property
    def merges(self) -> bool:
        """True if `merged` is implemented."""
        return type(self).merged is not Accumulator.merged


class _SiteState:
    """State of a measure at one site."""

    def __init__(self, measure: PooledMeasure) -> None:
        self.accumulator = measure.accumulator()
        self.replicates = SiteReplicates(measure, self.accumulator) if measure.replicated else None
        self.count = 0
        self.rows: int | None = None  # Of tokens; None if rows are samples.
        self.missing: tuple[Status, str] | None = None

    def clear(self) -> None:
        """Release the state."""
        del self.accumulator
        self.replicates = None

    def set_missing(self, error: Exception) -> None:
        """Record why the site has no value."""
        self.missing = "undefined" if isinstance(error, Undefined) else "failed", str(error)


class PooledMeasure(Measure):
    """A site measure that pools all batches of a site into one value.

    A subclass implements `accumulator`.

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
    ...     '''Fraction of the input's energy that an activation preserves.'''
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
        """Create the accumulator for one site."""

    def samples(self, observation: SiteBatch) -> tuple[Any, Any]:
        """Return the arguments for `Accumulator.add`, by default the reduced samples."""
        return observation.x, observation.y

    def take(self, accumulator: Any, observation: SiteBatch) -> None:
        """Update an accumulator with one batch, by default by calling `add` with `samples`."""
        accumulator.add(*self.samples(observation))

    def left_out(self, accumulator: Any) -> LeftOut:
        """Create the state for the replicates of one site, given its accumulator."""
        return LeftOutAccumulators(self)

    def reset(self) -> None:
        """Clear the state of all sites."""
        self._sites: dict[str, _SiteState] = {}
        self._values: dict[str, Value] = {}

    def update(self, observation: SiteBatch) -> None:
        """Add one batch at one site."""
        place = observation.place
        if place not in self._sites:
            self._sites[place] = _SiteState(self)
        site = self._sites[place]
        self._add(site, observation)
        if observation.is_last:
            self._values[place] = self._value(place, site)
            # The states of all sites together may not fit into memory.
            site.clear()

    def _add(self, site: _SiteState, observation: SiteBatch) -> None:
        first = site.count
        site.count += observation.count
        if observation.sample_index is not None:
            site.rows = (site.rows or 0) + len(observation.x)
        if site.missing is not None:
            return
        try:
            self.take(site.accumulator, observation)
        except (Undefined, NotFinite, RequestError) as error:
            site.set_missing(error)
        else:
            if site.replicates is not None:
                site.replicates.add(observation, first)

    def compute(self) -> Result:
        """Return one value per site, in call order."""
        return Result.of(
            self._values.get(place) or self._value(place, site)
            for place, site in self._sites.items()
        )

    def _value(self, place: str, site: _SiteState) -> Value:
        if site.missing is None:
            try:
                rows = {} if site.rows is None else {"rows": float(site.rows)}
                statistics = {**site.accumulator.statistics(), **rows}
                reason = site.accumulator.remark()
            except (Undefined, NotFinite, RequestError) as error:
                site.set_missing(error)
        if site.missing is not None:
            return Value.missing(place, *site.missing, site.count)
        replicates = site.replicates.values() if site.replicates else ()
        remark = site.replicates.remark() if site.replicates else ""
        reason = "; ".join(filter(None, (reason, remark)))
        return Value(place, statistics, site.count, reason=reason, replicates=replicates)


class FunctionMeasure(PooledMeasure):
    """A site measure defined by a function of ``(x, y)``.

    The function is called for each batch of each site. The value of a site is the mean over
    batches; ``std`` is their standard deviation. See `site_measure`.
    """

    function: ClassVar[Callable[..., float | Tensor]]

    def accumulator(self) -> Accumulator:
        """Create the list of scores for one site."""
        return _Scores(lambda x, y: self._number(type(self).function(x, y, **self.settings)))

    @classmethod
    def row_limit_of(cls, options: Mapping[str, OptionValue]) -> int | None:
        """Return `ROW_LIMIT`, since a function may compare all pairs of rows."""
        return ROW_LIMIT

    def take(self, accumulator: _Scores, observation: SiteBatch) -> None:
        """Score one batch at one site. Skip it if its score is undefined."""
        try:
            super().take(accumulator, observation)
        except Undefined as error:
            accumulator.undefined = accumulator.undefined or str(error)

    def _number(self, returned: object) -> float:
        """Convert the function's return value to a float."""
        size = getattr(returned, "numel", getattr(returned, "size", 1))
        size = size() if callable(size) else size
        kind = type(returned).__name__
        if returned is None or size != 1:
            text = "None" if returned is None else f"a {kind} of {size} numbers"
            fix = "end it with `return`" if returned is None else "return its mean()"
            raise PluginError(
                f"measure '{self.name}': the function returned {text}, expected one number; {fix}"
            )
        if "complex" in str(getattr(returned, "dtype", kind)):
            kind = "complex number"
        try:
            if kind != "complex number":  # NumPy would leave out the imaginary part.
                return float(returned)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        raise PluginError(
            f"measure '{self.name}': the function returned a {kind}, expected one number"
        )


class _Scores(Accumulator):
    """Scores of a site's batches, and the reason why some batches have none."""

    def __init__(self, score: Callable[[Any, Any], float]) -> None:
        self._score = score
        self.scores: list[float] = []
        self.undefined = ""

    def add(self, x: Any, y: Any) -> None:
        """Score one batch."""
        score = self._score(x, y)
        if not math.isfinite(score):
            raise NotFinite(f"the score is {score}")
        self.scores.append(score)

    def statistics(self) -> Mapping[str, float]:
        """Return the mean and standard deviation over batches."""
        scores = self.scores
        if not scores:
            raise Undefined(self.undefined)
        mean = statistics.fmean(scores)
        std = statistics.pstdev(scores)
        return {"value": mean, "std": std, "batches": float(len(scores))}

    def remark(self) -> str:
        """Return the reason why some batches have no score."""
        return f"in some batches: {self.undefined}" if self.undefined else ""


@overload
def site_measure(function: Callable[..., float | Tensor], /) -> type[FunctionMeasure]: ...


@overload
def site_measure(
    *,
    name: str = ...,
    bounds: tuple[float, float] = ...,
    more_means: MoreMeans = ...,
    version: str = ...,
    options: Mapping[str, Option] | None = ...,
    source: Source | str = ...,
    invariant_to: tuple[str, ...] = ...,
    independent_sites: bool = ...,
) -> Callable[[Callable[..., float | Tensor]], type[FunctionMeasure]]: ...


def site_measure(
    function: Callable[..., float | Tensor] | None = None,
    /,
    *,
    name: str = "",
    bounds: tuple[float, float] = (-math.inf, math.inf),
    more_means: MoreMeans = "neither",
    version: str = "1",
    options: Mapping[str, Option] | None = None,
    source: Source | str = "",
    invariant_to: tuple[str, ...] = (),
    independent_sites: bool = False,
) -> type[FunctionMeasure] | Callable[[Callable[..., float | Tensor]], type[FunctionMeasure]]:
    """Create a site measure from a function, as a decorator with or without parentheses.

    Parameters
    ----------
    function : callable
        The function, if the decorator has no parentheses.
    name : str
        Name of the measure; by default that of the function.
    bounds : tuple of float
        Minimum and maximum possible value.
    more_means : {"more nonlinear", "less nonlinear", "neither"}
    version : str
        Must be changed whenever the measure's values change.
    options : mapping of str to Option, optional
        Keyword arguments of the function that a user may set.
    source : Source or str
        Reference for the definition.
    invariant_to : tuple of str
        Invariances of the value; see `Measure`.
    independent_sites : bool
        True if several threads may call the function concurrently: it keeps no state between
        calls and draws no random numbers.

    Returns
    -------
    measure or callable
        The measure of a function ``f(x, y, **options)``, with x, y of shape (n, d); or a decorator
        that creates it. If there is no value, the function may raise `nlbench.Undefined` with the
        reason.

    Examples
    --------
    >>> @site_measure(bounds=(-1, 1), more_means="less nonlinear")
    ... def cosine(x, y):
    ...     '''Mean cosine between a sample's input and its output.'''
    ...     import torch
    ...     return torch.cosine_similarity(x, y).mean()
    >>> cosine.name, cosine.probe
    ('cosine', 'sites')
    >>> @site_measure
    ... def shift(x, y):
    ...     return (y - x).mean()
    >>> shift.name
    'shift'
    """

    def decorate(function: Callable[..., float | Tensor]) -> type[FunctionMeasure]:
        attributes = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "name": name or function.__name__,
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

    return decorate if function is None else decorate(function)
