"""Which axis of an activation holds the channels, and which the samples.

A shape alone doesn't say: (8, 56, 56, 96) is channels-last in ConvNeXt, and
(8, 197, 768) is tokens by channels in a vision transformer but channels by length
after a 1-D convolution. What made the tensor does say, so the axis is followed
from one operation to the next while the network runs, and so is the batch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined

from .operations import FunctionCall, Operation, axis_rule, in_each_dimension, layer, tensors_in

__all__ = [
    "Layout",
    "Layouts",
    "batch_first",
    "channel_axes",
    "softmax_axis",
]

# An axis that was indexed away or reduced, other than one that is only unknown.
GONE = -1
# Where each axis of an operation's input is in its output; `GONE`, or None if not known.
AxisMap = Sequence[int | None]


def at(moved: AxisMap, axis: int) -> int | None:
    """Give an axis of the input its place in the output; what is gone stays gone."""
    if axis == GONE:
        return GONE
    return moved[axis] if axis < len(moved) else None


def axis_map(call: FunctionCall, source: Tensor, output: Tensor) -> AxisMap:
    """Map the axes of one of a call's inputs to those of its output."""
    if call.operation.axes is None:
        return _same(source, output)
    moved: AxisMap = call.operation.axes(call.args, call.kwargs, source, output)
    return moved


def _same(source: Tensor, output: Tensor) -> AxisMap:
    """Take the axes to be where they were, if there are as many."""
    return list(range(source.ndim)) if output.ndim == source.ndim else [None] * source.ndim


def softmax_axis(call: FunctionCall) -> int:
    """Axis along which a softmax or a gated linear unit works, counted from 0.

    Without one a gated linear unit takes the last, and `torch.nn.functional.softmax` the first
    of up to one or of three axes, else the second.
    """
    dim = call.argument(1, "dim")
    rank: int = call.input.ndim
    if dim is None:
        dim = -1 if call.operation.kind == "glu" else 0 if rank in (0, 1, 3) else 1
    return int(dim) % max(rank, 1)


def batch_first(tensor: Tensor, batch: int | None) -> Tensor:
    """Put the batch axis first; a tensor without one is a single sample."""
    if batch is None:
        return tensor[None]
    return tensor.movedim(batch, 0) if batch else tensor


