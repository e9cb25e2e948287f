"""Linear units: the fraction of activation units that are the identity."""

from __future__ import annotations

from nlbench.errors import Undefined
from nlbench.measure import Measure, Result, Value
from nlbench.probes.graph import ChannelGraph

from .pathlength import NONLINEAR_ADVANTAGE


class LinearUnits(Measure):
    r"""Fraction of units whose function is the identity for any data, like a PReLU with slope 1.

    A unit is a channel of one activation call. The statistics of the network and of each call are
    ``value``, the fraction, and the counts ``nonlinear`` and ``units``. The nonlinear units form
    the core network.

    Definition
    ----------
    .. math::

        \frac{\#\{\text{units that are the identity}\}}{\#\{\text{units}\}}

    Units
    -----
    None.

    Undefined
    ---------
    A network whose output depends on no activation.

    Cost
    ----
    One forward pass on tensor shapes only.

    Limits
    ------
    Only exact identities count: the value is 0 for an ordinary network, regardless of its weights.

    Examples
    --------
    >>> import nlbench, torch
    >>> relu, linear = torch.nn.ReLU(), torch.nn.PReLU(1, init=1.0)
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 3), relu, torch.nn.Linear(3, 1), linear)
    >>> run = nlbench.evaluate(network, torch.randn(8, 4), ["linear-units"])
    >>> run["linear-units"].summary["value"]
    0.25
    """

    name = "linear-units"
    probe = "graph"
    bounds = (0.0, 1.0)
    more_means = "less nonlinear"
    exact = True
    source = NONLINEAR_ADVANTAGE

    def reset(self) -> None:
        """Discard the last graph."""
        self._result: Result | None = None

    def update(self, observation: ChannelGraph) -> None:
        """Count the units of a graph."""
        counts = {unit.site: (float(unit.active.sum()), unit.size) for unit in observation.units}
        if not counts:
            raise Undefined("the network's output depends on no activation")
        values = tuple(Value(site, _statistics(*pair)) for site, pair in counts.items())
        total = (sum(active for active, _ in counts.values()), sum(n for _, n in counts.values()))
        self._result = Result(_statistics(*total), values)

    def compute(self) -> Result:
        """Return the counts of the last graph."""
        if self._result is None:
            raise Undefined("no graph was observed")
        return self._result


def _statistics(nonlinear: float, units: int) -> dict[str, float]:
    return {"value": 1 - nonlinear / units, "nonlinear": nonlinear, "units": units}
