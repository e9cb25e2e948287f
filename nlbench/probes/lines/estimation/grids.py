"""Nested uniform grids on a group of segments, and the crossings between their nodes.

`GridGroup` evaluates the network at the nodes of a grid, stores the activation pattern at each
node, and halves the grid. If a unit with kinks is on different sides at two neighbouring nodes, it
has crossed between them; if a max-pooling window has different leaders, it has switched. Some of
these are dropped so that no boundary is counted twice: copies (see `copies`), window switches
caused by an earlier crossing, and coincident crossings of other units (see `coincidences`).

A unit within rounding error of its kink at a node keeps its side from the previous node, so that it
crosses at most once there. If its side is not yet known, no crossing is counted and the unit counts
as undecided. At both ends of a segment, sides come from double precision: an end has a neighbour on
one side only, so that a crossing near it would be lost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.probes.lines.recording.program import ProgramStep
from nlbench.probes.lines.segments import Segment

from .bits import pack, pack_positions, popcount, set_bits, union
from .coincidences import CrossingTable
from .copies import CrossingLog, find_coinciding_units
from .evaluator import Evaluator
from .patterns import Margins, Windows, crossed, tie_tolerance, value_at
from .piecewise import MeasuredRounding

FIRST_GRID_STEPS = 4
COST_PROBE_STEPS = 8
"""Number of steps in the second grid, from which the cost of an exact trace is predicted."""
COMPARED_STEPS = (0, 2, 5, 7)
"""Steps of the second grid at whose midpoints units are compared with each other."""
MAX_COPY_TOLERANCES = 8
"""Maximum difference, in tolerances, at which the values of two units count as equal."""
BYTES_PER_COMPARED_UNIT = 224


@dataclass
class _UnitSides:
    """Sides of the units of one kink at the current nodes.

    Parameters
    ----------
    states : tensor of shape (s, n + 1, 2, W)
        Packed flags, see `Margins.state`; neither is set where the side is unknown.
    counted : tensor of shape (s, W)
        Flags of the units that are not copies of others.
    unplaced, unplaced_at_end : tensor of shape (s, W)
        Flags of the units whose side is unknown at the start, or at the end.
    undecided : tensor of shape (s, W)
        Flags of the units that may have crossed and returned at a node where their side is unknown.
    is_paired : bool
        See `Margins`.
    """

    states: Tensor
    counted: Tensor
    unplaced: Tensor
    unplaced_at_end: Tensor
    undecided: Tensor
    is_paired: bool

    def settle(self, segments: Tensor, end: int, state: Tensor) -> None:
        """Set the sides of units at one end of segments (m,), where a state (m, 2, W) has any.

        The start is `end` 0, the end is 1.
        """
        known = _has_side(state)
        at = -end
        before = self.states[segments, at]
        self.states[segments, at] = before & ~known[:, None] | state
        if end:
            self.unplaced_at_end[segments] &= ~known
            return
        # Units without a side at the next nodes keep that of the start.
        kept = self.unplaced[segments] & known
        for node in range(1, self.states.shape[1]):
            kept &= ~_has_side(self.states[segments, node])
            self.states[segments, node] |= kept[:, None] & state
        self.unplaced[segments] &= ~known

    def count_undecided(self) -> Tensor:
        """Count the units that may have crossed unnoticed where their side is unknown: (s,)."""
        moves = _has_side(self.states[:, 1]) | _has_side(self.states[:, -1])
        ends = self.unplaced & moves | self.unplaced_at_end & _has_side(self.states[:, -1])
        return popcount(self.undecided | ends)

    def crossed(self, stride: int = 1) -> Tensor:
        """Return flags (s, n / stride, W) of the units that cross between `stride`-th nodes."""
        states = self.states[:, ::stride]
        return crossed(states[:, :-1], states[:, 1:], self.is_paired) & self.counted[:, None]


class GridGroup:
    """Segments whose grids are halved together.

    Parameters
    ----------
    evaluator : Evaluator
    segments : sequence of (start, end)
    rounding : sequence of MeasuredRounding
        In the middle of each segment.
    precise : callable
        Returns the evaluator in double precision.

    Attributes
    ----------
    steps : int
        Number of steps in the current grid.
    values : tensor of shape (s, steps + 1, k)
    undecided : tensor of shape (s,)
        Number of windows whose leader is unknown, summed over the nodes.
    evaluated_again : int64 tensor of shape (s,)
        Number of points evaluated since the last halving apart from its own.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        segments: Sequence[Segment],
        rounding: Sequence[MeasuredRounding],
        precise: Callable[[], Evaluator],
    ) -> None:
        self._evaluator = evaluator
        self._precise = precise
        piecewise = evaluator.piecewise
        self._first_steps = piecewise.first_steps
        self._site_index = piecewise.site_index
        self._starts = torch.stack([start for start, _ in segments])
        self._ends = torch.stack([end for _, end in segments])
        self._min_tolerance = torch.stack([measured.min_tolerance for measured in rounding])
        self._is_coarse = torch.stack([measured.is_coarse for measured in rounding])
        self._device = self._starts.device
        self.steps = 0
        # Initial capacity of the log for the crossings of a step on a GPU.
        self._capacity = 2**9
        self.values = torch.zeros(0)
        self._sides: dict[tuple[int, int], _UnitSides] = {}
        self._leads: dict[int, Tensor] = {}
        # Window members at both ends of the segment, (s, 2, rows, positions), by step.
        self._end_members: dict[int, Tensor] = {}
        # Number of switches less repeated crossings at each level, (s, sites), on the CPU.
        self._switches: list[Tensor] = []
        self._table: CrossingTable | None = None
        self._has_ties = torch.zeros(len(segments), dtype=torch.bool)
        # Number of crossings on the current grid that may repeat another.
        self.doubtful = torch.zeros(len(segments))
        self.evaluated_again = torch.zeros(len(segments), dtype=torch.int64)
        self._at_nodes = torch.zeros(len(segments), device=self._device)
        self.undecided = torch.zeros(len(segments), device=self._device)

    def __len__(self) -> int:
        return len(self._starts)

    def select(self, indices: Sequence[int]) -> None:
        """Keep only the given segments."""
        chosen = torch.tensor(indices)
        index = chosen.to(self._device)
        self._starts, self._ends = self._starts[index], self._ends[index]
        self._min_tolerance, self._is_coarse = self._min_tolerance[index], self._is_coarse[index]
        self.values = self.values[index]
        self._at_nodes, self.undecided = self._at_nodes[index], self.undecided[index]
        self._switches = [counts[chosen] for counts in self._switches]
        self.doubtful, self.evaluated_again = self.doubtful[chosen], self.evaluated_again[chosen]
        if self._table is not None:
            self._table.select(indices)
        self._leads = {key: lead[index] for key, lead in self._leads.items()}
        self._end_members = {key: x[index] for key, x in self._end_members.items()}
        for sides in self._sides.values():
            sides.states, sides.counted = sides.states[index], sides.counted[index]
            sides.unplaced = sides.unplaced[index]
            sides.unplaced_at_end = sides.unplaced_at_end[index]
            sides.undecided = sides.undecided[index]

    @property
    def pattern_bytes(self) -> int:
        """Size in bytes of the patterns at all nodes."""
        states = [sides.states for sides in self._sides.values()]
        tensors = (*states, *self._leads.values(), *self._end_members.values())
        return sum(x.nbytes for x in tensors)

    def begin(self) -> None:
        """Evaluate the nodes of the first grid."""
        self._retry_on_overflow(self._evaluate_first_grid)

    def halve(self) -> None:
        """Evaluate the middle of each step."""
        self.evaluated_again = torch.zeros(len(self), dtype=torch.int64)
        log = self._retry_on_overflow(self._evaluate_middles)
        if self._table is None:
            self._remove_repeated(log)
        else:
            self._retry_on_overflow(self._evaluate_unknown_ends)
            switches, self.doubtful, _ = self._table.counts()
            self._switches.append(switches)

    def _retry_on_overflow(
        self, evaluate: Callable[[CrossingLog, CrossingLog], None]
    ) -> CrossingLog:
        """Evaluate, retrying with more capacity while a log overflows. Nothing is stored then.

        Returns the log of crossings.
        """
        while True:
            crossings = CrossingLog(self._capacity)
            switches = CrossingLog(self._capacity)
            evaluate(crossings, switches)
            needed = max(crossings.needed, switches.needed)
            if needed <= self._capacity:
                return crossings
            self._capacity = 2 * needed

    def _evaluate_first_grid(self, crossings: CrossingLog, switches: CrossingLog) -> None:
        count = len(self)
        self.steps = FIRST_GRID_STEPS
        rows = torch.arange(count * (FIRST_GRID_STEPS + 1), device=self._device)
        segment_index = rows // (FIRST_GRID_STEPS + 1)
        nodes = rows % (FIRST_GRID_STEPS + 1)
        self._sides = {}
        self._leads = {}
        parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        units: dict[tuple[int, int], tuple[Tensor, bool]] = {}

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            if isinstance(pattern, Windows):
                self._add_first_leads(step, pattern, rows, switches)
                return
            key = (step.output, kink)
            all_units = torch.ones_like(pattern.values[:1]).bool()
            units[key] = pack(all_units), pattern.is_paired
            parts.setdefault(key, []).append((pattern.state, pattern.resting))

        values = self._run(segment_index, nodes / FIRST_GRID_STEPS, callback)
        switches.fetch()
        if switches.needed > self._capacity:
            return
        self.values = _split_by_segment([values], count)
        met = torch.zeros(count, FIRST_GRID_STEPS - 1, dtype=torch.bool, device=self._device)
        for key, (all_units, is_paired) in units.items():
            states, resting = (
                _split_by_segment(x, count) for x in zip(*parts.pop(key), strict=True)
            )
            unplaced, unplaced_at_end = (
                ~(_has_side(states[:, end]) | resting[:, end]) & all_units for end in (0, -1)
            )
            if key[0] in self._first_steps:
                met |= (resting[:, 1:-1] & crossed(states[:, :-2], states[:, 2:])).any(2)
            for i in range(1, FIRST_GRID_STEPS + 1):
                # A unit whose side is unknown keeps its previous one, unless it is resting.
                unknown = ~(_has_side(states[:, i]) | resting[:, i])
                states[:, i] |= unknown[:, None] & states[:, i - 1]
            counted = torch.full_like(unplaced, -1)
            undecided = torch.zeros_like(unplaced)
            self._sides[key] = _UnitSides(
                states, counted, unplaced, unplaced_at_end, undecided, is_paired
            )
        self._at_nodes += met.sum(1)
        self._switches.append(self._count_switches(switches, FIRST_GRID_STEPS))

    def compare_crossings(self) -> list[bool]:
        """Start comparing the crossings within each step, for which the nodes are evaluated again.

        Returns True for each segment that has coincident crossings.
        """
        self._retry_on_overflow(self._evaluate_ends)
        return self._has_ties.tolist()

    def _evaluate_ends(self, crossings: CrossingLog, _: CrossingLog) -> None:
        count = len(self)
        steps = self.steps
        self._log_at_nodes(crossings, torch.arange(count * (steps + 1), device=self._device))
        if crossings.needed <= self._capacity:
            has_windows = torch.zeros(len(self._site_index), dtype=torch.bool)
            has_windows[[self._site_index[output] for output in self._leads]] = True
            resting_values = self._evaluator.piecewise.resting_values.cpu().double()
            self._table = CrossingTable(crossings, count, steps, has_windows, resting_values)
            self._switches[-1], self.doubtful, self._has_ties = self._table.counts()

    def _evaluate_unknown_ends(self, crossings: CrossingLog, _: CrossingLog) -> None:
        """Evaluate again the nodes at which the values of new crossings are unknown."""
        assert self._table is not None
        nodes = self._table.unknown_nodes()
        self._log_at_nodes(crossings, nodes.to(self._device))
        if crossings.needed <= self._capacity:
            self._table.complete(crossings)
            self._add_evaluations(nodes // (self.steps + 1))

    def _add_evaluations(self, segment_index: Tensor) -> None:
        self.evaluated_again += torch.bincount(segment_index.cpu(), minlength=len(self))

    def _log_at_nodes(self, crossings: CrossingLog, nodes: Tensor) -> None:
        """Log the crossings of the steps on both sides of nodes (P,), with the values there.

        Nodes are counted across all segments.
        """
        steps = self.steps
        segment_index = nodes // (steps + 1)
        node = nodes % (steps + 1)

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            s = segment_index[rows]
            i = node[rows]
            for side in (0, 1):
                # A node is the left end of one step and the right end of another.
                left, right = (i - side).clamp(min=0), (i - side + 1).clamp(max=steps)
                interval = 2 * (s * steps + left) + side
                self._log_step(crossings, step, kink, pattern, (s, left, right), interval, side)

        if len(segment_index):
            self._run(segment_index, node / steps, callback)
        crossings.fetch()

    def _log_step(
        self,
        crossings: CrossingLog,
        step: ProgramStep,
        kink: int,
        pattern: Margins | Windows,
        steps: tuple[Tensor, Tensor, Tensor],
        interval: Tensor,
        side: int,
    ) -> None:
        """Log the crossings of steps (segment, left node, right node), with a pattern's values."""
        s, left, right = steps
        if isinstance(pattern, Windows):
            leads = self._leads[step.output]
            ends = leads[s, left], leads[s, right]
            pattern.state = ends[side]
            self._log_leaders(crossings, step, pattern, ends[1 - side], interval, side)
            return
        sides = self._sides[step.output, kink]
        states = sides.states[s, left], sides.states[s, right]
        units = crossed(*states, sides.is_paired) & sides.counted[s]
        self._log_crossings(crossings, step, kink, pattern, units, interval)

    def _evaluate_middles(self, crossings: CrossingLog, switches: CrossingLog) -> None:
        count = len(self)
        steps = self.steps
        rows = torch.arange(count * steps, device=self._device)
        segment_index = rows // steps
        place = rows % steps
        met = torch.zeros(count * steps, dtype=torch.bool, device=self._device)
        undecided = torch.zeros_like(self.undecided)
        middles: dict[tuple[int, int], list[Tensor]] = {}
        leads: dict[int, list[Tensor]] = {}

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            s = segment_index[rows]
            i = place[rows]
            key = (step.output, kink)
            if isinstance(pattern, Windows):
                log = switches if self._table is None else crossings
                doubtful = self._add_middle_leads(step, pattern, rows, s, i, log)
                leads.setdefault(step.output, []).append(pattern.state)
                undecided.index_add_(0, s, doubtful.to(undecided.dtype))
                return
            sides = self._sides[key]
            middle = pattern.state
            left, right = sides.states[s, i], sides.states[s, i + 1]
            left_known = _has_side(left)
            known = _has_side(middle)
            unplaced = sides.unplaced[s] & ~(known | left_known)
            unknown = ~known & left_known
            # Synchronising with a GPU costs more than operations that have no effect.
            if unknown.is_cuda or bool((unknown | unplaced).any()):
                resting = pattern.resting
                opposite = crossed(left, right)
                if step.output in self._first_steps:
                    met[rows] |= (unknown & resting & opposite).any(1)
                unknown &= ~resting
                doubtful = unknown & _has_side(right) & ~opposite | unplaced
                for segment, part in _rows_by_segment(rows, steps):
                    sides.undecided[segment] |= union(doubtful[None, part])[0]
            middle |= unknown[:, None] & left
            counted = sides.counted[s]
            paired = sides.is_paired
            interval = 2 * (s * steps + i)
            if self._table is None:
                # Copies that cross twice are recognised by their values in between.
                units = crossed(left, middle) & crossed(middle, right) & counted
                self._log_crossings(crossings, step, kink, pattern, units, interval)
            else:
                for side, ends in enumerate([(left, middle), (middle, right)]):
                    units = crossed(*ends, paired) & counted
                    self._log_crossings(crossings, step, kink, pattern, units, interval + side)
            middles.setdefault(key, []).append(middle)

        values = self._run(segment_index, (2 * place + 1) / (2 * steps), callback)
        crossings.fetch()
        switches.fetch()
        if max(crossings.needed, switches.needed) > self._capacity:
            return

        def insert_middles(nodes: Tensor, parts: Sequence[Tensor]) -> Tensor:
            return interleave(nodes, _split_by_segment(parts, count))

        self.steps = 2 * steps
        self.undecided += undecided
        self.values = insert_middles(self.values, [values])
        for key, sides in self._sides.items():
            sides.states = insert_middles(sides.states, middles.pop(key))
        self._leads = {key: insert_middles(lead, leads[key]) for key, lead in self._leads.items()}
        self._at_nodes += met.reshape(count, steps).sum(1)
        if self._table is None:
            self._switches.append(self._count_switches(switches, 2 * steps))
        else:
            self._table.halve(crossings)

    def look_again(self, segments: Sequence[int]) -> None:
        """Decide which of the doubtful crossings on segments coincide."""
        if self._table is not None:
            self._retry_on_overflow(functools.partial(self._compare_doubtful, segments))
            self._switches[-1], self.doubtful, _ = self._table.counts()

    def _compare_doubtful(
        self, segments: Sequence[int], crossings: CrossingLog, _: CrossingLog
    ) -> None:
        """Compare crossings that may coincide where they are expected."""
        assert self._table is not None
        positions, expected = self._table.positions_to_compare(segments)
        if not len(expected):
            return
        index = torch.arange(len(expected), device=self._device)
        positions = positions.to(self._device)
        place = positions.floor().long()
        segment_index = place // self.steps
        left = place % self.steps

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            s = segment_index[rows]
            i = left[rows]
            self._log_step(crossings, step, kink, pattern, (s, i, i + 1), index[rows], 0)

        self._run(segment_index, (positions - segment_index * self.steps) / self.steps, callback)
        crossings.fetch()
        if crossings.needed <= self._capacity:
            self._table.compare(crossings, expected)
            self._add_evaluations(segment_index)

    def _log_crossings(
        self,
        crossings: CrossingLog,
        step: ProgramStep,
        kink: int,
        margins: Margins,
        units: Tensor,
        interval: Tensor,
    ) -> None:
        """Log flagged units (P, W) with their distances from the kink."""
        at, unit, is_set = crossings.positions(units)
        if not len(at):
            return
        value = margins.values[at, unit] - margins.kink
        # Units that change sides in pairs are negatives of each other; other signs are ignored.
        values = torch.stack([value.abs(), value if margins.is_paired else value.abs()], 1)
        site = self._site_index[step.output]
        tolerance = margins.tolerance[at, 0]
        crossings.add(interval[at], site, kink, unit, values, tolerance, is_set)

    def counts(self) -> tuple[Tensor, list[float]]:
        """Return the crossings detected on each grid, and the undecided units of each segment.

        The crossings have shape (levels, s, sites), coarsest grid first, and are on the CPU.
        """
        levels = len(self._switches)
        sites = len(self._site_index)
        # The last level holds the undecided units, which saves a second transfer.
        result = torch.zeros(levels + 1, len(self), max(1, sites), device=self._device)
        for (output, _), sides in self._sides.items():
            for level in range(levels):
                flags = sides.crossed(2 ** (levels - 1 - level))
                result[level, :, self._site_index[output]] += popcount(flags).sum(1)
        # Units that are all zero at the same node form one boundary.
        result[:levels, :, :1] += self._at_nodes[:, None]
        result[levels, :, 0] = self.undecided / self.steps
        for sides in self._sides.values():
            result[levels, :, 0] += sides.count_undecided()
        on_cpu = result.cpu()
        seen = on_cpu[:levels, :, :sites] + torch.stack(self._switches)
        return seen, on_cpu[levels, :, 0].tolist()

    def exclude_copies(self) -> None:
        """Count only the first of several units that bend together along a whole segment."""
        precise = self._precise()
        if precise is not self._evaluator:
            self._settle_ends(precise)
        if not self._sides:
            return
        # Units behind overlapping windows may be equal at these places but not elsewhere.
        shared = self._evaluator.piecewise.shared
        parts = [
            torch.zeros_like(sides.counted) if key[0] in shared else union(sides.crossed())
            for key, sides in self._sides.items()
        ]
        widths = [words.shape[1] for words in parts]
        words = torch.cat(parts, 1)
        del parts
        limit = int(precise.budget / 2 / BYTES_PER_COMPARED_UNIT)
        taken = 0
        batch: list[int] = []
        for s, count in enumerate(popcount(words).tolist()):
            if batch and taken + count > limit:
                self._exclude_flagged_copies(batch, words[batch], widths, precise)
                batch = []
                taken = 0
            batch = [*batch, s]
            taken = taken + count
        self._exclude_flagged_copies(batch, words[batch], widths, precise)

    def _settle_ends(self, precise: Evaluator) -> None:
        """Take the sides of units at both ends of all segments from double precision."""
        count = len(self)

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            if isinstance(pattern, Margins):
                index = torch.arange(rows.start, rows.stop, device=self._device)
                for end in (0, 1):
                    (at,) = (index // count == end).nonzero().unbind(1)
                    sides = self._sides[step.output, kink]
                    sides.settle(index[at] % count, end, pattern.state[at])

        segment_index = torch.arange(count, device=self._device).repeat(2)
        t = torch.arange(2, device=self._device).repeat_interleave(count)
        precise.along(self._starts.double(), self._ends.double(), segment_index, t, callback)

    def _exclude_flagged_copies(
        self, indices: Sequence[int], words: Tensor, widths: Sequence[int], precise: Evaluator
    ) -> None:
        """Compare the units flagged in `words` (m, W), of which kink j has `widths[j]` words."""
        keys = list(self._sides)
        row, column = set_bits(words.cpu())
        stops = 64 * torch.tensor(widths).cumsum(0)
        kink = torch.bucketize(column, stops, right=True)
        # Units are sorted by segment, and by kink within each.
        kind = row * len(keys) + kink
        ends = torch.bincount(kind, minlength=len(words) * len(keys)).cumsum(0).tolist()
        spans = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        chosen = (column - (stops - 64 * torch.tensor(widths))[kink]).to(self._device)
        places = len(COMPARED_STEPS)
        values = torch.empty(len(chosen), places, dtype=torch.float64, device=self._device)
        tolerances = torch.zeros(len(spans), places, dtype=torch.float64, device=self._device)

        def callback(
            rows: slice, step: ProgramStep, index: int, pattern: Margins | Windows
        ) -> None:
            if isinstance(pattern, Windows):
                return
            key = keys.index((step.output, index))
            for j in range(len(pattern.values)):
                s, at = divmod(rows.start + j, places)
                span = s * len(keys) + key
                distance = pattern.values[j].index_select(0, chosen[spans[span]]) - pattern.kink
                is_within = distance.abs() <= pattern.tolerance[j]
                values[spans[span], at] = distance.masked_fill_(is_within, 0.0)
                tolerances[span, at] = pattern.tolerance[j, 0]

        index = torch.tensor(indices, device=self._device)
        segment_index = torch.arange(len(indices) * places, device=self._device) // places
        t = (2 * torch.tensor(COMPARED_STEPS) + 1).to(self._device) / (2 * COST_PROBE_STEPS)
        segment_starts = self._starts[index].double()
        segment_ends = self._ends[index].double()
        precise.along(segment_starts, segment_ends, segment_index, t.repeat(len(indices)), callback)
        tolerance = (MAX_COPY_TOLERANCES * tolerances.amax(1).cpu())[kind]
        is_paired = torch.tensor([sides.is_paired for sides in self._sides.values()])
        # Saturated units may share two distances without being copies.
        min_different = 3 if self._evaluator.piecewise.may_coincide else 2
        copies = find_coinciding_units(row, values.cpu(), tolerance, is_paired[kink], min_different)
        if bool(copies.any()):
            flags = pack_positions(row[copies], column[copies], words.shape).to(self._device)
            parts = torch.split(flags, list(widths), 1)
            for sides, part in zip(self._sides.values(), parts, strict=True):
                sides.counted[index] &= ~part

    def _run(self, segment_index: Tensor, t: Tensor, callback: Callable[..., None]) -> Tensor:
        rounding = self._min_tolerance, self._is_coarse
        return self._evaluator.along(self._starts, self._ends, segment_index, t, callback, rounding)

    def _remove_repeated(self, log: CrossingLog) -> None:
        """Stop counting units for which both crossings within a step repeat those of another."""
        repeated, interval, site, kink, unit = log.repeats()
        if self._evaluator.dtype != torch.float64 and bool(repeated.any()):
            # In single precision, some of the others agree by chance.
            suspects = torch.unique(interval[repeated])
            log = self._retry_on_overflow(functools.partial(self._log_double_crossings, suspects))
            repeated, interval, site, kink, unit = log.repeats()
        outputs = {index: output for output, index in self._site_index.items()}
        shared = self._evaluator.piecewise.shared
        for key in set(zip(site[repeated].tolist(), kink[repeated].tolist(), strict=True)):
            chosen = repeated & (site == key[0]) & (kink == key[1])
            output = outputs[key[0]]
            if output not in shared:
                counted = self._sides[output, key[1]].counted
                segment = interval[chosen] // self.steps
                counted &= ~pack_positions(segment, unit[chosen], counted.shape).to(self._device)

    def _log_double_crossings(
        self, intervals: Tensor, crossings: CrossingLog, _: CrossingLog
    ) -> None:
        """Log the units that crossed twice in steps of the previous grid, in double precision."""
        intervals = intervals.to(self._device)
        segment_index = intervals // self.steps
        middle = intervals % self.steps + 1

        def callback(rows: slice, step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            if isinstance(pattern, Margins):
                s = segment_index[rows]
                i = middle[rows]
                sides = self._sides[step.output, kink]
                before, after = (
                    crossed(sides.states[s, at], sides.states[s, at + 1]) for at in (i - 1, i)
                )
                units = before & after & sides.counted[s]
                self._log_crossings(crossings, step, kink, pattern, units, intervals[rows])

        t = middle / self.steps
        self._precise().along(
            self._starts.double(), self._ends.double(), segment_index, t, callback
        )
        crossings.fetch()
        if crossings.needed <= self._capacity:
            self._add_evaluations(segment_index)

    def _count_switches(self, switches: CrossingLog, steps: int) -> Tensor:
        """Count the distinct switches of leaders by segment and site: (s, sites)."""
        repeated, interval, site, _, _ = switches.repeats()
        sites = len(self._site_index)
        bins = (interval[~repeated] // steps) * sites + site[~repeated]
        return torch.bincount(bins, minlength=len(self) * sites).reshape(len(self), sites).float()

    def _add_first_leads(
        self, step: ProgramStep, windows: Windows, rows: slice, switches: CrossingLog
    ) -> None:
        """Store the leaders at nodes of the first grid, and log their switches."""
        nodes = FIRST_GRID_STEPS + 1
        if step.output not in self._leads:
            shape = len(self), nodes, windows.state.shape[1]
            self._leads[step.output] = windows.state.new_full(shape, -1)
            members = windows.values.new_zeros(len(self), 2, *windows.values.shape[1:])
            self._end_members[step.output] = members
        leads = self._leads[step.output]
        row = torch.arange(rows.start, rows.stop, device=self._device)
        s = row // nodes
        node = row % nodes
        for end in (0, 1):
            edge = self._rows_at(rows, nodes, end * FIRST_GRID_STEPS)
            self._end_members[step.output][s[edge], end] = windows.values[edge]
        before = torch.full_like(windows.state, -1)
        for i, at in enumerate(range(rows.start, rows.stop)):
            # Each leader depends on the previous one.
            segment, place = divmod(at, nodes)
            if place:
                before[i] = leads[segment, place - 1]
                windows.keep_leaders(before[i : i + 1], slice(i, i + 1))
            leads[segment, place] = windows.state[i]
        self._settle_tie(step, windows, s, before, self._rows_at(rows, nodes, 1), 0)
        self._log_switches(step, windows, before, s * FIRST_GRID_STEPS + node - 1, switches)

    def _rows_at(self, rows: slice, period: int, phase: int) -> Tensor:
        """Return the indices of the rows at a given phase of a period, without synchronising."""
        start: int = rows.start
        first = (phase - start) % period
        return torch.arange(first, max(first, rows.stop - start), period, device=self._device)

    def _add_middle_leads(
        self,
        step: ProgramStep,
        windows: Windows,
        rows: slice,
        s: Tensor,
        i: Tensor,
        switches: CrossingLog,
    ) -> Tensor:
        """Log the switches on both sides of middles.

        Return the number of doubtful leaders, (P,).
        """
        steps = self.steps
        leads = self._leads[step.output]
        left = leads[s, i]
        doubtful = windows.keep_leaders(left, slice(None)) * windows.is_coarse
        right = leads[s, i + 1]
        self._settle_tie(step, windows, s, left, self._rows_at(rows, steps, 0), 0)
        self._settle_tie(step, windows, s, right, self._rows_at(rows, steps, steps - 1), 1)
        interval = (s * steps + i) * 2
        for side, other in enumerate([left, right]):
            if self._table is None:
                self._log_switches(step, windows, other, interval + side, switches)
            else:
                # The middle is the right end of the left half.
                self._log_leaders(switches, step, windows, other, interval + side, 1 - side)
        return doubtful

    def _settle_tie(
        self, step: ProgramStep, windows: Windows, s: Tensor, leads: Tensor, at: Tensor, end: int
    ) -> None:
        """Break ties at an end of the segment in favour of the leader at the neighbouring node.

        `leads` (P, groups) contains the leaders at that end; rows `at` are next to it.
        """
        if not len(at):
            return
        members = self._end_members[step.output][s[at], end]
        near = windows.state[at]
        last = leads[at]
        tied = value_at(members, near) >= value_at(members, last) - tie_tolerance(members)
        leads[at] = torch.where(tied & (near >= 0) & (last >= 0), near, last)
        self._leads[step.output][s[at], -end] = leads[at]

    def _log_leaders(
        self,
        crossings: CrossingLog,
        step: ProgramStep,
        windows: Windows,
        other: Tensor,
        interval: Tensor,
        side: int,
    ) -> None:
        """Log windows whose leaders differ at the two ends of a step, with values at one end."""
        row, group, is_set = crossings.positions(pack(windows.has_other_leader(other)))
        if not len(row):
            return
        values = torch.stack(windows.leader_values(other, row, group), 1)
        leaders = windows.state[row, group].long(), other[row, group].long()
        if side:
            values = values.flip(1)
            leaders = leaders[::-1]
        for leader in leaders:
            group = (group * 0x9E3779B97F4A7C1 + leader) % 2**52
        tolerance = windows.tolerance.flatten()[row]
        site = self._site_index[step.output]
        crossings.add(interval[row], site, 0, group, values, tolerance, is_set)

    def _log_switches(
        self,
        step: ProgramStep,
        windows: Windows,
        other: Tensor,
        interval: Tensor,
        switches: CrossingLog,
    ) -> None:
        """Log the windows whose leader differs from that at a neighbouring node.

        Switches caused by an earlier unit's crossing are skipped: those whose other leader rests on
        a kink here, and those between equal values, for example if all units are resting.
        """
        row, group, is_set = switches.positions(pack(windows.has_other_leader(other)))
        if not len(row):
            return
        values = torch.stack(windows.leader_values(other, row, group), 1)
        own_values, other_values = values.unbind(1)
        rests = torch.isin(other_values, self._evaluator.piecewise.resting_values)
        moving = ~rests & (own_values != other_values) & is_set
        tolerance = windows.tolerance.flatten()[row]
        site = self._site_index[step.output]
        switches.add(interval[row], site, 0, group, values, tolerance, moving)


def _has_side(states: Tensor) -> Tensor:
    """Return the packed flags of units with a known side: (..., 2, W) to (..., W)."""
    return states[..., 0, :] | states[..., 1, :]


def _rows_by_segment(rows: slice, period: int) -> Iterator[tuple[int, slice]]:
    """Yield each segment with points among the rows, and the part of the rows that are its own."""
    start: int = rows.start
    for segment in range(start // period, (rows.stop - 1) // period + 1):
        first = max(0, segment * period - start)
        yield segment, slice(first, min(rows.stop, (segment + 1) * period) - start)


def _split_by_segment(parts: Sequence[Tensor], count: int) -> Tensor:
    """Concatenate values at points of `count` segments, and reshape to (s, points, ...)."""
    joined = torch.cat(list(parts))
    return joined.reshape(count, len(joined) // count, *joined.shape[1:])


def interleave(nodes: Tensor, middles: Tensor) -> Tensor:
    """Insert middles (s, n, ...) between nodes (s, n + 1, ...).

    Examples
    --------
    >>> interleave(torch.tensor([[0, 2, 4]]), torch.tensor([[1, 3]])).tolist()
    [[0, 1, 2, 3, 4]]
    """
    s, n = middles.shape[:2]
    result = nodes.new_empty(s, 2 * n + 1, *nodes.shape[2:])
    result[:, ::2] = nodes
    result[:, 1::2] = middles
    return result
