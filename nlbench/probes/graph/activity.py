"""Activity of a channel graph's units on samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, Undefined
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.module_stack import SiteNames
from nlbench.introspection.precision import exact_by_default

from .channel_graph import ChannelGraph, Units


@exact_by_default()
def unit_activity(
    model: nn.Module, graph: ChannelGraph, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Compute the fraction of samples and positions at which each unit changes its input, by site.

    The graph is that of the same model for the same input size.

    Examples
    --------
    >>> from nlbench.probes.graph.graph_observation import channel_graph
    >>> samples = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    >>> unit_activity(nn.ReLU(), channel_graph(nn.ReLU(), samples), [samples])["relu"].tolist()
    [0.0, 0.5]
    """
    totals = {unit.site: torch.zeros(unit.size, dtype=torch.float64) for unit in graph.units}
    samples = 0
    observer = _ActivityObserver(model, graph)
    with evaluation_mode(model), without_fast_path(), observer.hooked():
        for batch in batches:
            try:
                parts = [observer.fractions(batch)]
            except _AmbiguousOrder:
                parts = [observer.fractions(sample) for sample in torch.split(batch, 1)]
            for site, total in totals.items():
                if any(site not in fractions for fractions in parts):
                    raise Undefined(f"{site} is not called on the samples")
                total += sum(fractions[site] for fractions in parts) * (len(batch) / len(parts))
            samples += len(batch)
    return {site: total / samples for site, total in totals.items()}


class _AmbiguousOrder(Exception):
    """Raised if samples and channels share an axis in an order that shapes don't determine."""


class _ActivityObserver(SiteNames):
    """Compares the input and output of each activation call in a forward pass."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        super().__init__(model)
        self._units = {unit.site: unit for unit in graph.units}

    def fractions(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the fraction of samples and positions at which each unit is active, by site."""
        self._fractions: dict[str, Tensor] = {}
        self._samples = len(batch)
        inputs = batch.clone()
        self.begin(inputs)
        with self:
            self.model(inputs)
        return self._fractions

    def call(self, call: FunctionCall) -> Any:
        unit = next((self._units[name] for name in self.candidates if name in self._units), None)
        if unit is None:
            return call.run()
        if unit.site in self._fractions:
            raise Undefined(f"{unit.site} is called more often on the samples than on the example")
        if self.current is not None and self.current.kind == "glu":
            self._fractions[unit.site] = unit.active  # The sigmoid is nowhere the identity.
            return call.run()
        overwrites = call.function_name.endswith("_") or any(
            argument is True for argument in (*call.args, *call.kwargs.values())
        )
        before = call.input.clone() if overwrites else call.input
        output = call.run()
        if not bool(torch.isfinite(output).all()):
            raise NotFinite(f"{unit.site}: the output is not finite")
        self._fractions[unit.site] = self._fraction(unit, output != before)
        return output

    def _fraction(self, unit: Units, differs: Tensor) -> Tensor:
        fraction = _mean_over_samples(differs, unit, self._samples).float()
        lead = (1,) * (fraction.ndim - unit.entries.ndim)
        entries = unit.entries.reshape(lead + unit.entries.shape)
        positions = [axis for axis in range(fraction.ndim) if entries.shape[axis] == 1]
        fraction = fraction.mean(positions, keepdim=True) if positions else fraction
        fraction = fraction.cpu().double().reshape(-1)
        flat = entries.reshape(-1)
        is_unit = flat >= 0
        total = torch.zeros(unit.size, dtype=torch.float64)
        count = torch.bincount(flat[is_unit], minlength=unit.size)
        return total.index_add(0, flat[is_unit], fraction[is_unit]) / count


def _mean_over_samples(differs: Tensor, unit: Units, samples: int) -> Tensor:
    """Average over samples, reducing to the shape of the activation for one sample."""
    if tuple(differs.shape) == unit.shape and samples == 1:
        return differs
    axes = [
        axis
        for axis, size in enumerate(unit.shape)
        if differs.ndim == len(unit.shape) and differs.shape[axis] != size
    ]
    if len(axes) != 1 or differs.shape[axes[0]] != samples * unit.shape[axes[0]]:
        raise Undefined(
            f"{unit.site} has shape {tuple(differs.shape)} for {samples} samples, "
            f"but {unit.shape} for one"
        )
    axis = axes[0]
    if unit.entries.ndim == len(unit.shape) and unit.entries.shape[axis] > 1:
        raise _AmbiguousOrder
    # Windows or tokens are on the batch axis. They are averaged, so their order doesn't matter.
    split = (*unit.shape[:axis], samples, *unit.shape[axis:])
    return differs.float().reshape(split).mean(axis)
