"""Functions of one number that bend at kinks: activations, clamping, absolute values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.introspection.operations import Operation, line_rule
from nlbench.probes.function.probe import dual

from .rule import (
    SPARSEST,
    Apply,
    Bound,
    Crossings,
    Front,
    Input,
    Kinks,
    Margin,
    NotAffine,
    RecordedCall,
    Rule,
    kept,
    noise_of,
    only_first_traced,
    scaled,
    sign_changes,
)

__all__ = ["bending", "kinked", "pushed", "rule_of_kinks"]


Margins = Callable[[Sequence[Tensor]], list[Tensor]]


def pushed(
    apply: Apply, values: Sequence[Tensor], rates: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Carry values and rates through an operation, by forward-mode differentiation.

    Examples
    --------
    >>> y, rate = pushed(lambda x: 2 * x[0], [torch.tensor([3.0])], [torch.tensor([1.0])])
    >>> y.item(), rate.item()
    (6.0, 2.0)
    """
    (result,) = _pushed(lambda x: [apply(x)], values, rates)
    return result


def _pushed(
    apply: Margins, values: Sequence[Tensor], rates: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    with forward_ad.dual_level():
        results = list(map(_parts, apply(list(map(dual, values, rates)))))
    return results


def _parts(moving: Tensor) -> tuple[Tensor, Tensor]:
    value, rate = forward_ad.unpack_dual(moving)  # type: ignore[no-untyped-call]
    # A constant has none.
    return value, torch.zeros_like(value) if rate is None else rate


def bending(apply: Apply, bound: Bound, kinks: Kinks, shifted: int = 0, sign: float = 1.0) -> Rule:
    """Make the rule of units each of which bends where a margin of its own is zero.

    Parameters
    ----------
    apply, bound : callable
        See `Rule`.
    kinks : Kinks
        Their values are affine in the inputs.
    shifted : int
        The input that is changed to change a margin,
    sign : float
        and what of the margin's change: 1 or -1.
    """

    def shift(inputs: Sequence[Tensor], change: Tensor) -> list[Tensor]:
        return [x + sign * change if i == shifted else x for i, x in enumerate(inputs)]

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        pairs = zip(kinks.distances(inputs), kinks.noises(inputs, bounds), strict=True)
        found = [sign_changes(margin, noise) for margin, noise in pairs]
        if len(found) == 1:
            return found[0]
        return torch.cat([i for i, _ in found]), torch.cat([s for _, s in found])

    def advance(
        inputs: Sequence[Tensor],
        rates: Sequence[Tensor],
        bounds: Sequence[Tensor],
        rate_bounds: Sequence[Tensor],
    ) -> Front:
        found = []
        for pair, noise, rest in zip(
            _pushed(kinks.distances, inputs, rates),
            kinks.noises(inputs, bounds),
            kinks.noises(rates, rate_bounds),
            strict=True,
        ):
            value, speed = pair
            found.append(Margin(value, speed, noise))
            # On a kink a unit is where it is heading; if it stays there it is no more
            # than rounding, and goes nowhere.
            near = value.abs() <= noise
            still = near & (speed.abs() <= noise + rest)
            # As little as a number can change: it is no more to the next layers than rounding.
            floats = torch.finfo(value.dtype)
            least = noise * 2**-30 + 4 * floats.eps * inputs[shifted].abs() + floats.tiny
            heading = torch.where(still, 0.0, speed.sign() * least)
            inputs = shift(inputs, torch.where(near, heading - value, 0.0))
            rates = shift(rates, torch.where(still, -speed, 0.0))
        return Front(*pushed(apply, inputs, rates), found)

    return Rule(apply, bound, bend, advance=advance, pieces=kinks)


def kinked(
    kinks: Sequence[float],
    call: RecordedCall,
    slopes: Sequence[Tensor | float],
    mask: Tensor | None = None,
) -> Rule:
    """Rule of a function of one value that bends at `kinks`, where `mask` is 1.

    Parameters
    ----------
    kinks : sequence of float
        In order.
    call : RecordedCall
    slopes : sequence of tensor or float
        Of the pieces from left to right: one more than there are kinks.
    mask : tensor, optional
    """
    if not kinks:
        return Rule(call.apply, scaled(_size(slopes[0])))

    pieces = Kinks(lambda x: x[0] if mask is None else x[0] * mask, kinks)

    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        for c, noise in zip(kinks, pieces.noises(inputs, bounds), strict=True):
            x = x.masked_fill((x - c).abs() <= noise, c)
        result: Tensor = call.apply([x])
        return result

    return replace(bending(call.apply, _by_slopes(kinks, slopes), pieces), land=land)


def _size(slope: Tensor | float) -> Tensor | float:
    return slope.abs() if isinstance(slope, Tensor) else abs(slope)


def _by_slopes(kinks: Sequence[float], slopes: Sequence[Tensor | float]) -> Bound:
    """Bound of an output whose error is its input's times the slope of the piece it is on.

    Where one number stands for many positions that is the slopes' mean square, and a
    sixteenth of the largest at least, as windows of few positions may lie on one piece.
    """
    sizes = [_size(slope) for slope in slopes]

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        x, given = inputs[0], bounds[0]
        if all(isinstance(size, float) and size == sizes[0] for size in sizes):
            return given * sizes[0]
        shared = [i for i in range(1, x.ndim) if given.shape[i] == 1 and x.shape[i] > 1]
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
            squares = torch.as_tensor(squares).maximum(SPARSEST * largest**2)
        return given * torch.as_tensor(squares).clamp(min=0).sqrt()

    return bound


def rule_of_kinks(operation: Operation, call: RecordedCall) -> Rule:
    """Rule of an operation of which nothing is known but its kinks: the rest is asked of it."""
    if not isinstance(call.args[0], Input):
        raise NotAffine("its parameters depend on the input")
    only_first_traced(call)
    kinks = operation.kinks or ()
    places = [kinks[0] - 1, *kinks, kinks[-1] + 1] if kinks else [0.0, 1.0]

    @functools.cache
    def slopes(dtype: torch.dtype, device: torch.device) -> tuple[float, ...]:
        x = torch.tensor([places], dtype=dtype, device=device)
        y: Tensor = call.apply([x])
        return tuple((y.diff() / x.diff()).flatten().tolist())

    def line(points: Sequence[Tensor]) -> Tensor:
        """Draw the function through its kinks, as forward-mode differentiation needs it."""
        x = points[0]
        plain = x.detach()
        with torch.no_grad():
            own = slopes(plain.dtype, plain.device)
            at: Tensor = call.apply([plain])
        slope = torch.full_like(plain, own[0])
        for c, after in zip(kinks, own[1:], strict=True):
            slope = slope.masked_fill(plain > c, after)
        return at + (x - plain) * slope

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        own = slopes(inputs[0].dtype, inputs[0].device)
        return _by_slopes(kinks, own)(inputs, bounds, output)

    if not kinks:
        return Rule(call.apply, bound)
    own = replace(call, function=lambda *args, **kwargs: line([args[0]]))
    walked = kinked(kinks, own, [1.0] * (len(kinks) + 1))
    rule = kinked(kinks, call, [1.0] * (len(kinks) + 1))
    return replace(rule, bound=bound, advance=walked.advance)


@line_rule("relu", bends="at 0")
def relu(call: RecordedCall) -> Rule:
    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        # A product of numbers, as to select by a mask of bools takes ten times as long;
        # the absolute value makes 0 of -0.
        x = inputs[0]
        return torch.gt(x, noise_of(x.dtype) * bounds[0], out=torch.empty_like(x)).mul_(x).abs_()

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        # One number for many is that of those that are not zero.
        given = bounds[0]
        return given * (output != 0) if given.shape == output.shape else given

    return replace(kinked((0.0,), call, (0.0, 1.0)), land=land, bound=bound)


@line_rule("abs", "absolute", bends="at 0")
def absolute(call: RecordedCall) -> Rule:
    return kinked((0.0,), call, (1.0, 1.0))


@line_rule("leaky_relu", bends="at 0")
def leaky_relu(call: RecordedCall) -> Rule:
    slope = float(call.argument(1, "negative_slope", 0.01))
    if slope == 1:
        return Rule(call.apply, kept)
    return kinked((0.0,), call, (slope, 1.0))


@line_rule("rrelu", bends="at 0")
def rrelu(call: RecordedCall) -> Rule:
    if call.argument(3, "training", False):
        raise NotAffine("it draws at random")
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return kinked((0.0,), call, (slope, 1.0)) if slope != 1 else Rule(call.apply, kept)


@line_rule("prelu", bends="at 0, where its slope is not 1")
def prelu(call: RecordedCall) -> Rule:
    only_first_traced(call)
    slope: Tensor = call.argument(1, "weight")
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    # Slope 1 doesn't bend: a linearised channel has no boundary.
    bends = (slope != 1).to(slope.dtype).reshape(units)
    slopes = (slope.reshape(units), 1.0)
    if slope.is_meta:
        return kinked((0.0,), call, slopes)
    return kinked((0.0,), call, slopes, None if bool(bends.all()) else bends)


def _clip(low: Any, high: Any, call: RecordedCall) -> Rule:
    if isinstance(low, (Input, Tensor)) or isinstance(high, (Input, Tensor)):
        raise NotAffine("bounds that are tensors are not supported")
    if low is not None and high is not None and float(low) >= float(high):
        return Rule(call.apply, scaled(0.0))  # Constant.
    kinks = [float(c) for c in (low, high) if c is not None and math.isfinite(c)]
    slopes = [0.0] * (low is not None and math.isfinite(low)) + [1.0]
    return kinked(kinks, call, slopes + [0.0] * (high is not None and math.isfinite(high)))


@line_rule("hardtanh", bends="at both bounds")
def hardtanh(call: RecordedCall) -> Rule:
    return _clip(call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0), call)


