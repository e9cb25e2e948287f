"""What several measures compute of one site alike: once, for all that ask for it.

Measures that are `nlbench.Measure.parallel` share what functions make of one batch's x and y,
and accumulators that take in all batches of a site. They have promised to write into nothing that
they are shown; one that does is found out by the versions that PyTorch keeps of tensors, and what
it wrote into is made anew for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from nlbench.errors import PluginError

__all__ = ["Pool", "Shared", "Takes", "Taking", "View"]

Made = TypeVar("Made")


class Takes(Protocol):
    """An accumulator, such as `nlbench.Accumulator`."""

    def add(self, x: Any, y: Any) -> None:
        """Take in one batch."""


Taking = TypeVar("Taking", bound=Takes)


@dataclass
class _Once:
    """What was made, or the error met instead, and the seconds that it took."""

    made: Any = None
    error: Exception | None = None
    seconds: float = 0.0

    def get(self) -> Any:
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.made


def _timed(make: Callable[[], Any]) -> _Once:
    begin = time.perf_counter()
    try:
        once = _Once(make())
    except Exception as error:
        once = _Once(error=error)
    once.seconds = time.perf_counter() - begin
    return once


def _tensors(made: object) -> Iterator[Tensor]:
    """The tensors that something is, or holds."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, Mapping):
        for one in made.values():
            yield from _tensors(one)
    elif isinstance(made, tuple | list):
        for one in made:
            yield from _tensors(one)
    elif hasattr(made, "shown"):
        yield from _tensors(made.shown)


@dataclass
class _Pooled:
    accumulator: Any
    batch: int = -1
    last: _Once = field(default_factory=_Once)


class Pool:
    """The accumulators that measures share in one pass, by site."""

    def __init__(self) -> None:
        self._pooled: dict[Hashable, _Pooled] = {}

    def of(self, key: Hashable, accumulator: object) -> _Pooled:
        """Give the accumulator of a key; the first that is offered is taken."""
        return self._pooled.setdefault(key, _Pooled(accumulator))


class Shared:
    """One batch of one site, and what is computed of it; for one thread.

    Parameters
    ----------
    place : str
    batch : int
        Its number in the pass.
    x, y : tensor of shape (n, d)
        Seen by nobody else.
    pool : Pool
        Of the pass.
    """

    def __init__(self, place: str, batch: int, x: Tensor, y: Tensor, pool: Pool) -> None:
        self._place, self._batch, self._pool = place, batch, pool
        self._originals = x, y
        self.restore()

    def restore(self) -> None:
        """Begin anew: what is shown are copies."""
        self.x, self.y = (one.clone() for one in self._originals)
        self._made: dict[Hashable, _Once] = {}
        self._versions = [(self.x, self.x._version), (self.y, self.y._version)]

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into a tensor that is shown."""
        return all(tensor._version == version for tensor, version in self._versions)

    def made(self, function: Callable[[Tensor, Tensor], Any]) -> tuple[_Once, bool]:
        """What a function makes of x and y, and whether it was there already."""
        is_there = function in self._made
        if not is_there:
            once = self._made[function] = _timed(lambda: function(self.x, self.y))
            self._versions += [(tensor, tensor._version) for tensor in _tensors(once.made)]
        return self._made[function], is_there

    def pooled(
        self, accumulator: Takes, samples: Callable[[Tensor, Tensor], tuple[Any, Any]]
    ) -> tuple[Takes, _Once, bool]:
        """The site's accumulator, what taking in this batch came to, and whether it had."""
        given, _ = self.made(samples)
        pooled = self._pool.of((self._place, type(accumulator), samples), accumulator)
        is_there = pooled.batch >= self._batch
        # What failed once has missed a batch.
        if not is_there and pooled.last.error is None:
            pooled.last = _timed(lambda: pooled.accumulator.add(*given.get()))
            pooled.batch = self._batch
        return pooled.accumulator, pooled.last, is_there


class View:
    """One measure's access to what it shares with others.

    Attributes
    ----------
    seconds : float
        What others have spent on what it has got: measured alone it would have spent it.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: set[Hashable] = set()
        self.seconds = 0.0

    def check(self) -> None:
        """Refuse a measure that has written into what it was shown."""
        if not self._shared.is_intact:
            raise PluginError("update() writes into what other measures are shown")

    def made(self, function: Callable[[Tensor, Tensor], Made]) -> Made:
        """See `SiteBatch.shared`."""
        once, is_there = self._shared.made(function)
        self._charge(function, once, is_there)
        made: Made = once.get()
        return made

    def pooled(
        self, accumulator: Taking, samples: Callable[[Tensor, Tensor], tuple[Any, Any]]
    ) -> Taking:
        """See `SiteBatch.pooled`."""
        self._charge(samples, *self._shared.made(samples))
        found, once, is_there = self._shared.pooled(accumulator, samples)
        self._charge(type(accumulator), once, is_there)
        once.get()
        return found  # type: ignore[return-value]

    def _charge(self, key: Hashable, once: _Once, is_there: bool) -> None:
        if is_there and key not in self._known:
            self.seconds += once.seconds
        self._known.add(key)
