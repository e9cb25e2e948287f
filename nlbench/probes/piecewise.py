"""Which operations are affine or piecewise affine: one rule each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .envelope import pooling_windows, window_overtakes, window_tops
from .rules import (
    NOISE,
    Apply,
    Bound,
    Call,
    Crossings,
    Input,
    NotAffine,
    Rule,
    carried,
    collapsed,
    constant_size,
    kept,
    measured,
    peak,
    sign_changes,
    single,
)

__all__ = ["has_rule", "ignores_values", "reads_values", "rule_for"]

Maker = Callable[[Call], Rule]

# What rounding leaves of the largest term, half an eps, as a share of the noise.
ROUNDED = 1 / 32
# Most that a unit's bound exceeds its size: bounds multiply from layer to layer by sums of
# magnitudes, errors don't.
INHERITED = 32


def ignores_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call takes nothing but shape and kind from its traced tensors.

    `args` and `kwargs` have `Input` in place of traced tensors.
    """
    if name in _MAKES_CONSTANTS:
        return True
    return name in _FOLLOWS_SHAPE and not isinstance(args[0], Input)


def reads_values(name: str) -> bool:
    """Tell whether an operation hands a tensor's values to Python."""
    return name in _READS_VALUES


def has_rule(name: str) -> bool:
    """Tell whether an operation of this name may be affine or piecewise affine."""
    return name in _RULES


def rule_for(call: Call) -> Rule:
    """Give the rule of a call to an operation that has one.

    Raises
    ------
    NotAffine
        If the operation bends smoothly, jumps, or multiplies two traced values.
    """
    return _RULES[call.name](call)


def _affine(bound: Bound) -> Maker:
    def rule(call: Call) -> Rule:
        _only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
        return Rule(call.apply, bound)

    return rule


def _view(call: Call) -> Rule:
    def apply(points: Sequence[Tensor]) -> Tensor:
        return points[0].reshape(len(points[0]), *call.shape[1:])

    return Rule(apply, _moved(apply, copies=True))


def _rearrangement(call: Call) -> Rule:
    _only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
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


def _expand(call: Call) -> Rule:
    return Rule(lambda points: points[0].expand(len(points[0]), *call.shape[1:]), carried)


def _only_first_traced(call: Call, others: Sequence[Any]) -> None:
    if not isinstance(call.args[0], Input) or any(isinstance(a, Input) for a in others):
        raise NotAffine("its parameters depend on the input")


def _convolution(call: Call) -> Rule:
    _only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
    weight, bias = call.args[1], call.argument(2, "bias")
    reach = weight.abs().reshape(len(weight), -1).sum(1)
    offset = torch.zeros_like(reach) if bias is None else bias.abs()
    # A linear layer's units lie on the last axis, a convolution's on the second.
    units = (-1,) if call.name == "linear" else (-1,) + (1,) * (len(call.shape) - 2)
    reach, offset = reach.reshape(units), offset.reshape(units)
    return Rule(
        call.apply, lambda i, bounds, output: collapsed(bounds, output.ndim) * reach + offset
    )


def _batch_norm(call: Call) -> Rule:
    _only_first_traced(call, call.args[1:])
    weight, bias, mean, var, training = call.args[1:6]
    eps = call.args[7]
    if training or mean is None or var is None:
        raise NotAffine("it uses the statistics of the batch")
    units = (1, -1) + (1,) * (len(call.shape) - 2)
    slope = (var + eps).rsqrt() if weight is None else weight.abs() * (var + eps).rsqrt()
    offset = mean.abs() * slope if bias is None else mean.abs() * slope + bias.abs()
    slope, offset = slope.reshape(units), offset.reshape(units)
    return Rule(call.apply, lambda inputs, bounds, output: bounds[0] * slope + offset)


def _sum_of_two(call: Call) -> Rule:
    first, second = call.args[:2]
    alpha = abs(float(call.kwargs.get("alpha", 1)))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return _size(first, bounds, output) + alpha * _size(second, bounds, output)

    return Rule(call.apply, bound)


