"""Activation patterns: the piece that each unit of an operation is on, at many points at once.

There are three kinds of pieces (see `nlbench.probes.lines.rules`). A unit with kinks is above or
below each of them. A max-pooling window has a leader, the position of its largest member. A sorted
unit is or isn't among the k largest. `Margins` represents the first and the last kind, `Windows`
the second. Patterns take one or two bits per unit and are kept after the values are freed.

The side of a unit is unknown if its value is within rounding error of the kink. A unit exactly on
its kink is resting, for example if all its inputs are inactive ReLUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nlbench.probes.lines.rules.pieces import Kinks, MaxGroups, Ranks
from nlbench.probes.lines.rules.rounding import peak

from .bits import equal, greater, pack, popcount

RELATIVE_ROUNDING = {
    torch.float64: 4 * torch.finfo(torch.float64).eps,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
}
"""Rounding error of a value, relative to the largest value in its tensor at the same point.

Measurements gave 0.5 to 3 machine epsilons in networks with up to 64 layers.
"""


@dataclass(frozen=True)
class Margins:
    """Values of units at P points, and the kink with which they are compared.

    Parameters
    ----------
    values : tensor of shape (P, U)
    kink : float
        Value at which a unit changes sides.
    tolerance : tensor of shape (P, 1)
        Distance from the kink below which the side is unknown.
    is_coarse : bool tensor of shape (P, 1), optional
        True where rounding may make a value equal to the kink.
    is_paired : bool
        True if units change sides in pairs, as sorted units do.
    """

    values: Tensor
    kink: float
    tolerance: Tensor
    is_coarse: Tensor | None = None
    is_paired: bool = False

    @cached_property
    def state(self) -> Tensor:
        """Units above and units below the kink, packed into (P, 2, W)."""
        above = greater(self.values, self.kink + self.tolerance)
        below = greater(self.kink - self.tolerance, self.values)
        return torch.stack([pack(above), pack(below)], 1)

    @property
    def resting(self) -> Tensor:
        """Units exactly on the kink, packed into (P, W)."""
        is_equal = equal(self.values, self.kink)
        return pack(is_equal if self.is_coarse is None else is_equal & ~self.is_coarse)

    def changes(self, other: Tensor) -> Tensor:
        """Count the units on a different side than in the states `other` (P, 2, W): (P,)."""
        return popcount(crossed(self.state, other, self.is_paired))


@dataclass
class Windows:
    """Leaders of pooling windows at P points.

    Parameters
    ----------
    state : tensor of shape (P, groups)
        Positions of the leaders, or -1 where a window is resting.
    values : tensor of shape (P, rows, positions)
        Values covered by the windows.
    tolerance : tensor of shape (P, 1)
        Difference below which two values count as equal.
    is_coarse : bool tensor of shape (P,)
        True where the tolerance was increased to the measured rounding error.
    """

    state: Tensor
    values: Tensor
    tolerance: Tensor
    is_coarse: Tensor

    @classmethod
    def of(cls, pieces: MaxGroups, x: Sequence[Tensor], resting_values: Tensor) -> Windows:
        """Find the leaders. A window is resting if its maximum is one of `resting_values`."""
        positions, members = pieces.argmax(x)
        resting = torch.isin(members.gather(2, positions).flatten(1), resting_values)
        fits_int16 = members.shape[2] < 2**15
        lead = positions.flatten(1).to(torch.int16 if fits_int16 else torch.int32)
        tolerance = tie_tolerance(members)
        is_coarse = torch.zeros(len(lead), dtype=torch.bool, device=lead.device)
        return cls(lead.masked_fill_(resting, -1), members, tolerance, is_coarse)

    def has_other_leader(self, other: Tensor) -> Tensor:
        """Return a mask (P, groups) of the windows whose leader in `other` is different."""
        return (self.state != other) & (self.state >= 0) & (other >= 0)

    def leader_values(self, other: Tensor, row: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values, at its own points, of its leaders and of those in `other`."""
        channel = group // (other.shape[1] // self.values.shape[1])
        own_values = self.values[row, channel, self.state[row, group].long()]
        return own_values, self.values[row, channel, other[row, group].long()]

    def changes(self, other: Tensor) -> Tensor:
        """Count the windows whose leader in `other` (P, groups) is different: (P,)."""
        row, group = self.has_other_leader(other).nonzero().unbind(1)
        own_values, other_values = self.leader_values(other, row, group)
        differs = own_values - other_values > self.tolerance.flatten()[row]
        return torch.bincount(row[differs], minlength=len(other))

    def keep_leaders(self, before: Tensor, rows: slice) -> Tensor:
        """Keep previous leaders that are tied with the new ones. Return their number per row."""
        lead = self.state[rows]
        values = self.values[rows]
        tied = value_at(values, before) >= value_at(values, lead) - self.tolerance[rows]
        tied &= (before >= 0) & (lead >= 0)
        self.state[rows] = torch.where(tied, before, lead)
        return (tied & (before != lead)).sum(1)


