"""Estimates of rounding errors, which distinguish small values from zero.

Each tensor has a bound: an estimate of its rounding error in units of machine epsilon, which is
broadcastable to the tensor and has the same number of axes.

Errors are combined as 2-norms, since the errors of many terms partly cancel. A sum of n products
w x inherits an error of sqrt(Σ (w e)²), and rounding adds √n ε / 2 times the 2-norm of its terms,
which is more than half an epsilon of the sum. Sums of magnitudes would be strict bounds, but would
exceed the values by orders of magnitude within a dozen layers.

For a tensor with positions (pixels or tokens) the bound is one value per channel, the root mean
square over its positions. Values that are zero, such as inactive units, have no error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Bound = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]
"""Maps the inputs of a call, their bounds and its output to the output's bound."""

# Factor by which a true error may exceed its estimate, whose order of magnitude is correct at any
# depth (docs/how-it-works.md). In single precision, regions are short relative to rounding errors,
# so the same factor would hide many crossings; a smaller one balances missed and spurious regions.
_TOLERANCE_PER_BOUND = {
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: torch.finfo(torch.float32).eps / 16,
}
MIN_NONZERO_FRACTION = 1 / 16
"""Minimum fraction of a channel's positions that count as nonzero, if any are."""


def tolerance_factor(dtype: torch.dtype) -> float:
    """Return the factor that converts a bound to the magnitude below which values count as zero."""
    return _TOLERANCE_PER_BOUND[dtype]


def peak(x: Tensor) -> Tensor:
    """Return the largest magnitude at each point, (P, 1, ...). It is NaN if any value is NaN."""
    # Two reductions are 20 times as fast as `aminmax` on a CPU.
    flat = x.reshape(len(x), -1)
    if flat.shape[1] == 0:
        return x.new_zeros((len(x),) + (1,) * (x.ndim - 1))
    return torch.maximum(flat.amax(1), -flat.amin(1)).reshape((len(x),) + (1,) * (x.ndim - 1))


def peak_over(x: Tensor, axes: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return the largest magnitude over the given axes. It is NaN if any value is NaN."""
    if 0 in (x.shape[i] for i in axes):
        return x.abs().sum(list(axes), keepdim=keepdim)
    over = tuple(axes)
    return torch.maximum(x.amax(over, keepdim), x.amin(over, keepdim).neg_())


def largest_bound(bounds: Sequence[Tensor], ndim: int) -> Tensor:
    """Return the largest bound at each point, (P, 1, ...) with `ndim` axes."""
    largest = torch.stack([b.reshape(len(b), -1).amax(1) for b in bounds]).amax(0)
    return largest.reshape((-1,) + (1,) * (ndim - 1))


def root_sum_squares(errors: Sequence[Tensor]) -> Tensor:
    """Return the root of the sum of squares, without overflow or underflow of the squares."""
    return functools.reduce(torch.hypot, errors)


def unchanged(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Return the bound for an output that is the input or its negative."""
    return bounds[0]


def scaled(factor: Tensor | float) -> Bound:
    """Return the bound for an output that is the input times a factor.

    This covers the rounding of the product itself, half an epsilon, since no tensor's error is less
    than about half an epsilon relative to its size.
    """
    return lambda inputs, bounds, output: bounds[0] * factor


def rearranged(apply: Callable[[Sequence[Tensor]], Tensor]) -> Bound:
    """Return the bound for an output that selects, repeats or rearranges its input."""

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        if bounds[0][:1].numel() <= 1:
            return bounds[0].reshape((-1,) + (1,) * (output.ndim - 1))
        return _compact(apply([bounds[0].expand_as(inputs[0])]))

    return bound


def _compact(bound: Tensor) -> Tensor:
    """Reduce expanded axes to size 1."""
    for axis in range(1, bound.ndim):
        if bound.shape[axis] > 1 and bound.stride(axis) == 0:
            bound = bound.narrow(axis, 0, 1)
    return bound


def squared_errors(x: Tensor, bound: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Compute the contribution of each value to the squared error of a sum of `terms` products.

    It consists of the value's error and the rounding of its product. It is divided by the square of
    the returned size, (P, 1, ...), to avoid overflow and underflow.
    """
    axes = list(range(1, x.ndim))
    if not x.numel():
        return torch.zeros_like(x), x.new_ones(len(x), *(1,) * len(axes))
    # A value of zero has no error, and does not contribute to the size.
    inherited = nonzero(x).mul_(bound)
    size = torch.maximum(peak_over(x, axes, True), inherited.amax(axes, keepdim=True))
    size = _clamp_to_normal(size)
    reciprocal = size.reciprocal()  # Products are faster than quotients.
    squares = (x * (math.sqrt(terms) / 2 * reciprocal)).square_()
    return squares.add_(inherited.mul_(reciprocal).square_()), size


def channel_squares(x: Tensor, bound: Tensor, axis: int, terms: int) -> tuple[Tensor, Tensor]:
    """Compute the contribution of each channel to the squared error of a sum of `terms` products.

    Like `squared_errors`, but averaged over all axes except the channel axis `axis`; the results
    have shapes (P, channels) and (P, 1).
    """
    axis %= x.ndim
    others = [i for i in range(1, x.ndim) if i != axis]
    if not others or not x.numel():
        return squared_errors(x.sum(others) if others else x, bound, terms)
    flat = (x if axis == 1 else x.movedim(axis, 1)).flatten(2)
    largest = peak_over(flat, [2])
    # A channel that is zero has no error, and does not contribute to the size.
    inherited = torch.where(largest > 0, bound.amax(others), 0.0)
    size = _clamp_to_normal(torch.maximum(largest, inherited).amax(1, keepdim=True))
    fraction = torch.maximum(_nonzero_fraction(flat), largest.sign().mul_(MIN_NONZERO_FRACTION))
    rounding = (largest * (math.sqrt(terms) / 2 / size)).square_()
    return rounding.addcmul_(fraction, (inherited / size).square_()), size


def _clamp_to_normal(size: Tensor) -> Tensor:
    """Increase sizes whose reciprocal would overflow."""
    floats = torch.finfo(size.dtype)
    return size.clamp(min=floats.tiny / floats.eps)


def nonzero(x: Tensor) -> Tensor:
    """Return 1 for each element that is not zero, and 0 for the others, in the tensor's dtype.

    Multiplying by it takes a fifth of the time of selecting with a bool mask.
    """
    return torch.ne(x, 0, out=torch.empty_like(x))


def _nonzero_fraction(x: Tensor) -> Tensor:
    """Return the fraction of nonzero positions, (P, C), estimated from every third position."""
    # Number of positions from which only every third is counted, since counting is slow.
    if x.shape[2] >= 64:
        x = x[..., ::3]
    # Summing converted bools takes half the time of summing a comparison.
    return x.to(torch.bool).sum(-1, dtype=torch.int32).to(x.dtype) / max(1, x.shape[2])
