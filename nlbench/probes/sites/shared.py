"""Results shared between the measures of one package during a pass.

Each measure gets its own copies of a batch. Intermediate results that several measures need, such
as the samples centred in double precision, are computed once and kept for all measures of the same
package. Packages do not share results, so that none can modify another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from nlbench.introspection.distinct_rows import RowNumbers

T = TypeVar("T")


class Pair(Protocol):
    """Input and output of an activation, as passed to shared functions."""

    @property
    def x(self) -> Tensor:
        """Input (n, d)."""

    @property
    def y(self) -> Tensor:
        """Output (n, d)."""

    @property
    def rounding(self) -> tuple[float, float]:
        """Relative errors of x and y, excluding the rounding error of their own type."""

    @property
    def sources(self) -> RowNumbers | None:
        """Number of each row's sample, see `SiteBatch`."""

    def shared(self, function: Callable[[Pair], T]) -> T:
        """Return the result of another shared function."""


class SharedBatch:
    """A batch of one site, with the results that the measures of one package share.

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Copied on first access.
    clock : callable, optional
        Timer in seconds; by default `time.perf_counter`.
    rounding : tuple of float
        See `SiteBatch`.
    sources : RowNumbers, optional
        See `SiteBatch`.

    Attributes
    ----------
    lent : float
        Seconds saved so far: the cost of every result that was requested again.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        clock: Callable[[], float] | None = None,
        rounding: tuple[float, float] = (0.0, 0.0),
        sources: RowNumbers | None = None,
    ) -> None:
        self._originals, self._clock = (x, y), clock or time.perf_counter
        self.rounding = rounding
        self.sources = sources
        # The result or error of each function, and the seconds it would take on its own.
        self._results: dict[Callable[[Pair], Any], tuple[Any, float]] = {}
        self.lent = 0.0

    @cached_property
    def x(self) -> Tensor:
        """Copy of the input (n, d)."""
        return self._originals[0].clone()

    @cached_property
    def y(self) -> Tensor:
        """Copy of the output (n, d)."""
        return self._originals[1].clone()

    def shared(self, function: Callable[[Pair], T]) -> T:
        """Return a function's result on the batch, computing it on the first call."""
        if function in self._results:
            self.lent += self._results[function][1]
        else:
            self._results[function] = self._compute(function)
        result: T | Exception = self._results[function][0]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    def _compute(self, function: Callable[[Pair], Any]) -> tuple[Any, float]:
        lent, start = self.lent, self._clock()
        try:
            result = function(self)
        except Exception as error:
            # Raised again for each caller.
            result = error
        # On its own, the function would also have computed the shared results that it used.
        return result, self._clock() - start + self.lent - lent


class SharedAccess:
    """One measure's access to shared results.

    Attributes
    ----------
    seconds : float
        Seconds that other measures spent on results that this measure used.
    """

    def __init__(self, shared: SharedBatch) -> None:
        self._shared = shared
        self._requested: set[Callable[[Pair], Any]] = set()
        self.seconds = 0.0

    def get(self, function: Callable[[Pair], T]) -> T:
        """Return a shared result; see `SiteBatch.shared`."""
        before = self._shared.lent
        try:
            return self._shared.shared(function)
        finally:
            if function not in self._requested:
                self._requested.add(function)
                self.seconds += self._shared.lent - before
