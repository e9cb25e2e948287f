"""The channel graph, its builder, and the lengths of paths through it.

A node is a channel of a tensor. Each step creates nodes from earlier ones, so nodes are numbered in
topological order.

While the graph is built, each tensor in the network has a tensor of nodes with the same shape: the
node of each entry, or -1 if the entry doesn't depend on the network's input. An operation that
moves entries moves their nodes in the same way. All positions of a channel have the same node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined


@dataclass(frozen=True)
class Inputs:
    """Nodes at which paths start: the channels of one input to the network."""

    size: int


@dataclass(frozen=True)
class Merge:
    """Nodes at which branches meet."""

    sources: Tensor  # int64 (m, k): sets of nodes to merge, padded with -1
    copies: int  # number of new nodes per set: node `first + i * copies + j` is copy j for set i

    @property
    def size(self) -> int:
        """Number of new nodes."""
        return len(self.sources) * self.copies


@dataclass(frozen=True)
class Units:
    """The units of one activation call, each a node.

    Parameters
    ----------
    site : str
        Name of the call, as in the probe `sites`.
    sources : int64 tensor of shape (m,)
        Node that each unit acts on.
    active : float64 tensor of shape (m,)
        1 for a nonlinear unit, 0 for a linear one.
    entries : int64 tensor, broadcastable to `shape`
        Index of the unit that acts on each entry of the activation's input; -1 for a constant.
    shape : tuple of int
        Shape of the activation's input for one sample.
    """

    site: str
    sources: Tensor
    active: Tensor
    entries: Tensor
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of new nodes."""
        return len(self.sources)


def _raise_without_samples() -> Mapping[str, Tensor]:
    raise Undefined("there are no samples, so it isn't known how active the units are")


@dataclass(frozen=True)
class ChannelGraph:
    """Graph of the channels of a network's tensors, from the input to the output.

    This is the observation made by the probe `graph`.

    Parameters
    ----------
    steps : tuple of Inputs, Merge or Units
        Each step creates the next nodes, starting with node 0.
    outputs : int64 tensor
        Nodes of the output.
    activity : callable
        Runs the network on the subject's samples, and returns the activity of units by site; see
        `nlbench.probes.graph.activity.unit_activity`.
    samples : int
        Number of samples.
    """

    steps: tuple[Inputs | Merge | Units, ...]
    outputs: Tensor
    activity: Callable[[], Mapping[str, Tensor]] = _raise_without_samples
    samples: int = 0

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return sum(step.size for step in self.steps if isinstance(step, Inputs))

    @property
    def units(self) -> tuple[Units, ...]:
        """The activation calls, in call order."""
        return tuple(step for step in self.steps if isinstance(step, Units))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(step.size for step in self.steps)


@dataclass(frozen=True)
class Lengths:
    """Statistics over all paths."""

    mean: float  # mean number of active units on a path
    # Base-10 logarithm of the number of paths, which would overflow for deep networks.
    log10_paths: float


def walked_length(graph: ChannelGraph, activity: Mapping[str, Tensor] | None = None) -> float:
    """Compute the expected number of active units on a random walk back from the output.

    `activity` (m,), from 0 to 1, is by default 1 for nonlinear units.
    """
    length = torch.zeros(graph.nodes, dtype=torch.float64)
    end = 0
    for step in graph.steps:
        begin = end
        end = end + step.size
        if isinstance(step, Units):
            length[begin:end] = length[step.sources] + _activity(step, activity)
        elif isinstance(step, Merge):
            is_node = step.sources >= 0
            branches = length[step.sources.clamp(min=0)].where(is_node, 0.0)
            length[begin:end] = (branches.sum(1) / is_node.sum(1)).repeat_interleave(step.copies)
    return float(length[graph.outputs].mean())


def counted_lengths(graph: ChannelGraph, activity: Mapping[str, Tensor] | None = None) -> Lengths:
    """Compute the mean number of active units over all paths, with equal weights.

    The number of paths and the sum of their lengths are stored with a common power-of-two exponent
    at each node, so they are exact up to 53 bits and never overflow.
    """
    paths = torch.ones(graph.nodes, dtype=torch.float64)
    total = torch.zeros(graph.nodes, dtype=torch.float64)
    exponent = torch.zeros(graph.nodes, dtype=torch.int32)
    end = 0
    for step in graph.steps:
        begin = end
        end = end + step.size
        if isinstance(step, Units):
            paths[begin:end] = paths[step.sources]
            exponent[begin:end] = exponent[step.sources]
            added = paths[step.sources] * _activity(step, activity)
            total[begin:end] = total[step.sources] + added
        elif isinstance(step, Merge):
            summed = _sum(paths, total, exponent, step.sources)
            for values, sums in zip((paths, total, exponent), summed, strict=True):
                values[begin:end] = sums.repeat_interleave(step.copies)
    n, s, e = _sum(paths, total, exponent, graph.outputs[None])
    return Lengths(float(s / n), math.log10(float(n)) + int(e) * math.log10(2))


def _activity(step: Units, activity: Mapping[str, Tensor] | None) -> Tensor:
    return step.active if activity is None else activity[step.site]


