"""Crossings within one step that coincide.

Overlapping windows of a pooling layer sometimes have the same leader. The units after them are then
equal and cross together, but differ elsewhere, so they are not copies. The crossings within a step
are compared by the units' distances from their kinks at both ends of the step: units that agree at
both ends, or in the ratio of the two distances, cross at the same position. Units that agree at
only one end may do so: a unit that bends where another does has other distances behind the bend.
They are compared where one of them is expected to cross.

A distance that units of a layer have at several nodes is flat: their inputs are inactive or
saturated. Agreement in a flat distance is not evidence of a common cause.

A window switches from one member to another if the first is larger at the left end of the step and
the second at the right end. Members that are equal at an end have a common cause there and diverge
where it bends, so a switch between them is not a separate boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .copies import MAX_COMPARED_ROUNDING, UNKNOWN, CrossingLog, clusters, join_clusters

MAX_EQUAL_TOLERANCES = 0.25
"""Tolerance for equal values, in units of one epsilon of the layer's largest value."""
MAX_CROSSING_TOLERANCES = 8
"""Maximum distance from the kink, in units of the tolerance, at which a unit counts as crossing."""
MAX_TIE_ROUNDING = 1e-3
"""Maximum rounding error of a distance, relative to its change in a step, for resolving ties."""


