"""What a recorded call does to many points at once, where it bends, and what rounding leaves.

A rule is applied to points of a segment: the leading axis of a recorded tensor, of
size 1, becomes the axis of points. Beside each tensor travels an estimate of its rounding
error, in units of the machine's precision (axes as the tensor's, each of full size or 1),
which says which pre-activations can't be told from zero.

Errors are followed by 2-norms, as errors of many terms have many signs: a sum of n products
w x inherits the root of the sum of (w e)², and rounding adds half an epsilon of √n times the
2-norm of its terms, which is more than half an epsilon of the sum. Sums of magnitudes would
be bounds, but outgrow the values by orders of magnitude within a dozen layers. Of a tensor
with positions (an image's, a sentence's) one number a channel is carried, and the mean square
over its positions stands for all, numbers that are zero, as units that are off, having no
error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

__all__ = [
    "Apply",
    "Bound",
    "Crossings",
    "Front",
    "Input",
    "Kinks",
    "Leaders",
    "Margin",
    "NotAffine",
    "Pieces",
    "Ranks",
    "RecordedCall",
    "Rule",
    "changes",
    "channel_squares",
    "collapsed",
    "compact",
    "inner_axis",
    "joined",
    "kept",
    "moved",
    "noise_of",
    "only_first_traced",
    "peak",
    "peaks",
    "scaled",
    "sign_changes",
    "single",
    "squared_errors",
    "unit_crossings",
]


Crossings = tuple[Tensor, Tensor]
"""Between which points, and where: (m,) index of the left point, (m,) share in (0, 1)."""

Apply = Callable[[Sequence[Tensor]], Tensor]
Bound = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]
Bend = Callable[[Sequence[Tensor], Sequence[Tensor]], Crossings]

Land = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

# How many times the estimated error a value can be off; the estimate is of the size of the
# true error, over all depths (docs/how-it-works.md). In single precision that would hide a
# good part of the crossings, as a region is short beside it: there it is less than rounding
# may do, a balance between regions missed and regions made of noise.
_NOISE = {
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: torch.finfo(torch.float32).eps / 16,
}


def noise_of(dtype: torch.dtype) -> float:
    """Give what a bound is multiplied by for the size up to which a value may be zero."""
    return _NOISE[dtype]


class NotAffine(Exception):
    """Why a call has no rule; the recorder adds where it is."""


@dataclass(frozen=True)
class Input:
    """Stands in a call's arguments for its traced tensor number `index`."""

    index: int


@dataclass(frozen=True)
class RecordedCall:
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
class Kinks:
    """Units each of which bends where a value of its own passes a number.

    Parameters
    ----------
    value : callable
        From the inputs at P points to those values, (P, ...).
    numbers : sequence of float
        A unit may rest there for a while.
    error : callable, optional
        From the inputs and their bounds to that of the values; by default the first input's.
    """

    value: Callable[[Sequence[Tensor]], Tensor]
    numbers: Sequence[float] = (0.0,)
    error: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = lambda inputs, bounds: bounds[0]

    def distances(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Give what is zero where units bend, (P, ...) by number."""
        value = self.value(inputs)
        return [value - number if number else value for number in self.numbers]

    def noises(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        """Give up to where a distance can't be told from zero."""
        noise, error = noise_of(inputs[0].dtype), self.error(inputs, bounds)
        return [noise * (error + abs(number)) for number in self.numbers]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """See `changes`."""
        pairs = list(zip(self.distances(inputs), self.noises(inputs, bounds), strict=True))
        below = torch.stack([margin < -noise for margin, noise in pairs], 1)
        above = torch.stack([margin > noise for margin, noise in pairs], 1)
        return torch.stack([below, above]).logical_not_()


@dataclass(frozen=True)
class Leaders:
    """Groups of units of which the largest is passed on.

    Parameters
    ----------
    lead : callable
        From the inputs at P points to positions (P, rows, groups) of the leaders, int64, and to
        the values (P, rows, positions) among which they are.
    possible : callable
        See `changes`.
    """

    lead: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    possible: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Ranks:
    """Groups of units that are put in order, some of which are passed on.

    Parameters
    ----------
    lines : callable
        From the inputs at P points to (P, groups, units); also from their bounds.
    ranks : sequence of int
        Which are passed on; 0 is the largest.
    """

    lines: Callable[[Sequence[Tensor]], Tensor]
    ranks: Sequence[int]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """See `changes`: of each rank that is passed on, who may have it."""
        x = self.lines(inputs)
        error = self.lines([b.expand_as(x) for x, b in zip(inputs, bounds, strict=True)])
        error = noise_of(x.dtype) * error
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., self.ranks]
        apart = (x[..., None, :] - x.gather(-1, owner)[..., None]).abs()
        near = apart <= error[..., None, :] + error.gather(-1, owner)[..., None]
        return near.movedim(-1, 0)


