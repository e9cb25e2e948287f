"""Count boundaries and integrate along segments without finding a single breakpoint.

Between two points every unit that is on another piece has crossed a boundary at least once.
So the number of units that differ, summed over neighbours of a uniform grid, is a lower bound
of the number of boundaries, as transitions of activation codes at a fixed number of points
(Novak et al., "Sensitivity and Generalization in Neural Networks: an Empirical Study", ICLR
2018). It grows as the grid is halved: a unit that crosses twice within a step is missed, which
happens in proportion to the step. So what the last halvings added tells what the coming ones
would add, and how far that can be trusted. The same passes give the network's values, whose
distance to the chord is integrated and extrapolated alike, and compared with the network at
places where no grid has been.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError, UnsupportedOperation
from nlbench.introspection.memory import LiveBytes, PointMemory, halving, share_out, usable_memory
from nlbench.introspection.model_state import precise_device
from nlbench.introspection.precision import each_exact
from nlbench.probes.lines.recording.program import Step, is_same, run_alone, typed_copy
from nlbench.probes.lines.rules.rule import Leaders
from nlbench.probes.lines.trace import ChordParts, SegmentEstimate, chord_parts

from .patterns import (
    BEYOND,
    Margins,
    Rounding,
    Windows,
    bits_of,
    bits_of_some,
    crossed,
    noise_among,
    ones,
    packed,
    record_pieces,
    value_of,
)

__all__ = [
    "BUDGET",
    "EVALUATIONS",
    "TOLERANCE",
    "Estimator",
    "check_ends",
    "estimate_all",
    "on_device",
    "probes",
]

TOLERANCE = 1e-3
EVALUATIONS = 4096
BUDGET = 1000
"""Forward passes that an exact trace of a segment may take, where the method is chosen."""

FIRST = 4
"""Steps of the first grid."""
TOLD = 8
"""Steps by which the cost of an exact trace is told."""
LEAST = 16
"""Steps before an estimate is trusted."""
PROBES = 16
"""Places beside the grids at which the network is looked at."""
_ALIKE = 8
"""Values of two units are one, within so many times what rounding leaves of a value."""
_WATCHED = (0, 2, 5, 7)
"""Steps of the second grid at whose middle units are compared with each other."""
TOLD_APART = 1e-7
"""Share of its largest value that may be rounding of a unit that is compared with others."""
_A_COMPARED = 224
"""Bytes that a unit takes that is compared with others."""
_ROOM = 2**9
"""Crossings of a step that a GPU has places for at once."""
_BYTES = 2**27
_BYTES_GPU = 2**30
_POINTS = 64
_POINTS_GPU = 512
_TOGETHER = 8
_TOGETHER_GPU = 64

T = TypeVar("T")
Segment = tuple[Tensor, Tensor]


def probes() -> Tensor:
    """Places in [0, 1] at which estimates are compared with the network: one in each 16th.

    Examples
    --------
    >>> t = probes()
    >>> len(t), bool((t.diff() > 0).all())
    (16, True)
    """
    generator = torch.Generator().manual_seed(PROBES)
    share = torch.rand(PROBES, dtype=torch.float64, generator=generator)
    return (torch.arange(PROBES) + share) / PROBES


@dataclass
class _Sides:
    """On which side of one margin each unit is, at the nodes known so far.

    `states` (s, n + 1, 2, W) are packed flags, see `Margins.state`, neither set where it can't be
    told; `counted` (s, W) leaves out units that bend where others do; `unplaced` (s, W) are those
    that can't be told from the margin at the start, where no side is known of them.
    """

    states: Tensor
    counted: Tensor
    unplaced: Tensor
    is_paired: bool

    def crossed(self, stride: int = 1) -> Tensor:
        """Tell which units are counted between each two nodes, packed (s, n / stride, W)."""
        states = self.states[:, ::stride]
        return crossed(states[:, :-1], states[:, 1:], self.is_paired) & self.counted[:, None]


def _is_told(states: Tensor) -> Tensor:
    """Tell of which units a side is known, packed: (..., 2, W) to (..., W)."""
    return states[..., 0, :] | states[..., 1, :]


class _Found:
    """Crossings seen in a pass one by one, so that those that coincide are known as one.

    They are gathered where they are found, and told apart on the CPU once the pass has ended: a
    GPU is asked once. There are places for `room` of a step's there; how many of them that would
    have taken is `wanted`.
    """

    def __init__(self, room: int) -> None:
        self.room, self.wanted = room, 0
        self._columns: list[Tensor] = []
        self._counts: list[Tensor] = []

    def places(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give row and unit of each flag that is set in (P, W), and whether it is one."""
        if not words.is_cuda:
            row, unit = bits_of(words)
            return row, unit, torch.ones_like(row, dtype=torch.bool)
        row, unit, is_one, count = bits_of_some(words, self.room)
        self._counts.append(count)
        return row, unit, is_one

    def add(
        self,
        interval: Tensor,
        step: int,
        margin: int,
        unit: Tensor,
        values: Tensor,
        close: Tensor,
        is_one: Tensor,
    ) -> None:
        """Note crossings (m,): intervals, units and values (m, 2) that tell them apart to `close`.

        Only where `is_one` is True there is any.
        """
        numbers = [torch.where(is_one, interval, -1), unit, *values.unbind(1), close]
        constant = [
            torch.full_like(close, number, dtype=torch.float64) for number in (step, margin)
        ]
        self._columns.append(torch.stack([*(x.double() for x in numbers), *constant]))

    def fetch(self) -> None:
        """Bring over what was found."""
        if not self._columns:
            return
        whole = torch.cat(self._columns, 1)
        if self._counts:
            # In a column of its own, so that all comes at once.
            most = torch.stack(self._counts).amax().expand(len(whole), 1)
            whole = torch.cat([whole, most.double()], 1).cpu()
            self.wanted = int(whole[0, -1])
            whole = whole[:, :-1]
        self._columns = [whole[:, whole[0] >= 0]]

    def copies(self) -> tuple[Tensor, ...]:
        """Tell which repeat another: a flag each, with interval, step, margin and unit."""
        (columns,) = self._columns or [torch.zeros(7, 0)]
        interval, unit, first, second, close, step, margin = columns
        again = _repeated(interval, torch.stack([first, second], 1), close)
        return again, *(x.long() for x in (interval, step, margin, unit))