@axis_rule("embedding")
def _embedded(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return list(range(source.ndim))


@axis_rule("expand", "expand_as", "repeat", "tile", "broadcast_to", arranges="expands")
def _expanded(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [axis + output.ndim - source.ndim for axis in range(source.ndim)]


@axis_rule(
    "all", "amax", "amin", "any", "logsumexp", "max", "mean", "median", "min", "nanmean",
    "nansum", "prod", "std", "sum", "var", arranges="reduces"
)  # fmt: skip
def _reduced(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    if output.ndim >= source.ndim:
        return _same(source, output)
    return _without(source.ndim, _axes(args, kwargs, 1, "dim", "axis"), output.ndim)


@axis_rule(
    "flatten", "view", "reshape", "unflatten", "view_as", "reshape_as", "ravel",
    arranges="reshapes"
)  # fmt: skip
def _reshaped(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [_kept(source.shape, axis, output.shape) for axis in range(source.ndim)]


@axis_rule("einsum")
def _einsum(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow each axis by its letter; what is summed over is gone."""
    equation = args[0].replace(" ", "") if isinstance(args[0], str) else ""
    given, arrow, made = equation.partition("->")
    tensors = args[1] if isinstance(args[1], tuple | list) else args[1:]
    letters = next(
        (part for part, t in zip(given.split(","), tensors, strict=False) if t is source), ""
    )
    if not arrow or "." in equation or len(letters) != source.ndim:
        return [None] * source.ndim
    return [made.index(letter) if letter in made else GONE for letter in letters]


def _kept(before: Sequence[int], axis: int, after: Sequence[int]) -> int | None:
    """Where a reshape leaves an axis: as long as before, with as many entries ahead of it."""
    ahead, size = math.prod(before[:axis]), before[axis]
    places = [
        place
        for place in range(len(after))
        if after[place] == size and math.prod(after[:place]) == ahead
    ]
    return min(places, key=lambda place: abs(place - axis), default=None)


def _without(rank: int, dropped: Sequence[int], left: int) -> AxisMap:
    """Map the axes that stay when some are dropped, if as many stay as are `left`."""
    gone = {axis % rank for axis in dropped}
    stay = [axis for axis in range(rank) if axis not in gone]
    if len(stay) != left:
        return [None] * rank
    return [stay.index(axis) if axis in stay else GONE for axis in range(rank)]


@axis_rule("permute", arranges="moves")
def _permute(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    order = [axis % source.ndim for axis in _axes(args, kwargs, 1, "dims")]
    return [order.index(axis) for axis in range(source.ndim)]


@axis_rule("transpose", "swapaxes", "swapdims", arranges="moves")
def _transpose(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    first = _axes(args[:2], kwargs, 1, "dim0", "axis0")[0] % source.ndim
    second = _axes(args, kwargs, 2, "dim1", "axis1")[0] % source.ndim
    return [{first: second, second: first}.get(axis, axis) for axis in range(source.ndim)]


@axis_rule("mH", "mT", arranges="moves")
def _swap_last(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [*range(source.ndim - 2), source.ndim - 1, source.ndim - 2]


@axis_rule("H", "T", "t", arranges="moves")
def _reverse(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return list(reversed(range(source.ndim)))


@axis_rule("movedim", "moveaxis", arranges="moves")
def _movedim(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    rank = source.ndim
    origins = [axis % rank for axis in _axes(args[:2], kwargs, 1, "source")]
    targets = [axis % rank for axis in _axes(args, kwargs, 2, "destination")]
    moved: list[int | None] = [None] * rank
    for origin, target in zip(origins, targets, strict=True):
        moved[origin] = target
    free = iter(axis for axis in range(rank) if axis not in targets)
    return [next(free) if place is None else place for place in moved]


@axis_rule("squeeze", arranges="moves")
def _squeeze(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    rank = source.ndim
    if source is output:  # In place: the axes from before the call are no longer to be seen.
        return [None] * rank
    axes = _axes(args, kwargs, 1, "dim") or range(rank)
    return _without(rank, [axis for axis in axes if source.shape[axis] == 1], output.ndim)


@axis_rule("stack", "unsqueeze", arranges="moves")
def _insert(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``unsqueeze`` and ``stack``, which put one axis in."""
    place = (_axes(args, kwargs, 1, "dim") or [0])[0] % output.ndim
    if output.ndim != source.ndim + 1:  # As in place, where both are the output.
        return [None] * source.ndim
    return [axis + (axis >= place) for axis in range(source.ndim)]


@axis_rule("select", "unbind", arranges="moves")
def _drop(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``select`` and ``unbind``, which take one axis away."""
    return _without(source.ndim, (_axes(args[:2], kwargs, 1, "dim") or [0])[:1], output.ndim)


@axis_rule("getitem", arranges="moves")
def _index(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``x[...]``; of tensors and lists that pick, one by itself is followed."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(part is Ellipsis for part in index):
        index = (*index, Ellipsis)
    named = sum(part is not None and part is not Ellipsis for part in index)
    # Several that pick may broadcast and go to the front, and so may one beside a number.
    is_plain = sum(isinstance(part, Tensor | list) for part in index) == 1 and all(
        part is Ellipsis or isinstance(part, slice | Tensor | list) for part in index
    )
    moved: list[int | None] = []
    place = 0
    for part in index:
        if part is Ellipsis:
            skipped = source.ndim - named
            moved += range(place, place + skipped)
            place += skipped
        elif type(part) is int:
            moved.append(GONE)
        elif part is None:
            place += 1
        elif isinstance(part, slice) or (is_plain and _picks(part)):
            moved.append(place)
            place += 1
        else:
            return [None] * source.ndim
    return moved if place == output.ndim else [None] * source.ndim


def _picks(part: Any) -> bool:
    """Whether a part of an index is a row of numbers."""
    if isinstance(part, list):
        return all(type(entry) is int for entry in part)
    return part.ndim == 1 and part.dtype not in (torch.bool, torch.uint8)


def _axes(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, *names: str) -> list[int]:
    """Axes that an operation was given by name, or from one place on; none if it wasn't."""
    for name in names:
        if name in kwargs:
            value = kwargs[name]
            break
    else:
        value = args[place] if len(args) > place else None
        if isinstance(value, int) and not isinstance(value, bool):
            return [axis for axis in args[place:] if type(axis) is int]
    if isinstance(value, tuple | list):
        return [int(axis) for axis in value]
    return [value] if type(value) is int else []


layer(
    "second",
    *in_each_dimension("conv", "conv_transpose", "max_pool", "avg_pool", "lp_pool"),
    *in_each_dimension("adaptive_avg_pool", "adaptive_max_pool"),
    *("batch_norm", "instance_norm", "group_norm"),
)
_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")
layer(
    "last", *_RECURRENT, "linear", "embedding", "multi_head_attention_forward", "bilinear"
)  # fmt: skip
layer("normalized", "layer_norm")
_PRODUCTS = ("matmul", "rmatmul")
layer(
    "mixed", *_PRODUCTS, "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"
)  # fmt: skip
# Operations that make a tensor of nothing but numbers.
_FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What is known of a tensor's axes; None where nothing is.

    Parameters
    ----------
    channel, batch : int or None
        -1 where the axis is gone.
    sampled : bool or None
        Whether it comes from the model's input, and so differs from sample to sample.
    """

    channel: int | None
    batch: int | None
    sampled: bool | None


_UNKNOWN = Layout(None, None, None)


class Layouts:
    """Remembers the layout of every live tensor that the model's operations give.

    Parameters
    ----------
    batch : int
        Number of samples in the batch.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._layouts: MutableMapping[Tensor, Layout] = WeakTensorKeyDictionary()

    def begin(
        self, given: Tensor, constants: Iterable[Tensor] = (), channel: int | None = None
    ) -> None:
        """Note the model's input: samples along its first axis, channels as a rule unknown.

        Constants are the model's parameters and buffers; what is made of them alone is
        constant too.
        """
        for constant in constants:
            self._layouts[constant] = Layout(None, None, sampled=False)
        self._layouts[given] = Layout(channel, 0, sampled=True)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is known not to come from the model's input."""
        return self._layouts.get(tensor, _UNKNOWN).sampled is False

    def is_sampled(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the model's input."""
        return self._layouts.get(tensor, _UNKNOWN).sampled is True

    def channel(self, tensor: Tensor) -> int | None:
        """Give the axis that is known to hold a tensor's channels; None where none is."""
        axis = self._layouts.get(tensor, _UNKNOWN).channel
        return axis if axis is not None and 0 <= axis < tensor.ndim else None

    def adopt(self, output: Tensor, source: Tensor) -> None:
        """Note that an output is arranged as its source, where nothing is known of it."""
        if output not in self._layouts and source in self._layouts:
            self._layouts[output] = self._layouts[source]

    def of(self, tensor: Tensor) -> tuple[int, int, bool]:
        """Give a tensor's batch axis, its channel axis, and whether the latter is assumed.

        The channel axis is the one followed. Where nothing is known of it a tensor of three
        axes is taken as (batch, tokens, channels), a larger one as (batch, channels, ...),
        and that is said. Up to two axes leave no choice.

        Where nothing is known of the batch axis it is the first if that has a multiple of
        the batch's entries: samples, or the windows or tokens of all samples. A single entry
        that doesn't come from the model's input, such as a table of positions, is one row.

        Raises
        ------
        nlbench.Undefined
            If the batch isn't found.
        """
        layout = self._layouts.get(tensor, _UNKNOWN)
        batch = layout.batch
        if batch == GONE and self._batch > 1:
            raise _lost(len(tensor) if tensor.ndim else 1, self._batch)
        if batch in (None, GONE) or batch >= tensor.ndim:
            batch = 0
            rows = len(tensor) if tensor.ndim else self._batch
            is_row = rows == 1 and not layout.sampled
            if not (self._holds(rows) or is_row):
                raise _lost(rows, self._batch)
        if tensor.ndim <= 2:
            return batch, (0 if batch == 1 else 1), False
        channel = self.channel(tensor)
        if channel is not None and channel != batch:
            return batch, channel, False
        usual = [axis for axis in range(tensor.ndim) if axis != batch]
        return batch, usual[-1] if tensor.ndim == 3 else usual[0], True

    def follow(self, call: FunctionCall, output: object) -> None:
        """Note the layout of what a call gave; all tensors of a tuple or list are followed."""
        outputs = output if isinstance(output, tuple | list) else (output,)
        if not any(isinstance(tensor, Tensor) for tensor in outputs):
            return
        name, operation, sources = call.name, call.operation, call.tensors
        given = [(s, self._layouts[s]) for s in sources if s in self._layouts]
        is_layer = operation.channels in ("second", "last")
        if not given and not is_layer and name not in _FACTORIES:
            return
        sampled = _origin(name, len(sources), [layout for _, layout in given])
        # Arranged by the first tensor, whatever the others are.
        arranges = operation.arranges in ("moves", "reshapes", "expands") and name != "stack"
        if is_layer or arranges or operation.channels == "normalized":
            given = [(s, layout) for s, layout in given if s is sources[0]]
        for number, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            if number and operation.channels == "last":
                # Last states are (layers, batch, channels); attention weights have none.
                state = name in _RECURRENT and tensor.ndim == 3
                channel, batch = (2, 1) if state else (None, None)
                self._layouts[tensor] = Layout(channel, batch, sampled)
                continue
            self._layouts[tensor] = Layout(*self._after(call, given, tensor), sampled)

    def _after(
        self, call: FunctionCall, given: Sequence[tuple[Tensor, Layout]], output: Tensor
    ) -> tuple[int | None, int | None]:
        """Channel and batch axis of an output."""
        operation, sources = call.operation, call.tensors
        name, channels = call.name, operation.channels
        channel = batch = None
        # Arguments of the output's own rank first: a sum has the layout of the larger term.
        for source, layout in sorted(given, key=lambda pair: pair[0].ndim != output.ndim):
            moved = axis_map(call, source, output)
            if channel in (None, GONE) and layout.channel is not None:
                channel = at(moved, layout.channel)
            if batch in (None, GONE) and layout.batch is not None:
                batch = at(moved, layout.batch)
                merged = layout.batch == 0 and operation.arranges == "reshapes" and output.ndim > 0
                if batch is None and merged and self._holds(len(output)):
                    batch = 0
                if batch not in (None, GONE) and not self._holds(output.shape[batch]):
                    batch = GONE
        if batch == GONE and name in ("stack", "cat", "concat", "concatenate"):
            # Single samples may have been put together again.
            batch = None
        if channels == "second":
            channel = 1
        elif channels == "last" or (
            channels == "normalized" and len(call.argument(1, "normalized_shape") or ()) == 1
        ):
            channel = output.ndim - 1
        elif channels == "mixed":
            # A two-dimensional weight on the right makes features of the last axis.
            is_weight = name in _PRODUCTS and len(sources) == 2 and sources[1].ndim == 2
            by_weight = is_weight and not self.is_sampled(sources[1])
            channel = output.ndim - 1 if by_weight else None
        return channel, batch

    def _holds(self, rows: int) -> bool:
        return rows > 0 and rows % max(self._batch, 1) == 0


def _origin(name: str, sources: int, known: Sequence[Layout]) -> bool | None:
    """Whether what an operation gives comes from the model's input; None if that isn't known."""
    if any(layout.sampled for layout in known):
        return True
    are_constant = len(known) == sources and all(layout.sampled is False for layout in known)
    return False if are_constant and (sources or name in _FACTORIES) else None


def _lost(rows: int, batch: int) -> Undefined:
    return Undefined(
        f"its first axis has {rows} entries, the batch {batch}: "
        "which axis holds the samples is not known"
    )


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
        self.sought: set[int] = set()
        self.found: dict[int, int] = {}
        # Of a tensor, which input it comes of, and where that one's axes are in it.
        self._axes: MutableMapping[Tensor, tuple[int, list[int | None]]] = WeakTensorKeyDictionary()
        for number, tensor in enumerate(inputs):
            if tensor.ndim > 2 and tensor.is_floating_point():
                self._axes[tensor] = number, list(range(tensor.ndim))
                self.sought.add(number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        given = [tensor for tensor in call.tensors if tensor in self._axes]
        for tensor in given:
            axis = _taken_along(call.operation, tensor.ndim)
            if axis is not None:
                self._decide(tensor, axis)
        output = call.run()
        for tensor in given:
            number, axes = self._axes[tensor]
            for made in tensors_in((output,)):
                if made is not tensor and number not in self.found:
                    moved = axis_map(call, tensor, made)
                    after = [None if axis is None else at(moved, axis) for axis in axes]
                    self._axes[made] = number, after
        return output

    def _decide(self, tensor: Tensor, axis: int) -> None:
        number, axes = self._axes[tensor]
        if number not in self.found:
            self.found[number] = axes.index(axis) if axis in axes else 1
        if self.found.keys() == self.sought:
            raise _Found
