"""How often the units of a channel graph do anything, on the samples at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.errors import NotFinite, Undefined
from nlbench.probes.model_state import evaluation_mode, without_fast_path
from nlbench.probes.modules import Places, following
from nlbench.probes.ops import operation

from .channel_graph import ChannelGraph, Units

__all__ = ["unit_activity"]


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
    with evaluation_mode(model), without_fast_path(), following(model) as places:
        for batch in batches:
            try:
                found = [_shares(model, graph, places, batch)]
            except _Folded:
                found = [_shares(model, graph, places, sample) for sample in torch.split(batch, 1)]
            for site, total in totals.items():
                if any(site not in shares for shares in found):
                    raise Undefined(f"{site}: it is not called on the samples")
                total += sum(shares[site] for shares in found) * (len(batch) / len(found))
            samples += len(batch)
    return {site: total / samples for site, total in totals.items()}


class _Folded(Exception):
    """Samples and channels share an axis, in an order that shapes don't tell."""


def _shares(
    model: nn.Module, graph: ChannelGraph, places: Places, batch: Tensor
) -> dict[str, Tensor]:
    places.restart()
    observer = _Observer(places, graph, len(batch))
    with observer:
        model(batch.clone())
    return observer.shares


class _Observer(TorchFunctionMode):
    """Compares the input and the output of each activation call of one forward pass."""

    def __init__(self, places: Places, graph: ChannelGraph, samples: int) -> None:
        super().__init__()
        self.shares: dict[str, Tensor] = {}
        self._places, self._samples = places, samples
        self._units = {unit.site: unit for unit in graph.units}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = operation(func)
        kind = found.kind if found else ""
        if not kind or kind == "softmax":
            return func(*args, **kwargs)
        unit = self._units.get(self._places.site(kind))
        if unit is None:
            return func(*args, **kwargs)
        if kind == "glu":
            self.shares[unit.site] = unit.active  # The sigmoid inside is nowhere the identity.
            return func(*args, **kwargs)
        given = args[0] if args else kwargs["input"]
        # A copy where the call may overwrite it.
        overwrites = func.__name__.endswith("_") or any(
            a is True for a in (*args, *kwargs.values())
        )
        before = given.clone() if overwrites else given
        output = func(*args, **kwargs)
        if not bool(torch.isfinite(output).all()):
            raise NotFinite(f"{unit.site}: the output is not finite")
        self.shares[unit.site] = self._share(unit, output != before)
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
