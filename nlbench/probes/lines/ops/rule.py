"""What a recorded call does to many points at once, and where it bends.

A rule is applied to points of a segment: the leading axis of a recorded tensor, of
size 1, becomes the axis of points. Beside each tensor travels a bound on the size of
the terms it was summed from (axes as the tensor's, each of full size or 1). Rounding
errors are proportional to it, so it says which pre-activations can't be told from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Apply",
    "Bound",
    "Call",
    "Crossings",
    "Front",
    "Input",
    "Margin",
    "NotAffine",
    "Rule",
    "carried",
    "collapsed",
    "constant_size",
    "kept",
    "measured",
    "noise_of",
    "peak",
    "sign_changes",
    "single",
]


Crossings = tuple[Tensor, Tensor]
"""Between which points, and where: (m,) index of the left point, (m,) share in (0, 1)."""

Apply = Callable[[Sequence[Tensor]], Tensor]
Bound = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]
Bend = Callable[[Sequence[Tensor], Sequence[Tensor]], Crossings]

Land = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
Differ = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

# A sum of n products has an error of at most n eps/2 times the bound, typically of
# sqrt(n) eps/2 or less, as products are summed in blocks; what the terms inherit from
# the layers before is a few eps more. In single precision that would hide a good part of
# the crossings, as a region is short beside it: there it is less than rounding may do, a
# balance between regions missed and regions made of noise (measured in docs/how-it-works.md).
_NOISE = {
    torch.float64: 16 * torch.finfo(torch.float64).eps,
    torch.float32: torch.finfo(torch.float32).eps / 16,
}


def noise_of(dtype: torch.dtype) -> float:
    """Give the share of a bound up to which a value can't be told from zero."""
    return _NOISE[dtype]


class NotAffine(Exception):
    """Why a call has no rule; the recorder adds where it is."""


@dataclass(frozen=True)
class Input:
    """Stands in a call's arguments for its traced tensor number `index`."""

    index: int


