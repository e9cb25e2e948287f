"""Rules for sorting and for maxima: of two tensors, along axes and in pooling windows.

Where the inputs are affine, a maximum is the upper envelope of lines. It bends where another line
becomes the largest; `overtakes` finds these positions.
"""

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
from .kinks import kinked_units
from .pieces import Crossings, Kinks, MaxGroups, Ranks, unit_crossings
from .rounding import noise_of, root_sum_squares
from .rule import Input, NotAffine, RecordedCall, Rule, inner_axis

ArgmaxFunction = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


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

    return kinked_units(call.apply, bound, Kinks(margin, error=error))


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
    """Return the axes that a call reduces; raise if the batch axis is one of them."""
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

    return kinked_units(apply, sum_bound(axes, keepdim), Kinks(lambda x: x[0]))


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
    used = torch.zeros(size + 1, dtype=torch.int64)
    used[1:].index_fill_(0, torch.tensor(ranks, dtype=torch.int64), 1)
    used = used.cumsum(0)
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
        interval, unit, fraction = unit_crossings(margin, uncertain)
        *rest, pair = torch.unravel_index(unit, margin.shape[1:])
        left, right = x[(interval, *rest)], x[(interval + 1, *rest)]
        end_error = torch.maximum(error[(interval, *rest)], error[(interval + 1, *rest)])
        pair_lines = torch.stack([first[pair], second[pair]], 1)
        bends, fraction = _rank_changes(
            left, right, end_error, pair_lines, fraction, used.to(x.device)
        )
        return interval[bends], fraction[bends]

    others = [n for i, n in enumerate(call.shapes[0][1:], 1) if i != axis]

    def restored(by_rank: Tensor) -> Tensor:
        by_rank = by_rank.reshape(len(by_rank), *others, len(ranks))
        return by_rank.movedim(-1, axis).reshape(len(by_rank), *call.shape[1:])

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        x = lines(inputs[0])
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., ranks]
        return restored(lines(bounds[0].expand_as(inputs[0])).gather(-1, owner))

    rest = math.prod(call.shapes[0][1:]) // max(1, size)
    workspace = rest * max(4 * len(pairs), 2 * size * len(ranks))
    pieces = Ranks(lambda x: lines(x[0]).reshape(len(x[0]), -1, size), ranks, restored)
    return Rule(call.apply, bound, bend, workspace=workspace, pieces=pieces)


