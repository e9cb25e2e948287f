"""A site measure whose value is one number for all batches of a site together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.measure import Measure, Result, Status, Value

if TYPE_CHECKING:
    from nlbench.probes.sites.sites import SiteBatch

__all__ = ["PooledMeasure", "SiteStream"]


class SiteStream(Protocol):
    """All batches of one site, seen one after another."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch: x (n, d), y (n, k)."""

    def statistics(self) -> Mapping[str, float]:
        """Give the numbers of all batches, ``value`` first; raises Undefined without one."""

    def remark(self) -> str:
        """Say what a reader of the number has to know; mostly nothing."""


class PooledMeasure(Measure):
    """A site measure that keeps one stream per site; a subclass says which."""

    probe: ClassVar[str] = "sites"

    @abstractmethod
    def stream(self) -> SiteStream:
        """Make the stream of one site."""

    def reset(self) -> None:
        """Forget all sites."""
        self._streams: dict[str, SiteStream] = {}
        self._counts: dict[str, int] = {}
        self._missing: dict[str, tuple[Status, str]] = {}

    def samples(self, observation: SiteBatch) -> tuple[Tensor, Tensor]:
        """Choose what a stream is given of a look: by default the reduced samples."""
        return observation.x, observation.y

    def update(self, observation: SiteBatch) -> None:
        """Take in one batch of one site."""
        place = observation.place
        if place not in self._streams:
            self._streams[place] = self.stream()
        self._counts[place] = self._counts.get(place, 0) + len(observation.x)
        if place in self._missing:
            return
        try:
            self._streams[place].add(*self.samples(observation))
        except Undefined as error:
            self._missing[place] = ("undefined", str(error))
        except (NotFinite, RequestError) as error:
            self._missing[place] = ("failed", str(error))

    def compute(self) -> Result:
        """One value per site, in the order of the first call."""
        return Result.of(self._value(place) for place in self._streams)

    def _value(self, place: str) -> Value:
        n, stream = self._counts[place], self._streams[place]
        if place in self._missing:
            return Value.missing(place, *self._missing[place], n)
        try:
            return Value(place, stream.statistics(), n, reason=stream.remark())
        except Undefined as error:
            return Value.missing(place, "undefined", str(error), n)
        except NotFinite as error:
            return Value.missing(place, "failed", str(error), n)
