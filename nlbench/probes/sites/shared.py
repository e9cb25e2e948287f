"""What measures of one package make of one batch of a site alike: made once, and never lent out.

Each measure is shown copies of a batch. What several need beside it, such as the samples centred
in double precision, they ask for by a function; within a package its result is kept for all that
ask. Another package has results of its own, so that nothing it writes into is seen elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

__all__ = ["Borrowed", "Pair", "Shared"]

Made = TypeVar("Made")


class Pair(Protocol):
    """Input and output of an activation, as functions get them whose results are shared."""

    @property
    def x(self) -> Tensor:
        """The input (n, d)."""

    @property
    def y(self) -> Tensor:
        """The output (n, d)."""

    def shared(self, function: Callable[[Pair], Made]) -> Made:
        """What another function makes of them."""


class Shared:
    """One batch of one site, for the measures of one package.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Copied when a function first looks at them.
    clock : callable, optional
        By which seconds are counted; by default `time.perf_counter`.

    Attributes
    ----------
    lent : float
        Seconds of all results that were there already when they were asked for.
    """

    def __init__(self, x: Tensor, y: Tensor, clock: Callable[[], float] | None = None) -> None:
        self._given, self._clock = (x, y), clock or time.perf_counter
        # What a function made, or the error that it raised, and the seconds that it takes alone.
        self._results: dict[Callable[[Pair], Any], tuple[Any, float]] = {}
        self.lent = 0.0

    @cached_property
    def x(self) -> Tensor:
        """The input."""
        return self._given[0].clone()

    @cached_property
    def y(self) -> Tensor:
        """The output."""
        return self._given[1].clone()

    def shared(self, function: Callable[[Pair], Made]) -> Made:
        """What a function makes of the batch, or has made of it."""
        if function in self._results:
            self.lent += self._results[function][1]
        else:
            self._results[function] = self._computed(function)
        made: Made | Exception = self._results[function][0]
        if isinstance(made, Exception):
            raise made.with_traceback(None)
        return made

    def _computed(self, function: Callable[[Pair], Any]) -> tuple[Any, float]:
        lent, begin = self.lent, self._clock()
        try:
            made = function(self)
        except Exception as error:
            # Raised for each that asks.
            made = error
        # Alone it would have taken what it was lent of other functions too.
        return made, self._clock() - begin + self.lent - lent


class Borrowed:
    """One measure's access to what it shares.

    Attributes
    ----------
    seconds : float
        What others have spent on what it has got: alone it would have spent it.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: set[Callable[[Pair], Any]] = set()
        self.seconds = 0.0

    def get(self, function: Callable[[Pair], Made]) -> Made:
        """See `SiteBatch.shared`."""
        before = self._shared.lent
        try:
            return self._shared.shared(function)
        finally:
            if function not in self._known:
                self._known.add(function)
                self.seconds += self._shared.lent - before