def _rank_changes(
    left: Tensor, right: Tensor, error: Tensor, pair: Tensor, fraction: Tensor, used: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the crossings of two lines that change which line is at a rank in the output.

    Where several lines meet at a point, lines with smaller slopes rank above a given line before
    the point, and lines with larger slopes after it. Lines that coincide share their ranks.

    Parameters
    ----------
    left, right : tensor of shape (m, k)
        Values at 0 and at 1 of the k lines around each crossing.
    error : tensor of shape (m, k)
        Noise of the values.
    pair : int64 tensor of shape (m, 2)
        The two lines that cross.
    fraction : float64 tensor of shape (m,)
        Position of the crossing.
    used : int64 tensor of shape (k + 1,)
        Number of output ranks that are less than 0, 1, …, k.

    Returns
    -------
    bends : bool tensor of shape (m,)
        True where the output bends.
    fraction : float64 tensor of shape (m,)
        Position of the crossing, equal for all pairs of lines that meet at one point.
    """
    at = torch.lerp(left, right, fraction[:, None].to(left.dtype))
    slope = right - left
    level = at.gather(1, pair).mean(1, keepdim=True)
    rise = slope.gather(1, pair).diff(dim=1).abs()
    # The uncertainty of the position is the noise of both lines over their difference in slope.
    noise = error + error.gather(1, pair).sum(1, keepdim=True)
    off = (slope - slope.gather(1, pair[:, :1])).abs()
    tied = (at - level).abs() <= noise * (1 + off / rise)
    tied.scatter_(1, pair, True)
    above = ((at > level) & ~tied).sum(1)
    bends = torch.zeros_like(above, dtype=torch.bool)
    for line in pair.unbind(1):
        rates = slope.gather(1, line[:, None])
        equal = 2 * (error + error.gather(1, line[:, None]))
        smaller = (tied & (slope < rates - equal)).sum(1)
        larger = (tied & (slope > rates + equal)).sum(1)
        coinciding = tied.sum(1) - smaller - larger
        before, after = above + smaller, above + larger
        # Check for a used rank that the line has before the crossing but not after it.
        common = torch.maximum(before, after)
        common_end = torch.maximum(torch.minimum(before, after) + coinciding, common)
        bends |= used[before + coinciding] - used[before] > used[common_end] - used[common]
    lowest = slope.masked_fill(~tied, math.inf).argmin(1, keepdim=True)
    steepest = slope.masked_fill(~tied, -math.inf).argmax(1, keepdim=True)
    start, end = (
        (x.gather(1, lowest) - x.gather(1, steepest)).squeeze(1).double() for x in (left, right)
    )
    return bends, start / (start - end)


def _ranks(call: RecordedCall, size: int) -> list[int]:
    """Return the rank of each value in the output, in order; 0 is the largest."""
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
    return envelopes(call, windows, lambda x: x.flatten(-axes), argmax=_pooling_argmax(call, axes))


def _pooling_argmax(call: RecordedCall, axes: int) -> ArgmaxFunction:
    """Return a function that finds the argmax of each window with PyTorch's pooling."""
    if call.name.startswith("adaptive"):
        pool = getattr(functional, f"adaptive_max_pool{axes}d")
        settings: dict[str, Any] = {"output_size": call.shape[-axes:]}
    else:
        pool = getattr(functional, f"max_pool{axes}d")
        settings = _pool_settings(call.args, call.kwargs)

    def argmax(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x = inputs[0]
        if x.ndim == axes + 1:  # Without a channel axis.
            x = x.unsqueeze(1)
        positions: Tensor = pool(x, return_indices=True, **settings)[1]
        return positions.flatten(2), x.flatten(2)

    return argmax


def envelopes(
    call: RecordedCall,
    windows: Tensor,
    lines: Callable[[Tensor], Tensor],
    restored: Callable[[Tensor], Tensor] | None = None,
    argmax: ArgmaxFunction | None = None,
) -> Rule:
    """Create the rule for a call that computes the maximum of each window.

    Parameters
    ----------
    windows : tensor of shape (windows, members)
        See `pooling_windows`.
    lines : callable
        Maps the input at P points to its values or their negatives, (P, ..., positions).
    restored : callable, optional
        Maps the maxima (P, channels, windows) to the output; by default they are reshaped.
    argmax : callable, optional
        Faster implementation of `MaxGroups.argmax`.
    """
    windows_on = cache(windows.to)

    def output(maxima: Tensor) -> Tensor:
        if restored is not None:
            return restored(maxima)
        return maxima.reshape(len(maxima), *call.shape[1:])

    def line_bounds(x: Tensor, bound: Tensor) -> Tensor:
        """Return the bounds in the layout of the lines, one per channel or per position."""
        if bound.ndim == x.ndim and call.name.partition("pool")[1]:
            axes = int(call.name.partition("pool")[2][0])
            if all(size == 1 for size in bound.shape[-axes:]):
                return bound.flatten(-axes)
        return lines(bound.expand_as(x)).abs()

    def noise(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        return noise_of(inputs[0].dtype) * line_bounds(inputs[0], bounds[0])

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        x = lines(inputs[0])
        return window_overtakes(x, windows_on(x.device), noise(inputs, bounds))

    def members(inputs: Sequence[Tensor]) -> Tensor:
        x = lines(inputs[0])
        return _members(x, windows_on(x.device))

    def tied(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = lines(inputs[0])
        return window_leaders(x, windows_on(x.device), noise(inputs, bounds))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], result: Tensor) -> Tensor:
        errors = line_bounds(inputs[0], bounds[0])
        if errors.shape[-1] == 1 and bounds[0].ndim == result.ndim:
            return bounds[0]
        x = lines(inputs[0])
        return output(window_tops(x, windows_on(x.device), errors)).abs()

    def first_of_largest(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x = lines(inputs[0])
        x = x.reshape(len(x), -1, x.shape[-1])
        first = x[:, :, windows_on(x.device)].argmax(-1, keepdim=True)
        return windows_on(x.device).expand(*first.shape[:-1], -1).gather(-1, first).squeeze(-1), x

    positions = lines(torch.empty(call.shapes[0], device="meta")).shape[-1]
    rest = math.prod(call.shapes[0][1:]) // max(1, positions)
    return Rule(
        call.apply,
        bound,
        bend,
        workspace=4 * windows.numel() * max(1, rest),
        pieces=MaxGroups(argmax or first_of_largest, members, tied, output),
    )


def pooling_windows(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Sequence[int],
    out: Sequence[int],
) -> Tensor:
    """List the input positions in each max-pooling window.

    Parameters
    ----------
    name : str
        ``max_pool2d``, ``adaptive_max_pool1d``, ….
    args, kwargs
        The call's arguments, including the input.
    size, out : sequence of int
        Spatial sizes of input and output.

    Returns
    -------
    tensor of shape (windows, members)
        Positions in the flattened spatial axes. A window that is cut off at the border repeats its
        first member, which doesn't change the maximum.

    Examples
    --------
    >>> pooling_windows("max_pool1d", (None, 2), {"padding": 1}, (4,), (3,)).tolist()
    [[0, 0], [1, 2], [3, 3]]
    """
    if name.startswith("adaptive"):
        axes = [
            [list(range(o * n // m, math.ceil((o + 1) * n / m))) for o in range(m)]
            for n, m in zip(size, out, strict=True)
        ]
    else:
        settings = _pool_settings(args, kwargs)
        kernel = per_axis(settings["kernel_size"], len(size))
        stride = per_axis(settings.get("stride", kernel), len(size))
        padding = per_axis(settings.get("padding", 0), len(size))
        dilation = per_axis(settings.get("dilation", 1), len(size))
        axes = [
            [[i for i in range(o * s - p, o * s - p + k * d, d) if 0 <= i < n] for o in range(m)]
            for n, m, k, s, p, d in zip(size, out, kernel, stride, padding, dilation, strict=True)
        ]
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


def window_overtakes(x: Tensor, windows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the largest member of a window changes between neighbouring points.

    Parameters
    ----------
    x : tensor of shape (P, ..., positions)
        Spatial axes flattened; affine between neighbouring points.
    windows : tensor of shape (windows, members)
        See `pooling_windows`.
    noise : tensor of shape (P, ..., positions)
        Noise of each member; a member is tied with the largest if they differ by at most the larger
        of their noises. Any axis except the first may have size 1.

    Returns
    -------
    interval : tensor of shape (m,)
        Index of the left point.
    fraction : tensor of shape (m,)
        Position between left (0) and right (1).
    """
    top, members, _ = window_leaders(x, windows, noise)
    top, members = top.flatten(1, 2), members.flatten(1, 2)
    # A member that is largest at both points is also largest between them: a maximum is convex.
    changed = ~(top[:-1] & top[1:]).any(-1)
    interval, window = changed.nonzero().unbind(1)
    fraction, line = overtakes(
        members[interval, window],
        members[interval + 1, window],
        top[interval, window],
        top[interval + 1, window],
    )
    return interval[line], fraction


def window_leaders(x: Tensor, windows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the largest members of each window, including ties.

    Parameters
    ----------
    x, windows, noise
        See `window_overtakes`.

    Returns
    -------
    top : bool tensor of shape (P, channels, windows, members)
    members : tensor of shape (P, channels, windows, members)
    noise : tensor, broadcastable to `members`
        Noise of each member's distance from the largest: the larger of their noises.
    """
    members, noise = _members(x, windows), _members(noise, windows)
    if noise.shape[-1] > 1:
        largest = members.argmax(-1, keepdim=True)
        noise = torch.maximum(noise, noise.expand_as(members).gather(-1, largest))
    return members >= members.amax(-1, keepdim=True) - noise, members, noise


def window_tops(x: Tensor, windows: Tensor, values: Tensor) -> Tensor:
    """Return the entry of `values` at the largest member of each window.

    Parameters
    ----------
    x : tensor of shape (P, ..., positions)
    windows : tensor of shape (windows, members)
    values : tensor of shape (P, ..., positions)
        Any axis except the first and the last may have size 1.

    Returns
    -------
    tensor of shape (P, channels, windows)

    Examples
    --------
    >>> x, values = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0.1, 0.2, 0.3]])
    >>> window_tops(x, torch.tensor([[0, 1], [1, 2]]), values)
    tensor([[[0.1000, 0.3000]]])
    """
    members = _members(x, windows)
    values = _members(values, windows).expand_as(members)
    return values.gather(-1, members.argmax(-1, keepdim=True)).squeeze(-1)


def _members(x: Tensor, windows: Tensor) -> Tensor:
    """Return the window members (P, channels, windows, members); 1 × 1 for a single position."""
    x = x.reshape(len(x), -1, x.shape[-1])
    return x[..., None] if x.shape[-1] == 1 else x[:, :, windows]


def overtakes(left: Tensor, right: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the upper envelopes of lines on [0, 1] bend.

    Parameters
    ----------
    left, right : tensor of shape (n, k)
        Values at 0 and at 1 of k lines, for each of n envelopes.
    first, last : bool tensor of shape (n, k)
        Lines that count as the largest at 0 and at 1.

    Returns
    -------
    fraction : tensor of shape (m,)
        Positions in [0, 1] where an envelope bends.
    envelope : tensor of shape (m,)
        Index of the envelope.

    Examples
    --------
    >>> left, right = torch.tensor([[1.0, 0.75, 0.0]]), torch.tensor([[0.0, 0.75, 1.0]])
    >>> overtakes(left, right, left == 1, right == 1)[0]
    tensor([0.2500, 0.7500])
    """
    slope = right - left
    current = slope.masked_fill(~first, -math.inf).argmax(-1, keepdim=True)
    position = torch.zeros_like(left[:, :1])
    row = torch.arange(len(left), device=left.device)
    if left.is_cuda and 1 < left.shape[1] <= MAX_GPU_LINES:
        return _overtakes_on_gpu(left, slope, last, current)
    bends: list[tuple[Tensor, Tensor]] = []
    while True:
        active = (~last.gather(1, current).squeeze(1)).nonzero().squeeze(1)
        left, slope, last = left[active], slope[active], last[active]
        current, position, row = current[active], position[active], row[active]
        if not len(row):
            break
        current, position = _next(left, slope, current, position)
        inside = (position.squeeze(1) < 1).nonzero().squeeze(1)
        left, slope, last = left[inside], slope[inside], last[inside]
        current, position, row = current[inside], position[inside], row[inside]
        bends.append((position.squeeze(1), row))
    if not bends:
        return left.new_zeros(0), row
    return torch.cat([fraction for fraction, _ in bends]), torch.cat([row for _, row in bends])


MAX_GPU_LINES = 16
"""Maximum number of lines for which a GPU follows all envelopes to the end, since dropping finished
ones would require a synchronisation at each bend."""


def _overtakes_on_gpu(
    left: Tensor, slope: Tensor, last: Tensor, current: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `overtakes` with one synchronisation; k lines have fewer than k bends."""
    position = torch.zeros_like(left[:, :1])
    active = ~last.gather(1, current).squeeze(1)
    positions, bends = [], []
    for _ in range(left.shape[1] - 1):
        current, position = _next(left, slope, current, position)
        active &= position.squeeze(1) < 1
        positions.append(position.squeeze(1))
        bends.append(active)
        active = active & ~last.gather(1, current).squeeze(1)
    step, row = torch.stack(bends).nonzero().unbind(1)
    return torch.stack(positions)[step, row], row


def _next(left: Tensor, slope: Tensor, current: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the line that overtakes the current one next, and the position."""
    rise = slope - slope.gather(1, current)
    gap = left.gather(1, current) - left
    meeting = torch.where(rise > 0, gap / rise, math.inf).maximum(position)
    position = meeting.amin(-1, keepdim=True)
    steepest = slope.masked_fill(meeting > position, -math.inf)
    return steepest.argmax(-1, keepdim=True), position