@line_rule("relu6", bends="at 0 and 6")
def relu6(call: RecordedCall) -> Rule:
    return _clip(0.0, 6.0, call)


@line_rule("clamp", "clip", "clamp_min", bends="at its bounds", caveat="bounds are numbers")
def clamp(call: RecordedCall) -> Rule:
    return _clip(call.argument(1, "min"), call.argument(2, "max"), call)


@line_rule("clamp_max", bends="at its bound", caveat="the bound is a number")
def clamp_max(call: RecordedCall) -> Rule:
    return _clip(None, call.argument(1, "max"), call)


@line_rule("threshold", bends="at its threshold", caveat="where the value put in is the threshold")
def threshold(call: RecordedCall) -> Rule:
    threshold, value = float(call.args[1]), float(call.args[2])
    if threshold != value:
        raise NotAffine(f"it jumps from {value:g} to {threshold:g} at {threshold:g}")
    return kinked((threshold,), call, (0.0, 1.0))


@line_rule("hardsigmoid", bends="at -3 and 3")
def hardsigmoid(call: RecordedCall) -> Rule:
    # PyTorch differentiates its own with a sixth in single precision.
    exact = replace(call, function=lambda x: (x + 3).clamp(0, 6) / 6)
    slopes = (0.0, 1 / 6, 0.0)
    rule = kinked((-3.0, 3.0), call, slopes)
    return replace(rule, advance=kinked((-3.0, 3.0), exact, slopes).advance)


@line_rule("softshrink", bends="at -lambd and lambd")
def softshrink(call: RecordedCall) -> Rule:
    width = float(call.argument(1, "lambd", 0.5))
    return kinked((-width, width), call, (1.0, 0.0, 1.0)) if width else Rule(call.apply, kept)
