"""What each operation does to the channels of the tensors that it is given.

Conventions. Positions of a channel, tokens too, are one channel: pooling, interpolation and
means over positions keep it. Every sum and every product of two tensors that depend on
the input is a merge of two branches, so the gate of squeeze-and-excitation is a branch
beside what it multiplies. A product of matrices merges, for each entry, the channels of
the row and those of the column; attention is two such products, queries with keys and
the result with the values. Normalisation, softmax and maxima keep channels and are no units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import Call, Refused, Rule
from .nodes import compact, distinct, side_by_side, tidied, varies

__all__ = [
    "COMPARISONS",
    "CONSTANTS",
    "DECISIONS",
    "MIXING",
    "NUMBERS",
    "RULES",
    "added_product",
    "attention",
    "einsum",
    "multi_head",
    "product",
]


def product(call: Call) -> Tensor:
    """Follow a product of two matrices."""
    first, second = call.args[:2]
    if call.name == "__rmatmul__":
        first, second = second, first
    return _matrix_product(call, first, second)


def added_product(call: Call) -> Tensor:
    """Follow ``addmm`` and its like: a product added to a tensor."""
    made = _matrix_product(call, call.arg(1, "mat1"), call.arg(2, "mat2"))
    return call.builder.paired(call.nodes(call.arg(0, "input")), made).expand(call.shape)


def _matrix_product(call: Call, first: Tensor, second: Tensor) -> Tensor:
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


def einsum(call: Call) -> Tensor:
    """Follow a sum over products of two tensors."""
    operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    equation = str(call.args[0]).replace(" ", "")
    terms, _, result = equation.partition("->")
    labels = terms.split(",")
    if "." in equation or not result or len(labels) != 2 or len(set(result)) < len(result):
        raise Refused(f"einsum '{equation}' is not followed, only products of two tensors")
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


def attention(call: Call) -> Tensor:
    """Scaled dot-product attention of (..., tokens, channels) tensors."""
    query, key, value = (call.arg(i, name) for i, name in enumerate(("query", "key", "value")))
    call.only(query, key, value)
    builder = call.builder
    rows = builder.reduced(call.nodes(query), [-1], keep=True)
    keys = builder.reduced(call.nodes(key), [-1], keep=True).transpose(-2, -1)
    values = builder.reduced(call.nodes(value), [-2], keep=True)
    if rows.shape[:-2] != values.shape[:-2]:
        raise Refused("its queries and values have different numbers of heads")
    weights = builder.reduced(builder.paired(rows, keys), [-1], keep=True)
    return builder.paired(weights, values).expand(call.shape)


def multi_head(call: Call) -> tuple[Tensor, Any]:
    """Attention with its projections, of (tokens, batch, channels) tensors."""
    given = [call.arg(i, name) for i, name in enumerate(("query", "key", "value"))]
    call.only(*given)
    builder, heads = call.builder, int(call.arg(4, "num_heads"))
    width = int(call.arg(3, "embed_dim_to_check"))
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
        return made, None
    return made, builder.reduced(weights, [0, 1]).expand(tuple(shown.shape))


def _kept(call: Call) -> Tensor:
    """Entries stay where they are."""
    given = call.arg(0, "input")
    call.only(given)
    return call.nodes(given).expand(call.shape)


def _converted(call: Call) -> Tensor:
    return call.first


def _reshaped(call: Call) -> Tensor:
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        raise Refused("it reads the same memory as another type")
    return tidied(call.first.reshape(call.shape))


def _moved(call: Call) -> Any:
    """Entries move about: do the same to the numbers of their nodes."""
    given, *others = call.args or (call.kwargs["input"],)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "input"}
    call.fixed((others, kwargs))
    # A tensor of its own, since a call in place changes the shape of what it is given.
    nodes = call.nodes(given)
    moved = call.function(nodes.expand(nodes.shape), *others, **kwargs)
    return tidied(moved) if isinstance(moved, Tensor) else moved


def _expanded(call: Call) -> Tensor:
    return tidied(call.first.expand(call.shape))


def _repeated(call: Call) -> Tensor:
    """Positions repeated are one channel still; repeated channels are more channels."""
    counts = call.kwargs.get("repeats", call.kwargs.get("dims", call.args[1:]))
    counts = list(counts[0] if counts and isinstance(counts[0], Sequence) else counts)
    call.fixed(counts)
    nodes = call.first
    rank = max(len(counts), nodes.ndim)
    nodes = nodes.reshape((1,) * (rank - nodes.ndim) + tuple(nodes.shape))
    for axis, count in enumerate([1] * (rank - len(counts)) + [int(count) for count in counts]):
        if count > 1 and varies(nodes, axis):
            copies = [call.builder.copied(nodes) for _ in range(count - 1)]
            nodes = side_by_side([nodes, *copies], axis)
        elif count != 1:
            sizes = [1] * rank
            sizes[axis] = count
            nodes = tidied(nodes.repeat(sizes))
    return nodes


def _interleaved(call: Call) -> Tensor:
    """As `_repeated`, each entry beside its copies."""
    count, axis = call.arg(1, "repeats"), call.arg(2, "dim")
    nodes = call.first
    if axis is None or not isinstance(count, int) or not varies(nodes, axis):
        return tidied(_moved(call))
    parts = [nodes] + [call.builder.copied(nodes) for _ in range(count - 1)]
    axis %= nodes.ndim
    return tidied(torch.stack(parts, axis + 1).flatten(axis, axis + 1))


def _shuffled(call: Call) -> Tensor:
    """As `_moved`, for operations that move no integers."""
    # In float64, which holds every number of a node exactly.
    moved: Tensor = call.function(call.first.double(), *call.args[1:], **call.kwargs)
    return moved.long()


def _linear(call: Call) -> Tensor:
    given = call.arg(0, "input")
    call.only(given)
    return call.builder.dense(call.nodes(given), call.shape[-1])


def _convolution(groups_at: int) -> Rule:
    def rule(call: Call) -> Tensor:
        given = call.arg(0, "input")
        call.only(given)
        groups = int(call.arg(groups_at, "groups", 1))
        weight = call.arg(1, "weight")
        nodes = call.nodes(given)
        if nodes.ndim == weight.ndim:
            return call.builder.convolved(nodes, groups, call.shape)
        return call.builder.convolved(nodes[None], groups, (1, *call.shape))[0]

    return rule


def _positions(axes: int) -> Rule:
    """Positions along the last axes meet; a second output says where the maxima lie."""

    def rule(call: Call) -> Any:
        output = call.output
        nodes = call.first
        single = output if isinstance(output, Tensor) else output[0]
        if any(single.shape[axis] > 1 and varies(nodes, axis) for axis in range(-axes, 0)):
            raise Refused("it pools over channels, window by window")
        made = call.builder.reduced(nodes, range(-axes, 0), keep=True)
        if isinstance(output, Tensor):
            return made.expand(tuple(output.shape))
        return (made.expand(tuple(output[0].shape)), None)

    return rule


def _interpolated(call: Call) -> Tensor:
    nodes = call.first
    return call.builder.reduced(nodes, range(2, nodes.ndim), keep=True).expand(call.shape)


def _reduced(call: Call) -> Any:
    nodes = call.first
    axes = call.kwargs.get("dim", call.kwargs.get("axis", call.args[1] if call.args[1:] else None))
    if isinstance(axes, Tensor) or "other" in call.kwargs:
        raise Refused("it is not known how it mixes channels")
    if axes is None or axes == ():
        axes = range(nodes.ndim)
    axes = [axes] if isinstance(axes, int) else list(axes)
    single = call.output if isinstance(call.output, Tensor) else call.output[0]
    made = call.builder.reduced(nodes, axes, keep=single.ndim == nodes.ndim)
    return made if isinstance(call.output, Tensor) else (made, None)


def _merged(call: Call) -> Tensor:
    """Sums and products; of a constant nothing comes."""
    first, second = call.arg(0, "input"), call.arg(1, "other")
    one, other = call.nodes_of(first), call.nodes_of(second)
    if one is None or other is None:
        alone = other if one is None else one
        if alone is None:
            raise Refused("it is not known how it mixes channels")
        if call.name in _DIVISIONS and alone is (one if call.name == "__rtruediv__" else other):
            raise Refused("it divides by what depends on the input")
        return alone.expand(call.shape)
    if call.name in _DIVISIONS:
        raise Refused("it divides by what depends on the input")
    return call.builder.paired(one, other)


_DIVISIONS = frozenset(
    ("div", "__truediv__", "__itruediv__", "__rtruediv__", "divide", "true_divide")
)


def _added_product(call: Call) -> Tensor:
    """Follow ``addcmul``: a product, entry by entry, added to a tensor."""
    summand, one, other = (
        call.nodes(call.arg(i, name)) for i, name in enumerate(("input", "tensor1", "tensor2"))
    )
    return call.builder.paired(summand, call.builder.paired(one, other)).expand(call.shape)


def _concatenated(call: Call) -> Tensor:
    """Channels side by side; a constant beside positions of a channel joins that channel."""
    axis = call.arg(1, "dim", call.kwargs.get("axis", 0)) % call.output.ndim
    nodes = [call.nodes(t) for t in call.arg(0, "tensors") if t.ndim == call.output.ndim]
    size = call.output.shape[axis]
    if not any(varies(part, axis) for part in nodes):
        pattern = next(part.narrow(axis, 0, 1) for part in nodes if (part >= 0).any())
        is_long = any(part.shape[axis] > 1 and (part >= 0).any() for part in nodes)
        has_channels = len(distinct(pattern)[0]) > 1
        if (is_long or has_channels) and all(((p == pattern) | (p < 0)).all() for p in nodes):
            return pattern.expand([size if a == axis else -1 for a in range(pattern.ndim)])
    seen = torch.empty(0, dtype=torch.int64)
    for i, part in enumerate(nodes):
        own, _ = distinct(compact(part))
        if torch.isin(own[own >= 0], seen).any():
            nodes[i] = call.builder.copied(part)
        seen = torch.cat([seen, own])
    return side_by_side(nodes, axis)


def _stacked(call: Call) -> Tensor:
    tensors = list(call.arg(0, "tensors"))
    return torch.stack([call.nodes(t) for t in tensors], call.arg(1, "dim", 0))


def _padded(call: Call) -> Tensor:
    """Edges of positions belong to the channel; channels added are constant."""
    nodes = call.first
    pads = list(call.arg(1, "pad"))
    for number in range(len(pads) // 2):
        axis, (before, after) = nodes.ndim - 1 - number, pads[2 * number : 2 * number + 2]
        if before == 0 and after == 0:
            continue
        size = nodes.shape[axis] + before + after
        if varies(nodes, axis) or (nodes.shape[axis] == 1 and axis == 1):
            if call.arg(2, "mode", "constant") != "constant":
                raise Refused("it repeats channels at the edges")
            pad = [0, 0] * number + [before, after]
            nodes = torch.nn.functional.pad(nodes, pad, value=-1)
        else:
            one = nodes.narrow(axis, 0, 1)
            nodes = one.expand(*(size if a == axis else -1 for a in range(nodes.ndim)))
    return nodes


def _assigned(call: Call) -> Tensor:
    """``x[index] = value``: the numbers are assigned likewise."""
    target, index, value = call.args
    call.fixed(index)
    nodes = call.nodes(target).clone(memory_format=torch.contiguous_format)
    nodes[index] = call.nodes(value) if isinstance(value, Tensor) else -1
    return tidied(nodes)


def _embedded(call: Call) -> Tensor:
    index, weight = call.arg(0, "input"), call.arg(1, "weight")
    call.only(index)
    return call.builder.dense(call.nodes(index)[..., None], int(weight.shape[1]))


def _masked(call: Call) -> Tensor:
    given, mask, value = call.args[0], call.arg(1, "mask"), call.arg(2, "value")
    if any(isinstance(v, Tensor) and call.nodes_of(v) is not None for v in (mask, value)):
        raise Refused("what it puts in depends on the input")
    return call.nodes(given).expand(call.shape)


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _of_axes(names: Sequence[str], rule: Callable[[int], Rule]) -> dict[str, Rule]:
    return {f"{name}{axes}d": rule(axes) for name in names for axes in (1, 2, 3)}


CONSTANTS = frozenset(
    [f"{value}_like" for value in ("zeros", "ones", "full", "empty", "rand", "randn")]
    + [f"new_{value}" for value in ("zeros", "ones", "full", "empty", "tensor")]
)
"""Operations that take nothing but shape and kind from a tensor."""

COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
"""Operations whose truth values about integers, as token ids, are masks."""

DECISIONS = COMPARISONS | frozenset(
    ("isnan", "isinf", "isfinite", "all", "any", "logical_and", "logical_or", "logical_not")
)
"""Operations whose truth values a network may read; nothing else may come of them."""

NUMBERS = frozenset(
    ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__")
) | {"__dlpack__", "untyped_storage", "storage", "data_ptr"}
"""Operations that hand a tensor's numbers to whatever is not PyTorch."""

