"""What products of tensors do to channels: of matrices, in attention and as einsum."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .channel_calls import Call, Refused

__all__ = ["added_product", "attention", "einsum", "multi_head", "product"]


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
