"""Linear units: how much of a network's nonlinearity is switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.errors import Undefined
from nlbench.measure import Measure, Result, Value

from .pathlength import NONLINEAR_ADVANTAGE

if TYPE_CHECKING:
    from nlbench.probes.graph import ChannelGraph

__all__ = ["LinearUnits"]


class LinearUnits(Measure):
    """Share of units whose function is the identity whatever the data, as a PReLU of slope 1.

    A unit is a channel of one activation call. Of the network and of each call: ``value``, the
    share; ``nonlinear`` and ``units``, how many there are. What is left of each layer is the
    core network.
    """

    name = "linear-units"
    probe = "graph"
    bounds = (0.0, 1.0)
    more_means = "less nonlinear"
    source = NONLINEAR_ADVANTAGE

    def reset(self) -> None:
        """Forget the last graph."""
        self._result: Result | None = None

    def update(self, observation: ChannelGraph) -> None:
        """Count the units of a graph."""
        counts = {unit.site: (float(unit.active.sum()), unit.size) for unit in observation.units}
        if not counts:
            raise Undefined("the network has no activation that its output depends on")
        values = tuple(Value(site, _statistics(*pair)) for site, pair in counts.items())
        total = (sum(active for active, _ in counts.values()), sum(n for _, n in counts.values()))
        self._result = Result(_statistics(*total), values)

    def compute(self) -> Result:
        """Give what was counted."""
        if self._result is None:
            raise Undefined("there was no graph to measure")
        return self._result


def _statistics(nonlinear: float, units: int) -> dict[str, float]:
    return {"value": 1 - nonlinear / units, "nonlinear": nonlinear, "units": units}
