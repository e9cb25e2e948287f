"""Activations with a known amount of nonlinearity that the probes recognise as sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nlbench import register_op

Curve: TypeAlias = Callable[[Tensor, float], tuple[Tensor, Tensor]]


def _blend(curve: Curve) -> Curve:
    """Return (1 - t) x + t φ(x) for the amount t, and its derivative."""

    def blended(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        value, slope = curve(x, 1.0)
        return torch.lerp(x, value, t), 1 - t + t * slope

    return blended


def _swish(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    gate = (beta * x).sigmoid()
    return x * gate, gate * (1 + beta * x * (1 - gate))


def _gelu(x: Tensor, _: float) -> tuple[Tensor, Tensor]:
    fraction = torch.special.ndtr(x)
    return x * fraction, fraction + x * (-x.square() / 2).exp() / math.sqrt(2 * math.pi)


def _tanh(x: Tensor, _: float) -> tuple[Tensor, Tensor]:
    value = x.tanh()
    return value, 1 - value.square()


def _clip(upper: float) -> Curve:
    """Return the curve of x clipped to [0, upper]."""

    def clip(x: Tensor, _: float) -> tuple[Tensor, Tensor]:
        return x.clamp(0, upper), ((x > 0) & (x < upper)).to(x)

    return clip


def _hermite(x: Tensor, degree: float) -> tuple[Tensor, Tensor]:
    """Return He_k(x) / √k!, which has unit variance for normal inputs, and its derivative."""
    before = torch.zeros_like(x)
    value = torch.ones_like(x)
    for k in range(int(degree)):
        before, value = value, x * value - k * before
    scale = math.sqrt(math.factorial(int(degree)))
    return value / scale, degree * before / scale


def _cubic(x: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return √(1 - s) x + √s He₃(x) / √6, which has the affine residual s, and its derivative."""
    value, slope = _hermite(x, 3)
    affine = math.sqrt(1 - fraction)
    cubic = math.sqrt(fraction)
    return affine * x + cubic * value, affine + cubic * slope


def _wiggle(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return (3 - 2t) x + t sin(10x) / 5, which gets less steep as it bends, and its derivative."""
    return (3 - 2 * t) * x + t * (10 * x).sin() / 5, 3 - 2 * t + 2 * t * (10 * x).cos()


def _tent(x: Tensor, times: float) -> tuple[Tensor, Tensor]:
    """Return the n-times iterated tent map on [0, 1], with 2ⁿ pieces, and its derivative."""
    phase = x * 2 ** (times - 1)
    falls = phase.frac() >= 0.5
    return 2 * (phase - phase.round()).abs(), torch.where(falls, -(2**times), 2.0**times).to(x)


def _power(x: Tensor, order: float) -> tuple[Tensor, Tensor]:
    return x ** int(order), order * x ** (int(order) - 1)


FORMULAS: Mapping[str, Curve] = {
    "relu": _blend(_clip(math.inf)),
    "relu6": _blend(_clip(6.0)),
    "gelu": _blend(_gelu),
    "silu": _blend(_swish),
    "tanh": _blend(_tanh),
    "swish": _swish,
    "degree": _hermite,
    "cubic": _cubic,
    "tent": _tent,
    "wiggle": _wiggle,
    "power": _power,
    "negation": lambda x, _: (-x, -torch.ones_like(x)),
}
"""Elementwise functions by name; each returns its value and derivative, given an amount."""


class _Formula(torch.autograd.Function):
    # A single autograd operation, so that the probes see one activation instead of its parts.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str, amount: float) -> Tensor:
        return FORMULAS[name](x, amount)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, float], output: Tensor) -> None:
        x, *ctx.formula = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Formula.jvp(ctx, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (x,), (name, amount) = ctx.saved_tensors, ctx.formula
        return tangent * FORMULAS[name](x, amount)[1]


class _LinearMap(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return gradient @ matrix.T, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (matrix,) = ctx.saved_tensors
        return tangent @ matrix


class _SampleShift(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.roll(1, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing, since there is no backward pass."""


class Formula(nn.Module):
    """Elementwise activation with a known amount of nonlinearity.

    Examples
    --------
    >>> Formula("tent", 1)(torch.tensor([0.0, 0.25, 0.5, 1.0])).tolist()
    [0.0, 0.5, 1.0, 0.0]
    """

    def __init__(self, name: str, amount: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        """Apply the formula."""
        return _Formula.apply(x, self.name, self.amount)


class LinearMap(nn.Module):
    """Activation that is a linear map of the channels: a rotation or a permutation."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the matrix."""
        return _LinearMap.apply(x, self.matrix)


class SampleShift(nn.Module):
    """Activation that returns the previous sample's input, independent of the sample's own.

    Examples
    --------
    >>> SampleShift()(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [3.0, 1.0, 2.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Shift the inputs by one sample."""
        return _SampleShift.apply(x)


register_op(_Formula, kind="formula", modules=(Formula,))
register_op(_LinearMap, kind="map", modules=(LinearMap,))
register_op(_SampleShift, kind="shuffled", modules=(SampleShift,))
