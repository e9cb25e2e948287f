"""The channel graph, what builds it, and the lengths of the paths through it.

A node is a channel of a tensor. A step makes new nodes of earlier ones, so that the nodes
are numbered in an order in which everything comes after what it is made of.

While it is built, beside each tensor of a network travels one of the same shape with the number
of the node that each entry belongs to, -1 where it doesn't depend on the network's input. What
only moves entries about moves the numbers as well, whatever the layout; positions of one channel
bear one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined

__all__ = [
    "Builder",
    "ChannelGraph",
    "Inputs",
    "Lengths",
    "Merge",
    "Positions",
    "Units",
    "compact",
    "counted_lengths",
    "differs",
    "distinct",
    "side_by_side",
    "tidied",
    "varies",
    "walked_length",
]


@dataclass(frozen=True)
class Inputs:
    """Nodes at which paths begin: channels of an input of the network.

    Parameters
    ----------
    size : int
        Number of nodes made.
    """

    size: int


@dataclass(frozen=True)
class Merge:
    """Nodes at which branches meet.

    Parameters
    ----------
    sources : int64 tensor of shape (m, k)
        What each set consists of; -1 where it has fewer than k.
    copies : int
        How many nodes each set makes: node ``first + i * copies + j`` is copy j of set i.
    """

    sources: Tensor
    copies: int

    @property
    def size(self) -> int:
        """Number of nodes made."""
        return len(self.sources) * self.copies


@dataclass(frozen=True)
class Units:
    """The units of one activation call: one node each.

    Parameters
    ----------
    site : str
        Name of the call, as the probe `sites` has it.
    sources : int64 tensor of shape (m,)
        The nodes that they are applied to.
    active : float64 tensor of shape (m,)
        1 for a nonlinear unit, 0 for a linear one.
    entries : int64 tensor, broadcastable to `shape`
        Which unit acts on each entry of the activation's input; -1: none, a constant.
    shape : tuple of int
        Of the activation's input for one sample.
    """

    site: str
    sources: Tensor
    active: Tensor
    entries: Tensor
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of nodes made."""
        return len(self.sources)


def _without_samples() -> Mapping[str, Tensor]:
    raise Undefined("there are no samples, so it isn't known how active the units are")


@dataclass(frozen=True)
class ChannelGraph:
    """Channels of a network's tensors, from those of its input to those of its output.

    What the probe `graph` shows a measure.

    Parameters
    ----------
    steps : tuple of Inputs, Merge or Units
        Each makes the next nodes, from node 0 on.
    outputs : int64 tensor
        The output's nodes.
    activity : callable
        Runs the network on the subject's samples and gives, by site, the share of samples
        and positions at which each unit's output differs from its input; see
        `nlbench.probes.graph.probe.unit_activity`.
    samples : int
        How many samples that takes.
    """

    steps: tuple[Inputs | Merge | Units, ...]
    outputs: Tensor
    activity: Callable[[], Mapping[str, Tensor]] = _without_samples
    samples: int = 0

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return sum(step.size for step in self.steps if isinstance(step, Inputs))

    @property
    def units(self) -> tuple[Units, ...]:
        """The activation calls, in order."""
        return tuple(step for step in self.steps if isinstance(step, Units))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(step.size for step in self.steps)


@dataclass(frozen=True)
class Lengths:
    """What counting all paths gives.

    Parameters
    ----------
    mean : float
        Active units on a path, averaged over all paths.
    log10_paths : float
        Logarithm of the number of paths, which itself exceeds any float in a deep network.
    """

    mean: float
    log10_paths: float


def walked_length(graph: ChannelGraph, activity: Mapping[str, Tensor] | None = None) -> float:
    """Expected number of active units on a random walk back from the output.

    Parameters
    ----------
    graph : ChannelGraph
    activity : mapping of str to float64 tensor of shape (m,), optional
        By site, in place of what the graph says: how far each unit is active, 0 to 1.
    """
    length = torch.zeros(graph.nodes, dtype=torch.float64)
    end = 0
    for step in graph.steps:
        begin, end = end, end + step.size
        if isinstance(step, Units):
            length[begin:end] = length[step.sources] + _activity(step, activity)
        elif isinstance(step, Merge):
            there = step.sources >= 0
            branches = length[step.sources.clamp(min=0)].where(there, 0.0)
            length[begin:end] = (branches.sum(1) / there.sum(1)).repeat_interleave(step.copies)
    return float(length[graph.outputs].mean())


