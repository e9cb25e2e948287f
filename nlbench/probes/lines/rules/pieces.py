"""Affine pieces of the units of an operation, and the positions at which units change piece.

Three classes cover all operations: units with kinks, groups whose maximum is the output, and groups
that are sorted. Values within rounding error count as zero. A unit that is zero at a point can only
bend at that point, and a segment that lies in a unit's boundary has no crossings.

Where the inputs are affine, a maximum is the upper envelope of lines. It bends where another line
becomes the largest; `overtakes` finds these positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .rounding import tolerance_factor

Crossings = tuple[Tensor, Tensor]
"""Positions between points: index (m,) of the point to the left, and fraction (m,) in (0, 1)."""


class UnitPieces(Protocol):
    """Pieces of the units of an operation."""

    def find_breakpoints(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        """Return where the output bends if the inputs are affine between neighbouring points."""

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the pieces that each unit may be on, (pieces, P, ...). See `changes`."""


@dataclass(frozen=True)
class Kinks:
    """Units whose slope changes where their value crosses one of several thresholds."""

    # Maps the inputs at P points to the values of the units, (P, ...).
    value: Callable[[Sequence[Tensor]], Tensor]
    thresholds: Sequence[float] = (0.0,)  # values at which the slope changes
    # Maps the inputs and their error bounds to the error bound of the values; by default the bound
    # of the first input.
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
        return tolerance_factor(error.dtype) * (error + abs(threshold) if threshold else error)

    def find_breakpoints(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        """Return the crossings of all thresholds."""
        error = self.error(inputs, bounds)
        intervals = []
        fractions = []
        for threshold, margin in zip(self.thresholds, self.distances(inputs), strict=True):
            tolerance = functools.partial(self.tolerance, threshold=threshold)
            interval, _, fraction = unit_crossings(margin, error, tolerance)
            intervals.append(interval)
            fractions.append(fraction)
        return torch.cat(intervals), torch.cat(fractions)

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the pieces that each unit may be on, (pieces, P, ...). See `changes`."""
        pairs = list(zip(self.distances(inputs), self.tolerances(inputs, bounds), strict=True))
        below = torch.stack([margin < -tolerance for margin, tolerance in pairs], 1)
        above = torch.stack([margin > tolerance for margin, tolerance in pairs], 1)
        return torch.stack([below, above]).logical_not_()


@dataclass(frozen=True)
class MaxGroups:
    """Windows of units whose maximum is the output."""

    # Maps the input at P points to its values or their negatives, (P, ..., positions). It is also
    # applied to rates of change and to error bounds.
    lines: Callable[[Tensor], Tensor]
    # Returns the positions in each window, (windows, members), on a device.
    windows_on: Callable[[torch.device], Tensor]
    output: Callable[[Tensor], Tensor]  # maps the maxima, (P, rows, windows), to the call's output
    # Number of last axes that pooling flattens into positions; 0 for other maxima.
    pooled_axes: int = 0
    # Faster implementation of `argmax`.
    fast_argmax: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def argmax(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the position of each window's largest member, and the values that it indexes.

        The shapes are (P, rows, windows), int64, and (P, rows, positions).
        """
        if self.fast_argmax is not None:
            return self.fast_argmax(inputs[0])
        x = self.lines(inputs[0])
        x = x.reshape(len(x), -1, x.shape[-1])
        windows = self.windows_on(x.device)
        first = x[:, :, windows].argmax(-1, keepdim=True)
        return windows.expand(*first.shape[:-1], -1).gather(-1, first).squeeze(-1), x

    def members(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the members of each window, (P, rows, windows, members)."""
        return self._members(self.lines(inputs[0]))

    def tied(
        self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Find the largest members of each window, including ties: (P, rows, windows, members).

        Return where they are, the members, and the tolerance of each member's distance from the
        largest, which is the larger of their tolerances.
        """
        x = inputs[0]
        tolerance = self._members(tolerance_factor(x.dtype) * self._line_bounds(x, bounds[0]))
        members = self.members(inputs)
        if tolerance.shape[-1] > 1:
            largest = members.argmax(-1, keepdim=True)
            tolerance = torch.maximum(tolerance, tolerance.expand_as(members).gather(-1, largest))
        return members >= members.amax(-1, keepdim=True) - tolerance, members, tolerance

    def find_breakpoints(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        """Return where the largest member of a window changes."""
        top, members, _ = self.tied(inputs, bounds)
        top = top.flatten(1, 2)
        members = members.flatten(1, 2)
        # A member that is largest at both points is also largest between them: a maximum is convex.
        changed = ~(top[:-1] & top[1:]).any(-1)
        interval, window = changed.nonzero().unbind(1)
        fraction, line = overtakes(
            members[interval, window],
            members[interval + 1, window],
            top[interval, window],
            top[interval + 1, window],
        )
        return interval[line], fraction

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the pieces that each unit may be on, (pieces, P, ...). See `changes`."""
        return self.tied(inputs, bounds)[0].movedim(-1, 0)

    def bound(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        """Return the output's error bound, that of the largest member of each window."""
        errors = self._line_bounds(inputs[0], bounds[0])
        if errors.shape[-1] == 1 and bounds[0].ndim == output.ndim:
            return bounds[0]
        members = self.members(inputs)
        values = self._members(errors).expand_as(members)
        largest = values.gather(-1, members.argmax(-1, keepdim=True)).squeeze(-1)
        return self.output(largest).abs()

    def _line_bounds(self, x: Tensor, bound: Tensor) -> Tensor:
        """Return the bounds in the layout of the lines, one per channel or per position."""
        axes = self.pooled_axes
        if axes and bound.ndim == x.ndim and all(size == 1 for size in bound.shape[-axes:]):
            return bound.expand(*x.shape[:-axes], *bound.shape[-axes:]).flatten(-axes)
        return self.lines(bound.expand_as(x)).abs()

    def _members(self, lines: Tensor) -> Tensor:
        """Return the window members (P, rows, windows, members). 1 × 1 for a single position."""
        x = lines.reshape(len(lines), -1, lines.shape[-1])
        return x[..., None] if x.shape[-1] == 1 else x[:, :, self.windows_on(x.device)]


@dataclass(frozen=True)
class Ranks:
    """Groups of units that are sorted. The output consists of the values at certain ranks."""

    # Maps the inputs at P points to the values to sort, (P, groups, units). It is also applied to
    # error bounds.
    groups: Callable[[Sequence[Tensor]], Tensor]
    ranks: Sequence[int]  # ranks in the output; 0 is the largest
    # Maps values (P, groups, ranks) to the call's output.
    output: Callable[[Tensor], Tensor] = lambda by_rank: by_rank

    def find_breakpoints(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Crossings:
        """Return where two units swap ranks and a rank in the output is one of theirs."""
        x = self.groups(inputs)
        error = self._tolerance(inputs, bounds)
        size = x.shape[-1]
        first, second = _pairs(size, x.device)
        margin = x[..., first] - x[..., second]
        uncertain = torch.hypot(error[..., first], error[..., second])
        interval, unit, fraction = unit_crossings(margin, uncertain)
        group = unit // len(first)
        pair = unit % len(first)
        left = x[interval, group]
        right = x[interval + 1, group]
        end_error = torch.maximum(error[interval, group], error[interval + 1, group])
        lines = torch.stack([first[pair], second[pair]], 1)
        used = torch.zeros(size + 1, dtype=torch.int64)
        used[1:].index_fill_(0, torch.tensor(self.ranks, dtype=torch.int64), 1)
        used = used.cumsum(0).to(x.device)
        breakpoints, fraction = _rank_changes(left, right, end_error, lines, fraction, used)
        return interval[breakpoints], fraction[breakpoints]

    def possible(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        """Return a mask of the units that may have each rank, (units, P, groups, ranks)."""
        x = self.groups(inputs)
        error = self._tolerance(inputs, bounds)
        units = self._units_at_ranks(x)
        distance = (x[..., None, :] - x.gather(-1, units)[..., None]).abs()
        near = distance <= error[..., None, :] + error.gather(-1, units)[..., None]
        return near.movedim(-1, 0)

    def bound(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor], output: Tensor) -> Tensor:
        """Return the output's error bound, that of the unit at each rank."""
        error = self.groups([b.expand_as(x) for x, b in zip(inputs, bounds, strict=True)])
        return self.output(error.gather(-1, self._units_at_ranks(self.groups(inputs))))

    def _units_at_ranks(self, x: Tensor) -> Tensor:
        """Return the unit at each rank in the output, (P, groups, ranks)."""
        return x.argsort(dim=-1, descending=True, stable=True)[..., self.ranks]

    def _tolerance(self, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
        error = self.groups([b.expand_as(x) for x, b in zip(inputs, bounds, strict=True)])
        return tolerance_factor(error.dtype) * error


KnownPieces = Kinks | MaxGroups | Ranks
"""Pieces that estimates and adaptive traces distinguish."""


@functools.cache
def _pairs(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.combinations(torch.arange(size), 2).to(device).unbind(1)
    return first, second


def changes(pieces: UnitPieces, inputs: Sequence[Tensor], bounds: Sequence[Tensor]) -> Tensor:
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

    The margins (P, ...) are affine between neighbouring points. The tolerance maps their errors to
    the magnitudes up to which a margin counts as zero. Return the interval, the unit as an index
    into the flattened margins of a point, and the fraction of each crossing.
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


def _rank_changes(
    left: Tensor, right: Tensor, error: Tensor, pair: Tensor, fraction: Tensor, used: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the crossings of two of k lines that change which line is at a rank in the output.

    Where several lines meet at a point, lines with smaller slopes rank above a given line before
    the point, and lines with larger slopes after it. Lines that coincide share their ranks.

    For each crossing, `left` and `right` (m, k) are the values at 0 and at 1 of the lines around
    it, `pair` the two that cross and `fraction` its position; `used` (k + 1,) is the number of
    output ranks that are less than 0, 1, …, k. Return where the output bends, and the position,
    which is equal for all pairs of lines that meet at one point.
    """
    at = torch.lerp(left, right, fraction[:, None].to(left.dtype))
    slope = right - left
    level = at.gather(1, pair).mean(1, keepdim=True)
    rise = slope.gather(1, pair).diff(dim=1).abs()
    # The uncertainty of the position is the tolerance of both lines over their difference in slope.
    tolerance = error + error.gather(1, pair).sum(1, keepdim=True)
    off = (slope - slope.gather(1, pair[:, :1])).abs()
    tied = (at - level).abs() <= tolerance * (1 + off / rise)
    tied.scatter_(1, pair, True)
    above = ((at > level) & ~tied).sum(1)
    breakpoints = torch.zeros_like(above, dtype=torch.bool)
    for line in pair.unbind(1):
        rates = slope.gather(1, line[:, None])
        equal = 2 * (error + error.gather(1, line[:, None]))
        smaller = (tied & (slope < rates - equal)).sum(1)
        larger = (tied & (slope > rates + equal)).sum(1)
        coinciding = tied.sum(1) - smaller - larger
        before = above + smaller
        after = above + larger
        # Check for a used rank that the line has before the crossing but not after it.
        common = torch.maximum(before, after)
        common_end = torch.maximum(torch.minimum(before, after) + coinciding, common)
        breakpoints |= used[before + coinciding] - used[before] > used[common_end] - used[common]
    lowest = slope.masked_fill(~tied, math.inf).argmin(1, keepdim=True)
    steepest = slope.masked_fill(~tied, -math.inf).argmax(1, keepdim=True)
    start, end = (
        (x.gather(1, lowest) - x.gather(1, steepest)).squeeze(1).double() for x in (left, right)
    )
    return breakpoints, start / (start - end)


def overtakes(left: Tensor, right: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the upper envelopes of lines on [0, 1] bend, and the envelope of each position.

    `left` and `right` (n, k) are the values at 0 and at 1 of k lines, for each of n envelopes.
    `first` and `last` mark the lines that count as the largest there.

    Examples
    --------
    >>> left, right = torch.tensor([[1.0, 0.75, 0.0]]), torch.tensor([[0.0, 0.75, 1.0]])
    >>> overtakes(left, right, left == 1, right == 1)[0]
    tensor([0.2500, 0.7500])
    """
    slope = right - left
    current = slope.masked_fill(~first, -math.inf).argmax(-1, keepdim=True)
    position = torch.zeros_like(left[:, :1])
    row = torch.arange(len(left), device=left.device)
    if left.is_cuda and 1 < left.shape[1] <= MAX_GPU_LINES:
        return _overtakes_on_gpu(left, slope, last, current)
    breakpoints: list[tuple[Tensor, Tensor]] = []
    while True:
        active = (~last.gather(1, current).squeeze(1)).nonzero().squeeze(1)
        left = left[active]
        slope = slope[active]
        last = last[active]
        current = current[active]
        position = position[active]
        row = row[active]
        if not len(row):
            break
        current, position = _next(left, slope, current, position)
        inside = (position.squeeze(1) < 1).nonzero().squeeze(1)
        left = left[inside]
        slope = slope[inside]
        last = last[inside]
        current = current[inside]
        position = position[inside]
        row = row[inside]
        breakpoints.append((position.squeeze(1), row))
    if not breakpoints:
        return left.new_zeros(0), row
    return torch.cat([fraction for fraction, _ in breakpoints]), torch.cat(
        [row for _, row in breakpoints]
    )


MAX_GPU_LINES = 16
"""Maximum number of lines for which a GPU follows all envelopes to the end, since dropping finished
ones would require a synchronisation at each bend."""


def _overtakes_on_gpu(
    left: Tensor, slope: Tensor, last: Tensor, current: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `overtakes` with one synchronisation. K lines have fewer than k bends."""
    position = torch.zeros_like(left[:, :1])
    active = ~last.gather(1, current).squeeze(1)
    positions = []
    breakpoints = []
    for _ in range(left.shape[1] - 1):
        current, position = _next(left, slope, current, position)
        active &= position.squeeze(1) < 1
        positions.append(position.squeeze(1))
        breakpoints.append(active)
        active = active & ~last.gather(1, current).squeeze(1)
    step, row = torch.stack(breakpoints).nonzero().unbind(1)
    return torch.stack(positions)[step, row], row


def _next(left: Tensor, slope: Tensor, current: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the line that overtakes the current one next, and the position."""
    rise = slope - slope.gather(1, current)
    gap = left.gather(1, current) - left
    meeting = torch.where(rise > 0, gap / rise, math.inf).maximum(position)
    position = meeting.amin(-1, keepdim=True)
    steepest = slope.masked_fill(meeting > position, -math.inf)
    return steepest.argmax(-1, keepdim=True), position
