"""Rules of the operations that are affine in pieces: one each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.probes.jvp import dual

from .affine import only_first_traced, size_of
from .max_pooling import (
    pooling_windows,
    window_front,
    window_leaders,
    window_overtakes,
    window_tops,
)
from .rule import (
    Apply,
    Bound,
    Call,
    Crossings,
    Front,
    Input,
    Margin,
    NotAffine,
    Rule,
    kept,
    measured,
    noise_of,
    peak,
    sign_changes,
    single,
)

__all__ = ["bending", "changed", "pushed"]


Margins = Callable[[Sequence[Tensor]], list[Tensor]]
Noises = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
Shift = Callable[[Sequence[Tensor], Tensor], list[Tensor]]


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


def changed(apart: Callable[[Tensor, Tensor], Tensor], state: Tensor) -> Tensor:
    """Tell between which neighbours, of a row of samples, some unit changes to another piece.

    Where a sample lies on a boundary its neighbours are compared, and the change is taken to
    be behind it.

    Parameters
    ----------
    apart : callable
        From two rows of states to whether a unit is on different pieces.
    state : tensor of shape (P, ...)

    Returns
    -------
    bool tensor of shape (P - 1,)

    Examples
    --------
    >>> sign = torch.tensor([[0], [1], [0], [-1], [-1]])
    >>> changed(lambda a, b: a * b < 0, sign).tolist()
    [False, False, True, False]
    """
    pairs = apart(state[:-1], state[1:])
    if len(state) > 2:
        pairs[1:] |= apart(state[:-2], state[2:]) & ~pairs[:-1] & ~pairs[1:]
    return pairs.flatten(1).any(1)


def bending(apply: Apply, bound: Bound, margins: Margins, noises: Noises, shift: Shift) -> Rule:
    """Make the rule of units each of which bends where a margin of its own is zero.

    Parameters
    ----------
    apply, bound : callable
        See `Rule`.
    margins : callable
        From the inputs to tensors that are zero where units bend, affine in the inputs.
    noises : callable
        From inputs and bounds to what can't be told from zero, one a margin.
    shift : callable
        From inputs, or rates, and a change to inputs whose margins are changed by that.
    """

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        pairs = zip(margins(inputs), noises(inputs, bounds), strict=True)
        found = [sign_changes(margin, noise) for margin, noise in pairs]
        if len(found) == 1:
            return found[0]
        return torch.cat([i for i, _ in found]), torch.cat([s for _, s in found])

    def differ(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        different = torch.zeros(len(inputs[0]) - 1, dtype=torch.bool, device=inputs[0].device)
        for margin, noise in zip(margins(inputs), noises(inputs, bounds), strict=True):
            sign = (margin > noise).to(torch.int8) - (margin < -noise).to(torch.int8)
            different |= changed(lambda a, b: a * b < 0, sign)
        return different

    def advance(
        inputs: Sequence[Tensor],
        rates: Sequence[Tensor],
        bounds: Sequence[Tensor],
        rate_bounds: Sequence[Tensor],
    ) -> Front:
        found = []
        for pair, noise, rest in zip(
            _pushed(margins, inputs, rates),
            noises(inputs, bounds),
            noises(rates, rate_bounds),
            strict=True,
        ):
            value, speed = pair
            found.append(Margin(value, speed, noise))
            # On a kink a unit is where it is heading; if it stays there it is no more
            # than rounding, and goes nowhere.
            near = value.abs() <= noise
            still = near & (speed.abs() <= noise + rest)
            heading = torch.where(still, 0.0, speed.sign() * noise)
            inputs = shift(inputs, torch.where(near, heading - value, 0.0))
            rates = shift(rates, torch.where(still, -speed, 0.0))
        return Front(*pushed(apply, inputs, rates), found)

    return Rule(apply, bound, bend, advance=advance, differ=differ)


# What rounding leaves of the largest term, half an eps, as a share of the noise.
ROUNDED = 1 / 32
# Most that a unit's bound exceeds its size: bounds multiply from layer to layer by sums of
# magnitudes, errors don't.
INHERITED = 32


def kinked(
    kinks: Sequence[float], call: Call, mask: Tensor | None = None, bound: Bound | None = None
) -> Rule:
    """Rule of a function of one value that bends at `kinks`, where `mask` is 1."""
    if not kinks:
        return Rule(call.apply, measured)

    def margins(inputs: Sequence[Tensor]) -> list[Tensor]:
        x = inputs[0] if mask is None else inputs[0] * mask
        return [x - c if c else x for c in kinks]

    def noises(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        noise = noise_of(inputs[0].dtype)
        return [noise * (bounds[0] + abs(c)) for c in kinks]

    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        for c, noise in zip(kinks, noises(inputs, bounds), strict=True):
            x = x.masked_fill((x - c).abs() <= noise, c)
        result: Tensor = call.apply([x])
        return result

    def shift(inputs: Sequence[Tensor], change: Tensor) -> list[Tensor]:
        return [inputs[0] + change]

    rule = bending(call.apply, bound or _passed(1.0), margins, noises, shift)
    return replace(rule, land=land)


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


def relu(call: Call) -> Rule:
    def land(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        # A product of numbers, as to select by a mask of bools takes ten times as long;
        # the absolute value makes 0 of -0.
        x = inputs[0]
        return torch.gt(x, noise_of(x.dtype) * bounds[0], out=torch.empty_like(x)).mul_(x).abs_()

    return replace(kinked((0.0,), call), land=land)


def leaky_relu(call: Call) -> Rule:
    slope = float(call.argument(1, "negative_slope", 0.01))
    if slope == 1:
        return Rule(call.apply, kept)
    return kinked((0.0,), call, bound=_passed(abs(slope)))


def rrelu(call: Call) -> Rule:
    if call.argument(3, "training", False):
        raise NotAffine("it draws at random")
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return kinked((0.0,) if slope != 1 else (), call, bound=_passed(abs(slope)))


def prelu(call: Call) -> Rule:
    only_first_traced(call, call.args[1:])
    slope: Tensor = call.args[1]
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    # Slope 1 doesn't bend: a linearised channel has no boundary.
    bends = (slope != 1).to(slope.dtype).reshape(units)
    if slope.is_meta:
        return kinked((0.0,), call)
    mask = None if bool(bends.all()) else bends
    return kinked((0.0,), call, mask, _passed(float(slope.abs().max())))


def _clip(low: Any, high: Any, call: Call) -> Rule:
    if isinstance(low, (Input, Tensor)) or isinstance(high, (Input, Tensor)):
        raise NotAffine("bounds that are tensors are not supported")
    ends = [float(c) for c in (low, high) if c is not None]
    constant = len(ends) == 2 and ends[0] >= ends[1]
    return kinked([c for c in ends if math.isfinite(c) and not constant], call)


def hardtanh(call: Call) -> Rule:
    return _clip(call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0), call)


def clamp(call: Call) -> Rule:
    return _clip(call.argument(1, "min"), call.argument(2, "max"), call)


def clamp_max(call: Call) -> Rule:
    return _clip(None, call.argument(1, "max"), call)


def threshold(call: Call) -> Rule:
    threshold, value = float(call.args[1]), float(call.args[2])
    if threshold != value:
        raise NotAffine(f"it jumps from {value:g} to {threshold:g} at {threshold:g}")
    return kinked((threshold,), call)


def hardsigmoid(call: Call) -> Rule:
    # PyTorch differentiates its own with a sixth in single precision.
    exact = replace(call, function=lambda x: (x + 3).clamp(0, 6) / 6)
    rule = kinked((-3.0, 3.0), call, bound=_own)
    return replace(rule, advance=kinked((-3.0, 3.0), exact, bound=_own).advance)


def softshrink(call: Call) -> Rule:
    width = float(call.argument(1, "lambd", 0.5))
    return kinked((-width, width) if width else (), call)


def larger_of_two(call: Call) -> Rule:
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        raise NotAffine("the maximum over an axis is not supported")

    def margin(inputs: Sequence[Tensor]) -> Tensor:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return torch.sub(first, second)

    def noises(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        difference = margin(inputs)
        first, second = (size_of(a, bounds, difference) for a in call.args[:2])
        return [noise_of(difference.dtype) * (first + second)]

    def shift(inputs: Sequence[Tensor], change: Tensor) -> list[Tensor]:
        moved, first, second = list(inputs), *call.args[:2]
        if isinstance(first, Input):
            moved[first.index] = inputs[first.index] + change
        else:
            moved[second.index] = inputs[second.index] - change
        return moved

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        first, second = (size_of(a, bounds, output) for a in call.args[:2])
        if single(first) and single(second):
            return torch.maximum(first, second)
        larger = margin(inputs) >= 0
        return torch.where(~larger if call.name.startswith("min") else larger, first, second)

    return bending(call.apply, bound, lambda inputs: [margin(inputs)], noises, shift)


def max_pool(call: Call) -> Rule:
    axes = int(call.name.partition("pool")[2][0])
    windows = pooling_windows(
        call.name, call.args, call.kwargs, call.shapes[0][-axes:], call.shape[-axes:]
    )

    def positions(x: Tensor, bound: Tensor) -> Tensor:
        """Bounds with the spatial axes flattened: one of each channel, or of each position."""
        if any(size > 1 for size in bound.shape[-axes:]):
            bound = bound.expand(*bound.shape[:-axes], *x.shape[-axes:])
        return bound.flatten(-axes)

    def noise(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        return noise_of(inputs[0].dtype) * positions(inputs[0], bounds[0])

    def bend(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        return window_overtakes(inputs[0].flatten(-axes), windows, noise(inputs, bounds))

    def differ(inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        top, _ = window_leaders(inputs[0].flatten(-axes), windows, noise(inputs, bounds))
        return changed(lambda a, b: ~(a & b).any(-1), top)

    def advance(
        inputs: Sequence[Tensor],
        rates: Sequence[Tensor],
        bounds: Sequence[Tensor],
        rate_bounds: Sequence[Tensor],
    ) -> Front:
        x, rate = inputs[0].flatten(-axes), rates[0].flatten(-axes)
        front = window_front(x, rate, windows, noise(inputs, bounds))
        shape = (len(x), *call.shape[1:])
        return replace(front, value=front.value.reshape(shape), rate=front.rate.reshape(shape))

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        given = positions(inputs[0], bounds[0])
        if given.shape[-1] == 1:
            return bounds[0]
        return window_tops(inputs[0].flatten(-axes), windows, given).reshape(output.shape)

    # Members, who is largest, and which change places.
    workspace = 4 * windows.numel() * (call.shape[1] if len(call.shape) > axes + 1 else 1)
    return Rule(call.apply, bound, bend, advance=advance, differ=differ, workspace=workspace)