class CrossingTable:
    """Crossings of units and switches of windows within each step of a grid, with their values.

    Parameters
    ----------
    log : CrossingLog
        Contains each crossing twice, with the values at the left and at the right end of its step.
        Intervals are twice the step, plus 1 for the right end. Both values of a unit are its
        distance from the kink; those of a window are the values of its leaders at both ends.
    segments, steps : int
    has_windows : bool tensor of shape (sites,)
    resting_values : tensor
        Values at which many units rest.
    """

    def __init__(
        self,
        log: CrossingLog,
        segments: int,
        steps: int,
        has_windows: Tensor,
        resting_values: Tensor,
    ) -> None:
        self.segments = segments
        self.steps = steps
        self._has_windows = has_windows
        self._resting_values = resting_values
        crossings, values, tolerance = log.columns()
        side = crossings[0] % 2
        crossings[0] //= 2
        _, entry = torch.unique(_keys(crossings), return_inverse=True)
        count = int(entry.max()) + 1 if len(entry) else 0
        # Step (counted across all segments), site, kink and unit.
        self._crossings = crossings.new_zeros(4, count)
        self._crossings[:, entry] = crossings
        # Indexed by end and value, (2, 2, m).
        self._values = values.new_full((2, 2, count), UNKNOWN)
        self._values[side, :, entry] = values.T
        self._tolerance = tolerance.new_zeros(count)
        self._tolerance[entry] = tolerance
        # Crossings in one step with one label coincide; -1 where they have not been compared.
        self._labels = entry.new_full((count,), -1)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only the given segments."""
        position = torch.full((self.segments,), -1)
        position[list(indices)] = torch.arange(len(indices))
        segment = self._crossings[0] // self.steps
        step = self._crossings[0] % self.steps
        self._crossings[0] = position[segment] * self.steps + step
        is_kept = position[segment] >= 0
        self._crossings, self._values = self._crossings[:, is_kept], self._values[..., is_kept]
        self._tolerance = self._tolerance[is_kept]
        self._labels = self._labels[is_kept]
        self.segments = len(indices)

    def halve(self, log: CrossingLog) -> None:
        """Replace the crossings with those of the halved grid, logged in the middles of steps."""
        crossings, middle, tolerance = log.columns()
        # The middle is the right end of the left half; the other end is one of the previous step's.
        side = 1 - crossings[0] % 2
        known, entry = self._entries(crossings)
        values = middle.new_full((2, 2, len(side)), UNKNOWN)
        other = 1 - side[known]
        values[other, :, known] = self._values[other, :, entry]
        values[side, :, torch.arange(len(side))] = middle.T
        labels = torch.full_like(side, -1)
        labels[known] = self._labels[entry]
        self._labels = labels
        self.steps *= 2
        self._crossings = crossings
        self._values = values
        self._tolerance = tolerance

    def unknown_nodes(self) -> Tensor:
        """Return the nodes, counted across all segments, at which a crossing's value is unknown."""
        side, at = (self._values[:, 0] == UNKNOWN).nonzero().unbind(1)
        step = self._crossings[0, at]
        return torch.unique(step + step // self.steps + side)

    def complete(self, log: CrossingLog) -> None:
        """Add the values that are unknown from crossings logged at further nodes."""
        crossings, values, _ = log.columns()
        known, entry = self._entries(crossings)
        self._values[crossings[0, known] % 2, :, entry] = values.T[known]

    def positions_to_compare(self, segments: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return positions in steps, and the crossings of segments that are expected there.

        They are the positions of crossings that may coincide with others.
        """
        is_spurious = self._is_spurious_switch()
        certain, possible = self._join(is_spurious)
        is_first = certain == torch.arange(len(certain))
        size = torch.bincount(possible[is_first], minlength=len(certain))
        gaps = self._gaps()
        is_known = ~is_spurious & (gaps < UNKNOWN).all(0) & (gaps.sum(0) > 0)
        is_chosen = torch.isin(self._crossings[0] // self.steps, torch.tensor(segments))
        (crossing,) = (is_first & (size[possible] > 1) & is_known & is_chosen).nonzero().unbind(1)
        fraction = gaps[0, crossing] / gaps[:, crossing].sum(0)
        return self._crossings[0, crossing] + fraction, crossing

    def compare(self, log: CrossingLog, expected: Tensor) -> None:
        """Join the crossings that coincide at compared positions.

        Parameters
        ----------
        log : CrossingLog
            Contains, for each position, all crossings of its step. Intervals are the positions'
            indices.
        expected : int64 tensor
            See `positions_to_compare`.
        """
        crossings, values, tolerance = log.columns()
        certain, possible = self._join(self._is_spurious_switch())
        first = expected[crossings[0]]
        crossings[0] = 2 * self._crossings[0, first]
        known, entry = self._entries(crossings)
        first = first[known]
        distance = values[0, known] - self._has_windows[crossings[1, known]] * values[1, known]
        is_met = distance.abs() <= MAX_CROSSING_TOLERANCES * tolerance[known]
        is_met &= possible[entry] == possible[first]
        # A crossing that is elsewhere than expected says nothing about the others.
        is_as_expected = torch.zeros(len(possible), dtype=torch.bool)
        is_as_expected[entry[is_met & (entry == first)]] = True
        is_met &= is_as_expected[first]
        entry = entry[is_met]
        first = first[is_met]
        root = torch.arange(len(possible))
        root.scatter_reduce_(0, first, entry, "amin")
        root.scatter_reduce_(0, entry, root[first], "amin")
        is_labelled = self._labels >= 0
        is_labelled[entry] = True
        self._labels = torch.where(is_labelled, join_clusters(root, certain), -1)

    def _entries(self, crossings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of logged crossings that are in the table, and their entries."""
        keys, order = _keys(self._crossings).sort()
        new_keys = _keys(torch.cat([crossings[:1] // 2, crossings[1:]]))
        if not len(keys):
            return keys, keys
        # Sorting the new keys, too, halves the time.
        sorted_keys, new_order = new_keys.sort()
        at = torch.empty_like(new_order)
        at[new_order] = torch.searchsorted(keys, sorted_keys).clamp(max=len(keys) - 1)
        (known,) = (keys[at] == new_keys).nonzero().unbind(1)
        return known, order[at[known]]

    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Count the switches of windows less the crossings that repeat another in the same step.

        Returns
        -------
        switches : tensor of shape (segments, sites)
        doubtful : tensor of shape (segments,)
            Number of further crossings that may repeat another.
        has_ties : bool tensor of shape (segments,)
            True if a crossing repeats that of another unit, or if a switch is spurious.
        """
        step, site = self._crossings[:2]
        segment = step // self.steps
        is_switch = self._has_windows[site]
        is_spurious = is_switch & self._is_spurious_switch()
        certain, possible = self._join(is_spurious)
        index = torch.arange(len(step))
        repeated = is_spurious | (certain != index)
        gaps = self._gaps()
        is_unknown = is_switch & ((gaps == UNKNOWN) | (gaps <= self._tolerance)).any(0)
        further = ~repeated & ((possible != index) | is_unknown)

        def count_by_site(flags: Tensor) -> Tensor:
            kind = (segment * len(self._has_windows) + site)[flags]
            sites = len(self._has_windows)
            count = torch.bincount(kind, minlength=self.segments * sites)
            return count.reshape(self.segments, sites).float()

        doubtful = torch.bincount(segment[further], minlength=self.segments)
        doubtful += self._cycles(is_switch & ~repeated & ~further)
        has_ties = torch.zeros(self.segments, dtype=torch.bool)
        has_ties[segment[is_spurious | repeated & ~is_switch]] = True
        return count_by_site(is_switch) - count_by_site(repeated), doubtful.float(), has_ties

    def _join(self, is_spurious: Tensor) -> tuple[Tensor, Tensor]:
        """Return partitions into crossings that coincide and crossings that may coincide."""
        step = self._crossings[0]
        values = self._values
        tolerance = MAX_EQUAL_TOLERANCES * self._tolerance
        is_switch = self._has_windows[self._crossings[1]]
        is_flat = self._is_flat()
        has_evidence = ~is_flat.all(0)

        step_and_kind = 2 * step + is_switch

        def agree(group: Tensor, values: Tensor, tolerance: Tensor, is_compared: Tensor) -> Tensor:
            return clusters(group, values, tolerance, is_compared & ~is_spurious)

        is_compared = self._labels >= 0
        ends = values.flatten(0, 1).T
        gaps = self._gaps()
        width = gaps.sum(0).clamp(min=torch.finfo(gaps.dtype).tiny)
        accuracy = tolerance / width
        is_precise = (accuracy <= MAX_COMPARED_ROUNDING) & (gaps < UNKNOWN).all(0) & has_evidence
        certain = join_clusters(
            agree(step_and_kind, ends, tolerance, has_evidence),
            agree(step, (gaps[0] / width)[:, None], accuracy, is_precise),
            agree(step, self._labels.double()[:, None], torch.zeros_like(tolerance), is_compared),
        )
        possible = join_clusters(
            certain,
            agree(step_and_kind, values[0].T, tolerance, ~is_flat[0] & ~is_compared),
            agree(step_and_kind, values[1].T, tolerance, ~is_flat[1] & ~is_compared),
            agree(step_and_kind, ends, tolerance, ~has_evidence & ~is_compared),
        )
        return certain, possible

    def _is_spurious_switch(self) -> Tensor:
        """Return a mask of switches whose members are equal at an end or may both have rested.

        At one end, they must differ clearly at the other.
        """
        values = self._values
        gaps = self._gaps()
        is_known = values[:, 0] != UNKNOWN
        # The value, at each end, of the leader at the other end.
        others = torch.stack([values[0, 1], values[1, 0]])
        rests = torch.isin(others, self._resting_values) & is_known
        is_resolved = self._tolerance <= MAX_TIE_ROUNDING * gaps.sum(0)
        is_equal = gaps <= self._tolerance
        return is_equal.any(0) & is_resolved | is_equal.all(0) | (rests | ~is_known).all(0)

    def _gaps(self) -> Tensor:
        """Return the distances from the kink, or between the leaders, at both ends, (2, m)."""
        first, second = self._values.unbind(1)
        between = torch.stack([first[0] - second[0], second[1] - first[1]])
        gaps = torch.where(self._has_windows[self._crossings[1]], between, first)
        return torch.where(first == UNKNOWN, first, gaps)

    def _is_flat(self) -> Tensor:
        """Return a mask (2, m) of ends with a value that is unknown or recurs at other nodes."""
        step, site, kink = self._crossings[:3]
        count = len(step)
        segment = step // self.steps
        values = self._values[:, 0]
        is_switch = self._has_windows[site]
        node = torch.cat([step + segment, step + segment + 1])
        kinks = int(kink.max()) + 1 if count else 1
        kind = ((segment * len(self._has_windows) + site) * kinks + kink).repeat(2)
        tolerance = MAX_EQUAL_TOLERANCES * self._tolerance.repeat(2)
        cluster = clusters(kind, values.reshape(-1, 1), tolerance)
        first, last = torch.full_like(node, 2**62), torch.full_like(node, -1)
        first.scatter_reduce_(0, cluster, node, "amin")
        last.scatter_reduce_(0, cluster, node, "amax")
        recurs = (first != last)[cluster].reshape(2, count)
        return recurs & ~is_switch | (values == UNKNOWN)

    def _cycles(self, chosen: Tensor) -> Tensor:
        """Count the switches that others in the same step may imply: (segments,).

        One window may switch from A to C where others switch from A to B and from B to C.
        """
        (index,) = chosen.nonzero().unbind(1)
        step = self._crossings[0, index]
        tolerance = self._tolerance[index]
        count = len(index)
        values = self._values[1][:, index].reshape(-1, 1)
        entry = torch.arange(2 * count)
        member = clusters(step.repeat(2), values, tolerance.repeat(2))
        connected = join_clusters(member, entry % max(1, count))
        segment = (step // self.steps).repeat(2)

        def count_by_segment(flags: Tensor) -> Tensor:
            return torch.bincount(segment[flags], minlength=self.segments)

        members = count_by_segment(member == entry)
        return count_by_segment(entry < count) - members + count_by_segment(connected == entry)


def _keys(columns: Tensor) -> Tensor:
    """Return a hash of each column of (c, m)."""
    keys = columns[0]
    for column in columns[1:]:
        keys = (keys * 0x9E3779B97F4A7C1 + column) * 0x2545F4914F6CDD1D
        keys = keys ^ (keys >> 29)
    return keys
