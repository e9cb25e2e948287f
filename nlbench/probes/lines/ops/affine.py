"""Rules of the operations that are affine: one each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .rule import (
    Apply,
    Bound,
    Call,
    Input,
    NotAffine,
    Rule,
    carried,
    collapsed,
    constant_size,
    kept,
    measured,
    single,
)

Maker = Callable[[Call], Rule]

UNFOLDED = 4 * 2**20
"""Bytes of unfolded inputs that fit the cache of a core (2 to 8 MiB differ little)."""


def affine(bound: Bound) -> Maker:
    def rule(call: Call) -> Rule:
        only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
        return Rule(call.apply, bound)

    return rule


def view(call: Call) -> Rule:
    def apply(points: Sequence[Tensor]) -> Tensor:
        return points[0].reshape(len(points[0]), *call.shape[1:])

    return Rule(apply, _moved(apply, copies=True))


def rearrangement(call: Call) -> Rule:
    only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
    return Rule(call.apply, _moved(call.apply, copies=call.name == "flatten"))


def _moved(apply: Apply, *, copies: bool) -> Bound:
    """Bound of an output that selects or rearranges its input: so are the bounds.

    What would have to be copied many times over is the largest bound of each point instead.
    """

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        given = bounds[0]
        if single(given) or (copies and given.shape != inputs[0].shape):
            return collapsed(bounds, output.ndim)
        moved: Tensor = apply([given.expand_as(inputs[0])])
        return moved

    return bound


def expand(call: Call) -> Rule:
    return Rule(lambda points: points[0].expand(len(points[0]), *call.shape[1:]), carried)


def only_first_traced(call: Call, others: Sequence[Any]) -> None:
    if not isinstance(call.args[0], Input) or any(isinstance(a, Input) for a in others):
        raise NotAffine("its parameters depend on the input")


def convolution(call: Call) -> Rule:
    only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
    weight, bias = call.args[1], call.argument(2, "bias")
    reach = weight.abs().reshape(len(weight), -1).sum(1)
    offset = torch.zeros_like(reach) if bias is None else bias.abs()
    # A linear layer's units lie on the last axis, a convolution's on the second.
    units = (-1,) if call.name == "linear" else (-1,) + (1,) * (len(call.shape) - 2)
    reach, offset = reach.reshape(units), offset.reshape(units)
    # A convolution lays out the inputs of each output side by side, for all points at once.
    # On a CPU that has to stay in the cache: few points at a time are up to four times as
    # fast (16 channels of 32×32: 0.16 ms a point in place of 0.69).
    unfolded = weight[0].numel() * math.prod(call.shape[2:]) if call.name != "linear" else 0
    part = max(1, UNFOLDED // (weight.element_size() * max(1, unfolded)))

    def apply(points: Sequence[Tensor]) -> Tensor:
        x = points[0]
        if not unfolded or len(x) <= part or x.device.type != "cpu":
            result: Tensor = call.apply(points)
            return result
        joined: Tensor = torch.cat([call.apply([few]) for few in torch.split(x, part)])
        return joined

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        size: Tensor = collapsed(bounds, output.ndim) * reach + offset
        return size

    on_cpu = weight.device.type == "cpu"
    return Rule(
        apply,
        bound,
        workspace=0 if on_cpu else unfolded,
        reserve=part * unfolded if on_cpu else 0,
    )


def batch_norm(call: Call) -> Rule:
    only_first_traced(call, call.args[1:])
    weight, bias, mean, var, training = call.args[1:6]
    eps = call.args[7]
    if training or mean is None or var is None:
        raise NotAffine("it uses the statistics of the batch")
    units = (1, -1) + (1,) * (len(call.shape) - 2)
    slope = (var + eps).rsqrt() if weight is None else weight.abs() * (var + eps).rsqrt()
    offset = mean.abs() * slope if bias is None else mean.abs() * slope + bias.abs()
    slope, offset = slope.reshape(units), offset.reshape(units)
    return Rule(call.apply, lambda inputs, bounds, output: bounds[0] * slope + offset)


def sum_of_two(call: Call) -> Rule:
    first, second = call.args[:2]
    alpha = abs(float(call.kwargs.get("alpha", 1)))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return size_of(first, bounds, output) + alpha * size_of(second, bounds, output)

    return Rule(call.apply, bound)


def size_of(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Bound of a traced or constant term of an operation whose result is like `like`."""
    if not isinstance(term, Input):
        return constant_size(term, like)
    bound = bounds[term.index]
    return bound if bound.ndim == like.ndim else collapsed([bound], like.ndim)


