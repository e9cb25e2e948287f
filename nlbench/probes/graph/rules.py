"""What each operation does to the channels of the tensors that it is given.

Conventions. Positions of a channel, tokens too, are one channel: pooling, interpolation and
means over positions keep it. Every sum and every product of two tensors that depend on
the input is a merge of two branches, so the gate of squeeze-and-excitation is a branch
beside what it multiplies. A product of matrices merges, for each entry, the channels of
the row and those of the column; attention is two such products, queries with keys and
the result with the values. Normalisation, softmax and maxima keep channels and are no units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.introspection.function_calls import FunctionCall, tensors_in
from nlbench.introspection.operations import graph_rule, in_each_dimension

from .channel_graph import Builder, compact, differs, distinct, side_by_side, tidied, varies

__all__ = ["ChannelCall", "Refused", "unit"]


class Refused(Exception):
    """Why a call can't be followed; whoever catches it knows where it is."""


class ChannelCall(FunctionCall):
    """One call of an operation, and what is known of the channels of what it was given.

    Parameters
    ----------
    call : FunctionCall
    output
        What it gave.
    site : str
        Name of the call if it is an activation, else empty.
    nodes_of : callable
        From a tensor to its nodes, None for a constant.
    channel_of : callable
        From a tensor to the axis that is known to hold its channels, or None.
    real : callable
        From a parameter without numbers to the one that it stands in for.
    builder : Builder
    """

    def __init__(
        self,
        call: FunctionCall,
        output: Any,
        site: str,
        nodes_of: Callable[[Any], Tensor | None],
        channel_of: Callable[[Tensor], int | None],
        real: Callable[[Tensor], Tensor],
        builder: Builder,
    ) -> None:
        super().__init__(call.function, call.args, call.kwargs)
        self.output, self.site, self.builder = output, site, builder
        self.nodes_of, self.channel_of, self.real = nodes_of, channel_of, real

    def nodes(self, value: Any) -> Tensor:
        """Give the nodes of a tensor, a constant's being -1."""
        found = self.nodes_of(value)
        return torch.full((), -1).expand(tuple(value.shape)) if found is None else found

    @property
    def first(self) -> Tensor:
        """Nodes of the first argument."""
        return self.nodes(self.argument(0, "input"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output, the first of several."""
        output = self.output if isinstance(self.output, Tensor) else self.output[0]
        return tuple(output.shape)

    def is_of_channels(self, tensor: Tensor, axis: int) -> bool:
        """Tell whether entries along an axis are channels: they differ, or a layer put them there.

        Along any other axis are positions.
        """
        axis %= tensor.ndim
        return axis == self.channel_of(tensor) or differs(self.nodes(tensor), axis)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give the nodes of a tensor that is expanded to the output's shape.

        A channel that is repeated along its axis is so many channels.
        """
        nodes, channel = self.nodes(tensor), self.channel_of(tensor)
        expanded = nodes.expand(self.shape)
        if channel is None or nodes.shape[channel] > 1:
            return expanded
        after = len(self.shape) - nodes.ndim + channel
        return self.builder.again(
            expanded, _along(torch.arange(self.shape[after]), after, expanded)
        )

    def only(self, *values: Any) -> None:
        """Refuse if any other argument than these depends on the input."""
        own = {id(value) for value in values}
        if any(id(t) not in own and self.nodes_of(t) is not None for t in self.tensors):
            raise Refused("its weights depend on the input")

    def fixed(self, values: Any) -> None:
        """Refuse if what picks or counts entries depends on the input or has no numbers."""
        for tensor in tensors_in((values,)):
            if self.nodes_of(tensor) is not None:
                raise Refused("which entries it takes depends on the input")
            if tensor.is_meta:
                raise Undefined(
                    f"{self.name}: which entries it takes is not there, the model is on device meta"
                )


def unit(call: ChannelCall) -> Tensor:
    """A unit on each channel: any activation that has no rule of its own."""
    return call.builder.activated(call.first, call.site)


@graph_rule("glu")
def _gated(call: ChannelCall) -> Tensor:
    half, gate = call.first.chunk(2, call.argument(1, "dim", -1))
    return call.builder.paired(half, call.builder.activated(gate, call.site))


@graph_rule("prelu")
def _sloped(call: ChannelCall) -> Tensor:
    """A unit is linear where its slope is 1."""
    nodes, weight = call.first, call.real(call.argument(1, "weight"))
    call.only(call.argument(0, "input"))
    if weight.is_meta:
        raise Undefined(f"{call.site}: its slopes are not there, the model is on device meta")
    active = (weight.detach().reshape(-1) != 1).double().cpu()
    index = None
    if len(active) > 1:
        index = torch.arange(len(active)).reshape(-1, *(1,) * (nodes.ndim - 2))
    return call.builder.activated(nodes, call.site, active, index)


@graph_rule("leaky_relu")
def _leaking(call: ChannelCall) -> Tensor:
    bends = call.argument(1, "negative_slope", 0.01) != 1
    active = torch.full((1,), float(bends), dtype=torch.float64)
    return call.builder.activated(call.first, call.site, active)


@graph_rule("matmul", "rmatmul", "mm", "bmm")
def product(call: ChannelCall) -> Tensor:
    """Follow a product of two matrices."""
    first, second = call.args[:2]
    if call.name == "rmatmul":
        first, second = second, first
    return _matrix_product(call, first, second)


@graph_rule("addmm", "baddbmm")
def added_product(call: ChannelCall) -> Tensor:
    """Follow ``addmm`` and its like: a product added to a tensor."""
    made = _matrix_product(call, call.argument(1, "mat1"), call.argument(2, "mat2"))
    return call.builder.paired(call.nodes(call.argument(0, "input")), made).expand(call.shape)


def _matrix_product(call: ChannelCall, first: Tensor, second: Tensor) -> Tensor:
    one, other = call.nodes_of(first), call.nodes_of(second)
    if one is None and other is not None and first.ndim > 1 and other.ndim > 1:
        return call.builder.dense(other, call.shape[-2], axis=-2).expand(call.shape)
    if other is None and one is not None and second.ndim > 1:
        return call.builder.dense(one, call.shape[-1]).expand(call.shape)
    if one is None or other is None or one.ndim < 2 or other.ndim < 2:
        raise Refused("it is not known how a product with a vector mixes channels")
    rows = call.builder.reduced(one, [-1], keep=True)
    columns = call.builder.reduced(other, [-2], keep=True)
    return call.builder.paired(rows, columns)


@graph_rule("einsum")
def einsum(call: ChannelCall) -> Tensor:
    """Follow a sum over products of two tensors."""
    operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    equation = str(call.args[0]).replace(" ", "")
    terms, _, result = equation.partition("->")
    labels = terms.split(",")
    if "." in equation or not result or len(labels) != 2 or len(set(result)) < len(result):
        raise Refused(f"einsum '{equation}' is not followed, only products of two tensors")
    is_square = operands[0] is operands[1] and labels[0] == labels[1]
    if is_square and call.nodes_of(operands[0]) is not None:
        raise Refused("it squares, as pow does")
    if any(len(set(term)) < len(term) for term in labels):
        raise Refused(f"einsum '{equation}' takes a diagonal")
    parts = []
    for position, (term, operand) in enumerate(zip(labels, operands, strict=True)):
        nodes = call.nodes_of(operand)
        if nodes is None:
            continue
        gone = [axis for axis, label in enumerate(term) if label not in result]
        kept = [label for label in term if label in result]
        new = [label for label in labels[1 - position] if label in result and label not in term]
        nodes = call.builder.reduced(nodes, gone) if gone else nodes
        if call.nodes_of(operands[1 - position]) is None and (new or gone):
            # A constant mixes: each combination of its own axes is a channel made new.
            sizes = [call.shape[result.index(label)] for label in new]
            nodes = call.builder.dense(nodes[..., None], math.prod(sizes))
            nodes = nodes.reshape(*nodes.shape[:-1], *sizes)
            kept += new
        order = [kept.index(label) for label in result if label in kept]
        missing = [axis for axis, label in enumerate(result) if label not in kept]
        nodes = nodes.permute(order)
        for axis in missing:
            nodes = nodes.unsqueeze(axis)
        parts.append(nodes.expand(call.shape))
    return parts[0] if len(parts) == 1 else call.builder.paired(*parts)


@graph_rule("scaled_dot_product_attention")
def attention(call: ChannelCall) -> Tensor:
    """Scaled dot-product attention of (..., tokens, channels) tensors."""
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    call.only(query, key, value)
    builder = call.builder
    rows = builder.reduced(call.nodes(query), [-1], keep=True)
    keys = builder.reduced(call.nodes(key), [-1], keep=True).transpose(-2, -1)
    values = builder.reduced(call.nodes(value), [-2], keep=True)
    if rows.shape[:-2] != values.shape[:-2]:
        raise Refused("its queries and values have different numbers of heads")
    weights = builder.reduced(builder.paired(rows, keys), [-1], keep=True)
    return builder.paired(weights, values).expand(call.shape)


@graph_rule("multi_head_attention_forward")
def multi_head(call: ChannelCall) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with its projections, of (tokens, batch, channels) tensors."""
    given = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    call.only(*given)
    builder, heads = call.builder, int(call.argument(4, "num_heads"))
    width = int(call.argument(3, "embed_dim_to_check"))
    # Positions mix anyway; without them every projection is one vector of channels.
    flat = [
        builder.dense(
            builder.reduced(call.nodes(tensor), range(tensor.ndim - 1), keep=True), width
        ).reshape(heads, -1)
        for tensor in given
    ]
    rows, keys = (builder.reduced(nodes, [-1], keep=True) for nodes in flat[:2])
    weights = builder.paired(rows, keys)
    mixed = builder.paired(weights, flat[2]).reshape(-1)
    output, shown = call.output
    made = builder.dense(mixed, output.shape[-1]).expand(tuple(output.shape))
    if shown is None:
        return made
    return made, builder.reduced(weights, [0, 1]).expand(tuple(shown.shape))


@graph_rule(
    "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout", "batch_norm", "instance_norm", "layer_norm", "group_norm",
    "rms_norm", "normalize", "local_response_norm", "softmax", "log_softmax"
)  # fmt: skip
def _kept(call: ChannelCall) -> Tensor:
    """Entries stay where they are."""
    given = call.argument(0, "input")
    call.only(given)
    for value in (*call.args[1:], *call.kwargs.values()):
        if isinstance(value, Tensor) and value.numel() > 1:
            # Factors of channels, which are the second axis or the last ones.
            is_second = call.operation.channels == "second"
            lead = (1,) * (given.ndim - 2) if is_second else ()
            _tell_apart(call, given, value.reshape(*value.shape, *lead))
    return call.nodes(given).expand(call.shape)


@graph_rule(
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "contiguous",
    "clone", "detach", "alias", "requires_grad", "data", "real", "neg", "positive"
)  # fmt: skip
def _converted(call: ChannelCall) -> Tensor:
    given = call.argument(0, "input")
    if given.is_floating_point() and not call.output.is_floating_point():
        raise Refused("it rounds to whole numbers")
    return call.first


@graph_rule("view", "reshape", "flatten", "ravel", "unflatten", "view_as", "reshape_as")
def _reshaped(call: ChannelCall) -> Tensor:
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        raise Refused("it reads the same memory as another type")
    made = tidied(call.first.reshape(call.shape))
    positions = call.builder.positions
    if positions.padded and _long_axes(made) > _long_axes(call.first):
        positions.joined = True  # What stood at the edge may stand beside each entry now.
    return made


def _long_axes(nodes: Tensor) -> int:
    """How many axes of positions there are."""
    return sum(size > 1 and not varies(nodes, axis) for axis, size in enumerate(nodes.shape))


@graph_rule(
    "squeeze", "unsqueeze", "permute", "transpose", "t", "T", "mT", "swapaxes", "swapdims",
    "movedim", "moveaxis", "H", "mH", "select", "narrow", "split", "chunk", "tensor_split",
    "split_with_sizes", "unbind", "roll", "flip"
)  # fmt: skip
def _moved(call: ChannelCall) -> Any:
    """Entries move about: do the same to the numbers of their nodes."""
    return _likewise(call, call.first)


def _likewise(call: ChannelCall, numbers: Tensor) -> Any:
    """Move numbers about as the call moves the entries of what it is given."""
    others = call.args[1:]
    kwargs = {name: value for name, value in call.kwargs.items() if name != "input"}
    call.fixed((others, kwargs))
    # A tensor of its own, since a call in place changes the shape of what it is given.
    moved = call.function(numbers.expand(numbers.shape), *others, **kwargs)
    return tidied(moved) if isinstance(moved, Tensor) else moved


@graph_rule("expand", "expand_as", "broadcast_to")
def _expanded(call: ChannelCall) -> Tensor:
    call.builder.positions.copied = True
    return tidied(call.broadcast(call.argument(0, "input")))


def _tell_apart(call: ChannelCall, given: Tensor, constant: Tensor) -> None:
    """Note it where a constant makes different numbers of copies of the same one."""
    nodes, channel = call.nodes(given), call.channel_of(given)
    for axis in range(-constant.ndim, 0):
        place = given.ndim + axis
        if constant.shape[axis] < 2 or (channel is not None and place == channel):
            continue
        is_spread = place < 0 or given.shape[place] == 1
        if is_spread or (call.builder.positions.copied and not varies(nodes, place)):
            call.builder.positions.joined = True


def _taken(call: ChannelCall, axes: Iterable[int]) -> Tensor:
    """Entries are picked along axes: of channels, one that is taken again is another one."""
    given = call.argument(0, "input")
    nodes: Tensor = _moved(call)
    if not any(call.is_of_channels(given, axis) for axis in axes):
        positions = call.builder.positions
        positions.copied |= any(True for _ in axes)
        positions.joined |= positions.padded
        return nodes
    entries = torch.arange(given.numel()).reshape(given.shape)
    return call.builder.again(nodes, _times(_likewise(call, entries)))


@graph_rule("index_select", "take_along_dim")
def _selected(call: ChannelCall) -> Tensor:
    """``index_select``, ``take_along_dim``: the axis is named."""
    named = call.argument(1 if call.name == "index_select" else 2, "dim")
    return _taken(call, () if named is None else (named,))


@graph_rule("getitem")
def _indexed(call: ChannelCall) -> Tensor:
    """``x[...]``: tensors and lists pick, slices and masks take no entry twice."""
    given, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.as_tensor(p) if isinstance(p, _PICKS) else p for p in parts)
    widths = [_width(part) for part in parts]
    hidden = given.ndim - sum(widths)
    axes, axis = [], 0
    for part, width in zip(parts, widths, strict=True):
        if isinstance(part, Tensor) and part.dtype not in (torch.bool, torch.uint8):
            axes.append(axis)
        axis += hidden if part is Ellipsis else width
    return _taken(call, axes)


_PICKS = (Tensor, list, np.ndarray)


def _width(part: Any) -> int:
    """How many axes a part of an index takes."""
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.ndim
    return 0 if part is None or part is Ellipsis or isinstance(part, bool) else 1


def _times(numbers: Tensor) -> Tensor:
    """How often each number came before."""
    flat = numbers.reshape(-1)
    ordered, order = flat.sort(stable=True)
    times = torch.empty_like(flat)
    times[order] = torch.arange(len(flat)) - torch.searchsorted(ordered, ordered)
    return times.reshape(numbers.shape)


def _along(numbers: Tensor, axis: int, like: Tensor) -> Tensor:
    """Lay numbers along an axis of a tensor of the same rank."""
    return numbers.reshape([-1 if a == axis else 1 for a in range(like.ndim)])


@graph_rule("repeat", "tile")
def _repeated(call: ChannelCall) -> Tensor:
    """Positions repeated are one channel still; repeated channels are more channels."""
    counts = call.kwargs.get("repeats", call.kwargs.get("dims", call.args[1:]))
    counts = list(counts[0] if counts and isinstance(counts[0], Sequence) else counts)
    call.fixed(counts)
    given, nodes = call.argument(0, "input"), call.first
    rank = max(len(counts), nodes.ndim)
    lead = rank - nodes.ndim
    nodes = nodes.reshape((1,) * lead + tuple(nodes.shape))
    for axis, count in enumerate([1] * (rank - len(counts)) + [int(count) for count in counts]):
        if count == 1:
            continue
        size = nodes.shape[axis]
        sizes = [count if a == axis else 1 for a in range(rank)]
        nodes = side_by_side([nodes] * count, axis) if count else nodes.repeat(sizes)
        call.builder.positions.copied = True
        if axis >= lead and call.is_of_channels(given, axis - lead):
            times = torch.arange(size * count) // max(size, 1)
            nodes = call.builder.again(nodes, _along(times, axis, nodes))
    return tidied(nodes)


@graph_rule("repeat_interleave")
def _interleaved(call: ChannelCall) -> Tensor:
    """As `_repeated`, each entry beside its copies."""
    named = call.argument(2, "dim")
    return _taken(call, range(call.first.ndim) if named is None else (named,))


@graph_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def _shuffled(call: ChannelCall) -> Tensor:
    """As `_moved`, for operations that move no integers."""
    # In float64, which holds every number of a node exactly.
    moved: Tensor = call.function(call.first.double(), *call.args[1:], **call.kwargs)
    return moved.long()


@graph_rule("linear")
def _linear(call: ChannelCall) -> Tensor:
    given = call.argument(0, "input")
    call.only(given)
    return call.builder.dense(call.nodes(given), call.shape[-1])


@graph_rule(*in_each_dimension("conv", "conv_transpose"))
def _convolution(call: ChannelCall) -> Tensor:
    given = call.argument(0, "input")
    call.only(given)
    groups = int(call.argument(6, "groups", 1))
    nodes = call.nodes(given)
    if nodes.ndim == call.argument(1, "weight").ndim:
        return call.builder.convolved(nodes, groups, call.shape)
    return call.builder.convolved(nodes[None], groups, (1, *call.shape))[0]


@graph_rule(
    *in_each_dimension("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
)
def _pooled(call: ChannelCall) -> Tensor:
    """Positions along the last axes meet."""
    nodes, axes = call.first, range(-int(call.name[-2]), 0)
    positions = call.builder.positions
    is_apart = "max" in call.name and call.argument(4, "dilation", 1) not in (1, (1,) * len(axes))
    if "avg" not in call.name and (positions.joined or (positions.padded and is_apart)):
        raise Refused(_SEVERAL)
    shape = call.shape
    mixed = [axis for axis in axes if varies(nodes, axis)]
    if any(shape[axis] > 1 for axis in mixed):
        raise Refused("it pools over channels, window by window")
    if mixed and "avg" not in call.name:
        raise Refused("it takes the largest of several channels")
    if "adaptive" in call.name:
        positions.copied = True  # It may give more than it is given.
    return call.builder.reduced(nodes, axes, keep=True).expand(shape)


@graph_rule("interpolate", "upsample")
def _interpolated(call: ChannelCall) -> Tensor:
    nodes = call.first
    call.builder.positions.copied = True
    return call.builder.reduced(nodes, range(2, nodes.ndim), keep=True).expand(call.shape)


@graph_rule("mean", "sum", "amax", "amin", "nanmean", "nansum", "max", "min")
def _reduced(call: ChannelCall) -> Tensor:
    nodes = call.first
    axes = call.kwargs.get("dim", call.kwargs.get("axis", call.args[1] if call.args[1:] else None))
    if isinstance(axes, Tensor) or "other" in call.kwargs:
        raise Refused("it is not known how it mixes channels")
    if axes is None or axes == ():
        axes = range(nodes.ndim)
    axes = [axes] if isinstance(axes, int) else list(axes)
    is_extreme = call.operation.reduces == "extreme"
    if is_extreme and any(varies(nodes, axis) for axis in axes):
        raise Refused("it takes the largest or smallest of several channels")
    positions = call.builder.positions
    is_many = any(nodes.shape[axis] > 1 for axis in axes)
    if is_extreme and is_many and (positions.joined or positions.padded):
        raise Refused(_SEVERAL)
    return call.builder.reduced(nodes, axes, keep=len(call.shape) == nodes.ndim)


_SEVERAL = (
    "it may take the largest or smallest of several numbers that were laid side by side as "
    "positions of one channel"
)


@graph_rule(
    "add", "div", "divide", "iadd", "imul", "isub", "itruediv", "mul", "multiply", "radd", "rmul",
    "rsub", "rtruediv", "sub", "subtract", "true_divide", "truediv",
)  # fmt: skip
def _merged(call: ChannelCall) -> Tensor:
    """Sums and products; of a constant nothing comes."""
    first, second = call.argument(0, "input"), call.argument(1, "other")
    if call.kwargs.get("rounding_mode") is not None:
        raise Refused("it rounds to whole numbers")
    flowing = [value for value in (first, second) if call.nodes_of(value) is not None]
    if not flowing:
        raise Refused("it is not known how it mixes channels")
    combines = call.operation.combines
    if first is second and combines == "product":
        raise Refused("it squares, as pow does")
    divisor = first if call.name == "rtruediv" else second
    if combines == "quotient" and any(value is divisor for value in flowing):
        raise Refused("it divides by what depends on the input")
    branches = [call.broadcast(value) for value in flowing]
    if len(flowing) == 1:
        other = second if flowing[0] is first else first
        if isinstance(other, Tensor):
            _tell_apart(call, flowing[0], other)
    return branches[0] if len(branches) == 1 else call.builder.paired(*branches)


@graph_rule("addcmul")
def _added_product(call: ChannelCall) -> Tensor:
    """Follow ``addcmul``: a product, entry by entry, added to a tensor."""
    given = [call.argument(i, name) for i, name in enumerate(("input", "tensor1", "tensor2"))]
    if given[1] is given[2] and call.nodes_of(given[1]) is not None:
        raise Refused("it squares, as pow does")
    summand, one, other = map(call.broadcast, given)
    for value, constant in itertools.permutations(given, 2):
        if call.nodes_of(value) is not None and call.nodes_of(constant) is None:
            _tell_apart(call, value, constant)
    return call.builder.paired(summand, call.builder.paired(one, other))


@graph_rule("cat", "concat", "concatenate")
def _concatenated(call: ChannelCall) -> Tensor:
    """Channels side by side; a constant beside positions of a channel joins that channel."""
    axis = call.argument(1, "dim", call.kwargs.get("axis", 0)) % call.output.ndim
    tensors = [t for t in call.argument(0, "tensors") if t.ndim == call.output.ndim]
    nodes = [call.nodes(t) for t in tensors]
    size = call.output.shape[axis]
    if not any(call.is_of_channels(t, axis) for t in tensors):
        flowing = [part for part in nodes if (part >= 0).any()]
        pattern = flowing[0].narrow(axis, 0, 1)
        is_long = any(part.shape[axis] > 1 for part in flowing)
        if (is_long or len(flowing) == 1) and all(((p == pattern) | (p < 0)).all() for p in nodes):
            positions = call.builder.positions
            is_of_one = all(tensor is tensors[0] for tensor in tensors)
            positions.copied |= is_of_one
            positions.padded |= len(flowing) < len(nodes)
            positions.joined |= len(flowing) > 1 and not is_of_one
            return pattern.expand([size if a == axis else -1 for a in range(pattern.ndim)])
    return side_by_side(_each_its_own(call.builder, nodes), axis)


@graph_rule("stack")
def _stacked(call: ChannelCall) -> Tensor:
    """Channels side by side, along an axis of their own."""
    axis = call.argument(1, "dim", 0) % call.output.ndim
    nodes = [call.nodes(tensor).unsqueeze(axis) for tensor in call.argument(0, "tensors")]
    return side_by_side(_each_its_own(call.builder, nodes), axis)


def _each_its_own(builder: Builder, parts: Sequence[Tensor]) -> list[Tensor]:
    """Make copies of the channels of a part that another before it has."""
    made, seen = [], torch.empty(0, dtype=torch.int64)
    for part in parts:
        own, _ = distinct(compact(part))
        is_again = bool(torch.isin(own[own >= 0], seen).any())
        made.append(builder.again(part, torch.ones(()).long()) if is_again else part)
        seen = torch.cat([seen, own])
    return made


@graph_rule("pad")
def _padded(call: ChannelCall) -> Tensor:
    """Edges of positions belong to the channel; channels added are constant."""
    nodes = call.first
    pads = list(call.argument(1, "pad"))
    for number in range(len(pads) // 2):
        axis, (before, after) = nodes.ndim - 1 - number, pads[2 * number : 2 * number + 2]
        if before == 0 and after == 0:
            continue
        size = nodes.shape[axis] + before + after
        if varies(nodes, axis) or (nodes.shape[axis] == 1 and axis == 1):
            if call.argument(2, "mode", "constant") != "constant":
                raise Refused("it repeats channels at the edges")
            pad = [0, 0] * number + [before, after]
            nodes = torch.nn.functional.pad(nodes, pad, value=-1)
        else:
            call.builder.positions.padded |= call.argument(2, "mode", "constant") == "constant"
            one = nodes.narrow(axis, 0, 1)
            nodes = one.expand(*(size if a == axis else -1 for a in range(nodes.ndim)))
    return nodes


@graph_rule("setitem")
def _assigned(call: ChannelCall) -> Tensor:
    """``x[index] = value``: the numbers are assigned likewise."""
    target, index, value = call.args
    call.fixed(index)
    nodes = call.nodes(target).clone(memory_format=torch.contiguous_format)
    if not isinstance(value, Tensor):
        nodes[index] = -1
        return tidied(nodes)
    new = call.nodes(value)
    nodes[index] = new
    call.builder.positions.joined |= call.nodes_of(value) is not None
    inside = torch.zeros(nodes.shape, dtype=torch.bool)
    inside[index] = True
    for axis in range(nodes.ndim):
        if axis != call.channel_of(target) and not differs(nodes, axis):
            continue
        places = _along(torch.arange(nodes.shape[axis]), axis, nodes).expand(nodes.shape)
        kept, put = (
            nodes[where & (nodes >= 0)] * nodes.shape[axis] + places[where & (nodes >= 0)]
            for where in (~inside, inside)
        )
        # A channel that stays elsewhere along the axis too is there twice.
        again = put[torch.isin(put // nodes.shape[axis], kept // nodes.shape[axis])]
        if not torch.isin(again, kept).all():
            nodes[index] = call.builder.again(new, torch.ones(()).long())
            break
    return tidied(nodes)


@graph_rule("embedding")
def _embedded(call: ChannelCall) -> Tensor:
    index, weight = call.argument(0, "input"), call.argument(1, "weight")
    call.only(index)
    return call.builder.dense(call.nodes(index)[..., None], int(weight.shape[1]))


@graph_rule("masked_fill")
def _masked(call: ChannelCall) -> Tensor:
    given, mask, value = call.args[0], call.argument(1, "mask"), call.argument(2, "value")
    if any(isinstance(v, Tensor) and call.nodes_of(v) is not None for v in (mask, value)):
        raise Refused("what it puts in depends on the input")
    call.builder.positions.padded = True
    return call.nodes(given).expand(call.shape)