def value_at(members: Tensor, lead: Tensor) -> Tensor:
    """Return the values (P, groups) at the leaders' positions.

    The value is undefined where a position is -1.

    Examples
    --------
    >>> value_at(torch.tensor([[[3.0, 1.0]]]), torch.tensor([[1, 0]])).tolist()
    [[1.0, 3.0]]
    """
    positions = lead.clamp(min=0).long().reshape(len(lead), members.shape[1], -1)
    return members.gather(2, positions).flatten(1)


def tie_tolerance(members: Tensor) -> Tensor:
    """Return the difference (P, 1) below which members (P, rows, positions) count as equal.

    Examples
    --------
    >>> tie_tolerance(torch.tensor([[[3.0, -1.0]]])) == 12 * torch.finfo(torch.float32).eps
    tensor([[True]])
    """
    return RELATIVE_ROUNDING[members.dtype] * peak(members.flatten(1))


def find_margins(
    pieces: Kinks | Ranks, x: Sequence[Tensor], resting_values: Tensor
) -> list[Margins]:
    """Return the margins of an operation, one per kink, from its inputs at P points.

    Parameters
    ----------
    pieces : Kinks or Ranks
    x : sequence of tensor of shape (P, ...)
    resting_values : tensor
        Values at which many units rest.

    Examples
    --------
    >>> ranks = Ranks(lambda x: x[0][:, None], [0])
    >>> find_margins(ranks, [torch.tensor([[3.0, 1.0, 2.0]])], torch.zeros(1))[0].values
    tensor([[ 1., -2., -1.]])
    """
    if isinstance(pieces, Ranks):
        return _find_rank_margins(pieces, x, resting_values)
    flat = pieces.value(x)[:, None].flatten(1)
    size = peak(flat)
    return [
        Margins(flat, kink, RELATIVE_ROUNDING[flat.dtype] * size.clamp(min=abs(kink)))
        for kink in pieces.thresholds
    ]


def _find_rank_margins(ranks: Ranks, x: Sequence[Tensor], resting_values: Tensor) -> list[Margins]:
    """Return distances from the edge of the k largest, for each k next to a rank in the output.

    A swap at this edge moves one unit into the k largest and another out of them, so the number of
    units that left them is a lower bound on the number of boundaries between two points.
    """
    lines = ranks.groups(x)
    edges = {edge for rank in ranks.ranks for edge in (rank, rank + 1)}
    edges &= set(range(1, lines.shape[-1]))
    if not lines.numel() or not edges:
        return []
    ordered = lines.sort(-1, descending=True).values
    margins = []
    for edge in sorted(edges):
        last = ordered[..., edge - 1 : edge]
        next_ = ordered[..., edge : edge + 1]
        margin = torch.where(lines >= last, lines - next_, lines - last)
        # Resting units may swap without a boundary.
        resting = (last == next_) & torch.isin(last, resting_values) | torch.isin(
            lines, resting_values
        )
        margins.append(margin.masked_fill(resting, 0.0).flatten(1))
    tolerance = RELATIVE_ROUNDING[lines.dtype] * peak(lines.flatten(1))
    return [Margins(torch.cat(margins, 1), 0.0, tolerance, is_paired=True)]


def crossed(first: Tensor, second: Tensor, is_paired: bool = False) -> Tensor:
    """Return the units above at one point and below at the other.

    The tensors are packed, (..., 2, W) to (..., W). If units change sides in pairs, only those that
    moved down are returned.

    Examples
    --------
    >>> first, second = torch.tensor([[5], [2]]), torch.tensor([[2], [5]])
    >>> crossed(first, second).tolist(), crossed(first, second, is_paired=True).tolist()
    ([7], [5])
    """
    (above, below), (above_after, below_after) = first.unbind(-2), second.unbind(-2)
    down = above & below_after
    return down if is_paired else down | below & above_after