def _size(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Bound of a traced or constant term of an operation whose result is like `like`."""
    if not isinstance(term, Input):
        return constant_size(term, like)
    bound = bounds[term.index]
    return bound if bound.ndim == like.ndim else collapsed([bound], like.ndim)


def _scaling(call: Call) -> Rule:
    first, second = call.args[:2]
    if isinstance(first, Input) and isinstance(second, Input):
        raise NotAffine("a product of two values that both depend on the input")
    if call.name == "div" and (isinstance(second, Input) or call.kwargs.get("rounding_mode")):
        raise NotAffine("not piecewise affine")
    factor = second if isinstance(first, Input) else first
    size = factor.abs() if isinstance(factor, Tensor) else abs(factor)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        base = bounds[0] if inputs[0].ndim == output.ndim else collapsed(bounds, output.ndim)
        return base / size if call.name == "div" else base * size

    return Rule(call.apply, bound)


def _contraction(call: Call) -> Rule:
    operands = call.args[1] if call.name == "einsum" else call.args[-2:]
    if sum(isinstance(a, Input) for a in operands) > 1:
        raise NotAffine("a product of two values that both depend on the input")
    if call.name == "bmm":
        # The constant's leading axis is 1, which bmm, unlike matmul, doesn't broadcast.
        call = replace(call, name="matmul", function=torch.matmul)
    return Rule(call.apply, measured)


def _concatenation(call: Call) -> Rule:
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


def _padding(call: Call) -> Rule:
    _only_first_traced(call, (*call.args[1:], *call.kwargs.values()))
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


def _dropout(call: Call) -> Rule:
    if call.args[2]:
        raise NotAffine("it draws at random")
    return Rule(call.apply, kept)


def _kinked(
    kinks: Sequence[float], call: Call, mask: Tensor | None = None, bound: Bound | None = None
) -> Rule:
    """Rule of a function of one value that bends at `kinks`, where `mask` is 1."""
    if not kinks:
        return Rule(call.apply, measured)

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        x, bound = inputs[0], bounds[0]
        if mask is not None:
            x = x * mask
        found = [sign_changes(x - c if c else x, NOISE * (bound + abs(c))) for c in kinks]
        return torch.cat([i for i, _ in found]), torch.cat([s for _, s in found])

    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        for c in kinks:
            x = x.masked_fill((x - c).abs() <= NOISE * (bounds[0] + abs(c)), c)
        result: Tensor = call.apply([x])
        return result

    return Rule(call.apply, bound or _passed(1.0), bend, land)


def _own(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Bound of an output that is free of noise where its input is on a kink: its own size."""
    return peak(output)


def _passed(slope: float) -> Bound:
    """Bound of an output that is its input times `slope` at most.

    Its own size; more where the input is what a cancellation left, which passes on its
    rounding errors; less where the unit is small beside the others of its tensor, as it has
    no more noise than its input.
    """

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        given = bounds[0] if slope <= 1 else bounds[0] * slope
        size = peak(output)
        return torch.clamp(given * ROUNDED, size, size * INHERITED).minimum(given)

    return bound


def _relu(call: Call) -> Rule:
    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        # A product of numbers, as to select by a mask of bools takes ten times as long;
        # the absolute value makes 0 of -0.
        x = inputs[0]
        return torch.gt(x, NOISE * bounds[0], out=torch.empty_like(x)).mul_(x).abs_()

    return replace(_kinked((0.0,), call), land=land)


def _leaky_relu(call: Call) -> Rule:
    slope = float(call.argument(1, "negative_slope", 0.01))
    if slope == 1:
        return Rule(call.apply, kept)
    return _kinked((0.0,), call, bound=_passed(abs(slope)))


def _rrelu(call: Call) -> Rule:
    if call.argument(3, "training", False):
        raise NotAffine("it draws at random")
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return _kinked((0.0,) if slope != 1 else (), call, bound=_passed(abs(slope)))


def _prelu(call: Call) -> Rule:
    _only_first_traced(call, call.args[1:])
    slope: Tensor = call.args[1]
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    # Slope 1 doesn't bend: a linearised channel has no boundary.
    bends = (slope != 1).to(slope.dtype).reshape(units)
    mask = None if bool(bends.all()) else bends
    return _kinked((0.0,), call, mask, _passed(float(slope.abs().max())))


def _clip(low: Any, high: Any, call: Call) -> Rule:
    if isinstance(low, (Input, Tensor)) or isinstance(high, (Input, Tensor)):
        raise NotAffine("bounds that are tensors are not supported")
    ends = [float(c) for c in (low, high) if c is not None]
    constant = len(ends) == 2 and ends[0] >= ends[1]
    return _kinked([c for c in ends if math.isfinite(c) and not constant], call)


def _hardtanh(call: Call) -> Rule:
    return _clip(call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0), call)


def _clamp(call: Call) -> Rule:
    return _clip(call.argument(1, "min"), call.argument(2, "max"), call)


def _clamp_max(call: Call) -> Rule:
    return _clip(None, call.argument(1, "max"), call)


def _threshold(call: Call) -> Rule:
    threshold, value = float(call.args[1]), float(call.args[2])
    if threshold != value:
        raise NotAffine(f"it jumps from {value:g} to {threshold:g} at {threshold:g}")
    return _kinked((threshold,), call)


def _hardsigmoid(call: Call) -> Rule:
    return _kinked((-3.0, 3.0), call, bound=_own)