def counted_lengths(graph: ChannelGraph, activity: Mapping[str, Tensor] | None = None) -> Lengths:
    """Mean number of active units over all paths, each counted once.

    The number of paths and the sum of their lengths are kept with a common exponent of two
    for each node: exact as long as they have 53 bits, and never too large.

    Parameters
    ----------
    graph : ChannelGraph
    activity : mapping of str to float64 tensor of shape (m,), optional
        As for `walked_length`.
    """
    paths = torch.ones(graph.nodes, dtype=torch.float64)
    total = torch.zeros(graph.nodes, dtype=torch.float64)
    exponent = torch.zeros(graph.nodes, dtype=torch.int32)
    end = 0
    for step in graph.steps:
        begin, end = end, end + step.size
        if isinstance(step, Units):
            paths[begin:end] = paths[step.sources]
            exponent[begin:end] = exponent[step.sources]
            added = paths[step.sources] * _activity(step, activity)
            total[begin:end] = total[step.sources] + added
        elif isinstance(step, Merge):
            summed = _sum(paths, total, exponent, step.sources)
            for kept, made in zip((paths, total, exponent), summed, strict=True):
                kept[begin:end] = made.repeat_interleave(step.copies)
    n, s, e = _sum(paths, total, exponent, graph.outputs[None])
    return Lengths(float(s / n), math.log10(float(n)) + int(e) * math.log10(2))


def _activity(step: Units, activity: Mapping[str, Tensor] | None) -> Tensor:
    return step.active if activity is None else activity[step.site]


