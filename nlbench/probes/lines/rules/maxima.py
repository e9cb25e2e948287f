"""Rules for sorting and for maxima: of two tensors, along axes and in pooling windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nlbench.introspection.operations import line_rule

from .arithmetic import per_axis, sum_bound, term_error
from .pieces import Kinks, MaxGroups, Ranks
from .rounding import root_sum_squares
from .rule import Input, NotAffine, RecordedCall, Rule, inner_axis


@line_rule("maximum", "minimum", "max", "min", "fmax", "fmin", bends="where the two are equal")
def larger_of_two(call: RecordedCall) -> Rule:
    if len(call.args) > 1 and isinstance(call.args[1], int):
        return largest(call)
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over all axes mixes the samples of a batch")

    def margin(inputs: Sequence[Tensor]) -> Tensor:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return torch.sub(first, second)

    def error(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        return root_sum_squares(errors(bounds, margin(inputs)))

    def errors(bounds: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        # A constant is exact.
        return [
            term_error(a, bounds, like)
            if isinstance(a, Input)
            else like.new_zeros((1,) * like.ndim)
            for a in call.args[:2]
        ]

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        first, second = errors(bounds, output)
        if output.shape not in (first.shape, second.shape):
            return torch.maximum(first, second).expand(len(output), *(-1,) * (output.ndim - 1))
        larger = margin(inputs) >= 0
        return torch.where(~larger if "min" in call.name else larger, first, second)

    return Rule(call.apply, bound, Kinks(margin, error=error))


@line_rule("amax", "amin", bends="where the position of the maximum or minimum changes")
def largest(call: RecordedCall) -> Rule:
    axes = _inner_axes(call)
    sign = -1 if "min" in call.name else 1
    last = tuple(range(-len(axes), 0))

    def lines(x: Tensor) -> Tensor:
        return sign * x.movedim(axes, last).flatten(-len(axes))

    windows = torch.arange(math.prod(call.shapes[0][axis] for axis in axes))[None]
    return envelopes(call, windows, lines, lambda y: sign * y.reshape(len(y), *call.shape[1:]))


def _inner_axes(call: RecordedCall) -> list[int]:
    """Return the axes that a call reduces. Raise if the batch axis is one of them."""
    rank = len(call.shapes[0])
    dim = call.argument(2 if call.name == "linalg_vector_norm" else 1, "dim")
    dim = [dim] if isinstance(dim, int) else list(dim or range(rank))
    axes = sorted(axis % rank for axis in dim)
    if 0 in axes:
        raise NotAffine("it mixes the samples of a batch")
    return axes


@line_rule("cummax", "cummin", bends="where the position of the maximum or minimum changes")
def running_largest(call: RecordedCall) -> Rule:
    axis = inner_axis(call, 1)
    sign = -1 if call.name == "cummin" else 1
    size = call.shape[axis]
    # Window i consists of the first i + 1 members, padded with copies of the first.
    windows = torch.arange(size).expand(size, size).tril()
    others = [n for i, n in enumerate(call.shape[1:], 1) if i != axis]

    def restored(maxima: Tensor) -> Tensor:
        return sign * maxima.reshape(len(maxima), *others, size).movedim(-1, axis)

    return envelopes(call, windows, lambda x: sign * x.movedim(axis, -1), restored)


@line_rule(
    "linalg_vector_norm",
    bends="at 0, or where the position of the maximum changes",
    caveat="orders 1 and infinity only",
)
def norm(call: RecordedCall) -> Rule:
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


def _sum_of_magnitudes(call: RecordedCall, axes: list[int]) -> Rule:
    keepdim = bool(call.argument(3, "keepdim", False))

    def apply(points: Sequence[Tensor]) -> Tensor:
        return points[0].abs().sum(axes, keepdim=keepdim)

    return Rule(apply, sum_bound(axes, keepdim), Kinks(lambda x: x[0]))


MAX_SORTED_LENGTH = 256
"""Maximum length of a sorted axis, since every pair of its elements is compared."""


@line_rule(
    "sort",
    "topk",
    "kthvalue",
    "median",
    bends="where two elements swap ranks",
    caveat=f"along an axis with at most {MAX_SORTED_LENGTH} elements",
)
def sorted_along(call: RecordedCall) -> Rule:
    """Create the rule for sorting: where two values swap ranks, the output bends at both ranks."""
    position = {"topk": 2, "kthvalue": 2}.get(call.name, 1)
    rank = len(call.shapes[0])
    axis = call.argument(position, "dim", -1)
    if call.name == "sort" and isinstance(axis, bool):
        axis = call.argument(2, "dim", -1)  # The overload with `stable`.
    if not isinstance(axis, int):
        raise NotAffine("over all axes it mixes the samples of a batch")
    axis %= rank
    if axis == 0:
        raise NotAffine("it mixes the samples of a batch")
    size = call.shapes[0][axis]
    if size > MAX_SORTED_LENGTH:
        raise NotAffine(f"it sorts {size} numbers, at most {MAX_SORTED_LENGTH} are supported")
    ranks = _ranks(call, size)
    others = [n for i, n in enumerate(call.shapes[0][1:], 1) if i != axis]

    def groups(inputs: Sequence[Tensor]) -> Tensor:
        return inputs[0].movedim(axis, -1).reshape(len(inputs[0]), -1, size)

    def restored(by_rank: Tensor) -> Tensor:
        by_rank = by_rank.reshape(len(by_rank), *others, len(ranks))
        return by_rank.movedim(-1, axis).reshape(len(by_rank), *call.shape[1:])

    pieces = Ranks(groups, ranks, restored)
    rest = math.prod(call.shapes[0][1:]) // max(1, size)
    workspace = rest * max(2 * size * (size - 1), 2 * size * len(ranks))
    return Rule(call.apply, pieces.bound, pieces, workspace=workspace)


def _ranks(call: RecordedCall, size: int) -> list[int]:
    """Return the rank of each value in the output, in order. Rank 0 is the largest."""
    if call.name == "kthvalue":
        return [size - int(call.args[1])]
    if call.name == "median":
        return [size - 1 - (size - 1) // 2]
    if call.name == "topk":
        count = int(call.args[1])
        if not call.argument(4, "sorted", True):
            raise NotAffine("the order of its output is not fixed")
        return list(
            range(count) if call.argument(3, "largest", True) else range(size)[::-1][:count]
        )
    descending = call.kwargs.get("descending")
    if descending is None:
        descending = next((a for a in call.args[2:] if isinstance(a, bool)), False)
    return list(range(size) if descending else range(size)[::-1])


@line_rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", bends="where the position of the maximum in a window changes",
)  # fmt: skip
def max_pool(call: RecordedCall) -> Rule:
    """Create the rule for max pooling: the upper envelope of each window."""
    axes = int(call.name.partition("pool")[2][0])
    windows = pooling_windows(
        call.name, call.args, call.kwargs, call.shapes[0][-axes:], call.shape[-axes:]
    )
    if call.name.startswith("adaptive"):
        pool = getattr(functional, f"adaptive_max_pool{axes}d")
        settings: dict[str, Any] = {"output_size": call.shape[-axes:]}
    else:
        pool = getattr(functional, f"max_pool{axes}d")
        settings = _pool_settings(call.args, call.kwargs)

    def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim == axes + 1:  # Without a channel axis.
            x = x.unsqueeze(1)
        positions: Tensor = pool(x, return_indices=True, **settings)[1]
        return positions.flatten(2), x.flatten(2)

    return envelopes(call, windows, lambda x: x.flatten(-axes), None, axes, argmax)


def envelopes(
    call: RecordedCall,
    windows: Tensor,
    lines: Callable[[Tensor], Tensor],
    restored: Callable[[Tensor], Tensor] | None = None,
    pooled_axes: int = 0,
    fast_argmax: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Rule:
    """Create the rule for a call that computes the maximum of each window, see `MaxGroups`.

    `restored` maps the maxima (P, rows, windows) to the output; by default they are reshaped.
    """

    def reshaped(maxima: Tensor) -> Tensor:
        return maxima.reshape(len(maxima), *call.shape[1:])

    groups = MaxGroups(lines, cache(windows.to), restored or reshaped, pooled_axes, fast_argmax)
    positions = lines(torch.empty(call.shapes[0], device="meta")).shape[-1]
    rest = math.prod(call.shapes[0][1:]) // max(1, positions)
    workspace = 4 * windows.numel() * max(1, rest)
    return Rule(call.apply, groups.bound, groups, workspace=workspace)


def pooling_windows(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Sequence[int],
    out: Sequence[int],
) -> Tensor:
    """List the input positions in each max-pooling window, (windows, members).

    Positions are in the flattened spatial axes of `size`. A window that is cut off at the border
    repeats its first member, which doesn't change the maximum.

    Examples
    --------
    >>> pooling_windows("max_pool1d", (None, 2), {"padding": 1}, (4,), (3,)).tolist()
    [[0, 0], [1, 2], [3, 3]]
    """
    axes: list[list[Sequence[int]]] = []
    if name.startswith("adaptive"):
        for n, m in zip(size, out, strict=True):
            axes.append([range(o * n // m, math.ceil((o + 1) * n / m)) for o in range(m)])
    else:
        settings = _pool_settings(args, kwargs)
        kernel = per_axis(settings["kernel_size"], len(size))
        stride = per_axis(settings.get("stride", kernel), len(size))
        padding = per_axis(settings.get("padding", 0), len(size))
        dilation = per_axis(settings.get("dilation", 1), len(size))
        for n, m, k, s, p, d in zip(size, out, kernel, stride, padding, dilation, strict=True):
            windows_on_axis: list[Sequence[int]] = []
            for start in range(-p, m * s - p, s):
                places = range(start, start + k * d, d)
                windows_on_axis.append([i for i in places if 0 <= i < n])
            axes.append(windows_on_axis)
    flat = np.arange(math.prod(size)).reshape(size)
    windows = [flat[np.ix_(*members)].ravel().tolist() for members in itertools.product(*axes)]
    longest = max(map(len, windows))
    return torch.tensor([cells + cells[:1] * (longest - len(cells)) for cells in windows])


def _pool_settings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a max-pooling call."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    settings = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    # A missing or empty stride means the kernel size.
    return {name: settings[name] for name in names if settings.get(name) not in (None, [], ())}