def _softshrink(call: Call) -> Rule:
    width = float(call.argument(1, "lambd", 0.5))
    return _kinked((-width, width) if width else (), call)


def _larger_of_two(call: Call) -> Rule:
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over an axis is not supported")

    def margin(inputs: Sequence[Tensor]) -> Tensor:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return torch.sub(first, second)

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        difference = margin(inputs)
        first, second = (_size(a, bounds, difference) for a in call.args[:2])
        return sign_changes(difference, NOISE * (first + second))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        first, second = (_size(a, bounds, output) for a in call.args[:2])
        if single(first) and single(second):
            return torch.maximum(first, second)
        larger = margin(inputs) >= 0
        return torch.where(~larger if call.name.startswith("min") else larger, first, second)

    return Rule(call.apply, bound, bend)


def _max_pool(call: Call) -> Rule:
    axes = int(call.name.partition("pool")[2][0])
    windows = pooling_windows(
        call.name, call.args, call.kwargs, call.shapes[0][-axes:], call.shape[-axes:]
    )

    def positions(x: Tensor, bound: Tensor) -> Tensor:
        """Bounds with the spatial axes flattened: one of each channel, or of each position."""
        if any(size > 1 for size in bound.shape[-axes:]):
            bound = bound.expand(*bound.shape[:-axes], *x.shape[-axes:])
        return bound.flatten(-axes)

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        noise = NOISE * positions(inputs[0], bounds[0])
        return window_overtakes(inputs[0].flatten(-axes), windows, noise)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        given = positions(inputs[0], bounds[0])
        if given.shape[-1] == 1:
            return bounds[0]
        return window_tops(inputs[0].flatten(-axes), windows, given).reshape(output.shape)

    return Rule(call.apply, bound, bend)


# The last two precede a copy to NumPy or to a list.
_READS_VALUES = frozenset(
    "_local_scalar_dense item is_nonzero equal allclose nonzero resolve_conj resolve_neg".split()  # noqa: SIM905
)
_MAKES_CONSTANTS = frozenset(
    [f"{value}_like" for value in ("zeros", "ones", "full", "empty")]
    + [f"new_{value}" for value in ("zeros", "ones", "full", "empty", "tensor")]
)
_FOLLOWS_SHAPE = frozenset(("expand_as", "view_as", "reshape_as", "type_as"))


def _of_axes(*names: str) -> list[str]:
    return [f"{name}{axes}d" for name in names for axes in (1, 2, 3)]


def _named(names: str | Iterable[str], maker: Maker) -> dict[str, Maker]:
    return dict.fromkeys(names.split() if isinstance(names, str) else names, maker)


_RULES: Mapping[str, Maker] = {
    **_named("neg clone contiguous detach alias lift_fresh to _to_copy", _affine(kept)),
    **_named("view reshape _unsafe_view view_as reshape_as", _view),
    **_named("expand expand_as", _expand),
    **_named("flatten unflatten squeeze unsqueeze permute transpose mT", _rearrangement),
    **_named("swapaxes swapdims movedim select slice narrow index", _rearrangement),
    **_named("index_select split split_with_sizes chunk tensor_split unbind", _rearrangement),
    **_named("roll flip", _rearrangement),
    **_named("repeat pixel_shuffle pixel_unshuffle channel_shuffle mean", _affine(carried)),
    **_named(_of_axes("avg_pool", "adaptive_avg_pool", "upsample_nearest"), _affine(carried)),
    **_named("sum upsample_linear1d", _affine(measured)),
    **_named("pad constant_pad_nd", _padding),
    **_named("upsample_bilinear2d upsample_bicubic2d", _affine(measured)),
    **_named(_of_axes("conv_transpose"), _affine(measured)),
    **_named(["linear", *_of_axes("conv")], _convolution),
    **_named("matmul mm bmm addmm einsum", _contraction),
    **_named("add sub rsub subtract", _sum_of_two),
    **_named("mul multiply div divide true_divide", _scaling),
    **_named("cat concat concatenate stack", _concatenation),
    **_named("dropout feature_dropout alpha_dropout feature_alpha_dropout", _dropout),
    **_named("batch_norm", _batch_norm),
    **_named("relu", _relu),
    **_named("abs absolute", partial(_kinked, (0.0,))),
    **_named("leaky_relu", _leaky_relu),
    **_named("rrelu", _rrelu),
    **_named("prelu", _prelu),
    **_named("hardtanh", _hardtanh),
    **_named("clamp clip clamp_min", _clamp),
    **_named("clamp_max", _clamp_max),
    **_named("threshold", _threshold),
    **_named("hardsigmoid", _hardsigmoid),
    **_named("softshrink", _softshrink),
    **_named("maximum minimum max min", _larger_of_two),
    **_named(_of_axes("max_pool", "adaptive_max_pool"), _max_pool),
}