def scaling(call: Call) -> Rule:
    first, second = call.args[:2]
    if isinstance(first, Input) and isinstance(second, Input):
        raise NotAffine("a product of two values that both depend on the input")
    divides = call.name in ("div", "divide", "true_divide")
    if divides and (isinstance(second, Input) or call.kwargs.get("rounding_mode")):
        raise NotAffine("not piecewise affine")
    factor = second if isinstance(first, Input) else first
    size = factor.abs() if isinstance(factor, Tensor) else abs(factor)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        base = bounds[0] if inputs[0].ndim == output.ndim else collapsed(bounds, output.ndim)
        return base / size if divides else base * size

    return Rule(call.apply, bound)


def contraction(call: Call) -> Rule:
    operands = call.args[1] if call.name == "einsum" else call.args[-2:]
    if sum(isinstance(a, Input) for a in operands) > 1:
        raise NotAffine("a product of two values that both depend on the input")
    if call.name == "bmm":
        # The constant's leading axis is 1, which bmm, unlike matmul, doesn't broadcast.
        call = replace(call, name="matmul", function=torch.matmul)
    return Rule(call.apply, measured)


def concatenation(call: Call) -> Rule:
    # The axis that the parts are joined along; `stack` makes a new one.
    axis = call.argument(1, "dim", 0) % len(call.shape)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        parts = []
        for part in call.args[0]:
            given = bounds[part.index] if isinstance(part, Input) else part.abs()
            size = inputs[part.index].shape if isinstance(part, Input) else part.shape
            if call.name == "stack":
                given, size = given.unsqueeze(axis), (*size[:axis], 1, *size[axis:])
            if given.ndim == output.ndim:
                others = [i for i in range(1, output.ndim) if i != axis]
                if others:
                    given = given.amax(others, keepdim=True)
                shape = [len(output), *(1 for _ in size[1:])]
                shape[axis] = size[axis]
                parts.append(given.expand(shape))
        return torch.cat(parts, axis)

    if not any(isinstance(a, Tensor) for a in call.args[0]):
        return Rule(call.apply, bound)

    def apply(points: Sequence[Tensor]) -> Tensor:
        count = len(points[0])
        parts = [a if isinstance(a, Input) else a.expand(count, *a.shape[1:]) for a in call.args[0]]
        result: Tensor = replace(call, args=(parts, *call.args[1:])).apply(points)
        return result

    return Rule(apply, bound)


def padding(call: Call) -> Rule:
    only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
    if call.name == "pad" and call.argument(2, "mode", "constant") != "constant":
        return Rule(call.apply, carried)
    pads = list(call.argument(1, "pad"))
    value = call.argument(3, "value") if call.name == "pad" else call.argument(2, "value", 0)
    size = abs(float(value or 0))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        shape, kept_pads = list(bounds[0].shape), list(pads)
        for i in range(len(pads) // 2):
            axis = len(shape) - 1 - i
            if size == 0 and shape[axis] == 1:
                kept_pads[2 * i : 2 * i + 2] = 0, 0
            else:
                shape[axis] = inputs[0].shape[axis]
        return functional.pad(bounds[0].expand(shape), kept_pads, value=size)

    return Rule(call.apply, bound)


def dropout(call: Call) -> Rule:
    if call.args[2]:
        raise NotAffine("it draws at random")
    return Rule(call.apply, kept)
