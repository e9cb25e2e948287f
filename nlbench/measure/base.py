"""The base class for all measures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nlbench.citation import Source
from nlbench.options import Option, OptionValue, resolve_options

from .result import Result

if TYPE_CHECKING:
    from torch import Tensor

MoreMeans = Literal["more nonlinear", "less nonlinear", "neither"]

INVARIANCES: Mapping[str, str] = {
    "batches": "how samples are split into batches",
    "order": "the order of the samples within a batch",
    "units": "a common scale factor of input and output",
    "offsets": "a constant added to each channel of input and output",
    "rotations": "a common rotation of the channels of input and output",
}
"""Changes of the observations under which a measure may declare its value invariant."""


class Measure(ABC):
    """Base class for measures, which compute results from the observations of a probe.

    A subclass declares its properties in class attributes and implements ``update`` and
    ``compute``. One instance measures one subject: ``reset`` is called once, ``update`` with
    each observation, ``compute`` once.

    Attributes
    ----------
    name : str
        The registered name; by default the class name in lower case.
    probe : str
        Name of a registered probe: ``sites``, ``lines``, ``graph``, ``function`` or a plugin's.
    bounds : tuple of float
        Minimum and maximum possible value.
    more_means : {"more nonlinear", "less nonlinear", "neither"}
        Meaning of a larger value.
    version : str
        Must be changed whenever the measure's values change.
    options : mapping of str to Option
        Declared options. ``self.settings`` holds the resolved values.
    source : Source
        Reference for the definition; a string is used as its citation.
    invariant_to : tuple of str
        Keys of `INVARIANCES` that hold with default options; ``nlbench check-measure`` tests
        them.
    unreduced : mapping of str to callable
        Functions that map an unreduced activation (n, ...), batch first, to one number per sample
        (n,), for measures of the probe ``sites`` that require more than the reduced samples. The
        probe applies them to the input before the call and to the output after it;
        ``observation.unreduced[name]`` is the pair of results.
    independent_sites : bool
        True if several threads may update different sites concurrently: ``update`` reads and
        changes only the state of the observed site and draws no random numbers. The batches of a
        site arrive in order, one at a time; the first arrives while no other thread is updating.
        Not inherited: every class has to declare it.
    counts_crossings : bool
        False if a measure of lines uses no numbers of crossings, which cost most of an estimate.
    scale : str
        How the value depends on units, such as ``grows with the logits``; empty if it doesn't. See
        `scale_note` for a measure where this depends on an option.
    exact : bool
        True if the value doesn't depend on samples or paths, so that it has no sampling error;
        see `exact_of` for a measure where this depends on an option.
    replicated : bool
        True if the result should have replicates, set before ``reset`` is called. Measures derived
        from `PooledMeasure` have them without further code.
    memory : int, optional
        Limit in bytes for the state of replicates at one place, set with ``replicated``.

    Examples
    --------
    >>> class MeanShift(Measure):
    ...     '''Mean change made by an activation.'''
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
    counts_crossings: ClassVar[bool] = True
    scale: ClassVar[str] = ""
    exact: ClassVar[bool] = False
    replicated: bool = False
    memory: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Code added by a subclass may break what its base class guarantees.
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
        """Return the minimum and maximum possible value for resolved options."""
        return cls.bounds

    @classmethod
    def scale_note(cls, options: Mapping[str, OptionValue]) -> str:
        """Return `scale` for resolved options, which reports print with the value."""
        return cls.scale

    @classmethod
    def exact_of(cls, options: Mapping[str, OptionValue]) -> bool:
        """Return True if the value doesn't depend on samples or paths, for resolved options."""
        return cls.exact

    @classmethod
    def row_limit_of(cls, options: Mapping[str, OptionValue]) -> int | None:
        """Return the number of token rows to draw from a batch, or None for all."""
        return None

    def reset(self) -> None:  # noqa: B027 (a measure without state needs none)
        """Clear the state."""

    @abstractmethod
    def update(self, observation: Any) -> None:
        """Add one observation, such as a batch at a site or a traced segment."""

    @abstractmethod
    def compute(self) -> Result:
        """Return the result for all observations."""