MIXING = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum")
) | {"embedding", "conv1d", "conv2d", "conv3d"}
"""Operations by which truth values would become numbers that flow, as one-hot tokens do."""

RULES: Mapping[str, Rule] = {
    **_named("to float double half bfloat16 type type_as cpu cuda contiguous clone", _converted),
    **_named("detach alias requires_grad data real neg __neg__ positive", _converted),
    **_named("dropout dropout1d", _kept),
    **_named("dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout", _kept),
    **_named("batch_norm instance_norm layer_norm group_norm rms_norm normalize", _kept),
    **_named("local_response_norm softmax log_softmax", _kept),
    **_named("view reshape flatten ravel unflatten view_as reshape_as", _reshaped),
    **_named("squeeze unsqueeze", _moved),
    **_named("permute transpose t T mT swapaxes swapdims movedim moveaxis H mH", _moved),
    **_named("__getitem__ select narrow index_select take_along_dim split chunk", _moved),
    **_named("tensor_split split_with_sizes unbind roll flip", _moved),
    **_named("expand expand_as broadcast_to", _expanded),
    **_named("repeat tile", _repeated),
    **_named("repeat_interleave", _interleaved),
    **_named("pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle", _shuffled),
    **_named("linear", _linear),
    **_of_axes(["conv"], lambda axes: _convolution(6)),
    **_of_axes(["conv_transpose"], lambda axes: _convolution(6)),
    **_of_axes(["max_pool", "avg_pool", "lp_pool"], _positions),
    **_of_axes(["adaptive_avg_pool", "adaptive_max_pool"], _positions),
    **_named("interpolate upsample", _interpolated),
    **_named("mean sum amax amin nanmean nansum max min", _reduced),
    **_named("add __add__ __radd__ __iadd__ sub __sub__ __rsub__ __isub__ rsub", _merged),
    **_named("subtract mul __mul__ __rmul__ __imul__ multiply div __truediv__", _merged),
    **_named("__itruediv__ __rtruediv__ divide true_divide", _merged),
    **_named("matmul __matmul__ __rmatmul__ mm bmm", product),
    **_named("addmm baddbmm", added_product),
    **_named("addcmul", _added_product),
    **_named("einsum", einsum),
    **_named("scaled_dot_product_attention", attention),
    **_named("multi_head_attention_forward", multi_head),
    **_named("cat concat concatenate", _concatenated),
    **_named("stack", _stacked),
    **_named("pad", _padded),
    **_named("__setitem__", _assigned),
    **_named("embedding", _embedded),
    **_named("masked_fill", _masked),
}