def _sum(
    paths: Tensor, total: Tensor, exponent: Tensor, sources: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of paths and of lengths over rows of sources (m, k), and their exponents."""
    is_node = sources >= 0
    nodes = sources.clamp(min=0)
    exponents = exponent[nodes]
    lowest = torch.iinfo(torch.int32).min // 2
    largest = exponents.where(is_node, lowest).amax(1, keepdim=True)
    shift = exponents - largest
    n = torch.ldexp(paths[nodes], shift).where(is_node, 0.0).sum(1)
    s = torch.ldexp(total[nodes], shift).where(is_node, 0.0).sum(1)
    mantissa, excess = torch.frexp(n)
    return mantissa, torch.ldexp(s, -excess), largest[:, 0] + excess


@dataclass
class Positions:
    """Changes to the positions of a channel after which a maximum over them may not be pooling.

    A maximum over positions preserves a channel, like any pooling. A maximum over ``x`` and ``-x``,
    or over ``x`` and zeros, is an activation, no matter how the two became positions.

    Parameters
    ----------
    copied : bool
        True if a position may occur more than once.
    padded : bool
        True if the positions may include constants.
    joined : bool
        True if the positions may include values of different functions of the input.
    """

    copied: bool = False
    padded: bool = False
    joined: bool = False


class Builder:
    """Builder of a channel graph.

    Examples
    --------
    >>> builder = Builder()
    >>> nodes = builder.mix(builder.inputs(3)[None], 2)
    >>> nodes, builder.graph(nodes).nodes
    (tensor([[3, 4]]), 5)
    """

    def __init__(self) -> None:
        self.positions = Positions()
        self._steps: list[Inputs | Merge | Units] = []
        self._nodes = 0

    def graph(self, outputs: Tensor) -> ChannelGraph:
        """Return the graph, with the nodes in `outputs` as its outputs."""
        nodes = torch.unique(outputs)
        return ChannelGraph(tuple(self._steps), nodes[nodes >= 0])

    def inputs(self, count: int) -> Tensor:
        """Add nodes for input channels, and return them, (count,)."""
        return self._add(Inputs(count))

    def reduce(self, nodes: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor:
        """Merge entries along axes. Entries that all belong to one channel keep its node."""
        axes = sorted(axis % nodes.ndim for axis in axes)
        full = [1 if axis in axes else size for axis, size in enumerate(nodes.shape)]
        small, rows = _rows(nodes, axes)
        merged = self._merge_rows(rows)
        shape = [1 if axis in axes else size for axis, size in enumerate(small.shape)]
        result = merged.reshape(shape).expand(full)
        return result if keep else result.reshape([s for a, s in enumerate(full) if a not in axes])

    def mix(self, nodes: Tensor, outputs: int, axis: int = -1) -> Tensor:
        """Mix all channels along an axis into new ones, as a linear layer does."""
        axis %= nodes.ndim
        small, rows = _rows(nodes, [axis])
        mixed = self._mix_rows(rows, outputs)
        lead = [size for a, size in enumerate(small.shape) if a != axis]
        mixed = mixed.reshape(*lead, outputs).movedim(-1, axis)
        return mixed.expand([outputs if a == axis else s for a, s in enumerate(nodes.shape)])

    def convolve(self, nodes: Tensor, groups: int, shape: Sequence[int]) -> Tensor:
        """Mix the channels on axis 1 within each group into those of an output of `shape`."""
        small = compact(nodes)
        if small.shape[1] < nodes.shape[1]:  # All channels have the same node.
            small = small.expand(-1, groups, *small.shape[2:])
        rows = small.reshape(len(small) * groups, -1)
        mixed = self._mix_rows(rows, shape[1] // groups)
        mixed = mixed.reshape(len(small), shape[1], *(1,) * (len(shape) - 2))
        return mixed.expand(*shape)

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Merge two tensors elementwise, as an addition does. A constant adds no branch."""
        shape = _broadcast(first, second)[0].shape
        a, b = _broadcast(compact(first), compact(second))
        flat_a = a.reshape(-1)
        flat_b = b.reshape(-1)
        merged = torch.maximum(flat_a, flat_b)
        both = (flat_a >= 0) & (flat_b >= 0)
        pairs, inverse = _distinct_pairs(flat_a[both], flat_b[both])
        merged[both] = self._add(Merge(pairs, 1))[inverse]
        return merged.reshape(a.shape).expand(shape)

    def new_channels(self, nodes: Tensor, times: Tensor) -> Tensor:
        """Create new channels for repeated entries, as when a tensor is repeated.

        An entry keeps its channel if `times`, its number of earlier occurrences, is 0.
        """
        small, times = _broadcast(compact(nodes), times)
        flat = small.reshape(-1)
        before = times.reshape(-1)
        recurs = (flat >= 0) & (before > 0)
        pairs, inverse = _distinct_pairs(flat[recurs], before[recurs])
        result = flat.clone()
        result[recurs] = self._add(Merge(pairs[:, :1], 1))[inverse]
        return result.reshape(small.shape).expand(nodes.shape)

    def activate(
        self, nodes: Tensor, site: str, active: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """Add a unit to each channel.

        `active` is 1 for each nonlinear unit and 0 for each linear one; by default all are
        nonlinear. `index` is the position in `active` of each entry's unit, by default 0.
        """
        small = compact(nodes)
        active = torch.ones(1, dtype=torch.float64) if active is None else active
        index = torch.zeros((), dtype=torch.int64) if index is None else index
        a, b = _broadcast(small, index)
        flat = a.reshape(-1)
        is_node = flat >= 0
        pairs, inverse = _distinct_pairs(flat[is_node], b.reshape(-1)[is_node])
        entries = torch.full_like(flat, -1)
        entries[is_node] = inverse
        units = Units(
            site, pairs[:, 0], active[pairs[:, 1]], entries.view(a.shape), tuple(nodes.shape)
        )
        result = torch.full_like(flat, -1)
        result[is_node] = self._add(units)[inverse]
        return result.reshape(a.shape).expand(nodes.shape)

    def _add(self, step: Inputs | Merge | Units) -> Tensor:
        if step.size:
            self._steps.append(step)
        new = torch.arange(self._nodes, self._nodes + step.size)
        self._nodes += step.size
        return new

    def _merge_rows(self, rows: Tensor) -> Tensor:
        """Merge each row into one node, (m, k) to (m,)."""
        merged = rows.amax(1)
        several = ((rows != merged[:, None]) & (rows >= 0)).any(1)
        if several.any():
            sets, inverse = _sets(rows[several])
            merged[several] = self._add(Merge(sets, 1))[inverse]
        return merged

    def _mix_rows(self, rows: Tensor, copies: int) -> Tensor:
        """Mix each row into new nodes, (m, k) to (m, copies). Constants remain constant."""
        mixed = torch.full((len(rows), copies), -1)
        has_nodes = (rows >= 0).any(1)
        if has_nodes.any():
            sets, inverse = _sets(rows[has_nodes])
            mixed[has_nodes] = self._add(Merge(sets, copies)).reshape(len(sets), copies)[inverse]
        return mixed


def varies(nodes: Tensor, axis: int) -> bool:
    """Return True if nodes differ along an axis, from each other or from constants."""
    small = compact(nodes)
    if small.shape[axis] < 2:
        return False
    return not bool((small == small.narrow(axis, 0, 1)).all())


def differs(nodes: Tensor, axis: int) -> bool:
    """Return True if nodes differ from each other along an axis, ignoring constants."""
    small = compact(nodes)
    if small.shape[axis] < 2:
        return False
    largest = small.amax(axis, keepdim=True)
    return bool(((small != largest) & (small >= 0)).any())


def compact(nodes: Tensor) -> Tensor:
    """Reduce expanded axes to size 1."""
    for axis in range(nodes.ndim):
        if nodes.stride(axis) == 0 and nodes.shape[axis] > 1:
            nodes = nodes.narrow(axis, 0, 1)
    return nodes


def expand_constant(nodes: Tensor) -> Tensor:
    """Expand axes along which nodes are constant, so that later steps are fast."""
    small = compact(nodes)
    for axis, size in enumerate(small.shape):
        if size > 1 and not varies(small, axis):
            small = small.narrow(axis, 0, 1)
    return small.expand(nodes.shape)


def concatenate(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate nodes, keeping axes expanded if they are expanded in all parts."""
    small = list(parts)
    for other in range(parts[0].ndim):
        if other != axis and all(part.stride(other) == 0 for part in parts):
            small = [part.narrow(other, 0, 1) for part in small]
    joined = torch.cat(small, axis)
    sizes = [joined.shape[a] if a == axis else n for a, n in enumerate(parts[0].shape)]
    return joined.expand(sizes)


def _rows(nodes: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the compact tensor, and its entries along the given axes as rows, (m, k)."""
    small = compact(nodes)
    last = small.movedim(list(axes), list(range(-len(axes), 0))) if axes else small[..., None]
    # Unlike a reshape to (-1, k), this holds for k = 0.
    return small, last.flatten(-max(1, len(axes)))[None].flatten(0, -2)


def _sets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct sets of nodes in rows, padded with -1, and each row's index into them."""
    if len(rows) == 1:
        nodes = torch.unique(rows)
        return nodes[nodes >= 0][None], torch.zeros(1, dtype=torch.int64)
    ordered = rows.sort(1).values
    recurs = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:] = ordered[:, 1:].masked_fill(recurs, -1)
    sets, inverse = torch.unique(
        ordered.sort(1, descending=True).values, dim=0, return_inverse=True
    )
    return sets[:, (sets >= 0).any(0)], inverse


def _distinct_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs (m, 2) of nonnegative integers, and the index of each pair."""
    if not len(first):
        return first.new_empty(0, 2), first
    base = int(second.max()) + 1
    keys, inverse = torch.unique(first * base + second, return_inverse=True)
    return torch.stack([keys // base, keys % base], 1), inverse


def _broadcast(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    a: Tensor
    a, b = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
    return a, b
