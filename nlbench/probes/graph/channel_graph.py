"""The channel graph, and the lengths of the paths through it.

A node is a channel of a tensor. A step makes new nodes of earlier ones, so that the nodes
are numbered in an order in which everything comes after what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined

__all__ = [
    "ChannelGraph",
    "Inputs",
    "Lengths",
    "Merge",
    "Units",
    "counted_lengths",
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
        `nlbench.probes.graph.graph.unit_activity`.
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