Pieces = Kinks | Leaders | Ranks


def changes(pieces: Pieces, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
    """Tell between which neighbours, of a row of samples, some unit changes to another piece.

    That is where none of the pieces on which it may be at the one, for all that the bounds say,
    is one of those at the other: `possible` of the pieces gives them, a bool tensor of shape
    (pieces, P, ...). Where a sample lies on a boundary its neighbours are compared, and the change
    is taken to be behind it.

    Parameters
    ----------
    pieces : Kinks, Leaders or Ranks
    inputs, bounds
        See `Rule`.

    Returns
    -------
    bool tensor of shape (P - 1,)

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [0.0], [-1.0], [-1.0]])
    >>> changes(Kinks(lambda inputs: inputs[0]), [x], [torch.zeros(5, 1)]).tolist()
    [False, False, True, False]
    """
    possible = pieces.possible(inputs, bounds)

    def apart(by: int) -> Tensor:
        return ~(possible[:, :-by] & possible[:, by:]).any(0)

    found = apart(1)
    if possible.shape[1] > 2:
        found[1:] |= apart(2) & ~found[:-1] & ~found[1:]
    return found[:, None].flatten(1).any(1)


@dataclass(frozen=True)
class Rule:
    """How a call acts on points.

    Parameters
    ----------
    apply : callable
        From the inputs at P points, each (P, ...), to the output there.
    bound : callable
        From inputs, their bounds and the output to the output's bound: its rounding error,
        in units of the precision.
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
    pieces : Kinks, Leaders or Ranks, optional
        How to tell which piece each unit is on, for estimates, samples and checks; None: that
        isn't known.
    direct : callable, optional
        The call as it is, where `apply` is another way to compute it, made for float64.
    """

    apply: Apply
    bound: Bound
    bend: Bend | None = None
    land: Land | None = None
    advance: Advance | None = None
    workspace: int = 0
    reserve: int = 0
    pieces: Pieces | None = None
    direct: Apply | None = None


def peak(x: Tensor) -> Tensor:
    """Give the largest magnitude at each point, (P, 1, ...); NaN if there is one."""
    # Both apart are 20 times as fast as `aminmax` on a CPU.
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
    interval, _, share = unit_crossings(margin, noise)
    return interval, share


def unit_crossings(margin: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find where which units pass through zero; see `sign_changes`.

    Returns
    -------
    interval, unit, share : tensor of shape (m,)
        The unit as an index into those of a point.
    """
    flat, spread = margin[:, None].flatten(1), _by_unit(noise, margin)
    # Each search for what is True makes a GPU's host wait, and a mask is such a search: there all
    # is decided before the only one. A CPU would rather not compare all units, but the few that
    # may have changed sides.
    if margin.is_cuda:
        wide = noise.expand_as(margin)
        found = _opposite(margin[:-1], margin[1:], wide[:-1], wide[1:])
        interval, unit = _places(found[:, None].flatten(1))
        left, right = flat[interval, unit], flat[interval + 1, unit]
    else:
        above = margin > noise
        interval, unit = _places((above[:-1] ^ above[1:])[:, None].flatten(1))
        left, right = flat[interval, unit], flat[interval + 1, unit]
        cell = unit // max(1, flat.shape[1] // max(1, spread.shape[1]))
        found = _opposite(left, right, spread[interval, cell], spread[interval + 1, cell])
        interval, unit, left, right = interval[found], unit[found], left[found], right[found]
    left, right = left.double(), right.double()
    return interval, unit, left / (left - right)


def _by_unit(noise: Tensor, margin: Tensor) -> Tensor:
    """Flatten the noise of units, (P, n): each number is that of as many units in a row."""
    axes = max((i + 1 for i, size in enumerate(noise.shape) if size > 1), default=0)
    if noise.shape[:axes] != margin.shape[:axes] or not axes:
        noise = noise.expand_as(margin)
    return noise[:, None].flatten(1)


def _opposite(left: Tensor, right: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Tell which values lie at both sides of zero, both beyond the noise."""
    return ((left > near) & (right < -far)) | ((left < -near) & (right > far))


def _places(found: Tensor) -> tuple[Tensor, Tensor]:
    """Give row and column of each True of a bool matrix, row by row."""
    columns, word = found.shape[1], 8
    if columns and columns % word == 0 and not found.is_cuda:
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


def only_first_traced(call: RecordedCall, why: str = "its parameters depend on the input") -> None:
    """Refuse a call of which another argument than the first depends on the input."""
    others = (*call.args[1:], *call.kwargs.values())
    if not isinstance(call.args[0], Input) or any(isinstance(a, Input) for a in tree_iter(others)):
        raise NotAffine(why)


def inner_axis(call: RecordedCall, place: int) -> int:
    """Give the axis that a call works along, which may not be that of samples."""
    axis = int(call.argument(place, "dim")) % len(call.shapes[0])
    if axis == 0:
        raise NotAffine("it mixes the samples of a batch")
    return axis


def scaled(factor: Tensor | float) -> Bound:
    """Bound of an output that is the input times a number.

    Rounding, half an epsilon of the product, is in it: no tensor's error is less than about
    half an epsilon of its size.
    """
    return lambda inputs, bounds, output: bounds[0] * factor


def joined(errors: Sequence[Tensor]) -> Tensor:
    """Give the root of the sum of squares; where squares would overflow or vanish, too."""
    return functools.reduce(torch.hypot, errors)


def compact(bound: Tensor) -> Tensor:
    """Shorten axes along which a tensor repeats itself without memory of its own."""
    for axis in range(1, bound.ndim):
        if bound.shape[axis] > 1 and bound.stride(axis) == 0:
            bound = bound.narrow(axis, 0, 1)
    return bound


def moved(apply: Apply) -> Bound:
    """Bound of an output that selects, repeats or rearranges its input: so are the bounds."""

    def bound(inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        if single(bounds[0]):
            return bounds[0].reshape((-1,) + (1,) * (output.ndim - 1))
        return compact(apply([bounds[0].expand_as(inputs[0])]))

    return bound


MANY = 64
"""Positions of which every third is looked at: to count all costs more than the largest."""
SPARSEST = 1 / 16
"""Share of a channel's positions that count at least, if any does."""


def squared_errors(x: Tensor, bound: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Give what each number adds to the squared error of a sum of `terms` products.

    That is what it inherits, together with the rounding of the product that it is in.

    Parameters
    ----------
    x : tensor of shape (P, ...)
    bound : tensor of shape (P, ...), each axis of full size or 1
    terms : int
        How many products are summed.

    Returns
    -------
    squares : tensor of shape (P, ...)
        Over the square of `size`, as squares of small or large numbers would leave the range
        of floats.
    size : tensor of shape (P, 1, ...)
    """
    axes = list(range(1, x.ndim))
    if not x.numel():
        return torch.zeros_like(x), x.new_ones(len(x), *(1,) * len(axes))
    # What is zero has no error, and so no say in the size.
    given = torch.where(x != 0, bound, 0.0)
    size = _not_zero(torch.maximum(peaks(x, axes, True), given.amax(axes, keepdim=True)))
    share = size.reciprocal()  # Products, as quotients take longer.
    squares = (x * (math.sqrt(terms) / 2 * share)).square_()
    return squares.add_(given.mul_(share).square_()), size


def channel_squares(x: Tensor, bound: Tensor, axis: int, terms: int) -> tuple[Tensor, Tensor]:
    """Give what each channel adds to the squared error of a sum of `terms` products.

    As `squared_errors`, but (P, channels) and (P, 1): over all axes but `axis`, that of the
    channels, the mean square stands for all.
    """
    axis %= x.ndim
    others = [i for i in range(1, x.ndim) if i != axis]
    if not others or not x.numel():
        return squared_errors(x.sum(others) if others else x, bound, terms)
    flat = (x if axis == 1 else x.movedim(axis, 1)).flatten(2)
    largest = peaks(flat, [2])
    # A channel that is zero has no error, and so no say in the size.
    given = torch.where(largest > 0, bound.amax(others), 0.0)
    size = _not_zero(torch.maximum(largest, given).amax(1, keepdim=True))
    share = torch.maximum(_share_of_nonzero(flat), largest.sign().mul_(SPARSEST))
    rounding = (largest * (math.sqrt(terms) / 2 / size)).square_()
    return rounding.addcmul_(share, (given / size).square_()), size


def _not_zero(size: Tensor) -> Tensor:
    """Replace what is zero, or so small that its reciprocal is no number."""
    floats = torch.finfo(size.dtype)
    least = floats.tiny / floats.eps
    return torch.where(size > least, size, least)


def _share_of_nonzero(x: Tensor) -> Tensor:
    """Give the share of positions that are not zero, (P, C), of many from every third."""
    if x.shape[2] >= MANY:
        x = x[..., ::3]
    # As bools, by which to add takes half the time of what a comparison gives.
    return x.to(torch.bool).sum(-1, dtype=torch.int32).to(x.dtype) / max(1, x.shape[2])


def peaks(x: Tensor, axes: Sequence[int], keepdim: bool = False) -> Tensor:
    """Give the largest magnitude over some axes; NaN if there is one."""
    if 0 in (x.shape[i] for i in axes):
        return x.abs().sum(list(axes), keepdim=keepdim)
    over = tuple(axes)
    return torch.maximum(x.amax(over, keepdim), x.amin(over, keepdim).neg_())


def single(bound: Tensor) -> bool:
    """Tell whether a bound is one number a point."""
    return bound[:1].numel() <= 1