@dataclass(frozen=True)
class Call:
    """One recorded call.

    Parameters
    ----------
    name : str
        Of the operation, without overload and without the underscore of its in-place form.
    function : callable
        The out-of-place operation.
    args, kwargs
        With `Input` in place of traced tensors.
    shapes : tuple of tuple of int
        Of the traced tensors, each with the leading axis of 1.
    shape : tuple of int
        Of the result, with the leading axis of 1.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Give an argument that may have been passed by position or by name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def apply(self, points: Sequence[Tensor]) -> Any:
        """Run the call on other tensors."""
        args = [_filled(a, points) for a in self.args]
        kwargs = {name: _filled(a, points) for name, a in self.kwargs.items()}
        return self.function(*args, **kwargs)


def _filled(argument: Any, points: Sequence[Tensor]) -> Any:
    if isinstance(argument, Input):
        return points[argument.index]
    if isinstance(argument, (list, tuple)):
        return [_filled(a, points) for a in argument]
    return argument


@dataclass(frozen=True)
class Margin:
    """What must pass through zero for a unit to bend, at points that move.

    Parameters
    ----------
    value, rate : tensor of shape (P, ...)
        The margin, and by how much it changes as t does by 1.
    noise : tensor of shape (P, ...), each axis of full size or 1
        Magnitude up to which the value can't be told from zero.
    """

    value: Tensor
    rate: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Front:
    """What a call makes of points that move: (P, ...) each, and the margins of its units."""

    value: Tensor
    rate: Tensor
    margins: Sequence[Margin]


Advance = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], "Front"
]


@dataclass(frozen=True)
class Rule:
    """How a call acts on points.

    Parameters
    ----------
    apply : callable
        From the inputs at P points, each (P, ...), to the output there.
    bound : callable
        From inputs, their bounds and the output to the output's bound.
    bend : callable, optional
        From inputs and their bounds to the places where the output bends, given
        that the inputs are affine between neighbouring points. None: it is affine.
    land : callable, optional
        From inputs and their bounds to the output, as `apply`, but inputs that can't
        be told from a kink are on it. At a breakpoint a unit is zero but for rounding;
        were that passed on where all other units are off, the next layer would see
        signs in the noise.
    advance : callable, optional
        From inputs, their rates, the bounds of either, to the `Front`. Where a unit is on
        a kink it counts as where it is heading.
    workspace : int
        Numbers a point that `apply` or `bend` need beside inputs and output, if many.
    reserve : int
        The same, however many points.
    differ : callable, optional
        From inputs and their bounds to a bool for each two neighbouring points, whether
        some unit is on another piece.
    """

    apply: Apply
    bound: Bound
    bend: Bend | None = None
    land: Land | None = None
    advance: Advance | None = None
    differ: Differ | None = None
    workspace: int = 0
    reserve: int = 0


def peak(x: Tensor) -> Tensor:
    """Give the largest magnitude at each point, (P, 1, ...); NaN if there is one."""
    flat = x.reshape(len(x), -1)
    if flat.shape[1] == 0:
        return x.new_zeros((len(x),) + (1,) * (x.ndim - 1))
    return torch.maximum(flat.amax(1), -flat.amin(1)).reshape((len(x),) + (1,) * (x.ndim - 1))


def sign_changes(margin: Tensor, noise: Tensor) -> Crossings:
    """Find where units pass through zero.

    A value within the noise counts as zero: a unit that is zero at a point bends
    there, if at all, and a segment inside a unit's boundary has no crossings.

    Parameters
    ----------
    margin : tensor of shape (P, ...), P at least 2
        Affine between neighbouring points.
    noise : tensor of shape (P, ...), each axis of full size or 1
        Magnitude up to which a margin can't be told from zero.
    """
    above = margin > noise
    interval, unit = _places((above[:-1] ^ above[1:]).reshape(len(above) - 1, -1))
    flat = margin.reshape(len(margin), -1)
    left, right = flat[interval, unit], flat[interval + 1, unit]
    cell = torch.unravel_index(unit, margin.shape[1:])
    noise = noise.expand_as(margin)
    left, right = left.double(), right.double()
    near, far = noise[(interval, *cell)], noise[(interval + 1, *cell)]
    opposite = ((left > near) & (right < -far)) | ((left < -near) & (right > far))
    interval, left, right = interval[opposite], left[opposite], right[opposite]
    return interval, left / (left - right)


def _places(found: Tensor) -> tuple[Tensor, Tensor]:
    """Give row and column of each True of a bool matrix, row by row."""
    columns, word = found.shape[1], 8
    if columns and columns % word == 0:
        # Few are True. Eight at a time: to look at each costs as much as to compute them.
        words = found.reshape(-1).view(torch.int64).nonzero().squeeze(1)
        hit, bit = found.reshape(-1, word)[words].nonzero().unbind(1)
        flat = words[hit] * word + bit
        return flat // columns, flat % columns
    row, column = found.nonzero().unbind(1)
    return row, column


def collapsed(bounds: Sequence[Tensor], ndim: int) -> Tensor:
    """Give the largest bound of each point, (P, 1, ...) with `ndim` axes."""
    largest = torch.stack([b.reshape(len(b), -1).amax(1) for b in bounds]).amax(0)
    return largest.reshape((-1,) + (1,) * (ndim - 1))


def kept(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Bound of an output that is the input, or its negative."""
    return bounds[0]


def single(bound: Tensor) -> bool:
    """Tell whether a bound is one number a point."""
    return bound[:1].numel() <= 1


def constant_size(constant: Tensor | float, like: Tensor) -> Tensor:
    """Give the bound of a constant beside a tensor: its size, element by element."""
    size = torch.as_tensor(constant, device=like.device).to(like.dtype).abs()
    return size.reshape((1,) * (like.ndim - size.ndim) + tuple(size.shape))


def carried(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Bound of an output that averages its inputs, or repeats them."""
    return collapsed(bounds, output.ndim)


def measured(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
    """Bound of an output that is larger than its inputs: its own size, or theirs."""
    return torch.maximum(collapsed(bounds, output.ndim), peak(output))
