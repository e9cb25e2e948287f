"""Rules for elementwise functions with kinks: activations, clamping, absolute values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.introspection.operations import Operation, line_rule

from .pieces import Kinks
from .rounding import MIN_NONZERO_FRACTION, Bound, nonzero, scaled, tolerance_factor
from .rule import NotAffine, RecordedCall, Rule, check_only_first_traced


def kinked_function(
    kinks: Sequence[float],
    call: RecordedCall,
    slopes: Sequence[Tensor | float],
    mask: Tensor | None = None,
) -> Rule:
    """Create the rule for an elementwise function that bends at `kinks` where `mask` is 1.

    The slopes are those of the pieces from left to right, one more than there are kinks.
    """
    if not kinks:
        return Rule(call.apply, scaled(_magnitude(slopes[0])))

    pieces = Kinks(lambda x: x[0] if mask is None else x[0] * mask, kinks)

    def snap(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        for c, tolerance in zip(kinks, pieces.tolerances(inputs, bounds), strict=True):
            x = x.masked_fill((x - c).abs() <= tolerance, c)
        return call.apply([x])

    return Rule(call.apply, _slope_bound(kinks, slopes), pieces, snap)


def _magnitude(slope: Tensor | float) -> Tensor | float:
    return slope.abs() if isinstance(slope, Tensor) else abs(slope)


def _slope_bound(kinks: Sequence[float], slopes: Sequence[Tensor | float]) -> Bound:
    """Return the bound for an output whose error is the input's error times the slope of its piece.

    Where positions share a bound, the slope is the root mean square over them, but at least a
    quarter of the largest slope, since the few positions of a window may lie on one piece.
    """
    sizes = [_magnitude(slope) for slope in slopes]

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        x = inputs[0]
        error = bounds[0]
        if all(isinstance(size, float) and size == sizes[0] for size in sizes):
            return error * sizes[0]
        shared = [i for i in range(1, x.ndim) if error.shape[i] == 1 and x.shape[i] > 1]
        slope: Tensor | float = sizes[0]
        squares: Tensor | float = slope**2
        largest = torch.as_tensor(sizes[0], dtype=x.dtype, device=x.device)
        for c, before, after in zip(kinks, sizes, sizes[1:], strict=False):
            right = (x > c).to(x.dtype)
            if shared:
                right = right.mean(shared, keepdim=True)
            squares = squares + right * (after**2 - before**2)
            largest = torch.maximum(largest, torch.as_tensor(after, dtype=x.dtype, device=x.device))
        if shared:
            squares = torch.as_tensor(squares).maximum(MIN_NONZERO_FRACTION * largest**2)
        return error * torch.as_tensor(squares).clamp(min=0).sqrt()

    return bound


def rule_of_kinks(operation: Operation, call: RecordedCall) -> Rule:
    """Create the rule for an operation from its kinks, computing the slopes by calling it."""
    check_only_first_traced(call)
    kinks = operation.kinks or ()
    points = [kinks[0] - 1, *kinks, kinks[-1] + 1] if kinks else [0.0, 1.0]

    @functools.cache
    def slopes(dtype: torch.dtype, device: torch.device) -> tuple[float, ...]:
        x = torch.tensor([points], dtype=dtype, device=device)
        y: Tensor = call.apply([x])
        return tuple((y.diff() / x.diff()).flatten().tolist())

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the operation, with forward-mode derivatives computed from its slopes."""
        plain = x.detach()
        value: Tensor = call.function(plain, *args, **kwargs)
        if not _is_dual(x):
            return value
        own_slopes = slopes(plain.dtype, plain.device)
        slope = torch.full_like(plain, own_slopes[0])
        for c, after in zip(kinks, own_slopes[1:], strict=True):
            slope = slope.masked_fill(plain > c, after)
        return value + (x - plain) * slope

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        own_slopes = slopes(inputs[0].dtype, inputs[0].device)
        return _slope_bound(kinks, own_slopes)(inputs, bounds, output)

    if not kinks:
        return Rule(call.apply, bound)
    rule = kinked_function(kinks, replace(call, function=function), [1.0] * (len(kinks) + 1))
    return replace(rule, bound=bound)


