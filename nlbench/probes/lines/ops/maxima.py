"""The larger of two tensors, the largest along axes, and what is sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nlbench.probes.ops import line_rule

from .arithmetic import error_of
from .kinks import bending, changed
from .max_pooling import envelopes
from .rule import (
    Call,
    Crossings,
    Front,
    Input,
    Kinks,
    Margin,
    NotAffine,
    Ranks,
    Rule,
    inner_axis,
    joined,
    noise_of,
    unit_crossings,
)


@line_rule("maximum", "minimum", "max", "min", "fmax", "fmin", bends="where the two are equal")
def larger_of_two(call: Call) -> Rule:
    if len(call.args) > 1 and isinstance(call.args[1], int):
        return largest(call)
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over all axes mixes the samples of a batch")

    def margin(inputs: Sequence[Tensor]) -> Tensor:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return torch.sub(first, second)

    def noises(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        difference = margin(inputs)
        return [noise_of(difference.dtype) * joined(errors(bounds, difference))]

    def errors(bounds: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        # A constant is exact.
        return [
            error_of(a, bounds, like) if isinstance(a, Input) else like.new_zeros((1,) * like.ndim)
            for a in call.args[:2]
        ]

    def shift(inputs: Sequence[Tensor], change: Tensor) -> list[Tensor]:
        moved, first, second = list(inputs), *call.args[:2]
        if isinstance(first, Input):
            moved[first.index] = inputs[first.index] + change
        else:
            moved[second.index] = inputs[second.index] - change
        return moved

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        first, second = errors(bounds, output)
        if output.shape not in (first.shape, second.shape):
            return torch.maximum(first, second).expand(len(output), *(-1,) * (output.ndim - 1))
        larger = margin(inputs) >= 0
        return torch.where(~larger if "min" in call.name else larger, first, second)

    first, second = call.args[:2]
    shifted = first.index if isinstance(first, Input) else second.index
    rule = bending(call.apply, bound, lambda inputs: [margin(inputs)], noises, shift, shifted)
    return replace(rule, pieces=Kinks(lambda inputs: [(margin(inputs), 0.0)]))


@line_rule("amax", "amin", bends="where another becomes the largest")
def largest(call: Call) -> Rule:
    axes = _inner_axes(call)
    sign = -1 if "min" in call.name else 1
    last = tuple(range(-len(axes), 0))

    def lines(x: Tensor) -> Tensor:
        return sign * x.movedim(axes, last).flatten(-len(axes))

    windows = torch.arange(math.prod(call.shapes[0][axis] for axis in axes))[None]
    return envelopes(call, windows, lines, lambda y: sign * y.reshape(len(y), *call.shape[1:]))


def _inner_axes(call: Call) -> list[int]:
    """Give the axes that a call works along, of which none may be that of samples."""
    rank = len(call.shapes[0])
    given = call.argument(2 if call.name == "linalg_vector_norm" else 1, "dim")
    given = [given] if isinstance(given, int) else list(given or range(rank))
    axes = sorted(axis % rank for axis in given)
    if 0 in axes:
        raise NotAffine("it mixes the samples of a batch")
    return axes


@line_rule("cummax", "cummin", bends="where another becomes the largest")
def running_largest(call: Call) -> Rule:
    axis = inner_axis(call, 1)
    sign = -1 if call.name == "cummin" else 1
    size = call.shape[axis]
    # The first so many, repeating the first one.
    windows = torch.arange(size).expand(size, size).tril()
    others = [n for i, n in enumerate(call.shape[1:], 1) if i != axis]

    def restored(maxima: Tensor) -> Tensor:
        return sign * maxima.reshape(len(maxima), *others, size).movedim(-1, axis)

    return envelopes(call, windows, lambda x: sign * x.movedim(axis, -1), restored)


@line_rule(
    "linalg_vector_norm",
    bends="at 0, or where another becomes the largest",
    caveat="orders 1 and infinity",
)
def norm(call: Call) -> Rule:
    order = call.argument(1, "ord", 2)
    axes = _inner_axes(call)
    if order == 1:
        return _sum_of_magnitudes(call, axes)
    if order != math.inf:
        raise NotAffine("not piecewise affine")
    last = tuple(range(-len(axes), 0))

    def lines(x: Tensor) -> Tensor:
        flat = x.movedim(axes, last).flatten(-len(axes))
        return torch.cat([flat, -flat], -1)

    windows = torch.arange(2 * math.prod(call.shapes[0][axis] for axis in axes))[None]
    return envelopes(call, windows, lines)


def _sum_of_magnitudes(call: Call, axes: list[int]) -> Rule:
    kept = call.argument(3, "keepdim", False)

    def apply(points: Sequence[Tensor]) -> Tensor:
        return points[0].abs().sum(axes, keepdim=kept)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        terms = math.prod(call.shapes[0][axis] for axis in axes)
        error = torch.hypot(bounds[0].expand_as(inputs[0]), inputs[0] * (math.sqrt(terms) / 2))
        total: Tensor = torch.linalg.vector_norm(error, dim=axes, keepdim=kept)
        return total

    def noises(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        return [noise_of(inputs[0].dtype) * bounds[0]]

    rule = bending(apply, bound, lambda x: [x[0]], noises, lambda x, change: [x[0] + change])
    return replace(rule, pieces=Kinks(lambda x: [(x[0], 0.0)]))


MOST = 256
"""Numbers that may be sorted: each pair of them is looked at."""


@line_rule(
    "sort",
    "topk",
    "kthvalue",
    "median",
    bends="where two change places",
    caveat=f"along an axis of at most {MOST}",
)
def sorted_along(call: Call) -> Rule:
    """Numbers by their rank along an axis: where two change places, those of both ranks bend."""
    place = {"topk": 2, "kthvalue": 2}.get(call.name, 1)
    rank = len(call.shapes[0])
    axis = call.argument(place, "dim", -1)
    if call.name == "sort" and isinstance(axis, bool):
        axis = call.argument(2, "dim", -1)  # The overload that may be stable.
    if not isinstance(axis, int):
        raise NotAffine("over all axes it mixes the samples of a batch")
    axis %= rank
    if axis == 0:
        raise NotAffine("it mixes the samples of a batch")
    size = call.shapes[0][axis]
    if size > MOST:
        raise NotAffine(f"it sorts {size} numbers, at most {MOST} are supported")
    ranks = _ranks(call, size)
    pairs = torch.combinations(torch.arange(size), 2)

    def lines(x: Tensor) -> Tensor:
        return x.movedim(axis, -1)

    def noise(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        return noise_of(inputs[0].dtype) * lines(bounds[0].expand_as(inputs[0]))

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        x, error = lines(inputs[0]), noise(inputs, bounds)
        first, second = (pairs[:, i].to(x.device) for i in (0, 1))
        margin = x[..., first] - x[..., second]
        uncertain = torch.hypot(error[..., first], error[..., second])
        interval, unit, share = unit_crossings(margin, uncertain)
        *rest, pair = torch.unravel_index(unit, margin.shape[1:])
        weight = share[:, None].to(x.dtype)
        at = torch.lerp(x[(interval, *rest)], x[(interval + 1, *rest)], weight)
        level = (at.gather(1, first[pair][:, None]) + at.gather(1, second[pair][:, None])) / 2
        # How many are larger, but for the two, is the rank that they change.
        above = at > level
        above.scatter_(1, first[pair][:, None], False).scatter_(1, second[pair][:, None], False)
        upper = above.sum(1)
        known = torch.tensor(ranks, device=x.device)
        seen = torch.isin(upper, known) | torch.isin(upper + 1, known)
        return interval[seen], share[seen]

    def differ(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        x, error = lines(inputs[0]), noise(inputs, bounds).expand_as(lines(inputs[0]))
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., ranks]

        def clear(row: Tensor, one: Tensor, other: Tensor) -> Tensor:
            gap = (x[row].gather(-1, one) - x[row].gather(-1, other)).abs()
            return gap > error[row].gather(-1, one) + error[row].gather(-1, other)

        def apart(a: Tensor, b: Tensor) -> Tensor:
            one, other = owner[a], owner[b]
            return clear(a, one, other) & clear(b, one, other)

        return changed(apart, torch.arange(len(x), device=x.device))

    def advance(
        inputs: Sequence[Tensor],
        rates: Sequence[Tensor],
        bounds: Sequence[Tensor],
        rate_bounds: Sequence[Tensor],
    ) -> Front:
        x, rate, error = lines(inputs[0]), lines(rates[0]), noise(inputs, bounds)
        # Of numbers that are the same but for rounding that which rises fastest is first.
        most = rate.abs().amax(-1, keepdim=True)
        ahead = x + rate / torch.where(most > 0, most, 1) * error.amax(-1, keepdim=True)
        owner = ahead.argsort(dim=-1, descending=True, stable=True)[..., ranks]
        value, speed = x.gather(-1, owner), rate.gather(-1, owner)
        own = error.expand_as(x)
        margin = Margin(
            value[..., None] - x[..., None, :],
            speed[..., None] - rate[..., None, :],
            torch.hypot(own.gather(-1, owner)[..., None], own[..., None, :]),
        )
        return Front(restored(value), restored(speed), [margin])

    def restored(by_rank: Tensor) -> Tensor:
        return by_rank.movedim(-1, axis).reshape(len(by_rank), *call.shape[1:])

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        x = lines(inputs[0])
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., ranks]
        return restored(lines(bounds[0].expand_as(inputs[0])).gather(-1, owner))

    rest = math.prod(call.shapes[0][1:]) // max(1, size)
    workspace = rest * max(4 * len(pairs), 2 * size * len(ranks))
    # Each rank that is given ends where the next begins.
    tops = {top for rank in ranks for top in (rank, rank + 1) if 0 < top < size}
    pieces = Ranks(lambda x: lines(x[0]).reshape(len(x[0]), -1, size), tuple(sorted(tops)))
    return Rule(
        call.apply,
        bound,
        bend,
        advance=advance,
        differ=differ,
        workspace=workspace,
        pieces=pieces,
    )


def _ranks(call: Call, size: int) -> list[int]:
    """Which places, from the largest on, the output has, in its order."""
    if call.name == "kthvalue":
        return [size - int(call.args[1])]
    if call.name == "median":
        return [size - 1 - (size - 1) // 2]
    if call.name == "topk":
        count = int(call.args[1])
        if not call.argument(4, "sorted", True):
            raise NotAffine("the order of what it gives is not fixed")
        return list(
            range(count) if call.argument(3, "largest", True) else range(size)[::-1][:count]
        )
    by_name = call.kwargs.get("descending")
    given = next((a for a in call.args[2:] if isinstance(a, bool)), False)
    return list(range(size) if (given if by_name is None else by_name) else range(size)[::-1])
