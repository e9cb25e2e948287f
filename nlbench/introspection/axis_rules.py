"""Rules for the axes of an operation's output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .function_calls import FunctionCall, is_transformed
from .operations import axis_rule

GONE = -1
"""Position of an axis that was indexed away or reduced; an unknown position is None."""

AxisMap = Sequence[int | None]
"""For each axis of an operation's input, its position in the output: an index, `GONE` or None."""


def moved_axis(places: AxisMap, axis: int) -> int | None:
    """Return the position of an input axis in the output. `GONE` stays `GONE`."""
    if axis == GONE:
        return GONE
    return places[axis] if axis < len(places) else None


def axis_map(call: FunctionCall, source: Tensor, output: Tensor) -> AxisMap:
    """Map the axes of one of a call's inputs to those of its output."""
    if call.operation.axes is None:
        return _identity(source, output)
    return call.operation.axes(call.args, call.kwargs, source, output)


def selected_entries(call: FunctionCall, source: Tensor, axis: int) -> Tensor | None:
    """Return the entries of an input's axis in the order of the output. None if they are kept.

    Examples
    --------
    >>> call = FunctionCall(torch.flip, (torch.zeros(3, 2), [0]))
    >>> selected_entries(call, call.input, 0).tolist()
    [2, 1, 0]
    """
    name = call.name
    if name not in _SELECTIONS or source is not call.input:
        return None
    entries = torch.arange(source.shape[axis])
    if name == "getitem":
        part = _part_of_axis(call.args[1], source.ndim, axis)
        if not isinstance(part, list | Tensor) or not has_known_indices(part):
            return None
        return entries[torch.as_tensor(part).cpu()]
    axes = [place % source.ndim for place in _axes(call.args, call.kwargs, *_SELECTIONS[name])]
    if axis not in axes:
        return None
    if name == "flip":
        return entries.flip(0)
    if name == "roll":
        return entries.roll(_axes(call.args[:2], call.kwargs, 1, "shifts")[axes.index(axis)])
    if name == "index_select":
        index = call.argument(2, "index")
        return entries[index.cpu()] if has_known_indices(index) else None
    # Each position may select another sample.
    return torch.zeros_like(entries)


_SELECTIONS = {
    "getitem": (1, ""),
    "flip": (1, "dims"),
    "roll": (2, "dims"),
    "index_select": (1, "dim"),
    "gather": (1, "dim"),
    "take_along_dim": (2, "dim"),
}
"""Operations that select entries of an axis, with the argument that is the axis."""

WRITES = ("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce")
"""Operations that write rows at given numbers, whose order is unknown."""


def has_known_indices(part: list[Any] | Tensor) -> bool:
    """Return True if a part of an index is a list or tensor of integers whose values are known."""
    is_hidden = isinstance(part, Tensor) and (part.is_meta or is_transformed(part))
    return not is_hidden and _is_row_of_indices(part)


def _part_of_axis(index: Any, rank: int, axis: int) -> Any:
    """Return the part of an index for an axis of its tensor."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    kept = [slice(None)] * (rank - sum(part is not Ellipsis for part in parts))
    ellipsis = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[ellipsis : ellipsis + 1] = kept
    return parts[axis] if axis < len(parts) else None


def _identity(source: Tensor, output: Tensor) -> AxisMap:
    """Map each axis to itself if input and output have the same number of axes."""
    return list(range(source.ndim)) if output.ndim == source.ndim else [None] * source.ndim


@axis_rule("embedding")
def _embed(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return list(range(source.ndim))


@axis_rule("expand", "expand_as", "repeat", "tile", "broadcast_to", arranges="expands")
def _expand(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [axis + output.ndim - source.ndim for axis in range(source.ndim)]


@axis_rule(
    "all", "amax", "amin", "any", "logsumexp", "max", "mean", "median", "min", "nanmean",
    "nansum", "prod", "std", "sum", "var"
)  # fmt: skip
def _reduce(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    if output.ndim >= source.ndim:
        return _identity(source, output)
    return _drop_axes(source.ndim, _axes(args, kwargs, 1, "dim", "axis"), output.ndim)


@axis_rule(
    "flatten", "view", "reshape", "unflatten", "view_as", "reshape_as", "ravel",
    arranges="reshapes"
)  # fmt: skip
def _reshape(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [_find_reshaped_axis(source.shape, axis, output.shape) for axis in range(source.ndim)]


@axis_rule("einsum")
def _einsum(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Match the axes by their letters. An axis that is summed over is gone."""
    equation = args[0].replace(" ", "") if isinstance(args[0], str) else ""
    inputs, arrow, result = equation.partition("->")
    tensors = args[1] if isinstance(args[1], tuple | list) else args[1:]
    letters = next(
        (part for part, t in zip(inputs.split(","), tensors, strict=False) if t is source), ""
    )
    if not arrow or "." in equation or len(letters) != source.ndim:
        return [None] * source.ndim
    return [result.index(letter) if letter in result else GONE for letter in letters]


