"""Which operations are affine or piecewise affine: one rule each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .envelope import pooling_windows, window_overtakes
from .rules import (
    NOISE,
    Bound,
    Call,
    Crossings,
    Input,
    NotAffine,
    Rule,
    carried,
    collapsed,
    kept,
    measured,
    peak,
    sign_changes,
)

__all__ = ["has_rule", "ignores_values", "reads_values", "rule_for"]

Maker = Callable[[Call], Rule]


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
    return Rule(lambda points: points[0].reshape(len(points[0]), *call.shape[1:]), carried)


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
    first, second, alpha = call.args[0], call.args[1], abs(call.kwargs.get("alpha", 1))
    ndim = len(call.shape)

    def size(term: Any, bounds: Sequence[Tensor]) -> Tensor | float:
        if not isinstance(term, Input):
            return _largest(term)
        bound = bounds[term.index]
        return bound if bound.ndim == ndim else collapsed([bound], ndim)

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return torch.as_tensor(size(first, bounds) + alpha * size(second, bounds))

    return Rule(call.apply, bound)


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
    if not any(isinstance(a, Tensor) for a in call.args[0]):
        return Rule(call.apply, carried)

    def apply(points: Sequence[Tensor]) -> Tensor:
        count = len(points[0])
        parts = [a if isinstance(a, Input) else a.expand(count, *a.shape[1:]) for a in call.args[0]]
        result: Tensor = replace(call, args=(parts, *call.args[1:])).apply(points)
        return result

    return Rule(apply, measured)


def _dropout(call: Call) -> Rule:
    if call.args[2]:
        raise NotAffine("it draws at random")
    return Rule(call.apply, kept)


def _kinked(kinks: Sequence[float], call: Call, mask: Tensor | None = None) -> Rule:
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

    return Rule(call.apply, _own, bend, land)


def _own(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Bound of an output that is free of noise where its input is on a kink: its own size."""
    return peak(output)


def _relu(call: Call) -> Rule:
    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        # A product of numbers, as to select by a mask of bools takes ten times as long;
        # the absolute value makes 0 of -0.
        x = inputs[0]
        return torch.gt(x, NOISE * bounds[0], out=torch.empty_like(x)).mul_(x).abs_()

    return replace(_kinked((0.0,), call), land=land)


def _abs(call: Call) -> Rule:
    return _kinked((0.0,), call)


def _leaky_relu(call: Call) -> Rule:
    slope = float(call.argument(1, "negative_slope", 0.01))
    return _kinked((0.0,) if slope != 1 else (), call) if slope != 1 else Rule(call.apply, kept)


def _rrelu(call: Call) -> Rule:
    if call.argument(3, "training", False):
        raise NotAffine("it draws at random")
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return _kinked((0.0,) if slope != 1 else (), call)


def _prelu(call: Call) -> Rule:
    _only_first_traced(call, call.args[1:])
    slope: Tensor = call.args[1]
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    # Slope 1 doesn't bend: a linearised channel has no boundary.
    bends = (slope != 1).to(slope.dtype).reshape(units)
    mask = None if bool(bends.all()) else bends
    return _kinked((0.0,), call, mask)


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
    return _kinked((-3.0, 3.0), call)


def _softshrink(call: Call) -> Rule:
    width = float(call.argument(1, "lambd", 0.5))
    return _kinked((-width, width) if width else (), call)


def _larger_of_two(call: Call) -> Rule:
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over an axis is not supported")

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        terms = [inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2]]
        sizes = [bounds[a.index] if isinstance(a, Input) else _largest(a) for a in call.args[:2]]
        return sign_changes(terms[0] - terms[1], NOISE * torch.as_tensor(sizes[0] + sizes[1]))

    return Rule(call.apply, measured, bend)


def _max_pool(call: Call) -> Rule:
    axes = int(call.name.partition("pool")[2][0])
    windows = pooling_windows(
        call.name, call.args, call.kwargs, call.shapes[0][-axes:], call.shape[-axes:]
    )

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        return window_overtakes(inputs[0].flatten(-axes), windows, NOISE * collapsed(bounds, 1))

    return Rule(call.apply, carried, bend)


def _largest(constant: Tensor | float) -> float:
    if isinstance(constant, Tensor):
        return float(constant.abs().max()) if constant.numel() else 0.0
    return abs(float(constant))


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
    **_named("flatten unflatten squeeze unsqueeze permute transpose mT", _affine(carried)),
    **_named("swapaxes swapdims movedim select slice narrow index", _affine(carried)),
    **_named("index_select split split_with_sizes chunk tensor_split unbind", _affine(carried)),
    **_named("roll flip repeat pixel_shuffle pixel_unshuffle", _affine(carried)),
    **_named("channel_shuffle mean", _affine(carried)),
    **_named(_of_axes("avg_pool", "adaptive_avg_pool", "upsample_nearest"), _affine(carried)),
    **_named("sum pad constant_pad_nd upsample_linear1d", _affine(measured)),
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
    **_named("abs absolute", _abs),
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
