"""Pieces of units of piecewise-affine operations, and where between points they change.

Three kinds cover all operations: units with kinks, groups whose largest member is the output, and
groups that are sorted. A value within the noise counts as zero: a unit that is zero at a point
bends there, if at all, and a segment inside a unit's boundary has no crossings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import noise_of

Crossings = tuple[Tensor, Tensor]
"""Positions between points: index (m,) of the point to the left, and fraction (m,) in (0, 1)."""


@dataclass(frozen=True)
class Kinks:
    """Units that each bend where a value passes one of several numbers.

    Parameters
    ----------
    value : callable
        Maps the inputs at P points to those values, (P, ...).
    numbers : sequence of float
        The kinks.
    error : callable, optional
        Maps the inputs and their bounds to the bound of the values; by default the first input's.
    """

    value: Callable[[Sequence[Tensor]], Tensor]
    numbers: Sequence[float] = (0.0,)
    error: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = lambda inputs, bounds: bounds[0]

    def distances(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the distances from each kink, (P, ...)."""
        value = self.value(inputs)
        return [value - number if number else value for number in self.numbers]

    def noises(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        """Return the magnitudes below which the distances count as zero."""
        noise, error = noise_of(inputs[0].dtype), self.error(inputs, bounds)
        return [noise * (error + abs(number)) for number in self.numbers]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return the pieces that units may be on, (pieces, P, ...); see `changes`."""
        pairs = list(zip(self.distances(inputs), self.noises(inputs, bounds), strict=True))
        below = torch.stack([margin < -noise for margin, noise in pairs], 1)
        above = torch.stack([margin > noise for margin, noise in pairs], 1)
        return torch.stack([below, above]).logical_not_()


@dataclass(frozen=True)
class Leaders:
    """Groups of units whose maximum is the output.

    Parameters
    ----------
    lead : callable
        Maps the inputs at P points to the positions (P, rows, groups) of the leaders, int64, and
        to the values (P, rows, positions).
    members : callable
        Maps the inputs at P points to the members (P, rows, groups, members) of each group. It is
        also applied to rates of change.
    tied : callable
        Maps the inputs and their bounds to a mask of the members that may be the largest, all
        members, and the noise of their distances from the largest (each axis of full size or 1).
    output : callable
        Maps the maxima, (P, rows, groups), to the call's output.
    """

    lead: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    members: Callable[[Sequence[Tensor]], Tensor]
    tied: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor], Tensor]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return the pieces that units may be on, (pieces, P, ...); see `changes`."""
        return self.tied(inputs, bounds)[0].movedim(-1, 0)


@dataclass(frozen=True)
class Ranks:
    """Groups of units that are sorted; the output is the values at some ranks.

    Parameters
    ----------
    lines : callable
        Maps the inputs at P points to (P, groups, units). It is also applied to bounds.
    ranks : sequence of int
        Ranks in the output; 0 is the largest.
    output : callable
        Maps values (P, groups, ranks) to the call's output.
    """

    lines: Callable[[Sequence[Tensor]], Tensor]
    ranks: Sequence[int]
    output: Callable[[Tensor], Tensor] = lambda by_rank: by_rank

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return the units that may have each rank, (units, P, groups, ranks); see `changes`."""
        x = self.lines(inputs)
        error = self.lines([b.expand_as(x) for x, b in zip(inputs, bounds, strict=True)])
        error = noise_of(x.dtype) * error
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., self.ranks]
        distance = (x[..., None, :] - x.gather(-1, owner)[..., None]).abs()
        near = distance <= error[..., None, :] + error.gather(-1, owner)[..., None]
        return near.movedim(-1, 0)


Pieces = Kinks | Leaders | Ranks


def changes(pieces: Pieces, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
    """Return True between neighbouring samples where some unit changes its piece: (P - 1,).

    Rounding may leave several pieces possible for a unit. A unit changes where no piece is possible
    at both samples. If a sample lies on a boundary, its neighbours are compared and the change is
    placed after it.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [0.0], [-1.0], [-1.0]])
    >>> changes(Kinks(lambda inputs: inputs[0]), [x], [torch.zeros(5, 1)]).tolist()
    [False, False, True, False]
    """
    possible = pieces.possible(inputs, bounds)

    def differ(by: int) -> Tensor:
        return ~(possible[:, :-by] & possible[:, by:]).any(0)

    changed = differ(1)
    if possible.shape[1] > 2:
        changed[1:] |= differ(2) & ~changed[:-1] & ~changed[1:]
    return changed[:, None].flatten(1).any(1)


def unit_crossings(margin: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find which units pass through zero, and where.

    Parameters
    ----------
    margin : tensor of shape (P, ...), P at least 2
        Affine between neighbouring points.
    noise : tensor of shape (P, ...), each axis of full size or 1
        Magnitude up to which a margin counts as zero.

    Returns
    -------
    interval, unit, fraction : tensor of shape (m,)
        The unit is an index into the flattened margins of a point.
    """
    above, below = margin > noise, margin < -noise
    crosses = (above[:-1] & below[1:]).logical_or_(below[:-1] & above[1:])
    interval, unit = crosses[:, None].flatten(1).nonzero().unbind(1)
    flat = margin[:, None].flatten(1)
    left, right = flat[interval, unit].double(), flat[interval + 1, unit].double()
    return interval, unit, left / (left - right)
