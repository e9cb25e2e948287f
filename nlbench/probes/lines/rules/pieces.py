"""Affine pieces of the units of an operation, and the positions at which units change piece.

Three classes cover all operations: units with kinks, groups whose maximum is the output, and groups
that are sorted. Values within rounding error count as zero. A unit that is zero at a point can only
bend at that point, and a segment that lies in a unit's boundary has no crossings.
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
    """Units whose slope changes where their value crosses one of several thresholds.

    Parameters
    ----------
    value : callable
        Maps the inputs at P points to the values of the units, (P, ...).
    thresholds : sequence of float
        Values at which the slope changes.
    error : callable, optional
        Maps the inputs and their error bounds to the error bound of the values; by default the
        bound of the first input.
    """

    value: Callable[[Sequence[Tensor]], Tensor]
    thresholds: Sequence[float] = (0.0,)
    error: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = lambda inputs, bounds: bounds[0]

    def distances(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the signed distances from each threshold, (P, ...)."""
        value = self.value(inputs)
        return [value - threshold if threshold else value for threshold in self.thresholds]

    def tolerances(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[Tensor]:
        """Return the magnitudes below which the distances count as zero."""
        error = self.error(inputs, bounds)
        return [self.tolerance(error, threshold) for threshold in self.thresholds]

    @staticmethod
    def tolerance(error: Tensor, threshold: float) -> Tensor:
        """Return the magnitudes below which distances from a threshold count as zero."""
        return noise_of(error.dtype) * (error + abs(threshold) if threshold else error)

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the pieces that each unit may be on, (pieces, P, ...); see `changes`."""
        pairs = list(zip(self.distances(inputs), self.tolerances(inputs, bounds), strict=True))
        below = torch.stack([margin < -tolerance for margin, tolerance in pairs], 1)
        above = torch.stack([margin > tolerance for margin, tolerance in pairs], 1)
        return torch.stack([below, above]).logical_not_()


@dataclass(frozen=True)
class MaxGroups:
    """Groups of units whose maximum is the output.

    Parameters
    ----------
    argmax : callable
        Maps the inputs at P points to the position of the largest member of each group, int64
        (P, rows, groups), and the values (P, rows, positions) that it indexes.
    members : callable
        Maps the inputs at P points to the members (P, rows, groups, members) of each group. It is
        also applied to rates of change.
    tied : callable
        Maps the inputs and their bounds to a mask of the members that may be the largest, the
        members, and the tolerance for their distances from the largest, broadcastable to them.
    output : callable
        Maps the maxima, (P, rows, groups), to the call's output.
    """

    argmax: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
    members: Callable[[Sequence[Tensor]], Tensor]
    tied: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor], Tensor]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the pieces that each unit may be on, (pieces, P, ...); see `changes`."""
        return self.tied(inputs, bounds)[0].movedim(-1, 0)


@dataclass(frozen=True)
class Ranks:
    """Groups of units that are sorted; the output consists of the values at certain ranks.

    Parameters
    ----------
    groups : callable
        Maps the inputs at P points to the values to sort, (P, groups, units). It is also applied
        to error bounds.
    ranks : sequence of int
        Ranks in the output; 0 is the largest.
    output : callable
        Maps values (P, groups, ranks) to the call's output.
    """

    groups: Callable[[Sequence[Tensor]], Tensor]
    ranks: Sequence[int]
    output: Callable[[Tensor], Tensor] = lambda by_rank: by_rank

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the units that may have each rank, (units, P, groups, ranks)."""
        x = self.groups(inputs)
        error = self.groups([b.expand_as(x) for x, b in zip(inputs, bounds, strict=True)])
        error = noise_of(x.dtype) * error
        owner = x.argsort(dim=-1, descending=True, stable=True)[..., self.ranks]
        distance = (x[..., None, :] - x.gather(-1, owner)[..., None]).abs()
        near = distance <= error[..., None, :] + error.gather(-1, owner)[..., None]
        return near.movedim(-1, 0)


Pieces = Kinks | MaxGroups | Ranks


def changes(pieces: Pieces, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
    """Return a mask (P - 1,) of the intervals between samples in which some unit changes piece.

    Because of rounding, several pieces may be possible for a unit. A unit changes piece where no
    piece is possible at both samples. If a sample lies on a boundary, its neighbours are compared,
    and the change is assigned to the interval after it.

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


def unit_crossings(
    margin: Tensor, error: Tensor, tolerance: Callable[[Tensor], Tensor] = lambda error: error
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the units that cross zero, and the positions of the crossings.

    Parameters
    ----------
    margin : tensor of shape (P, ...), P at least 2
        Affine between neighbouring points.
    error : tensor, broadcastable to `margin`
    tolerance : callable
        Maps errors (m,) to the magnitudes up to which a margin counts as zero, which are not
        negative; by default the errors themselves.

    Returns
    -------
    interval, unit, fraction : tensor of shape (m,)
        The unit is an index into the flattened margins of a point.
    """
    flat = margin[:, None].flatten(1)
    is_above = (margin > 0)[:, None].flatten(1)
    if margin.is_cuda:
        # Synchronising takes longer than comparing all units.
        is_known = (margin.abs() > tolerance(error))[:, None].flatten(1)
        changes_sign = (is_above[:-1] ^ is_above[1:]) & is_known[:-1] & is_known[1:]
        interval, unit = changes_sign.nonzero().unbind(1)
        left, right = flat[interval, unit].double(), flat[interval + 1, unit].double()
        return interval, unit, left / (left - right)
    # Tolerances are computed for the few units whose sign changes only.
    interval, unit = (is_above[:-1] ^ is_above[1:]).nonzero().unbind(1)
    error = error.expand(len(margin), *error.shape[1:])
    errors = error[:, None].flatten(1)
    # Errors are often shared by positions, so they are not expanded.
    place = unit
    if errors.shape[1] != flat.shape[1]:
        indices = torch.arange(errors.shape[1], device=error.device)
        shared = indices.reshape(1, *error.shape[1:]).expand(1, *margin.shape[1:])
        place = shared.flatten()[unit]
    left, right = flat[interval, unit], flat[interval + 1, unit]
    is_known = (left.abs() > tolerance(errors[interval, place])).logical_and_(
        right.abs() > tolerance(errors[interval + 1, place])
    )
    if not bool(is_known.all()):
        known = is_known.nonzero().squeeze(1)
        interval, unit, left, right = (x[known] for x in (interval, unit, left, right))
    left, right = left.double(), right.double()
    return interval, unit, left / (left - right)
