"""Measures of a whole network, computed by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from nlbench.measure import Measure, Result


class NetworkMeasure(Measure):
    """Base class for measures whose result a function computes from the first batch."""

    probe = "function"
    function: ClassVar[Callable[[Any], Result]]

    def update(self, observation: Any) -> None:
        """Store the first batch, which has the network and its inputs."""
        if not hasattr(self, "_first"):
            self._first = observation

    def compute(self) -> Result:
        """Return the function's result."""
        return type(self).function(self._first)


def network_measure(name: str, function: Callable[[Any], Result]) -> type[Measure]:
    """Return a measure with the given name, described by the function's docstring."""
    members = {"name": name, "function": staticmethod(function), "__doc__": function.__doc__}
    return type("NamedNetworkMeasure", (NetworkMeasure,), members)
