"""Build a channel graph: which channel each entry of a tensor belongs to.

Beside each tensor of a network travels one of the same shape with the number of the node
that each entry belongs to, -1 where it doesn't depend on the network's input. What only
moves entries about moves the numbers as well, whatever the layout; positions of one
channel bear one number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nlbench.probes.axes import at, axis_map
from nlbench.probes.ops import FunctionCall, Operation, tensors_in

from .channel_graph import ChannelGraph, Inputs, Merge, Units

__all__ = [
    "Builder",
    "Positions",
    "channel_axes",
    "compact",
    "differs",
    "distinct",
    "side_by_side",
    "tidied",
    "varies",
]


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
        self, nodes: Tensor, site: str, active: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """Put a unit on each channel.

        Parameters
        ----------
        nodes : int64 tensor
            Of the activation's input.
        site : str
        active : float64 tensor of shape (s,)
            Whether the units with index 0, 1, … are nonlinear.
        index : int64 tensor, broadcastable to `nodes`, optional
            Which of them acts on each entry; by default index 0.
        """
        small = compact(nodes)
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


def channel_axes(
    run: Callable[[tuple[Tensor, ...]], object], inputs: tuple[Tensor, ...]
) -> list[int]:
    """Tell for each input which axis the first layer takes as channels.

    The network runs until that is known; what it changes on the way is the caller's to put
    back.

    Parameters
    ----------
    run : callable
        Runs the network on inputs.
    inputs : tuple of tensor
        Each with the batch first.

    Returns
    -------
    list of int
        Axis 1 where no layer says otherwise.

    Examples
    --------
    >>> import torch
    >>> layer, tokens = torch.nn.Linear(4, 2), torch.zeros(1, 3, 4)
    >>> channel_axes(lambda given: layer(given[0] + 1), (tokens,))
    [2]
    """
    finder = _Finder(inputs)
    if finder.sought:
        # A failure of the network itself shows when it is recorded.
        with contextlib.suppress(_Found, Exception), finder:
            run(inputs)
    return [finder.found.get(number, 1) for number in range(len(inputs))]


def _taken_along(operation: Operation, rank: int) -> int | None:
    """Along which axis of its input a layer takes channels; None where it takes none."""
    if operation.channels == "second" or operation.name == "prelu":
        return 1
    is_last = operation.channels in ("last", "normalized") or operation.name == "matmul"
    return rank - 1 if is_last else None


class _Found(BaseException):
    """Ends a pass; no network catches it by mistake."""


class _Finder(TorchFunctionMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: dict[int, int] = {}
        self.sought = {
            number
            for number, tensor in enumerate(inputs)
            if tensor.ndim > 2 and tensor.is_floating_point()
        }
        # By identity of a tensor: the input it comes of, and where that one's axes are in it.
        self._axes: dict[int, tuple[int, list[int | None]]] = {
            id(inputs[number]): (number, list(range(inputs[number].ndim))) for number in self.sought
        }
        self._alive: list[Tensor] = list(inputs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        call = FunctionCall(func, args, kwargs)
        given = [tensor for tensor in call.tensors if id(tensor) in self._axes]
        for tensor in given:
            axis = _taken_along(call.operation, tensor.ndim)
            if axis is not None:
                self._decide(tensor, axis)
        output = call.run()
        for tensor in given:
            number, axes = self._axes[id(tensor)]
            for made in tensors_in((output,)):
                if made is not tensor and number not in self.found:
                    moved = axis_map(call, tensor, made)
                    after = [None if axis is None else at(moved, axis) for axis in axes]
                    self._axes[id(made)] = (number, after)
                    self._alive.append(made)
        return output

    def _decide(self, tensor: Tensor, axis: int) -> None:
        number, axes = self._axes[id(tensor)]
        if number not in self.found:
            self.found[number] = axes.index(axis) if axis in axes else 1
        if self.found.keys() == self.sought:
            raise _Found
