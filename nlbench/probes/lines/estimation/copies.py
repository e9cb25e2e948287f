"""Crossings and units that are copies of each other.

Units that bend at the same position form one boundary. A network has such units where weights are
shared or repeated, where an image is constant over an area, and where several units are multiples
of one value. They are identified in two ways: by crossings within one step whose values agree up to
rounding, and by distances from their kinks that are proportional at several points of a segment.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .bits import first_set_bits, set_bits

UNKNOWN = 1e300
"""Placeholder for an unknown value, different from all other values."""
MAX_COMPARED_ROUNDING = 1e-7
"""Maximum rounding error of a unit, relative to its largest value, at which multiples of the unit
can be recognised."""


class CrossingLog:
    """Crossings in one evaluation of a grid, collected on the device and compared on the CPU.

    It synchronises with a GPU only once. On a GPU there is room for `capacity` crossings of each
    step; `needed` is the capacity needed for all of them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.needed = 0
        self._columns: list[Tensor] = []
        self._counts: list[Tensor] = []

    def positions(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row and unit of each set flag in (P, W), and a mask of the used entries."""
        if not words.is_cuda:
            row, unit = set_bits(words)
            return row, unit, torch.ones_like(row, dtype=torch.bool)
        row, unit, is_set, count = first_set_bits(words, self.capacity)
        self._counts.append(count)
        return row, unit, is_set

    def add(
        self,
        interval: Tensor,
        site: int,
        kink: int,
        unit: Tensor,
        values: Tensor,
        tolerance: Tensor,
        is_valid: Tensor,
    ) -> None:
        """Add crossings (m,) of a kink at a site.

        Crossings in one interval are the same if their `values`, (m, 2), agree within `tolerance`.
        Entries where `is_valid` is False are ignored.
        """
        numbers = [torch.where(is_valid, interval, -1), unit, *values.unbind(1), tolerance]
        constant = [
            torch.full_like(tolerance, number, dtype=torch.float64) for number in (site, kink)
        ]
        self._columns.append(torch.stack([*(x.double() for x in numbers), *constant]))

    def fetch(self) -> None:
        """Copy the crossings to the CPU."""
        if not self._columns:
            return
        columns = torch.cat(self._columns, 1)
        if self._counts:
            # Use an extra column, since a separate tensor would require a second transfer.
            needed = torch.stack(self._counts).amax().expand(len(columns), 1)
            columns = torch.cat([columns, needed.double()], 1).cpu()
            self.needed = int(columns[0, -1])
            columns = columns[:, :-1]
        self._columns = [columns[:, columns[0] >= 0]]

    def repeats(self) -> tuple[Tensor, ...]:
        """Return a mask of repeated crossings, and the interval, site, kink and unit of all."""
        crossings, values, tolerance = self.columns()
        cluster = clusters(crossings[0], values.T.contiguous(), tolerance)
        return cluster != torch.arange(len(cluster)), *crossings

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the interval, site, kink and unit (4, m), values (2, m) and tolerances (m,)."""
        (columns,) = self._columns or [torch.zeros(7, 0)]
        interval, unit, first, second, tolerance, site, kink = columns.double()
        crossings = torch.stack([interval, site, kink, unit]).long()
        return crossings, torch.stack([first, second]), tolerance


def clusters(
    group: Tensor, values: Tensor, tolerance: Tensor, is_compared: Tensor | None = None
) -> Tensor:
    """Cluster the rows (m, d) that agree within a group.

    Return the first row of each row's cluster.

    Parameters
    ----------
    group : int64 tensor of shape (m,)
    values : float64 tensor of shape (m, d)
    tolerance : float64 tensor of shape (m,)
    is_compared : bool tensor of shape (m,), optional
        False for rows that form clusters of their own.

    Examples
    --------
    >>> values = torch.tensor([[1.0], [2.0], [1.0], [1.0]])
    >>> clusters(torch.tensor([0, 0, 0, 1]), values, torch.zeros(4)).tolist()
    [0, 1, 0, 3]
    """
    result = torch.arange(len(values))
    if is_compared is not None:
        (rows,) = is_compared.nonzero().unbind(1)
        result[rows] = rows[clusters(group[rows], values[rows], tolerance[rows])]
        return result
    if not len(values):
        return result
    # Equal rows have equal projections, and few other rows do.
    weights = torch.tensor([0.7 ** (i / 2) for i in range(values.shape[1])], dtype=values.dtype)
    projection = values.masked_fill(values == UNKNOWN, 0.0) @ weights
    order, group, projection = _sorted_by(group, projection)
    rounding = 8 * torch.finfo(values.dtype).eps * projection[1:].abs()
    near = projection.diff() <= weights.sum() * tolerance.max() + rounding
    (at,) = (near & (group.diff() == 0)).nonzero().unbind(1)
    first = order[at]
    second = order[at + 1]
    difference = (values[first] - values[second]).abs().amax(1)
    at = at[difference <= torch.maximum(tolerance[first], tolerance[second])]
    # Consecutive pairs form one cluster.
    follows = torch.zeros_like(at, dtype=torch.bool)
    follows[1:] = at.diff() == 1
    cluster = (~follows).cumsum(0) - 1
    members = torch.cat([order[at], order[at + 1]])
    # Each cluster is represented by its first member, which comes from the earliest step.
    earliest = torch.full_like(at, len(values))
    earliest = earliest.scatter_reduce(0, cluster.repeat(2), members, "amin")
    result[members] = earliest[cluster.repeat(2)]
    return result


def _sorted_by(group: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by group, and by value within each group: the order, groups and values."""
    # NumPy's sort takes a third of the time of PyTorch's, or less for short integers.
    by_value = np.argsort(values.numpy())
    groups = (group - group.min()).numpy()[by_value]
    short = groups.astype(np.int16) if groups.max() < 2**15 else groups
    order = torch.from_numpy(by_value[np.argsort(short, kind="stable")])
    return order, group[order], values[order]


def join_clusters(*partitions: Tensor) -> Tensor:
    """Join the clusters of several partitions (m,), represented as in `clusters`.

    Examples
    --------
    >>> join_clusters(torch.tensor([0, 0, 2, 3]), torch.tensor([0, 1, 1, 3])).tolist()
    [0, 0, 0, 3]
    """
    labels = partitions[0]
    while True:
        before = labels
        for partition in partitions:
            smallest = labels.scatter_reduce(0, partition, labels, "amin", include_self=True)
            labels = torch.minimum(labels, smallest[partition])
        if torch.equal(labels, before):
            return labels


def find_coinciding_units(
    segment: Tensor, distances: Tensor, tolerance: Tensor, is_signed: Tensor, min_different: int = 2
) -> Tensor:
    """Return a mask of the units that bend at the same positions as an earlier unit.

    Two units of a segment bend together if they are equal up to sign or, if they have values on
    both sides of the kink, multiples of each other. A unit that is constant at the compared points
    is never compared, since all its inputs may be inactive there.

    Parameters
    ----------
    segment : int64 tensor of shape (m,)
    distances : float64 tensor of shape (m, points)
        Distances from the kink, 0 where they are within rounding error. Overwritten.
    tolerance : float64 tensor of shape (m,)
        Rounding error of a unit's distances.
    is_signed : bool tensor of shape (m,)
        True for units whose negatives don't count as copies.
    min_different : int
        Minimum number of different distances that units must have in common.
    """
    # Make the first distance positive, so that a unit equals its negative.
    first = distances.gather(1, (distances != 0).to(torch.int8).argmax(1, keepdim=True)).sign()
    distances *= first.masked_fill_(is_signed[:, None], 1.0)
    scale = distances.abs().amax(1).clamp(min=torch.finfo(distances.dtype).tiny)
    on_both_sides = (distances > 0).any(1) & (distances < 0).any(1)
    is_scaled = on_both_sides & (tolerance / scale <= MAX_COMPARED_ROUNDING)
    differs = distances.sort(1).values.diff(dim=1) > tolerance[:, None]
    varies = differs.sum(1) + 1 >= min_different
    scale = scale.masked_fill_(~is_scaled, 1.0)
    values = distances.div_(scale[:, None])
    cluster = clusters(2 * segment + is_scaled, values, tolerance / scale, varies)
    return cluster != torch.arange(len(cluster))
