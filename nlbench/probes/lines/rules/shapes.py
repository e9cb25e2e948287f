"""Rules for operations that select, repeat, rearrange or join elements without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nlbench.introspection.operations import line_rule

from .rounding import rearranged, unchanged
from .rule import Input, NotAffine, RecordedCall, Rule, check_only_first_traced, inner_axis


@line_rule(
    "neg", "positive", "clone", "contiguous", "detach", "alias", "lift_fresh", "to", "_to_copy"
)
def identity(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    return Rule(call.apply, unchanged)


@line_rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "expand", "expand_as")
def view(call: RecordedCall) -> Rule:
    to_shape = Tensor.expand if call.name.startswith("expand") else Tensor.reshape

    def apply(points: Sequence[Tensor]) -> Tensor:
        return to_shape(points[0], len(points[0]), *call.shape[1:])

    return Rule(apply, rearranged(apply))


@line_rule(
    "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "mT", "swapaxes",
    "swapdims", "movedim", "select", "slice", "narrow", "split", "split_with_sizes", "chunk",
    "tensor_split", "unbind", "roll", "flip", "repeat", "repeat_interleave", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "diagonal", "unfold",
    "im2col", "tril", "triu", "rot90", "as_strided", "t",
)  # fmt: skip
@line_rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
@line_rule("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
@line_rule(*(f"{mode}_pad{axes}d" for mode in ("reflection", "replication") for axes in (1, 2, 3)))
def rearrangement(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    if _is_part_of_batch(call):
        return Rule(lambda points: points[0], unchanged)
    return Rule(call.apply, rearranged(call.apply))


def _is_part_of_batch(call: RecordedCall) -> bool:
    """Return True if a call returns the part of a batch that holds the recorded sample.

    The network computes the batch in parts, all alike. A slice for a single sample may also be one
    to which all others are compared.
    """
    splits = call.name in ("split", "split_with_sizes", "chunk", "tensor_split")
    if not splits and call.name not in ("slice", "narrow"):
        return False
    if int(call.argument(2 if splits else 1, "dim", 0)) % len(call.shapes[0]):
        return False
    return splits or len(call.apply([torch.empty(2, *call.shapes[0][1:])])) == 2


@line_rule("index", "index_select", caveat="with constant indices")
def selection(call: RecordedCall) -> Rule:
    check_only_first_traced(call, "which numbers it selects depends on the input")
    return Rule(call.apply, rearranged(call.apply))


@line_rule("gather", caveat="with constant indices")
def gathering(call: RecordedCall) -> Rule:
    check_only_first_traced(call, "which numbers it selects depends on the input")
    axis = inner_axis(call, 1)
    index = call.argument(2, "index")

    def apply(points: Sequence[Tensor]) -> Tensor:
        return torch.gather(points[0], axis, repeat_samples(index, len(points[0])))

    return Rule(apply, rearranged(apply))


@line_rule("max_unpool2d", "max_unpool3d", caveat="with constant indices")
def unpooling(call: RecordedCall) -> Rule:
    check_only_first_traced(call, "where it writes depends on the input")
    index = call.args[1]
    size = call.argument(2, "output_size")

    def apply(points: Sequence[Tensor]) -> Tensor:
        return call.function(points[0], repeat_samples(index, len(points[0])), size)

    return Rule(apply, rearranged(apply))


def repeat_samples(constant: Any, count: int) -> Any:
    """Expand a constant with an axis of one sample to `count` samples."""
    return constant.expand(count, *constant.shape[1:])


@line_rule(
    "scatter", "scatter_add", "slice_scatter", "select_scatter", caveat="with constant indices"
)
@line_rule("index_add", "index_copy", "masked_scatter", caveat="with constant indices")
def scattering(call: RecordedCall) -> Rule:
    """Create the rule for writing or adding elements into a tensor at constant positions."""
    if call.name == "masked_scatter" or "reduce" in call.kwargs:
        raise NotAffine("its result depends on the order of elements")
    is_slice = call.name in ("slice_scatter", "select_scatter")
    source, axis = (1, 2) if is_slice else (3, 1)
    positions = [a for i, a in enumerate(call.args) if i not in (0, source)]
    if any(isinstance(a, Input) for a in (*positions, *call.kwargs.values())):
        raise NotAffine("where it writes depends on the input")
    inner_axis(replace(call, shapes=(call.shape,)), axis)

    def filled(points: Sequence[Tensor]) -> tuple[Any, ...]:
        count = len(points[0])
        # An index along one axis has no batch axis; all other operands have one.
        return tuple(
            repeat_samples(a, count) if isinstance(a, Tensor) and a.ndim == len(call.shape) else a
            for a in call.args
        )

    def apply(points: Sequence[Tensor]) -> Tensor:
        return replace(call, args=filled(points)).apply(points)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        errors = [b.expand_as(v) for b, v in zip(bounds, x, strict=True)]
        size = torch.stack([e.reshape(len(e), -1).amax(1) for e in errors]).amax(0)
        size = torch.where(size > 0, size, 1)
        squares = [(e / size.reshape(-1, *(1,) * (e.ndim - 1))).square() for e in errors]
        exact = [torch.zeros_like(a) if _is_float(a) else a for a in filled(x)]
        sums: Tensor = replace(call, args=tuple(exact)).apply(squares)
        return sums.sqrt() * size.reshape(-1, *(1,) * (sums.ndim - 1))

    return Rule(apply, bound)


def _is_float(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


@line_rule("assigned", caveat="`copy_` and assignment to a slice")
def assigned(call: RecordedCall) -> Rule:
    """Create the rule for assignment to some elements of a tensor, as recorded by `Recorder`."""
    base, value, target, source = call.args

    def put(base: Tensor, value: Tensor, count: int) -> Tensor:
        flat = repeat_samples(base, count).reshape(count, -1).clone()
        columns = target.to(flat.device)
        source_columns = source.to(flat.device)
        flat[:, columns] = repeat_samples(value, count).reshape(count, -1)[:, source_columns]
        return flat.reshape(count, *call.shape[1:])

    def apply(points: Sequence[Tensor]) -> Tensor:
        tensors = [points[a.index] if isinstance(a, Input) else a for a in (base, value)]
        return put(tensors[0], tensors[1], len(points[0]))

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        errors = [
            bounds[a.index].expand_as(x[a.index]) if isinstance(a, Input) else torch.zeros_like(a)
            for a in (base, value)
        ]
        return put(errors[0], errors[1], len(output))

    return Rule(apply, bound)


@line_rule("cat", "concat", "concatenate", "stack")
def concatenation(call: RecordedCall) -> Rule:
    # The axis along which the parts are joined; `stack` inserts it.
    axis = call.argument(1, "dim", 0) % len(call.shape)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        parts = []
        for part in call.args[0]:
            error = bounds[part.index] if isinstance(part, Input) else torch.zeros_like(part)
            size = x[part.index].shape if isinstance(part, Input) else part.shape
            if call.name == "stack":
                error = error.unsqueeze(axis)
                size = (*size[:axis], 1, *size[axis:])
            if error.ndim == output.ndim:
                parts.append((error, size))
        # Along the other axes, use the maximum size over all parts.
        shape = [max(e.shape[i] for e, _ in parts) for i in range(output.ndim)]
        shape[0] = len(output)
        return torch.cat(
            [e.expand(*shape[:axis], size[axis], *shape[axis + 1 :]) for e, size in parts], axis
        )

    if not any(isinstance(a, Tensor) for a in call.args[0]):
        return Rule(call.apply, bound)

    def apply(points: Sequence[Tensor]) -> Tensor:
        count = len(points[0])
        parts = [a if isinstance(a, Input) else repeat_samples(a, count) for a in call.args[0]]
        return replace(call, args=(parts, *call.args[1:])).apply(points)

    return Rule(apply, bound)


@line_rule("pad", "constant_pad_nd")
def padding(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    if call.name == "pad" and call.argument(2, "mode", "constant") != "constant":
        return Rule(call.apply, rearranged(call.apply))
    pads = list(call.argument(1, "pad"))

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        # The padding is exact. A bound is not padded along axes where it is broadcast.
        bound_pads = [*pads]
        for i in range(len(pads) // 2):
            axis = output.ndim - 1 - i
            if bounds[0].shape[axis] == 1 and x[0].shape[axis] > 1:
                bound_pads[2 * i : 2 * i + 2] = 0, 0
        return functional.pad(bounds[0], bound_pads)

    return Rule(call.apply, bound)


@line_rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(call: RecordedCall) -> Rule:
    if call.args[2]:
        raise NotAffine("it draws random numbers")
    return Rule(call.apply, unchanged)
