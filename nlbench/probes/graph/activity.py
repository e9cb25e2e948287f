"""How often the units of a channel graph do anything, on the samples at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, Undefined
from nlbench.probes.model_state import evaluation_mode, without_fast_path
from nlbench.probes.precision import exact_by_default
from nlbench.probes.site_names import SiteNames, input_of

from .channel_graph import ChannelGraph, Units

__all__ = ["unit_activity"]


@exact_by_default()
def unit_activity(
    model: nn.Module, graph: ChannelGraph, batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Share of samples and positions at which each unit's output differs from its input.

    Parameters
    ----------
    model : torch.nn.Module
    graph : ChannelGraph
        Of the same model, at the same size of input.
    batches : iterable of tensor
        Samples, at least one, on the model's device.

    Returns
    -------
    dict of str to float64 tensor of shape (m,)
        By site, for each of its units.

    Raises
    ------
    nlbench.NotFinite
        If an activation's output isn't finite.
    nlbench.Undefined
        If an activation isn't called on the samples as it was on the graph's example.

    Examples
    --------
    >>> from nlbench.probes.graph.graph import channel_graph
    >>> samples = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    >>> unit_activity(nn.ReLU(), channel_graph(nn.ReLU(), samples), [samples])["relu"].tolist()
    [0.0, 0.5]
    """
    totals = {unit.site: torch.zeros(unit.size, dtype=torch.float64) for unit in graph.units}
    samples = 0
    observer = _Observer(model, graph)
    with evaluation_mode(model), without_fast_path(), observer.hooked():
        for batch in batches:
            try:
                found = [observer.shares(batch)]
            except _Folded:
                found = [observer.shares(sample) for sample in torch.split(batch, 1)]
            for site, total in totals.items():
                if any(site not in shares for shares in found):
                    raise Undefined(f"{site}: it is not called on the samples")
                total += sum(shares[site] for shares in found) * (len(batch) / len(found))
            samples += len(batch)
    return {site: total / samples for site, total in totals.items()}


class _Folded(Exception):
    """Samples and channels share an axis, in an order that shapes don't tell."""


class _Observer(SiteNames):
    """Compares the input and the output of each activation call of a forward pass."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        super().__init__(model)
        self._units = {unit.site: unit for unit in graph.units}

    def shares(self, batch: Tensor) -> dict[str, Tensor]:
        """Share of samples and positions at which units do anything, by site."""
        self._shares: dict[str, Tensor] = {}
        self._samples = len(batch)
        given = batch.clone()
        self.begin(given)
        with self:
            self.model(given)
        return self._shares

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of PyTorch's, and see what it does if it is a unit's."""
        unit = next((self._units[name] for name in self.candidates if name in self._units), None)
        if unit is None:
            return func(*args, **kwargs)
        if unit.site in self._shares:
            raise Undefined(f"{unit.site}: it is called more often on the samples")
        given = input_of(args, kwargs)
        if self.current is not None and self.current.kind == "glu":
            self._shares[unit.site] = unit.active  # The sigmoid inside is nowhere the identity.
            return func(*args, **kwargs)
        # A copy where the call may overwrite it.
        overwrites = func.__name__.endswith("_") or any(
            a is True for a in (*args, *kwargs.values())
        )
        before = given.clone() if overwrites else given
        output = func(*args, **kwargs)
        if not bool(torch.isfinite(output).all()):
            raise NotFinite(f"{unit.site}: the output is not finite")
        self._shares[unit.site] = self._share(unit, output != before)
        return output

    def _share(self, unit: Units, differs: Tensor) -> Tensor:
        share = _one_sample(differs, unit, self._samples).float()
        entries = unit.entries.reshape((1,) * (share.ndim - unit.entries.ndim) + unit.entries.shape)
        alike = [axis for axis in range(share.ndim) if entries.shape[axis] == 1]
        share = share.mean(alike, keepdim=True) if alike else share
        share, flat = share.cpu().double().reshape(-1), entries.reshape(-1)
        there = flat >= 0
        total = torch.zeros(unit.size, dtype=torch.float64)
        count = torch.bincount(flat[there], minlength=unit.size)
        return total.index_add(0, flat[there], share[there]) / count


def _one_sample(differs: Tensor, unit: Units, samples: int) -> Tensor:
    """Average over samples: to the shape that the activation has for one."""
    if tuple(differs.shape) == unit.shape and samples == 1:
        return differs
    axes = [
        axis
        for axis, size in enumerate(unit.shape)
        if differs.ndim == len(unit.shape) and differs.shape[axis] != size
    ]
    if len(axes) != 1 or differs.shape[axes[0]] != samples * unit.shape[axes[0]]:
        raise Undefined(
            f"{unit.site}: its shape is {tuple(differs.shape)} for {samples} samples, "
            f"but {unit.shape} for one"
        )
    axis = axes[0]
    if unit.entries.ndim == len(unit.shape) and unit.entries.shape[axis] > 1:
        raise _Folded
    # Windows or tokens are folded into the axis of samples: they are alike, so that it doesn't
    # matter in which order they lie.
    apart = (*unit.shape[:axis], samples, *unit.shape[axis:])
    return differs.float().reshape(apart).mean(axis)
