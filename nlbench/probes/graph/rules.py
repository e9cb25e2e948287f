"""Rules for the effect of operations on channels.

Conventions: all positions of a channel, such as tokens, form one channel, so pooling, interpolation
and means over positions preserve it. Each sum or product of two tensors that depend on the input
merges two branches, so the gate of squeeze-and-excitation is a branch. A matrix product merges, for
each entry, the channels of the row with those of the column. Attention consists of two matrix
products: queries with keys, and the result with the values. Normalisation, softmax and maxima
preserve channels and have no units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.introspection.function_calls import FunctionCall, tensors_in
from nlbench.introspection.operations import add_dimensions, graph_rule

from .channel_graph import Builder, compact, concatenate, differs, expand_constant, varies

if TYPE_CHECKING:
    from .tracker import ChannelTracker


class UnfollowableCall(Exception):
    """Raised if the rules can't follow a call. The tracker adds its place to the message."""


class ChannelCall(FunctionCall):
    """A call with the nodes and channel axes of its operands."""

    def __init__(self, call: FunctionCall, tracker: ChannelTracker, output: Any, site: str) -> None:
        super().__init__(call.function, call.args, call.kwargs)
        self.output = output
        self.site = site
        self.builder = tracker.builder
        self.nodes_of = tracker.nodes_of
        self.channel_of = tracker.layouts.channel
        self.real = tracker.real

    def nodes(self, value: Any) -> Tensor:
        """Return the nodes of a tensor, with -1 for a constant."""
        nodes = self.nodes_of(value)
        return torch.full((), -1).expand(tuple(value.shape)) if nodes is None else nodes

    @property
    def first(self) -> Tensor:
        """Nodes of the first argument."""
        return self.nodes(self.argument(0, "input"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output, or of the first output if there are several."""
        output = self.output if isinstance(self.output, Tensor) else self.output[0]
        return tuple(output.shape)

    def holds_channels(self, tensor: Tensor, axis: int) -> bool:
        """Return True if an axis holds channels: nodes differ along it, or a layer made it so.

        All other axes hold positions.
        """
        axis %= tensor.ndim
        return axis == self.channel_of(tensor) or differs(self.nodes(tensor), axis)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Expand the nodes of a tensor to the output's shape.

        A channel that is repeated along the channel axis becomes several channels.
        """
        nodes = self.nodes(tensor)
        channel = self.channel_of(tensor)
        expanded = nodes.expand(self.shape)
        if channel is None or nodes.shape[channel] > 1:
            return expanded
        after = len(self.shape) - nodes.ndim + channel
        return self.builder.new_channels(
            expanded, _along(torch.arange(self.shape[after]), after, expanded)
        )

    def require_only(self, *values: Any) -> None:
        """Raise if an argument other than the given ones depends on the input."""
        allowed = {id(value) for value in values}
        if any(id(t) not in allowed and self.nodes_of(t) is not None for t in self.tensors):
            raise UnfollowableCall("its weights depend on the input")

    def require_constant(self, values: Any) -> None:
        """Raise if indices or counts depend on the input, or are on the meta device."""
        for tensor in tensors_in((values,)):
            if self.nodes_of(tensor) is not None:
                raise UnfollowableCall("which entries it selects depends on the input")
            if tensor.is_meta:
                raise Undefined(
                    f"{self.name}: its indices have no numbers, the model is on the device meta"
                )


def unit(call: ChannelCall) -> Tensor:
    """Add a unit to each channel, for an activation that has no rule of its own."""
    return call.builder.activate(call.first, call.site)


@graph_rule("glu")
def _glu(call: ChannelCall) -> Tensor:
    half, gate = call.first.chunk(2, call.argument(1, "dim", -1))
    return call.builder.merge(half, call.builder.activate(gate, call.site))


@graph_rule("prelu")
def _prelu(call: ChannelCall) -> Tensor:
    """Follow PReLU, whose units are linear where the slope is 1."""
    nodes = call.first
    weight = call.real(call.argument(1, "weight"))
    call.require_only(call.argument(0, "input"))
    if weight.is_meta:
        raise Undefined(f"{call.site}: its slopes have no numbers, the model is on the device meta")
    active = (weight.detach().reshape(-1) != 1).double().cpu()
    index = None
    if len(active) > 1:
        index = torch.arange(len(active)).reshape(-1, *(1,) * (nodes.ndim - 2))
    return call.builder.activate(nodes, call.site, active, index)


@graph_rule("leaky_relu")
def _leaky_relu(call: ChannelCall) -> Tensor:
    bends = call.argument(1, "negative_slope", 0.01) != 1
    active = torch.full((1,), float(bends), dtype=torch.float64)
    return call.builder.activate(call.first, call.site, active)


@graph_rule("matmul", "rmatmul", "mm", "bmm")
def product(call: ChannelCall) -> Tensor:
    """Follow a product of two matrices."""
    first, second = call.args[:2]
    if call.name == "rmatmul":
        first, second = second, first
    return _matrix_product(call, first, second)


@graph_rule("addmm", "baddbmm")
def addmm(call: ChannelCall) -> Tensor:
    """Follow a matrix product added to a tensor."""
    product = _matrix_product(call, call.argument(1, "mat1"), call.argument(2, "mat2"))
    return call.builder.merge(call.nodes(call.argument(0, "input")), product).expand(call.shape)


def _matrix_product(call: ChannelCall, first: Tensor, second: Tensor) -> Tensor:
    left, right = call.nodes_of(first), call.nodes_of(second)
    if left is None and right is not None and first.ndim > 1 and right.ndim > 1:
        return call.builder.mix(right, call.shape[-2], axis=-2).expand(call.shape)
    if right is None and left is not None and second.ndim > 1:
        return call.builder.mix(left, call.shape[-1]).expand(call.shape)
    if left is None or right is None or left.ndim < 2 or right.ndim < 2:
        raise UnfollowableCall("it is not known how a product with a vector mixes channels")
    rows = call.builder.reduce(left, [-1], keep=True)
    columns = call.builder.reduce(right, [-2], keep=True)
    return call.builder.merge(rows, columns)


@graph_rule("einsum")
def einsum(call: ChannelCall) -> Tensor:
    """Follow a sum over products of two tensors."""
    operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    equation = str(call.args[0]).replace(" ", "")
    terms, _, result = equation.partition("->")
    labels = terms.split(",")
    if "." in equation or not result or len(labels) != 2 or len(set(result)) < len(result):
        raise UnfollowableCall(f"einsum '{equation}' is not followed, only products of two tensors")
    is_square = operands[0] is operands[1] and labels[0] == labels[1]
    if is_square and call.nodes_of(operands[0]) is not None:
        raise UnfollowableCall("it squares, as pow does")
    if any(len(set(term)) < len(term) for term in labels):
        raise UnfollowableCall(f"einsum '{equation}' takes a diagonal")
    parts = []
    for position, (term, operand) in enumerate(zip(labels, operands, strict=True)):
        nodes = call.nodes_of(operand)
        if nodes is None:
            continue
        summed = [axis for axis, label in enumerate(term) if label not in result]
        remaining = [label for label in term if label in result]
        new = [label for label in labels[1 - position] if label in result and label not in term]
        nodes = call.builder.reduce(nodes, summed) if summed else nodes
        if call.nodes_of(operands[1 - position]) is None and (new or summed):
            # A constant mixes channels, creating a new channel for each entry along its own axes.
            sizes = [call.shape[result.index(label)] for label in new]
            nodes = call.builder.mix(nodes[..., None], math.prod(sizes))
            nodes = nodes.reshape(*nodes.shape[:-1], *sizes)
            remaining += new
        order = [remaining.index(label) for label in result if label in remaining]
        missing = [axis for axis, label in enumerate(result) if label not in remaining]
        nodes = nodes.permute(order)
        for axis in missing:
            nodes = nodes.unsqueeze(axis)
        parts.append(nodes.expand(call.shape))
    return parts[0] if len(parts) == 1 else call.builder.merge(*parts)


@graph_rule("scaled_dot_product_attention")
def attention(call: ChannelCall) -> Tensor:
    """Follow scaled dot-product attention on (..., tokens, channels) tensors."""
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    call.require_only(query, key, value)
    builder = call.builder
    rows = builder.reduce(call.nodes(query), [-1], keep=True)
    keys = builder.reduce(call.nodes(key), [-1], keep=True).transpose(-2, -1)
    values = builder.reduce(call.nodes(value), [-2], keep=True)
    if rows.shape[:-2] != values.shape[:-2]:
        raise UnfollowableCall("its queries and values have different numbers of heads")
    weights = builder.reduce(builder.merge(rows, keys), [-1], keep=True)
    return builder.merge(weights, values).expand(call.shape)


@graph_rule("multi_head_attention_forward")
def multi_head(call: ChannelCall) -> Tensor | tuple[Tensor, Tensor]:
    """Follow attention on (tokens, batch, channels) tensors, including its projections."""
    inputs = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    call.require_only(*inputs)
    builder = call.builder
    heads = int(call.argument(4, "num_heads"))
    width = int(call.argument(3, "embed_dim_to_check"))
    # Attention mixes all positions, so each projection is reduced to a single vector of channels.
    flat = [
        builder.mix(
            builder.reduce(call.nodes(tensor), range(tensor.ndim - 1), keep=True), width
        ).reshape(heads, -1)
        for tensor in inputs
    ]
    rows, keys = (builder.reduce(nodes, [-1], keep=True) for nodes in flat[:2])
    weights = builder.merge(rows, keys)
    mixed = builder.merge(weights, flat[2]).reshape(-1)
    output, attention_weights = call.output
    nodes = builder.mix(mixed, output.shape[-1]).expand(tuple(output.shape))
    if attention_weights is None:
        return nodes
    return nodes, builder.reduce(weights, [0, 1]).expand(tuple(attention_weights.shape))


@graph_rule(
    "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout", "batch_norm", "instance_norm", "layer_norm", "group_norm",
    "rms_norm", "normalize", "local_response_norm", "softmax", "log_softmax"
)  # fmt: skip
def _keep_places(call: ChannelCall) -> Tensor:
    """Follow operations that keep each entry at its position."""
    source = call.argument(0, "input")
    call.require_only(source)
    for value in (*call.args[1:], *call.kwargs.values()):
        if isinstance(value, Tensor) and value.numel() > 1:
            # Factors per channel, along the second axis or the last axes.
            is_second = call.operation.channels == "second"
            trailing = (1,) * (source.ndim - 2) if is_second else ()
            _distinguish_copies(call, source, value.reshape(*value.shape, *trailing))
    return call.nodes(source).expand(call.shape)


@graph_rule(
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "contiguous",
    "clone", "detach", "alias", "requires_grad", "data", "real", "neg", "positive"
)  # fmt: skip
def _convert(call: ChannelCall) -> Tensor:
    if call.output.is_complex():
        raise UnfollowableCall("complex numbers are not followed")
    if call.argument(0, "input").is_floating_point() and not call.output.is_floating_point():
        raise UnfollowableCall("it rounds to whole numbers")
    return call.first


@graph_rule("view", "reshape", "flatten", "ravel", "unflatten", "view_as", "reshape_as")
def _reshape(call: ChannelCall) -> Tensor:
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        raise UnfollowableCall("it reads the same memory as another type")
    nodes = expand_constant(call.first.reshape(call.shape))
    positions = call.builder.positions
    if positions.padded and _count_position_axes(nodes) > _count_position_axes(call.first):
        positions.joined = True  # Entries and padding may now be positions of the same channel.
    return nodes


def _count_position_axes(nodes: Tensor) -> int:
    return sum(size > 1 and not varies(nodes, axis) for axis, size in enumerate(nodes.shape))


@graph_rule(
    "squeeze", "unsqueeze", "permute", "transpose", "t", "T", "mT", "swapaxes", "swapdims",
    "movedim", "moveaxis", "H", "mH", "select", "narrow", "split", "chunk", "tensor_split",
    "split_with_sizes", "unbind", "roll", "flip"
)  # fmt: skip
def _move(call: ChannelCall) -> Any:
    """Move nodes in the same way as the call moves entries."""
    return _move_likewise(call, call.first)


def _move_likewise(call: ChannelCall, numbers: Tensor) -> Any:
    """Move numbers in the same way as the call moves the entries of its input."""
    others = call.args[1:]
    kwargs = {name: value for name, value in call.kwargs.items() if name != "input"}
    call.require_constant((others, kwargs))
    # `expand` makes a new tensor, since an in-place call changes the shape of its input.
    moved = call.function(numbers.expand(numbers.shape), *others, **kwargs)
    return expand_constant(moved) if isinstance(moved, Tensor) else moved


@graph_rule("expand", "expand_as", "broadcast_to")
def _expand(call: ChannelCall) -> Tensor:
    call.builder.positions.copied = True
    return expand_constant(call.broadcast(call.argument(0, "input")))


def _distinguish_copies(call: ChannelCall, source: Tensor, constant: Tensor) -> None:
    """Record that a constant may cause copies of a position to differ."""
    nodes = call.nodes(source)
    channel = call.channel_of(source)
    for axis in range(-constant.ndim, 0):
        place = source.ndim + axis
        if constant.shape[axis] < 2 or (channel is not None and place == channel):
            continue
        is_expanded = place < 0 or source.shape[place] == 1
        if is_expanded or (call.builder.positions.copied and not varies(nodes, place)):
            call.builder.positions.joined = True


def _select_entries(call: ChannelCall, axes: Iterable[int]) -> Tensor:
    """Follow selected entries. If a channel is selected again, the copy is a new channel."""
    source = call.argument(0, "input")
    nodes: Tensor = _move(call)
    if not any(call.holds_channels(source, axis) for axis in axes):
        positions = call.builder.positions
        positions.copied |= any(True for _ in axes)
        positions.joined |= positions.padded
        return nodes
    entries = torch.arange(source.numel()).reshape(source.shape)
    return call.builder.new_channels(nodes, _earlier_occurrences(_move_likewise(call, entries)))


@graph_rule("index_select", "take_along_dim")
def _index_select(call: ChannelCall) -> Tensor:
    dim = call.argument(1 if call.name == "index_select" else 2, "dim")
    return _select_entries(call, () if dim is None else (dim,))


@graph_rule("getitem")
def _getitem(call: ChannelCall) -> Tensor:
    """Follow ``x[...]``, where only tensors and lists can select an entry twice."""
    source, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(
        torch.as_tensor(p) if isinstance(p, (Tensor, list, np.ndarray)) else p for p in parts
    )
    widths = [_width(part) for part in parts]
    hidden = source.ndim - sum(widths)
    axes = []
    axis = 0
    for part, width in zip(parts, widths, strict=True):
        if isinstance(part, Tensor) and part.dtype not in (torch.bool, torch.uint8):
            axes.append(axis)
        axis += hidden if part is Ellipsis else width
    return _select_entries(call, axes)


def _width(part: Any) -> int:
    """Return the number of axes consumed by a part of an index."""
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.ndim
    return 0 if part is None or part is Ellipsis or isinstance(part, bool) else 1


def _earlier_occurrences(numbers: Tensor) -> Tensor:
    """Return how often each number occurs before its position in the flattened tensor."""
    flat = numbers.reshape(-1)
    ordered, order = flat.sort(stable=True)
    counts = torch.empty_like(flat)
    counts[order] = torch.arange(len(flat)) - torch.searchsorted(ordered, ordered)
    return counts.reshape(numbers.shape)


def _along(numbers: Tensor, axis: int, like: Tensor) -> Tensor:
    """Reshape a vector to lie along one axis of a tensor with as many axes as `like`."""
    return numbers.reshape([-1 if a == axis else 1 for a in range(like.ndim)])


@graph_rule("repeat", "tile")
def _repeat(call: ChannelCall) -> Tensor:
    """Follow repetition: repeated positions remain one channel, repeated channels are new ones."""
    counts = call.kwargs.get("repeats", call.kwargs.get("dims", call.args[1:]))
    counts = list(counts[0] if counts and isinstance(counts[0], Sequence) else counts)
    call.require_constant(counts)
    source = call.argument(0, "input")
    nodes = call.first
    rank = max(len(counts), nodes.ndim)
    lead = rank - nodes.ndim
    nodes = nodes.reshape((1,) * lead + tuple(nodes.shape))
    for axis, count in enumerate([1] * (rank - len(counts)) + [int(count) for count in counts]):
        if count == 1:
            continue
        size = nodes.shape[axis]
        sizes = [count if a == axis else 1 for a in range(rank)]
        nodes = concatenate([nodes] * count, axis) if count else nodes.repeat(sizes)
        call.builder.positions.copied = True
        if axis >= lead and call.holds_channels(source, axis - lead):
            times = torch.arange(size * count) // max(size, 1)
            nodes = call.builder.new_channels(nodes, _along(times, axis, nodes))
    return expand_constant(nodes)


@graph_rule("repeat_interleave")
def _repeat_interleave(call: ChannelCall) -> Tensor:
    """Follow repetition that places copies next to each entry."""
    dim = call.argument(2, "dim")
    return _select_entries(call, range(call.first.ndim) if dim is None else (dim,))


@graph_rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def _shuffle(call: ChannelCall) -> Tensor:
    """Move nodes using an operation that does not accept integers."""
    # float64 represents the indices of nodes exactly.
    moved: Tensor = call.function(call.first.double(), *call.args[1:], **call.kwargs)
    return moved.long()


@graph_rule("linear")
def _linear(call: ChannelCall) -> Tensor:
    source = call.argument(0, "input")
    call.require_only(source)
    return call.builder.mix(call.nodes(source), call.shape[-1])


@graph_rule(*add_dimensions("conv", "conv_transpose"))
def _convolution(call: ChannelCall) -> Tensor:
    source = call.argument(0, "input")
    call.require_only(source)
    groups = int(call.argument(6, "groups", 1))
    nodes = call.nodes(source)
    if nodes.ndim == call.argument(1, "weight").ndim:
        return call.builder.convolve(nodes, groups, call.shape)
    return call.builder.convolve(nodes[None], groups, (1, *call.shape))[0]


@graph_rule(
    *add_dimensions("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
)
def _pool(call: ChannelCall) -> Tensor:
    """Merge positions along the last axes."""
    nodes = call.first
    axes = range(-int(call.name[-2]), 0)
    positions = call.builder.positions
    is_dilated = "max" in call.name and call.argument(4, "dilation", 1) not in (1, (1,) * len(axes))
    if "avg" not in call.name and (positions.joined or (positions.padded and is_dilated)):
        raise UnfollowableCall(_JOINED_POSITIONS)
    shape = call.shape
    mixed = [axis for axis in axes if varies(nodes, axis)]
    if any(shape[axis] > 1 for axis in mixed):
        raise UnfollowableCall("it pools over channels, window by window")
    if mixed and "avg" not in call.name:
        raise UnfollowableCall("it takes the largest of several channels")
    if "adaptive" in call.name:
        positions.copied = True  # Its output may be larger than its input.
    return call.builder.reduce(nodes, axes, keep=True).expand(shape)


@graph_rule("interpolate", "upsample")
def _interpolate(call: ChannelCall) -> Tensor:
    nodes = call.first
    call.builder.positions.copied = True
    return call.builder.reduce(nodes, range(2, nodes.ndim), keep=True).expand(call.shape)


@graph_rule("mean", "sum", "amax", "amin", "nanmean", "nansum", "max", "min")
def _reduce(call: ChannelCall) -> Tensor:
    nodes = call.first
    axes = call.kwargs.get("dim", call.kwargs.get("axis", call.args[1] if call.args[1:] else None))
    if isinstance(axes, Tensor) or "other" in call.kwargs:
        raise UnfollowableCall("it is not known how it mixes channels")
    if axes is None or axes == ():
        axes = range(nodes.ndim)
    axes = [axes] if isinstance(axes, int) else list(axes)
    is_extreme = call.operation.reduces == "extreme"
    if is_extreme and any(varies(nodes, axis) for axis in axes):
        raise UnfollowableCall("it takes the largest or smallest of several channels")
    positions = call.builder.positions
    is_many = any(nodes.shape[axis] > 1 for axis in axes)
    if is_extreme and is_many and (positions.joined or positions.padded):
        raise UnfollowableCall(_JOINED_POSITIONS)
    return call.builder.reduce(nodes, axes, keep=len(call.shape) == nodes.ndim)


_JOINED_POSITIONS = (
    "it may take the largest or smallest of several numbers that were joined as positions of one "
    "channel"
)


@graph_rule(
    "add", "div", "divide", "iadd", "imul", "isub", "itruediv", "mul", "multiply", "radd", "rmul",
    "rsub", "rtruediv", "sub", "subtract", "true_divide", "truediv",
)  # fmt: skip
def _add_or_multiply(call: ChannelCall) -> Tensor:
    """Follow sums and products. A constant adds no branch."""
    first = call.argument(0, "input")
    second = call.argument(1, "other")
    if call.kwargs.get("rounding_mode") is not None:
        raise UnfollowableCall("it rounds to whole numbers")
    flowing = [value for value in (first, second) if call.nodes_of(value) is not None]
    if not flowing:
        raise UnfollowableCall("it is not known how it mixes channels")
    combines = call.operation.combines
    if first is second and combines == "product":
        raise UnfollowableCall("it squares, as pow does")
    divisor = first if call.name == "rtruediv" else second
    if combines == "quotient" and any(value is divisor for value in flowing):
        raise UnfollowableCall("its divisor depends on the input")
    return _merge_operands(call, first, second)


def _merge_operands(call: ChannelCall, *operands: Any) -> Tensor:
    """Merge operands elementwise. A constant adds no branch, but may distinguish copies."""
    flowing = [value for value in operands if call.nodes_of(value) is not None]
    for value, other in itertools.product(flowing, operands):
        if isinstance(other, Tensor) and call.nodes_of(other) is None:
            _distinguish_copies(call, value, other)
    *branches, merged = map(call.broadcast, flowing)
    for branch in reversed(branches):
        merged = call.builder.merge(branch, merged)
    return merged


@graph_rule("addcmul")
def _addcmul(call: ChannelCall) -> Tensor:
    """Follow an elementwise product added to a tensor."""
    inputs = [call.argument(i, name) for i, name in enumerate(("input", "tensor1", "tensor2"))]
    if inputs[1] is inputs[2] and call.nodes_of(inputs[1]) is not None:
        raise UnfollowableCall("it squares, as pow does")
    return _merge_operands(call, *inputs)


@graph_rule("lerp")
def _interpolate_linearly(call: ChannelCall) -> Tensor:
    """Follow a weighted sum of two tensors. A constant one adds no branch."""
    start, end, weight = (call.argument(i, n) for i, n in enumerate(("input", "end", "weight")))
    if call.nodes_of(weight) is not None:
        raise UnfollowableCall("its weight depends on the input")
    return _merge_operands(call, start, end, weight)


@graph_rule("cat", "concat", "concatenate")
def _concatenate(call: ChannelCall) -> Tensor:
    """Follow concatenation. A constant next to positions of a channel becomes part of it."""
    axis = call.argument(1, "dim", call.kwargs.get("axis", 0)) % call.output.ndim
    tensors = [t for t in call.argument(0, "tensors") if t.ndim == call.output.ndim]
    nodes = [call.nodes(t) for t in tensors]
    size = call.output.shape[axis]
    if not any(call.holds_channels(t, axis) for t in tensors):
        flowing = [part for part in nodes if (part >= 0).any()]
        pattern = flowing[0].narrow(axis, 0, 1)
        is_long = any(part.shape[axis] > 1 for part in flowing)
        if (is_long or len(flowing) == 1) and all(((p == pattern) | (p < 0)).all() for p in nodes):
            positions = call.builder.positions
            are_copies = all(tensor is tensors[0] for tensor in tensors)
            positions.copied |= are_copies
            positions.padded |= len(flowing) < len(nodes)
            positions.joined |= len(flowing) > 1 and not are_copies
            return pattern.expand([size if a == axis else -1 for a in range(pattern.ndim)])
    return concatenate(_separate_channels(call.builder, nodes), axis)


@graph_rule("stack")
def _stack(call: ChannelCall) -> Tensor:
    """Follow stacking, which creates a channel axis."""
    axis = call.argument(1, "dim", 0) % call.output.ndim
    nodes = [call.nodes(tensor).unsqueeze(axis) for tensor in call.argument(0, "tensors")]
    return concatenate(_separate_channels(call.builder, nodes), axis)


def _separate_channels(builder: Builder, parts: Sequence[Tensor]) -> list[Tensor]:
    """Create new channels for each part that shares channels with an earlier part."""
    results = []
    seen = torch.empty(0, dtype=torch.int64)
    for part in parts:
        nodes = torch.unique(compact(part))
        recurs = bool(torch.isin(nodes[nodes >= 0], seen).any())
        results.append(builder.new_channels(part, torch.ones(()).long()) if recurs else part)
        seen = torch.cat([seen, nodes])
    return results


@graph_rule("pad")
def _pad(call: ChannelCall) -> Tensor:
    """Follow padding: padded positions are part of the channel, padded channels are constant."""
    nodes = call.first
    pads = list(call.argument(1, "pad"))
    for index in range(len(pads) // 2):
        axis = nodes.ndim - 1 - index
        (before, after) = pads[2 * index : 2 * index + 2]
        if before == 0 and after == 0:
            continue
        size = nodes.shape[axis] + before + after
        if varies(nodes, axis) or (nodes.shape[axis] == 1 and axis == 1):
            if call.argument(2, "mode", "constant") != "constant":
                raise UnfollowableCall("it repeats channels at the edges")
            pad = [0, 0] * index + [before, after]
            nodes = torch.nn.functional.pad(nodes, pad, value=-1)
        else:
            call.builder.positions.padded |= call.argument(2, "mode", "constant") == "constant"
            edge = nodes.narrow(axis, 0, 1)
            nodes = edge.expand(*(size if a == axis else -1 for a in range(nodes.ndim)))
    return nodes


@graph_rule("setitem")
def _setitem(call: ChannelCall) -> Tensor:
    """Follow ``x[index] = value`` by assigning nodes in the same way."""
    target, index, value = call.args
    call.require_constant(index)
    nodes = call.nodes(target).clone(memory_format=torch.contiguous_format)
    if not isinstance(value, Tensor):
        nodes[index] = -1
        return expand_constant(nodes)
    new = call.nodes(value)
    nodes[index] = new
    call.builder.positions.joined |= call.nodes_of(value) is not None
    inside = torch.zeros(nodes.shape, dtype=torch.bool)
    inside[index] = True
    for axis in range(nodes.ndim):
        if axis != call.channel_of(target) and not differs(nodes, axis):
            continue
        places = _along(torch.arange(nodes.shape[axis]), axis, nodes).expand(nodes.shape)
        old, assigned = (
            nodes[where & (nodes >= 0)] * nodes.shape[axis] + places[where & (nodes >= 0)]
            for where in (~inside, inside)
        )
        # A channel that also remains elsewhere along the axis would occur twice.
        recurring = assigned[torch.isin(assigned // nodes.shape[axis], old // nodes.shape[axis])]
        if not torch.isin(recurring, old).all():
            nodes[index] = call.builder.new_channels(new, torch.ones(()).long())
            break
    return expand_constant(nodes)


@graph_rule("embedding")
def _embed(call: ChannelCall) -> Tensor:
    index = call.argument(0, "input")
    weight = call.argument(1, "weight")
    call.require_only(index)
    return call.builder.mix(call.nodes(index)[..., None], int(weight.shape[1]))


@graph_rule("masked_fill")
def _masked_fill(call: ChannelCall) -> Tensor:
    source = call.args[0]
    mask = call.argument(1, "mask")
    value = call.argument(2, "value")
    if any(isinstance(v, Tensor) and call.nodes_of(v) is not None for v in (mask, value)):
        raise UnfollowableCall("its mask or value depends on the input")
    call.builder.positions.padded = True
    return call.nodes(source).expand(call.shape)