def _is_dual(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


@line_rule("relu", bends="at 0")
def relu(call: RecordedCall) -> Rule:
    def snap(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        # Multiplying takes a tenth of the time of selecting with a bool mask; the absolute value
        # converts -0 to 0.
        x = inputs[0]
        return (
            torch.gt(x, tolerance_factor(x.dtype) * bounds[0], out=torch.empty_like(x))
            .mul_(x)
            .abs_()
        )

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        # A bound shared by several positions holds for the nonzero ones.
        error = bounds[0]
        return nonzero(output).mul_(error) if error.shape == output.shape else error

    return replace(kinked_function((0.0,), call, (0.0, 1.0)), snap=snap, bound=bound)


@line_rule("abs", "absolute", bends="at 0")
def absolute(call: RecordedCall) -> Rule:
    return kinked_function((0.0,), call, (1.0, 1.0))


@line_rule("leaky_relu", bends="at 0")
def leaky_relu(call: RecordedCall) -> Rule:
    slope = float(call.argument(1, "negative_slope", 0.01))
    return kinked_function((0.0,) if slope != 1 else (), call, (slope, 1.0))


@line_rule("rrelu", bends="at 0")
def rrelu(call: RecordedCall) -> Rule:
    if call.argument(3, "training", False):
        raise NotAffine("it draws random numbers")
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return kinked_function((0.0,) if slope != 1 else (), call, (slope, 1.0))


@line_rule("prelu", bends="at 0, unless its slope is 1")
def prelu(call: RecordedCall) -> Rule:
    check_only_first_traced(call)
    slope: Tensor = call.argument(1, "weight")
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    # A slope of 1 doesn't bend: a linearised channel has no boundary.
    bends = (slope != 1).to(slope.dtype).reshape(units)
    slopes = (slope.reshape(units), 1.0)
    if slope.is_meta:
        return kinked_function((0.0,), call, slopes)
    return kinked_function((0.0,), call, slopes, None if bool(bends.all()) else bends)


def _clip(low: Any, high: Any, call: RecordedCall) -> Rule:
    if low is not None and high is not None and float(low) >= float(high):
        return Rule(call.apply, scaled(0.0))  # Constant.
    kinks = [float(c) for c in (low, high) if c is not None and math.isfinite(c)]
    slopes = [0.0] * (low is not None and math.isfinite(low)) + [1.0]
    return kinked_function(kinks, call, slopes + [0.0] * (high is not None and math.isfinite(high)))


@line_rule("hardtanh", bends="at both bounds")
def hardtanh(call: RecordedCall) -> Rule:
    return _clip(call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0), call)


@line_rule("relu6", bends="at 0 and 6")
def relu6(call: RecordedCall) -> Rule:
    return _clip(0.0, 6.0, call)


@line_rule("clamp", "clip", "clamp_min", bends="at its bounds")
def clamp(call: RecordedCall) -> Rule:
    return _clip(call.argument(1, "min"), call.argument(2, "max"), call)


@line_rule("clamp_max", bends="at its bound")
def clamp_max(call: RecordedCall) -> Rule:
    return _clip(None, call.argument(1, "max"), call)


@line_rule(
    "threshold", bends="at its threshold", caveat="if the replacement value equals the threshold"
)
def threshold(call: RecordedCall) -> Rule:
    threshold = float(call.args[1])
    value = float(call.args[2])
    if threshold != value:
        raise NotAffine(f"it jumps from {value:g} to {threshold:g} at {threshold:g}")
    return kinked_function((threshold,), call, (0.0, 1.0))


@line_rule("hardsigmoid", bends="at -3 and 3")
def hardsigmoid(call: RecordedCall) -> Rule:
    def function(x: Tensor) -> Tensor:
        # PyTorch's own derivative uses 1/6 in single precision.
        return (x + 3).clamp(0, 6) / 6 if _is_dual(x) else call.function(x)

    return kinked_function((-3.0, 3.0), replace(call, function=function), (0.0, 1 / 6, 0.0))


@line_rule("softshrink", bends="at -lambd and lambd")
def softshrink(call: RecordedCall) -> Rule:
    width = float(call.argument(1, "lambd", 0.5))
    return kinked_function((-width, width) if width else (), call, (1.0, 0.0, 1.0))