def _repeated(group: Tensor, values: Tensor, close: Tensor) -> Tensor:
    """Tell which rows (m, d) repeat an earlier row of their group, within `close` (m,)."""
    # Rows that are alike have projections that are, and few others have.
    weights = torch.tensor([0.7 ** (i / 2) for i in range(values.shape[1])], dtype=values.dtype)
    if not len(values):
        return torch.zeros(0, dtype=torch.bool)
    order = (values @ weights).argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    apart = torch.maximum(close[order][1:], close[order][:-1])
    near = group[order].diff() == 0
    for column in values.unbind(1):
        near &= column[order].diff().abs() <= apart
    kind = torch.cat([near.new_zeros(1), ~near]).cumsum(0)
    # The first of each is the one that counts: that of the earliest step.
    earliest = torch.full_like(order, len(order)).scatter_reduce(0, kind, order, "amin")
    again = torch.ones(len(order), dtype=torch.bool)
    again[earliest[: int(kind[-1]) + 1]] = False
    return again


def _bend_alike(owner: Tensor, known: Tensor, far: Tensor, is_signed: Tensor) -> Tensor:
    """Tell which units bend at the places where an earlier one of their segment does, all along.

    They are equal, up to their sign, or multiples of one another by one factor at places on both
    sides of the kink. Of units that don't vary from place to place nothing is told: all that they
    are given may be off there.

    Parameters
    ----------
    owner : int64 tensor of shape (m,)
        The segments.
    known : float64 tensor of shape (m, places)
        Distances from the kink, 0 where they can't be told from it. They are overwritten.
    far : float64 tensor of shape (m,)
        How far apart those of one unit may be by rounding.
    is_signed : bool tensor of shape (m,)
        Whether a unit and its negative are two.
    """
    # So that a unit and its negative are one, the first place is on the positive side.
    first = known.gather(1, (known != 0).to(torch.int8).argmax(1, keepdim=True)).sign()
    known *= first.masked_fill_(is_signed[:, None], 1.0)
    scale = known.abs().amax(1).clamp(min=torch.finfo(known.dtype).tiny)
    multiples = (known > 0).any(1) & (known < 0).any(1) & (far / scale <= TOLD_APART)
    varies = known.amax(1) - known.amin(1) > far
    # Each that does not vary is a group of its own.
    alone = 2 * len(known) + torch.arange(len(known))
    group = torch.where(varies, 2 * owner + multiples, alone)
    scale = scale.masked_fill_(~multiples, 1.0)
    return _repeated(group, known.div_(scale[:, None]), far / scale)


