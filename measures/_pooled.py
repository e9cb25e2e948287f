"""A site measure whose value is one number for all batches of a site together."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.measure import Measure, ProbeName, Reading, Value

if TYPE_CHECKING:
    from nlbench.probes.sites import SiteLook

__all__ = ["PooledMeasure", "SiteStream"]


class SiteStream(Protocol):
    """All batches of one site, seen one after another."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch: x (n, d), y (n, k)."""

    def score(self) -> float:
        """Give the number of all batches; raises Undefined where there is none."""

    def remark(self) -> str:
        """Say what a reader of the number has to know; mostly nothing."""


class PooledMeasure(Measure):
    """A site measure that keeps one stream per site; a subclass says which."""

    probe: ClassVar[ProbeName] = "sites"

    @abstractmethod
    def stream(self) -> SiteStream:
        """Make the stream of one site."""

    def start(self) -> None:
        """Forget all sites."""
        self._streams: dict[str, SiteStream] = {}
        self._counts: dict[str, int] = {}
        self._failed: dict[str, str] = {}

    def update(self, look: SiteLook) -> None:
        """Take in one batch of one site."""
        place = look.place
        if place not in self._streams:
            self._streams[place] = self.stream()
        self._counts[place] = self._counts.get(place, 0) + len(look.x)
        if place in self._failed:
            return
        try:
            self._streams[place].add(look.x, look.y)
        except (NotFinite, RequestError) as error:
            self._failed[place] = str(error)

    def finish(self) -> Reading:
        """One value per site, in the order of the first call."""
        return Reading.of(self._value(place) for place in self._streams)

    def _value(self, place: str) -> Value:
        n, stream = self._counts[place], self._streams[place]
        if place in self._failed:
            return Value.missing(place, "failed", self._failed[place], n)
        try:
            return Value(place, {"value": stream.score()}, n, reason=stream.remark())
        except Undefined as error:
            return Value.missing(place, "undefined", str(error), n)
        except NotFinite as error:
            return Value.missing(place, "failed", str(error), n)
