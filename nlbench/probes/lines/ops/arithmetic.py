"""Sums of tensors, products with constants, choices by constant masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.probes.ops import line_rule, not_affine

from .rule import Call, Input, NotAffine, Rule, collapsed, joined, kept

UNEVEN = 1e3
"""How many times its mean a constant's largest number may be to stand for all of a channel."""


def error_of(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Error of a traced term of an operation, or what rounding makes of adding a constant."""
    if isinstance(term, Input):
        bound = bounds[term.index]
        return bound if bound.ndim == like.ndim else collapsed([bound], like.ndim)
    size = torch.as_tensor(term, device=like.device).to(like.dtype).abs() / 2
    return size.reshape((1,) * (like.ndim - size.ndim) + tuple(size.shape))


def _even(term: Any, channels: Sequence[int]) -> Any:
    """Replace a constant with positions by its channels' largest numbers, if they are alike."""
    if not isinstance(term, Tensor) or term.ndim != len(channels) or term.is_meta:
        return term
    positions = list(range(2, term.ndim))
    if not positions or not term.numel():
        return term
    size = term.abs()
    most, mean = size.amax(positions, keepdim=True), size.mean(positions, keepdim=True)
    return most if bool((most <= UNEVEN * mean).all()) else term


@line_rule("add", "sub", "rsub", "subtract")
def sum_of_two(call: Call) -> Rule:
    alpha = abs(float(call.kwargs.get("alpha", 1)))
    first, second = (_even(term, call.shape) for term in call.args[:2])
    if first == second if isinstance(first, Input) else False:
        # Twice the same number is off by twice its error.
        return Rule(call.apply, lambda x, bounds, output: bounds[0] * (1 + alpha))
    if alpha == 0:
        alpha = 0.0

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        one, other = (error_of(term, bounds, output) for term in (first, second))
        return joined([one, alpha * other]).expand(len(output), *(-1,) * (output.ndim - 1))

    return Rule(call.apply, bound)


@line_rule("mul", "multiply", "div", "divide", "true_divide", caveat="by a constant")
def scaling(call: Call) -> Rule:
    first, second = call.args[:2]
    if isinstance(first, Input) and isinstance(second, Input):
        raise NotAffine("a product of two values that both depend on the input")
    divides = call.name in ("div", "divide", "true_divide")
    if divides and (isinstance(second, Input) or call.kwargs.get("rounding_mode")):
        raise NotAffine("not piecewise affine")
    factor = second if isinstance(first, Input) else first
    size = factor.abs() if isinstance(factor, Tensor) else abs(factor)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        base = bounds[0] if x[0].ndim == output.ndim else collapsed(bounds, output.ndim)
        return base / size if divides else base * size

    return Rule(call.apply, bound)


@line_rule("pow", caveat="to the power of 1")
def power(call: Call) -> Rule:
    if not isinstance(call.args[0], Input) or call.args[1] != 1:
        raise NotAffine("not piecewise affine")
    return Rule(call.apply, kept)


@line_rule("lerp", caveat="with a constant weight")
def interpolated(call: Call) -> Rule:
    first, second, weight = call.args[:3]
    if isinstance(weight, Input):
        raise NotAffine("a product of two values that both depend on the input")
    share = torch.as_tensor(weight)

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        part = share.to(output.device, output.dtype).abs()
        rest = (1 - share.to(output.device, output.dtype)).abs()
        return joined(
            [rest * error_of(first, bounds, output), part * error_of(second, bounds, output)]
        )

    return Rule(call.apply, bound)


@line_rule("addcmul", "addcdiv", caveat="of two factors one is constant, of divisors all")
def product_added(call: Call) -> Rule:
    summand, one, other = call.args[:3]
    if isinstance(other, Input) and (isinstance(one, Input) or call.name == "addcdiv"):
        raise NotAffine("a product of two values that both depend on the input")
    value = abs(float(call.kwargs.get("value", 1)))

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        factor, base = (one, other) if isinstance(other, Input) else (other, one)
        size = factor.abs() * value if call.name == "addcmul" else value / factor.abs()
        return joined([error_of(summand, bounds, output), size * error_of(base, bounds, output)])

    return Rule(call.apply, bound)


@line_rule("where", caveat="with a constant mask")
def choice(call: Call) -> Rule:
    mask, first, second = call.args[:3]
    if isinstance(mask, Input):
        raise NotAffine("what it chooses depends on the input")

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return torch.where(
            mask, _inherited(first, bounds, output), _inherited(second, bounds, output)
        )

    return Rule(call.apply, bound)


def _inherited(term: Any, bounds: Sequence[Tensor], like: Tensor) -> Tensor:
    """Error of a term that is taken as it is: a constant has none."""
    return error_of(term, bounds, like) if isinstance(term, Input) else like.new_zeros(())


@line_rule("masked_fill", caveat="with a constant mask")
def masking(call: Call) -> Rule:
    given, mask, value = call.args[:3]
    if isinstance(mask, Input):
        raise NotAffine("what it chooses depends on the input")

    def bound(x: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        return torch.where(
            mask, _inherited(value, bounds, output), _inherited(given, bounds, output)
        )

    return Rule(call.apply, bound)


not_affine(
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "sign",
    "sgn", "heaviside", "floor", "ceil", "round", "trunc", "fix", "frac", "floor_divide", "fmod",
    "remainder", "logical_and", "logical_or", "logical_not", "logical_xor", "argmax", "argmin",
    "argsort", "isnan", "isinf", "isfinite", "signbit", "copysign", "bitwise_and", "bitwise_or",
    why="not piecewise affine, as it jumps",
)  # fmt: skip
not_affine(
    "reciprocal", "square", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10",
    "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh",
    "acosh", "atanh", "erf", "erfc", "erfinv", "sinc", "logit", "float_power", "hypot",
    "logaddexp", "xlogy", "special_erf", "special_erfc", "special_entr", "special_log1p",
    "special_expm1", "special_exp2", "special_sinc", "special_xlogy", "special_i0", "polar",
    "lgamma", "digamma", "outer", "cross", "dot", "kron", "tensordot", "chain_matmul",
)  # fmt: skip