class _Group:
    """Segments whose grids are halved together.

    Parameters
    ----------
    estimator : Estimator
        Of the network.
    segments : sequence of (start, end)
    rounding : sequence of Rounding
        In the middle of each.
    """

    def __init__(
        self, estimator: Estimator, segments: Sequence[Segment], rounding: Sequence[Rounding]
    ) -> None:
        self._estimator, piecewise = estimator, estimator.piecewise
        self._first = piecewise.first
        self._starts = torch.stack([start for start, _ in segments])
        self._ends = torch.stack([end for _, end in segments])
        self._least = torch.stack([found.least for found in rounding])
        self._is_coarse = torch.stack([found.is_coarse for found in rounding])
        self._device, self._dtype = self._starts.device, self._starts.dtype
        self.steps = 0
        self._room = _ROOM
        self.values = torch.zeros(0)
        self._sides: dict[tuple[int, int], _Sides] = {}
        self._leads: dict[int, Tensor] = {}
        self._at_start: dict[int, Tensor] = {}  # (s, rows, positions) by step
        self._switches: list[Tensor] = []  # (s, steps that bend) of each level, on the CPU
        self._at_nodes = torch.zeros(len(segments), device=self._device)
        self.undecided = torch.zeros(len(segments), device=self._device)
        self._places = piecewise.places

    def __len__(self) -> int:
        return len(self._starts)

    def kept(self, which: Sequence[int]) -> None:
        """Go on with some of the segments."""
        index = torch.tensor(which, device=self._device)
        self._starts, self._ends = self._starts[index], self._ends[index]
        self._least, self._is_coarse = self._least[index], self._is_coarse[index]
        self.values = self.values[index]
        self._at_nodes, self.undecided = self._at_nodes[index], self.undecided[index]
        self._switches = [found[torch.tensor(which)] for found in self._switches]
        self._leads = {key: lead[index] for key, lead in self._leads.items()}
        self._at_start = {key: members[index] for key, members in self._at_start.items()}
        for sides in self._sides.values():
            sides.states, sides.counted = sides.states[index], sides.counted[index]
            sides.unplaced = sides.unplaced[index]

    @property
    def bytes_kept(self) -> int:
        """What the patterns of all nodes take."""
        tensors = [sides.states for sides in self._sides.values()]
        return sum(x.nbytes for x in (*tensors, *self._leads.values(), *self._at_start.values()))

    def begin(self) -> None:
        """Look at the nodes of the first grid."""
        self._until_there_is_room(self._begun)

    def halve(self) -> None:
        """Look at the middle of each step."""
        self._until_there_is_room(self._halved)

    def _until_there_is_room(self, look: Callable[[_Found, _Found], None]) -> None:
        """Look again where more was found than there was room for; until then nothing is kept."""
        while True:
            new, switched = _Found(self._room), _Found(self._room)
            look(new, switched)
            wanted = max(new.wanted, switched.wanted)
            if wanted <= self._room:
                return
            self._room = 2 * wanted

    def _begun(self, new: _Found, switched: _Found) -> None:
        count, self.steps = len(self), FIRST
        every = torch.arange(count * (FIRST + 1), device=self._device)
        owner, nodes = every // (FIRST + 1), every % (FIRST + 1)
        self._sides, self._leads = {}, {}
        seen: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        about: dict[tuple[int, int], tuple[Tensor, bool]] = {}

        def watch(rows: slice, step: Step, number: int, found: Margins | Windows) -> None:
            if isinstance(found, Windows):
                self._first_leads(step, found, rows, switched)
                return
            key, all_units = (step.output, number), torch.ones_like(found.values[:1]).bool()
            about[key] = packed(all_units), found.is_paired
            seen.setdefault(key, []).append((found.state, found.resting))

        values = self._run(owner, nodes / FIRST, watch)
        switched.fetch()
        if switched.wanted > self._room:
            return
        self.values = _by_segment([values], count)
        met = torch.zeros(count, FIRST - 1, dtype=torch.bool, device=self._device)
        for key, (all_units, is_paired) in about.items():
            states, resting = (_by_segment(x, count) for x in zip(*seen.pop(key), strict=True))
            unplaced = ~(_is_told(states[:, 0]) | resting[:, 0]) & all_units
            if key[0] in self._first:
                met |= (resting[:, 1:-1] & crossed(states[:, :-2], states[:, 2:])).any(2)
            for i in range(1, FIRST + 1):
                # A unit that can't be told from its kink stays where it was, unless it rests.
                unknown = ~(_is_told(states[:, i]) | resting[:, i])
                states[:, i] |= unknown[:, None] & states[:, i - 1]
            counted = torch.full_like(unplaced, -1)
            self._sides[key] = _Sides(states, counted, unplaced, is_paired)
        self._at_nodes += met.sum(1)
        self._switches.append(self._switched(switched, FIRST))

    def _halved(self, new: _Found, switched: _Found) -> None:
        count, steps = len(self), self.steps
        every = torch.arange(count * steps, device=self._device)
        owner, place = every // steps, every % steps
        met = torch.zeros(count * steps, dtype=torch.bool, device=self._device)
        undecided = torch.zeros_like(self.undecided)
        between: dict[tuple[int, int], list[Tensor]] = {}
        leads: dict[int, list[Tensor]] = {}

        def watch(rows: slice, step: Step, number: int, found: Margins | Windows) -> None:
            s, i, key = owner[rows], place[rows], (step.output, number)
            if isinstance(found, Windows):
                doubtful = self._middle_leads(step, found, rows, s, i, switched)
                leads.setdefault(step.output, []).append(found.state)
                undecided.index_add_(0, s, doubtful.to(undecided.dtype))
                return
            sides, middle = self._sides[key], found.state
            left, right = sides.states[s, i], sides.states[s, i + 1]
            known, told = _is_told(left), _is_told(middle)
            unplaced = sides.unplaced[s] & ~(told | known)
            unknown = ~told & known
            # To ask a GPU costs more than to do what changes nothing.
            if unknown.is_cuda or bool((unknown | unplaced).any()):
                resting = found.resting
                opposite = crossed(left, right)
                if step.output in self._first:
                    met[rows] |= (unknown & resting & opposite).any(1)
                unknown &= ~resting
                doubtful = ones(unknown & _is_told(right) & ~opposite | unplaced)
                undecided.index_add_(0, s, doubtful.to(undecided.dtype))
            middle |= unknown[:, None] & left
            twice = crossed(left, middle) & crossed(middle, right) & sides.counted[s]
            at, unit, is_one = new.places(twice)
            if len(at):
                value = found.values[at, unit] - found.kink
                # A single value tells less than three: units near a boundary lie close. Of
                # two that change places each is the other's negative.
                second = value if sides.is_paired else value.abs()
                values = torch.stack([value.abs(), second], 1)
                place_of, noise = self._places[step.output], found.noise[at, 0]
                new.add(at + rows.start, place_of, number, unit, values, noise, is_one)
            between.setdefault(key, []).append(middle)

        values = self._run(owner, (2 * place + 1) / (2 * steps), watch)
        new.fetch()
        switched.fetch()
        if max(new.wanted, switched.wanted) > self._room:
            return

        def with_middles(nodes: Tensor, middles: Sequence[Tensor]) -> Tensor:
            return _interleaved(nodes, _by_segment(middles, count))

        self.steps = 2 * steps
        self.undecided += undecided
        self.values = with_middles(self.values, [values])
        for key, sides in self._sides.items():
            sides.states = with_middles(sides.states, between.pop(key))
        self._leads = {key: with_middles(lead, leads[key]) for key, lead in self._leads.items()}
        self._leave_out_new_copies(new, steps)
        self._at_nodes += met.reshape(count, steps).sum(1)
        self._switches.append(self._switched(switched, 2 * steps))

    def counts(self) -> tuple[Tensor, list[float]]:
        """Boundaries seen by each grid so far, by what makes them, and units undecided.

        On the CPU: (levels, s, steps that bend) from the coarsest grid on; a number a segment.
        """
        levels, kinds = len(self._switches), len(self._places)
        # Room for what is undecided, also where a network bends nowhere.
        result = torch.zeros(levels + 1, len(self), max(1, kinds), device=self._device)
        for (output, _), sides in self._sides.items():
            for level in range(levels):
                found = sides.crossed(2 ** (levels - 1 - level))
                result[level, :, self._places[output]] += ones(found).sum(1)
        # All units that are zero at one node, where the inputs are, make one boundary.
        result[:levels, :, :1] += self._at_nodes[:, None]
        result[levels, :, 0] = self.undecided
        whole = result.cpu()
        seen = whole[:levels, :, :kinds] + torch.stack(self._switches)
        return seen, whole[levels, :, 0].tolist()

    def leave_out_copies(self, precise: Estimator) -> None:
        """Of units that bend at the same places all along a segment count the first.

        Copies of a unit do, and units that are multiples of one number that passes through zero.

        Parameters
        ----------
        precise : Estimator
            The network in double precision.
        """
        flags = [sides.crossed() for sides in self._sides.values()]
        if not flags:
            return
        widths = [words.shape[2] for words in flags]
        words = torch.cat([_any(one) for one in flags], 1)
        del flags
        most, taken = int(precise.budget / 2 / _A_COMPARED), 0
        some: list[int] = []
        for s, count in enumerate(ones(words).tolist()):
            if some and taken + count > most:
                self._leave_out_copies_of(some, words[some], widths, precise)
                some, taken = [], 0
            some, taken = [*some, s], taken + count
        self._leave_out_copies_of(some, words[some], widths, precise)

    def _leave_out_copies_of(
        self, which: Sequence[int], words: Tensor, widths: Sequence[int], precise: Estimator
    ) -> None:
        """Look at the flagged units of some segments: (m, W), of each margin so many words."""
        known = list(self._sides)
        row, column = bits_of(words.cpu())
        stops = 64 * torch.tensor(widths).cumsum(0)
        margin = torch.bucketize(column, stops, right=True)
        # By segment and margin.
        kind = row * len(known) + margin
        ends = torch.bincount(kind, minlength=len(words) * len(known)).cumsum(0).tolist()
        spans = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        chosen = (column - (stops - 64 * torch.tensor(widths))[margin]).to(self._device)
        values = torch.empty(len(chosen), len(_WATCHED), dtype=torch.float64, device=self._device)
        noises = torch.zeros(len(spans), len(_WATCHED), dtype=torch.float64, device=self._device)

        def watch(rows: slice, step: Step, number: int, found: Margins | Windows) -> None:
            if isinstance(found, Windows):
                return
            place = known.index((step.output, number))
            for j in range(len(found.values)):
                s, at = divmod(rows.start + j, len(_WATCHED))
                mine = s * len(known) + place
                apart = found.values[j].index_select(0, chosen[spans[mine]]) - found.kink
                values[spans[mine], at] = apart.masked_fill_(apart.abs() <= found.noise[j], 0.0)
                noises[mine, at] = found.noise[j, 0]

        index = torch.tensor(which, device=self._device)
        owner = torch.arange(len(which) * len(_WATCHED), device=self._device) // len(_WATCHED)
        places = (2 * torch.tensor(_WATCHED) + 1).to(self._device) / (2 * TOLD)
        starts, stops_at = self._starts[index].double(), self._ends[index].double()
        precise.along(starts, stops_at, owner, places.repeat(len(which)), watch)
        far = (_ALIKE * noises.amax(1).cpu())[kind]
        is_paired = torch.tensor([sides.is_paired for sides in self._sides.values()])
        again = _bend_alike(row, values.cpu(), far, is_paired[margin])
        if bool(again.any()):
            repeats = _flags_at(row[again], column[again], words.shape).to(self._device)
            parts = torch.split(repeats, list(widths), 1)
            for sides, repeated in zip(self._sides.values(), parts, strict=True):
                sides.counted[index] &= ~repeated

    def _run(self, owner: Tensor, t: Tensor, watch: Callable[..., None]) -> Tensor:
        rounding = self._least, self._is_coarse
        return self._estimator.along(self._starts, self._ends, owner, t, watch, rounding)

    def _leave_out_new_copies(self, new: _Found, steps: int) -> None:
        again, *found = new.copies()
        interval, step, margin, unit = (x[again] for x in found)
        outputs = {place: output for output, place in self._places.items()}
        for key in set(zip(step.tolist(), margin.tolist(), strict=True)):
            mine = (step == key[0]) & (margin == key[1])
            counted = self._sides[outputs[key[0]], key[1]].counted
            repeats = _flags_at(interval[mine] // steps, unit[mine], counted.shape)
            counted &= ~repeats.to(self._device)

    def _switched(self, found: _Found, steps: int) -> Tensor:
        """Count switches of leaders that differ, by segment and step: (s, steps that bend)."""
        again, interval, step, _, _ = found.copies()
        kinds = len(self._places)
        place = (interval[~again] // steps) * kinds + step[~again]
        return torch.bincount(place, minlength=len(self) * kinds).reshape(len(self), kinds).float()

    def _first_leads(self, step: Step, windows: Windows, rows: slice, found: _Found) -> None:
        if step.output not in self._leads:
            kept_shape = len(self), FIRST + 1, windows.state.shape[1]
            self._leads[step.output] = windows.state.new_full(kept_shape, -1)
            there = windows.values.new_zeros(len(self), *windows.values.shape[1:])
            self._at_start[step.output] = there
        kept = self._leads[step.output]
        row = torch.arange(rows.start, rows.stop, device=self._device)
        s, node = row // (FIRST + 1), row % (FIRST + 1)
        start = self._rows_at(rows, FIRST + 1, 0)
        self._at_start[step.output][s[start]] = windows.values[start]
        before = torch.full_like(windows.state, -1)
        for i, at in enumerate(range(rows.start, rows.stop)):
            # Whose leader is the one before depends on the one before that.
            segment, place = divmod(at, FIRST + 1)
            if place:
                before[i] = kept[segment, place - 1]
                windows.keep(before[i : i + 1], slice(i, i + 1))
            kept[segment, place] = windows.state[i]
        self._lead_from_start(step, windows, s, before, self._rows_at(rows, FIRST + 1, 1))
        self._add_switches(step, windows, before, s * FIRST + node - 1, found)

    def _rows_at(self, rows: slice, period: int, phase: int) -> Tensor:
        """Give which of some rows are so far into their segment, without a look at the device."""
        start: int = rows.start
        first = (phase - start) % period
        return torch.arange(first, max(first, rows.stop - start), period, device=self._device)

    def _middle_leads(
        self,
        step: Step,
        windows: Windows,
        rows: slice,
        s: Tensor,
        i: Tensor,
        found: _Found,
    ) -> Tensor:
        """Give how many of the leaders are told by those before alone: (P,)."""
        steps, kept = self.steps, self._leads[step.output]
        left = kept[s, i]
        doubtful = windows.keep(left, slice(None)) * windows.is_coarse
        self._lead_from_start(step, windows, s, left, self._rows_at(rows, steps, 0))
        interval = (s * steps + i) * 2
        self._add_switches(step, windows, left, interval, found)
        self._add_switches(step, windows, kept[s, i + 1], interval + 1, found)
        return doubtful

    def _lead_from_start(
        self, step: Step, windows: Windows, s: Tensor, before: Tensor, first: Tensor
    ) -> None:
        """Of those that are tied at the start the one that leads behind it leads there, too."""
        if not len(first):
            return
        there = self._at_start[step.output][s[first]]
        ours, theirs = windows.state[first], before[first]
        tied = value_of(there, ours) >= value_of(there, theirs) - noise_among(there)
        before[first] = torch.where(tied & (ours >= 0) & (theirs >= 0), ours, theirs)
        self._leads[step.output][s[first], 0] = before[first]

    def _add_switches(
        self, step: Step, windows: Windows, other: Tensor, interval: Tensor, found: _Found
    ) -> None:
        """Note where a window's leader differs from that at a neighbour.

        Not where that one rests at a kink here, or the two are equal, as units are that all
        rest: what happens is the crossing of a unit before them.
        """
        row, group, is_one = found.places(packed(windows.led_by_others(other)))
        if not len(row):
            return
        mine, theirs = windows.of_leaders(other, row, group)
        moving = ~torch.isin(theirs, self._estimator.piecewise.flats) & (mine != theirs) & is_one
        values = torch.stack([mine, theirs], 1)
        close = windows.noise.flatten()[row]
        found.add(interval[row], self._places[step.output], 0, group, values, close, moving)


def _flags_at(rows: Tensor, units: Tensor, shape: Sequence[int]) -> Tensor:
    """Give packed flags (n, W) of which some are set."""
    place = torch.unique(rows * (64 * shape[1]) + units)
    flags = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    return flags.index_add_(0, place // 64, 1 << place % 64).reshape(tuple(shape))


def _any(words: Tensor) -> Tensor:
    """Tell which flags are set at any of n places: (s, n, W) to (s, W)."""
    found = words[:, 0]
    for i in range(1, words.shape[1]):
        found = found | words[:, i]
    return found


def _by_segment(parts: Sequence[Tensor], count: int) -> Tensor:
    """Join parts of what there is at the places of so many segments: (s, places, ...)."""
    joined = torch.cat(list(parts))
    return joined.reshape(count, len(joined) // count, *joined.shape[1:])


def _interleaved(nodes: Tensor, middles: Tensor) -> Tensor:
    """Put (s, n, ...) between (s, n + 1, ...)."""
    s, n = middles.shape[:2]
    result = nodes.new_empty(s, 2 * n + 1, *nodes.shape[2:])
    result[:, ::2], result[:, 1::2] = nodes, middles
    return result


@dataclass(frozen=True)
class _Crossings:
    """What the grids so far say of the number of boundaries of one segment."""

    at_least: int
    total: float
    error: float
    scatter: float
    pair: float
    by_step: Tensor
    twice: int
    undecided: int

    def is_close(self, tolerance: float) -> bool:
        """Tell whether what halving can tell is known: what rounding has lost stays so."""
        return self.scatter <= SURE * tolerance * self.total

    def is_settled(self, tolerance: float) -> bool:
        """Tell whether a pair of crossings that may be due would not show."""
        return self.pair <= tolerance * self.total

    @classmethod
    def of(cls, counts: Tensor, undecided: float, lost: float) -> _Crossings:
        """Extrapolate (levels, steps that bend) counts of grids, each half as fine as the next.

        `lost` is what rounding may have made one.
        """
        totals = counts.sum(1)
        seen = float(totals[-1])
        added = totals.diff().clamp(min=0)
        # What a halving adds is half of what the one before added: a sum of halves is the whole.
        last = added[-2:]
        rest = float(last.sum() / (2 ** torch.arange(len(last), dtype=added.dtype)).sum())
        # Units that cross twice come by chance, two crossings each: the spread of their sum, of
        # those to come and of those that tell of them; and what the ratio of halves leaves open.
        # Where the last two added nothing, all before them tell how likely a pair is yet.
        whole = 2 ** len(added) - 1
        likely = max(rest, float(added.sum()) / whole)
        spread = SURE * math.sqrt(2 * likely * (1 + 2 / 3)) if likely > FEWEST else 0.0
        drift = abs(rest - float(added[-1])) / 2
        # Pairs come whole, and where none was seen half a one may have been due.
        may_be = likely + min(1.0, RARELY * seen) / whole > RARE
        pair = 2.0 if may_be else 0.0
        gain = counts[-1] - counts[-2]
        share = gain / gain.sum() if float(gain.sum()) > 0 else torch.zeros_like(gain)
        by_step = counts[-1] + rest * share
        total = seen + rest
        if float(by_step.sum()) > 0:
            by_step = by_step * (total / float(by_step.sum()))
        return cls(
            round(seen),
            total,
            max(pair, spread) + drift + undecided + lost,
            spread + drift + undecided,
            pair,
            by_step,
            round(float(added[-1]) / 2),
            round(undecided),
        )


SURE = 2.0
"""Standard deviations in an error."""
FEWEST = 0.05
"""Crossings to come below which halving goes on for none."""
RARE = 0.02
"""Crossings to come below which none is expected: a pair in a hundred such segments."""
RARELY = 1.5e-2
"""Crossings in pairs that are due to each crossing seen, where no pair was, at the first grid: in
networks of two layers of 24 units 1.4e-2 were."""
CHEAP = 128
"""Steps up to which pairs are looked for where none was seen and one would show."""
LOST = 1.0
"""Crossings that may have been taken for one with another, or for none: by single precision, and
where windows of max pooling are tied."""


@dataclass(frozen=True)
class _Deviation:
    """What the grids so far say of the distance to the chord: (k,) each."""

    parts: ChordParts
    error: Tensor

    @classmethod
    def of(cls, values: Tensor, seen: Tensor | None) -> _Deviation:
        """Extrapolate from values (n + 1, k) at a grid; `seen` (m, k) are those at `probes`."""
        t = torch.linspace(0, 1, len(values), dtype=torch.float64, device=values.device)
        finest, finer, coarse = (chord_parts(t[::by], values[::by]) for by in (1, 2, 4))
        parts, before = _extrapolated(finest, finer), _extrapolated(finer, coarse).total
        total = parts.total
        # At least what the extrapolation has changed: kinks spoil its order now and then.
        error = torch.maximum((total - before).abs(), (total - finest.above - finest.below).abs())
        if seen is not None:
            middles = (values[1::2] - (values[:-1:2] + values[2::2]) / 2).abs().amax(0)
            beside = (seen - _interpolated(values, probes().to(values.device))).abs()
            # On a grid half as fine no value was further from the line between its neighbours:
            # what is further now lies between the nodes.
            error = error + (beside - middles).clamp(min=0).mean(0)
        return cls(parts, error)


def _extrapolated(fine: ChordParts, coarse: ChordParts) -> ChordParts:
    """Of a rule whose error falls to a quarter with half the step (Richardson)."""
    pairs = (fine.above, coarse.above), (fine.below, coarse.below)
    above, below = ((one + (one - other) / 3).clamp(min=0) for one, other in pairs)
    return ChordParts(above, below, fine.variation)


def _interpolated(values: Tensor, t: Tensor) -> Tensor:
    """Values (m, k) at places between the nodes of a uniform grid, on the lines that join them."""
    at = t * (len(values) - 1)
    left = at.floor().long().clamp(0, len(values) - 2)
    share = (at - left)[:, None]
    return (1 - share) * values[left] + share * values[left + 1]


class Estimator:
    """A network in one precision, which estimates groups of segments.

    Attributes
    ----------
    chunk : int
        Points that are run at once.
    together : int
        Segments in a group.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, first: Segment, memory: int | None
    ) -> None:
        self.network = typed_copy(model, dtype)
        self.dtype = dtype
        ends = torch.stack(first).to(dtype)
        self.device = ends.device
        self.piecewise = record_pieces(self.network, ends[:1])
        on_gpu = self.device.type == "cuda"
        each = self._bytes_a_point(ends[:1])
        points = min(_POINTS_GPU if on_gpu else _POINTS, (_BYTES_GPU if on_gpu else _BYTES) // each)
        # The other half is for patterns.
        half = PointMemory(each, each, 0, 0).times(2)
        _, self.chunk = share_out(half, self.device, memory, max(1, points))
        self.budget = usable_memory(self.device, memory)
        # There are no patterns yet: where one fits, two do.
        self._check(torch.cat([ends, ends.mean(0, keepdim=True)])[: max(2, self.chunk)])
        self.together = _TOGETHER_GPU if on_gpu else max(1, min(_TOGETHER, self.chunk // 4))

    @torch.inference_mode()
    def _bytes_a_point(self, one: Tensor) -> int:
        """Count what lives together while a point is carried, (1, *input), and looked at."""

        def watch(step: Step, number: int, found: Margins | Windows) -> None:
            if isinstance(found, Margins):
                _ = found.state, found.resting

        with LiveBytes() as live:
            self.piecewise.run(one.clone(), watch)
        peak: int = live.peak
        return max(1, peak)

    def _check(self, points: Tensor) -> None:
        with torch.inference_mode():
            together = self.piecewise.run(points)
        alone = run_alone(self.network, points).reshape(len(points), -1)
        if not is_same(together, alone, self.dtype):
            raise UnsupportedOperation(
                "forward", "the network", "the recorded program does not reproduce its output"
            )

    def outputs(self, segments: Sequence[Segment], t: Sequence[Tensor]) -> list[Tensor]:
        """Values (m, k) of the network at places (m,) of each segment, in float64."""
        counts = [len(x) for x in t]
        owner = torch.arange(len(t)).repeat_interleave(torch.tensor(counts)).to(self.device)
        starts, ends = (torch.stack(x) for x in zip(*segments, strict=True))
        values = self.along(starts, ends, owner, torch.cat(list(t)).to(self.device))
        return list(torch.split(values, counts))

    def along(
        self,
        starts: Tensor,
        ends: Tensor,
        owner: Tensor,
        t: Tensor,
        watch: Callable[..., None] | None = None,
        rounding: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Run the network at places t (P,) of the segments (s, *input) that own them.

        `watch` is told which of the places are run, as a slice, and what `Piecewise.run` tells;
        `rounding` are `Rounding.least` and `.is_coarse` of each segment, (s, n). Returns the
        outputs, float64 (P, k).
        """
        outputs = []
        for first in range(0, len(owner), self.chunk):
            rows = slice(first, min(first + self.chunk, len(owner)))
            weight = t[rows].double().to(starts.dtype).reshape(-1, *[1] * (starts.ndim - 1))
            inputs = torch.lerp(starts[owner[rows]], ends[owner[rows]], weight)
            told = None if watch is None else functools.partial(watch, rows)
            least = None if rounding is None else [x[owner[rows]] for x in rounding]
            output = self.piecewise.run(inputs, told, least).double()
            if not torch.isfinite(output).all():
                raise NotFinite("the network's output is not finite on the segment")
            outputs.append(output)
        return torch.cat(outputs)


@dataclass(frozen=True)
class _Wanted:
    """What is asked for; see `estimate_all`."""

    tolerance: float
    evaluations: int
    budget: int


@dataclass
class _State:
    """What is known of one segment."""

    estimator: Estimator
    segment: Segment
    rounding: Rounding
    crossings: _Crossings | None = None
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    deviation: _Deviation | None = None
    is_exact: bool = False
    is_rough: bool = False
    wasted: int = 0

    def left_by_rounding(self) -> Tensor:
        """What rounding leaves of the distances of values to their chord: (k,)."""
        values, measured = self.values, self.rounding.output
        size = values.abs().amax() if values.numel() else values.new_zeros(())
        expected = 2 * torch.finfo(self.estimator.dtype).eps * size
        # Where it is far more, outputs are what is left of larger numbers.
        beyond = measured > 2 * BEYOND * expected
        return torch.where(beyond, 2 * measured, expected).expand(values.shape[1])

    def is_close(self, tolerance: float) -> bool:
        """Tell whether the distances to the chord are known."""
        assert self.deviation is not None
        error, total, floor = (
            torch.linalg.vector_norm(x)
            for x in (self.deviation.error, self.deviation.parts.total, self.left_by_rounding())
        )
        return bool(error <= torch.maximum(total * tolerance, 2 * floor))

    def estimate(self, tolerance: float) -> SegmentEstimate:
        """Give what there is to know."""
        crossings, deviation = self.crossings, self.deviation
        assert crossings is not None
        assert deviation is not None
        steps, sites = len(self.values) - 1, self.estimator.piecewise.program.sites
        start, end = self.segment
        return SegmentEstimate(
            t=torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=self.values.device),
            values=self.values.clone(),
            length=float(torch.linalg.vector_norm((end - start).double())),
            above=deviation.parts.above.clone(),
            below=deviation.parts.below.clone(),
            variation=deviation.parts.variation.clone(),
            deviation_error=deviation.error + self.left_by_rounding(),
            crossings=crossings.total,
            at_least=crossings.at_least,
            error=crossings.error,
            contributions=dict(zip(sites, crossings.by_step.tolist(), strict=True)),
            twice=crossings.twice,
            undecided=crossings.undecided,
            evaluations=steps + 1 + PROBES + self.wasted,
            tolerance=tolerance,
            converged=self.is_close(tolerance) and crossings.is_close(tolerance),
            precision=torch.finfo(self.estimator.dtype).eps,
        )


def check_ends(starts: Tensor, ends: Tensor) -> None:
    """Refuse segments (n, *input) whose ends don't fit each other.

    Raises
    ------
    nlbench.RequestError, nlbench.NotFinite
    """
    if starts.shape != ends.shape:
        raise RequestError(
            f"a segment from shape {tuple(starts.shape[1:])} to {tuple(ends.shape[1:])}, "
            "expected the same shape"
        )
    if starts.ndim < 2:
        raise RequestError("a segment's ends are single numbers, expected tensors with an axis")
    for name, end in (("start", starts), ("end", ends)):
        if not end.is_floating_point():
            raise RequestError(f"the segment's {name} has dtype {end.dtype}, expected floats")
        if end.is_meta:
            raise RequestError(f"the segment's {name} is on the device meta: it has no numbers")
        if not torch.isfinite(end).all():
            raise NotFinite(f"the segment's {name} is not finite")


def on_device(model: nn.Module, starts: Tensor, ends: Tensor) -> Iterator[Segment]:
    """Give segments where a model is computed, one by one."""
    device = precise_device(model, starts)
    for start, end in zip(starts.detach(), ends.detach(), strict=True):
        yield start.to(device), end.to(device)


@each_exact
def estimate_all(
    model: nn.Module,
    segments: Iterable[Segment],
    *,
    tolerance: float,
    evaluations: int,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
    budget: int = 0,
) -> Iterator[SegmentEstimate | None]:
    """Estimate one segment after another; see `nlbench.probes.lines.estimate_segment`.

    Parameters
    ----------
    model : torch.nn.Module
    segments : iterable of (start, end)
    tolerance, evaluations, dtype, memory
        As of `estimate_segment`.
    budget : int
        Where nine points tell that an exact trace takes no more forward passes than this,
        nothing is estimated.

    Yields
    ------
    SegmentEstimate or None
        In the order of the segments; None where an exact trace is within the budget.
    """
    if not 0 < tolerance < 1:
        raise RequestError(f"a tolerance of {tolerance}, expected more than 0 and less than 1")
    waiting = iter(segments)
    first = next(waiting, None)
    if first is None:
        return
    waiting = itertools.chain([first], waiting)

    @functools.cache
    def estimator(precision: torch.dtype) -> Estimator:
        return Estimator(model, precision, first, memory)

    single = dtype or torch.float32
    wanted = _Wanted(tolerance, evaluations, budget)
    while group := list(itertools.islice(waiting, estimator(single).together)):
        states = _estimated(estimator, single, group, wanted, dtype is None)
        again = [i for i, state in enumerate(states) if state.is_rough]
        if again:
            for few in _in_groups(again, estimator(torch.float64).together):
                some = [group[i] for i in few]
                found = _estimated(estimator, torch.float64, some, wanted, False)
                for i, state in zip(few, found, strict=True):
                    states[i] = replace(state, wasted=states[i].wasted + state.wasted)
        for state in states:
            yield None if state.is_exact else state.estimate(tolerance)


def _in_groups(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[i : i + most] for i in range(0, len(items), most)]


def _estimated(
    estimator_in: Callable[[torch.dtype], Estimator],
    dtype: torch.dtype,
    segments: Sequence[Segment],
    wanted: _Wanted,
    may_be_rough: bool,
) -> list[_State]:
    """Give what there is to know of segments, again with less at once where memory runs out."""
    estimator = estimator_in(dtype)
    before = estimator.chunk

    def attempt(points: int) -> list[_State]:
        estimator.chunk = points
        groups = _in_groups(segments, max(1, len(segments) * points // before))
        found = (_estimate(estimator, estimator_in, few, wanted, may_be_rough) for few in groups)
        return list(itertools.chain.from_iterable(found))

    states, estimator.chunk = halving(attempt, before, estimator.device)
    estimator.together = max(1, estimator.together * estimator.chunk // before)
    return states


@torch.inference_mode()
def _estimate(
    estimator: Estimator,
    estimator_in: Callable[[torch.dtype], Estimator],
    segments: Sequence[Segment],
    wanted: _Wanted,
    may_be_rough: bool,
) -> list[_State]:
    """Give what there is to know of segments."""
    states = []
    for segment in segments:
        start, end = (x.to(estimator.dtype) for x in segment)
        rounding = estimator.piecewise.rounding(torch.lerp(start, end, 0.5)[None])
        states.append(_State(estimator, (start, end), rounding))
    active, tolerance = list(states), wanted.tolerance
    group = _Group(
        estimator, [state.segment for state in states], [state.rounding for state in states]
    )
    group.begin()
    has_windows = any(isinstance(p, Leaders) for p in estimator.piecewise.pieces.values())
    lost = LOST if estimator.dtype == torch.float32 or has_windows else 0.0
    while active:
        group.halve()
        full = 2 * group.steps + 1 + PROBES > wanted.evaluations or (
            2 * group.bytes_kept * 2 > estimator.budget / 2
        )
        if group.steps == TOLD and full:
            _leave_out_copies(group, active, estimator_in(torch.float64))
        # Here all comes over that the numbers of boundaries are made of.
        counts, doubtful = group.counts()
        going = []
        for i, state in enumerate(active):
            undecided = doubtful[i] / group.steps
            state.crossings = _Crossings.of(counts[:, i], undecided, lost)
            state.values = group.values[i]
            if group.steps == TOLD and _leaves(state, wanted, may_be_rough):
                continue
            met = state.crossings.is_close(tolerance) and (
                group.steps >= CHEAP or state.crossings.is_settled(tolerance)
            )
            if group.steps < LEAST or not (met or full):
                going.append(i)
        if not going or full:
            break
        if len(going) < len(active):
            group.kept(going)
        active = [active[i] for i in going]
        if group.steps == TOLD:
            _leave_out_copies(group, active, estimator_in(torch.float64))
    _integrate(estimator, [s for s in states if not (s.is_exact or s.is_rough)], wanted)
    return states


def _leave_out_copies(group: _Group, states: Sequence[_State], precise: Estimator) -> None:
    group.leave_out_copies(precise)
    for state in states:
        state.wasted += len(_WATCHED)


def _leaves(state: _State, wanted: _Wanted, may_be_rough: bool) -> bool:
    """Tell, from nine points, whether a segment is for an exact trace or for more precision."""
    assert state.crossings is not None
    state.is_exact = state.crossings.total + 1 <= wanted.budget
    if state.is_exact or not may_be_rough:
        return state.is_exact
    rounding, tolerance = state.left_by_rounding(), wanted.tolerance
    deviation = _Deviation.of(state.values, None).parts.total
    lost = float(torch.linalg.vector_norm(rounding))
    allowed = SURE * tolerance * state.crossings.total
    if (
        state.crossings.undecided + 2 * LOST > allowed
        or lost > tolerance * float(torch.linalg.vector_norm(deviation)) / 2
    ):
        state.is_rough, state.wasted = True, state.wasted + TOLD + 1
    return state.is_rough


def _integrate(estimator: Estimator, states: Sequence[_State], wanted: _Wanted) -> None:
    """Halve grids until the distances to the chord are known."""
    if not states:
        return
    seen = estimator.outputs([s.segment for s in states], [probes()] * len(states))
    late = list(zip(states, seen, strict=True))
    while late:
        going = []
        for state, beside in late:
            state.deviation = _Deviation.of(state.values, beside)
            needed = 2 * len(state.values) - 1 + PROBES
            if not state.is_close(wanted.tolerance) and needed <= wanted.evaluations:
                going.append((state, beside))
        late = going
        if late:
            chosen = [state for state, _ in late]
            counts = [len(state.values) - 1 for state in chosen]
            middles = [(2 * torch.arange(n, dtype=torch.float64) + 1) / (2 * n) for n in counts]
            found = estimator.outputs([state.segment for state in chosen], middles)
            for state, middle in zip(chosen, found, strict=True):
                state.values = _interleaved(state.values[None], middle[None])[0]
