"""Where the axes of a tensor go when an operation rearranges them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RESHAPES = {"flatten", "view", "reshape", "unflatten", "view_as", "reshape_as", "ravel"}
EXPANSIONS = {"expand", "expand_as", "repeat", "tile", "broadcast_to"}
_REDUCTIONS_OF_AXES = {
    "all", "amax", "amin", "any", "logsumexp", "max", "mean", "median", "min", "nanmean",
    "nansum", "prod", "std", "sum", "var",
}  # fmt: skip

# An axis that was indexed away or reduced, other than one that is only unknown.
GONE = -1
# Where each axis of an operation's input is in its output; `GONE`, or None if not known.
AxisMap = Sequence[int | None]


def at(moved: AxisMap, axis: int) -> int | None:
    """Give an axis of the input its place in the output; what is gone stays gone."""
    if axis == GONE:
        return GONE
    return moved[axis] if axis < len(moved) else None


def axis_map(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], source: Tensor, output: Tensor
) -> AxisMap:
    """Map the axes of an operation's input to those of its output."""
    rank = source.ndim
    if source is output and name in ("squeeze", "unsqueeze"):
        # In place: the axes from before the call are no longer to be seen.
        return [None] * rank
    if name in MOVES:
        return MOVES[name](args, kwargs, source, output)
    if name in RESHAPES:
        return [_kept(source.shape, axis, output.shape) for axis in range(rank)]
    if name in _REDUCTIONS_OF_AXES and output.ndim < rank:
        return _without(rank, _axes(args, kwargs, 1, "dim", "axis"), output.ndim)
    if name in EXPANSIONS:
        return [axis + output.ndim - rank for axis in range(rank)]
    if name == "einsum":
        return _einsum(args, source)
    if name == "embedding" or output.ndim == rank:
        return list(range(rank))
    return [None] * rank


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """What an operation was given by name or at a place; None if it wasn't."""
    return kwargs.get(name, args[place] if len(args) > place else None)


def softmax_axis(given: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Axis along which a softmax or a gated linear unit works, counted from 0."""
    dim = argument(args, kwargs, 1, "dim")
    return int(-1 if dim is None else dim) % max(given.ndim, 1)


def batch_first(tensor: Tensor, batch: int | None) -> Tensor:
    """Put the batch axis first; a tensor without one is a single sample."""
    if batch is None:
        return tensor[None]
    return tensor.movedim(batch, 0) if batch else tensor


def reduces(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int, axis: int
) -> bool:
    """Whether an operation is a reduction along one axis of its input, among others."""
    dropped = _axes(args, kwargs, 1, "dim", "axis") if name in _REDUCTIONS_OF_AXES else []
    return axis in {other % rank for other in dropped}


def _einsum(args: Sequence[Any], source: Tensor) -> AxisMap:
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


def _permute(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    order = [axis % source.ndim for axis in _axes(args, kwargs, 1, "dims")]
    return [order.index(axis) for axis in range(source.ndim)]


def _transpose(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    first = _axes(args[:2], kwargs, 1, "dim0", "axis0")[0] % source.ndim
    second = _axes(args, kwargs, 2, "dim1", "axis1")[0] % source.ndim
    return [{first: second, second: first}.get(axis, axis) for axis in range(source.ndim)]


def _swap_last(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return [*range(source.ndim - 2), source.ndim - 1, source.ndim - 2]


def _reverse(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    return list(reversed(range(source.ndim)))


def _movedim(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    rank = source.ndim
    origins = [axis % rank for axis in _axes(args[:2], kwargs, 1, "source")]
    targets = [axis % rank for axis in _axes(args, kwargs, 2, "destination")]
    moved: list[int | None] = [None] * rank
    for origin, target in zip(origins, targets, strict=True):
        moved[origin] = target
    free = iter(axis for axis in range(rank) if axis not in targets)
    return [next(free) if place is None else place for place in moved]


def _squeeze(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    rank = source.ndim
    axes = _axes(args, kwargs, 1, "dim") or range(rank)
    return _without(rank, [axis for axis in axes if source.shape[axis] == 1], output.ndim)


def _insert(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``unsqueeze`` and ``stack``, which put one axis in."""
    place = (_axes(args, kwargs, 1, "dim") or [0])[0] % output.ndim
    if output.ndim != source.ndim + 1:
        return [None] * source.ndim
    return [axis + (axis >= place) for axis in range(source.ndim)]


def _drop(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``select`` and ``unbind``, which take one axis away."""
    return _without(source.ndim, (_axes(args[:2], kwargs, 1, "dim") or [0])[:1], output.ndim)


def _index(args: Any, kwargs: Any, source: Tensor, output: Tensor) -> AxisMap:
    """Follow ``x[...]``; where a tensor or list picks, only the axes ahead of it are sure."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    moved: list[int | None] = []
    place = 0
    named = sum(part is not None and part is not Ellipsis for part in index)
    for part in index:
        if part is None:
            place += 1
        elif part is Ellipsis:
            skipped = source.ndim - named
            moved += range(place, place + skipped)
            place += skipped
        elif isinstance(part, slice):
            moved.append(place)
            place += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            moved.append(GONE)
        else:
            # Several index tensors may broadcast and go to the front: only one is safe.
            picks = [p for p in index if isinstance(p, Tensor | list)]
            one = len(picks) == 1 and isinstance(part, Tensor) and part.ndim == 1
            plain = all(p is Ellipsis or isinstance(p, slice | Tensor) for p in index)
            if not (one and plain and part.dtype not in (torch.bool, torch.uint8)):
                return [None] * source.ndim
            moved.append(place)
            place += 1
    rest = source.ndim - len(moved)
    moved += range(place, place + rest)
    return moved if place + rest == output.ndim else [None] * source.ndim


MOVES: Mapping[str, Callable[[Any, Any, Tensor, Tensor], AxisMap]] = {
    "__getitem__": _index,
    "H": _reverse,
    "T": _reverse,
    "mH": _swap_last,
    "mT": _swap_last,
    "moveaxis": _movedim,
    "movedim": _movedim,
    "permute": _permute,
    "select": _drop,
    "squeeze": _squeeze,
    "stack": _insert,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "t": _reverse,
    "transpose": _transpose,
    "unbind": _drop,
    "unsqueeze": _insert,
}


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