def _find_reshaped_axis(before: Sequence[int], axis: int, after: Sequence[int]) -> int | None:
    """Find an axis after a reshape, by its size and the product of the sizes before it."""
    ahead = math.prod(before[:axis])
    size = before[axis]
    places = [
        place
        for place in range(len(after))
        if after[place] == size and math.prod(after[:place]) == ahead
    ]
    return min(places, key=lambda place: abs(place - axis), default=None)


def _drop_axes(rank: int, dropped: Sequence[int], output_rank: int) -> AxisMap:
    """Map the axes when some are dropped. All are unknown unless `output_rank` remain."""
    gone = {axis % rank for axis in dropped}
    remaining = [axis for axis in range(rank) if axis not in gone]
    if len(remaining) != output_rank:
        return [None] * rank
    return [remaining.index(axis) if axis in remaining else GONE for axis in range(rank)]


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
    if source is output:  # In place: the axes before the call are no longer known.
        return [None] * rank
    axes = _axes(args, kwargs, 1, "dim") or range(rank)
    return _drop_axes(rank, [axis for axis in axes if source.shape[axis] == 1], output.ndim)


@axis_rule("stack", "unsqueeze", arranges="moves")
def _insert(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Map the axes for ``unsqueeze`` and ``stack``, which insert an axis."""
    place = (_axes(args, kwargs, 1, "dim") or [0])[0] % output.ndim
    if output.ndim != source.ndim + 1:  # In place: the source is the output itself.
        return [None] * source.ndim
    return [axis + (axis >= place) for axis in range(source.ndim)]


@axis_rule("select", "unbind", arranges="moves")
def _drop(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Map the axes for ``select`` and ``unbind``, which drop an axis."""
    return _drop_axes(source.ndim, (_axes(args[:2], kwargs, 1, "dim") or [0])[:1], output.ndim)


@axis_rule("getitem", arranges="moves")
def _index(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Map the axes for ``x[...]``. They are unknown if the index has several tensors or lists."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(part is Ellipsis for part in index):
        index = (*index, Ellipsis)
    named = sum(part is not None and part is not Ellipsis for part in index)
    # Several tensors may broadcast and move to the front, as may one tensor next to an integer.
    is_single = sum(isinstance(part, Tensor | list) for part in index) == 1 and all(
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
        elif isinstance(part, slice) or (is_single and _is_row_of_indices(part)):
            moved.append(place)
            place += 1
        else:
            return [None] * source.ndim
    return moved if place == output.ndim else [None] * source.ndim


def _is_row_of_indices(part: list[Any] | Tensor) -> bool:
    """Return True if a part of an index is a one-dimensional list or tensor of integers."""
    if isinstance(part, list):
        return all(type(entry) is int for entry in part)
    return part.ndim == 1 and part.dtype not in (torch.bool, torch.uint8)


def _axes(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, *names: str) -> list[int]:
    """Return axes passed by name, or by position from `place` on."""
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