def _sum(
    paths: Tensor, total: Tensor, exponent: Tensor, sources: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the rows of ``sources``; (m, k) to three of (m,)."""
    there, picked = sources >= 0, sources.clamp(min=0)
    exponents = exponent[picked]
    lowest = torch.iinfo(torch.int32).min // 2
    largest = exponents.where(there, lowest).amax(1, keepdim=True)
    shift = exponents - largest
    n = torch.ldexp(paths[picked], shift).where(there, 0.0).sum(1)
    s = torch.ldexp(total[picked], shift).where(there, 0.0).sum(1)
    mantissa, more = torch.frexp(n)
    return mantissa, torch.ldexp(s, -more), largest[:, 0] + more


@dataclass
class Positions:
    """What was done to positions of a channel, by which a maximum over them is more than pooling.

    A maximum over positions keeps a channel, as any pooling does. One of ``x`` beside ``-x``, or
    beside zeros, is an activation, however the two were laid side by side.

    Parameters
    ----------
    copied : bool
        Whether some are there more than once.
    padded : bool
        Whether constants stand beside some.
    joined : bool
        Whether side by side are values of different functions of the input.
    """

    copied: bool = False
    padded: bool = False
    joined: bool = False


class Builder:
    """Makes the nodes of a channel graph.

    Examples
    --------
    >>> builder = Builder()
    >>> nodes = builder.dense(builder.inputs(3)[None], 2)
    >>> nodes, builder.graph(nodes).nodes
    (tensor([[3, 4]]), 5)
    """

    def __init__(self) -> None:
        self.positions = Positions()
        self._steps: list[Inputs | Merge | Units] = []
        self._nodes = 0

    def graph(self, outputs: Tensor) -> ChannelGraph:
        """Give what was built so far; ``outputs`` bears the output's nodes."""
        nodes = distinct(outputs)[0]
        return ChannelGraph(tuple(self._steps), nodes[nodes >= 0])

    def inputs(self, count: int) -> Tensor:
        """Make nodes of input channels; (count,)."""
        return self._add(Inputs(count))

    def reduced(self, nodes: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor:
        """Let entries along axes meet in one; a single channel among them stays itself."""
        axes = sorted(axis % nodes.ndim for axis in axes)
        kept = [1 if axis in axes else size for axis, size in enumerate(nodes.shape)]
        small, rows = _rows(nodes, axes)
        met = self._met(rows)
        shape = [1 if axis in axes else size for axis, size in enumerate(small.shape)]
        made = met.reshape(shape).expand(kept)
        return made if keep else made.reshape([s for a, s in enumerate(kept) if a not in axes])

    def dense(self, nodes: Tensor, outputs: int, axis: int = -1) -> Tensor:
        """Mix all channels along an axis into new ones, as a linear layer does."""
        axis %= nodes.ndim
        small, rows = _rows(nodes, [axis])
        made = self._mixed(rows, outputs)
        lead = [size for a, size in enumerate(small.shape) if a != axis]
        made = made.reshape(*lead, outputs).movedim(-1, axis)
        return made.expand([outputs if a == axis else s for a, s in enumerate(nodes.shape)])

    def convolved(self, nodes: Tensor, groups: int, shape: Sequence[int]) -> Tensor:
        """Mix the channels of axis 1 within each group into those of an output's shape."""
        small = compact(nodes)
        if small.shape[1] < nodes.shape[1]:  # All its channels are one.
            small = small.expand(-1, groups, *small.shape[2:])
        rows = small.reshape(len(small) * groups, -1)
        made = self._mixed(rows, shape[1] // groups)
        made = made.reshape(len(small), shape[1], *(1,) * (len(shape) - 2))
        return made.expand(*shape)

    def paired(self, first: Tensor, second: Tensor) -> Tensor:
        """Let two tensors meet entry by entry, as at an addition; a constant adds no branch."""
        shape = _together(first, second)[0].shape
        a, b = _together(compact(first), compact(second))
        flat_a, flat_b = a.reshape(-1), b.reshape(-1)
        made = torch.maximum(flat_a, flat_b)
        both = (flat_a >= 0) & (flat_b >= 0)
        pairs, which = _distinct_pairs(flat_a[both], flat_b[both])
        made[both] = self._add(Merge(pairs, 1))[which]
        return made.reshape(a.shape).expand(shape)

    def again(self, nodes: Tensor, times: Tensor) -> Tensor:
        """Make another channel of each that comes again, as where a tensor is beside itself.

        Parameters
        ----------
        nodes : int64 tensor
        times : int64 tensor, broadcastable to `nodes`
            How often each entry came before; 0: it stays the channel that it is.
        """
        small, times = _together(compact(nodes), times)
        flat, before = small.reshape(-1), times.reshape(-1)
        more = (flat >= 0) & (before > 0)
        pairs, which = _distinct_pairs(flat[more], before[more])
        made = flat.clone()
        made[more] = self._add(Merge(pairs[:, :1], 1))[which]
        return made.reshape(small.shape).expand(nodes.shape)

    def activated(
        self,
        nodes: Tensor,
        site: str,
        active: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """Put a unit on each channel.

        Parameters
        ----------
        nodes : int64 tensor
            Of the activation's input.
        site : str
        active : float64 tensor of shape (s,), optional
            Whether the units with index 0, 1, … are nonlinear; by default all are.
        index : int64 tensor, broadcastable to `nodes`, optional
            Which of them acts on each entry; by default index 0.
        """
        small = compact(nodes)
        active = torch.ones(1, dtype=torch.float64) if active is None else active
        index = torch.zeros((), dtype=torch.int64) if index is None else index
        a, b = _together(small, index)
        flat = a.reshape(-1)
        there = flat >= 0
        pairs, which = _distinct_pairs(flat[there], b.reshape(-1)[there])
        entries = torch.full_like(flat, -1)
        entries[there] = which
        units = Units(
            site, pairs[:, 0], active[pairs[:, 1]], entries.view(a.shape), tuple(nodes.shape)
        )
        made = torch.full_like(flat, -1)
        made[there] = self._add(units)[which]
        return made.reshape(a.shape).expand(nodes.shape)

    def _add(self, step: Inputs | Merge | Units) -> Tensor:
        if step.size:
            self._steps.append(step)
        made = torch.arange(self._nodes, self._nodes + step.size)
        self._nodes += step.size
        return made

    def _met(self, rows: Tensor) -> Tensor:
        """One node a row: (m, k) to (m,)."""
        made = rows.amax(1)
        several = ((rows != made[:, None]) & (rows >= 0)).any(1)
        if several.any():
            sets, which = _sets(rows[several])
            made[several] = self._add(Merge(sets, 1))[which]
        return made

    def _mixed(self, rows: Tensor, copies: int) -> Tensor:
        """New nodes, some a row: (m, k) to (m, copies). Of constants come constants."""
        made = torch.full((len(rows), copies), -1)
        there = (rows >= 0).any(1)
        if there.any():
            sets, which = _sets(rows[there])
            made[there] = self._add(Merge(sets, copies)).reshape(-1, copies)[which]
        return made


def varies(nodes: Tensor, axis: int) -> bool:
    """Tell whether the channel changes along an axis, so that it is an axis of channels."""
    small = compact(nodes)
    if small.shape[axis] < 2:
        return False
    return not bool((small == small.narrow(axis, 0, 1)).all())


def differs(nodes: Tensor, axis: int) -> bool:
    """Tell whether there are different channels along an axis, whatever constants are beside."""
    small = compact(nodes)
    if small.shape[axis] < 2:
        return False
    largest = small.amax(axis, keepdim=True)
    return bool(((small != largest) & (small >= 0)).any())


def compact(nodes: Tensor) -> Tensor:
    """Leave out the repetitions along axes that were expanded: size 1 there."""
    for axis in range(nodes.ndim):
        if nodes.stride(axis) == 0 and nodes.shape[axis] > 1:
            nodes = nodes.narrow(axis, 0, 1)
    return nodes


def distinct(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Different numbers in order, and which each number is."""
    different: Tensor
    different, which = numbers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return different, which


def tidied(nodes: Tensor) -> Tensor:
    """Expand along the axes along which numbers only repeat, so that later steps are quick."""
    small = compact(nodes)
    for axis, size in enumerate(small.shape):
        if size > 1 and not varies(small, axis):
            small = small.narrow(axis, 0, 1)
    return small.expand(nodes.shape)


def side_by_side(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate, and leave other axes expanded along which all parts only repeat."""
    small = list(parts)
    for other in range(parts[0].ndim):
        if other != axis and all(part.stride(other) == 0 for part in parts):
            small = [part.narrow(other, 0, 1) for part in small]
    made = torch.cat(small, axis)
    return made.expand([made.shape[a] if a == axis else n for a, n in enumerate(parts[0].shape)])


def _rows(nodes: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A tensor without repetitions, and its entries along axes as rows; ((...), (m, k))."""
    small = compact(nodes)
    last = small.movedim(list(axes), list(range(-len(axes), 0))) if axes else small[..., None]
    count = torch.Size([small.shape[axis] for axis in axes]).numel()
    return small, last.reshape(-1, count)


def _sets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct sets among rows, -1 in place of repetitions, and which each row is."""
    if len(rows) == 1:
        only = distinct(rows)[0]
        return only[only >= 0][None], torch.zeros(1, dtype=torch.int64)
    ordered = rows.sort(1).values
    again = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:] = ordered[:, 1:].masked_fill(again, -1)
    sets, which = _distinct_rows(ordered.sort(1, descending=True).values)
    return sets[:, (sets >= 0).any(0)], which


def _distinct_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct pairs (m, 2) of numbers from 0, and which each pair is."""
    if not len(first):
        return first.new_empty(0, 2), first
    base = int(second.max()) + 1
    keys, which = distinct(first * base + second)
    return torch.stack([keys // base, keys % base], 1), which


def _distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows, and which each row is."""
    if rows.shape[1] == 1:
        numbers, which = distinct(rows[:, 0])
        return numbers[:, None], which
    different: Tensor
    different, which = rows.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    return different, which


def _together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    one: Tensor
    one, other = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
    return one, other
