"""Which piece every unit of a recorded network is on, at many points at once.

A unit of an operation that is affine in pieces is on one side or the other of each of its
kinks; a window of max pooling is led by one of its members; what is sorted is among the k
largest or not. All are read off the network's values as they pass, and kept in a bit or two a
unit, so that patterns can be compared long after the values are gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines.recording.program import (
    Program,
    Step,
    program_of,
    run_program,
    walk_measured,
)
from nlbench.probes.lines.rules.rule import Kinks, Leaders, Pieces, Ranks, peak

__all__ = [
    "BEYOND",
    "ROUNDING",
    "Margins",
    "Piecewise",
    "Rounding",
    "UnknownPieces",
    "Watch",
    "Windows",
    "bits_of",
    "bits_of_some",
    "crossed",
    "margins_of",
    "noise_among",
    "ones",
    "packed",
    "record_pieces",
    "value_of",
]

ROUNDING = {
    torch.float64: 4 * torch.finfo(torch.float64).eps,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
}
"""What rounding leaves of a value, as a share of the largest of its tensor at that point.

In networks of up to 64 layers it is 0.5 to 3 machine epsilons.
"""
BEYOND = 2
"""How many times as much it is measured to be where that counts in place of it."""


class UnknownPieces(UnsupportedOperation):
    """Piecewise affine, but how its units' pieces are told apart is not known."""


@dataclass(frozen=True)
class Margins:
    """What tells on which side of one number units are, at P points.

    Parameters
    ----------
    values : tensor of shape (P, U)
        Of the units.
    kink : float
        The number that a unit passes as it changes sides.
    noise : tensor of shape (P, 1)
        Difference up to which a value can't be told from it.
    is_coarse : bool tensor of shape (P, 1), optional
        Whether values that are equal to it may be so by rounding.
    is_paired : bool
        Whether units change places two by two.
    """

    values: Tensor
    kink: float
    noise: Tensor
    is_coarse: Tensor | None = None
    is_paired: bool = False

    @cached_property
    def state(self) -> Tensor:
        """Which units are above and which below, packed (P, 2, W)."""
        above, below = self.values > self.kink + self.noise, self.values < self.kink - self.noise
        return torch.stack([packed(above), packed(below)], 1)

    @property
    def resting(self) -> Tensor:
        """Which units rest on the number, packed (P, W)."""
        found = self.values == self.kink
        return packed(found if self.is_coarse is None else found & ~self.is_coarse)

    def changes(self, other: Tensor) -> Tensor:
        """Count units that are on another side in other states, (P, 2, W): (P,)."""
        return ones(crossed(self.state, other, self.is_paired))


@dataclass
class Windows:
    """Who leads the windows of a pooling at P points.

    Parameters
    ----------
    state : tensor of shape (P, groups)
        Positions of the leaders, -1 where a window rests.
    values : tensor of shape (P, rows, positions)
        Among which they are.
    noise : tensor of shape (P, 1)
        Difference up to which two of them can't be told apart.
    is_coarse : bool tensor of shape (P,)
        Whether that is more than is expected of values of their size.
    """

    state: Tensor
    values: Tensor
    noise: Tensor
    is_coarse: Tensor

    @classmethod
    def of(cls, pieces: Leaders, x: Sequence[Tensor], flats: Tensor) -> Windows:
        """Find them; windows whose largest is one of `flats` rest."""
        positions, members = pieces.lead(x)
        resting = torch.isin(members.gather(2, positions).flatten(1), flats)
        few = members.shape[2] < 2**15
        lead = positions.flatten(1).to(torch.int16 if few else torch.int32)
        noise = noise_among(members)
        expected = torch.zeros(len(lead), dtype=torch.bool, device=lead.device)
        return cls(lead.masked_fill_(resting, -1), members, noise, expected)

    def led_by_others(self, other: Tensor) -> Tensor:
        """Tell which windows others (P, groups) lead elsewhere."""
        return (self.state != other) & (self.state >= 0) & (other >= 0)

    def of_leaders(self, other: Tensor, row: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """Values here of the leader of some windows, and of that elsewhere: (m,) each."""
        channel = group // (other.shape[1] // self.values.shape[1])
        mine = self.values[row, channel, self.state[row, group].long()]
        return mine, self.values[row, channel, other[row, group].long()]

    def changes(self, other: Tensor) -> Tensor:
        """Count windows that others (P, groups) lead elsewhere: (P,)."""
        row, group = self.led_by_others(other).nonzero().unbind(1)
        mine, theirs = self.of_leaders(other, row, group)
        apart = mine - theirs > self.noise.flatten()[row]
        return torch.bincount(row[apart], minlength=len(other))

    def keep(self, before: Tensor, rows: slice) -> Tensor:
        """Let who led before lead on where it is as large: units may be tied all along.

        Returns in how many windows of each row that is another than the largest.
        """
        lead, values = self.state[rows], self.values[rows]
        tied = value_of(values, before) >= value_of(values, lead) - self.noise[rows]
        tied &= (before >= 0) & (lead >= 0)
        self.state[rows] = torch.where(tied, before, lead)
        return (tied & (before != lead)).sum(1)


def value_of(members: Tensor, lead: Tensor) -> Tensor:
    """Values (P, groups) at positions; anything where there is none.

    Examples
    --------
    >>> value_of(torch.tensor([[[3.0, 1.0]]]), torch.tensor([[1, 0]])).tolist()
    [[1.0, 3.0]]
    """
    positions = lead.clamp(min=0).long().reshape(len(lead), members.shape[1], -1)
    return members.gather(2, positions).flatten(1)


def noise_among(members: Tensor) -> Tensor:
    """Difference up to which two members (P, rows, positions) can't be told apart: (P, 1).

    Examples
    --------
    >>> noise_among(torch.tensor([[[3.0, -1.0]]])) == 12 * torch.finfo(torch.float32).eps
    tensor([[True]])
    """
    return ROUNDING[members.dtype] * peak(members.flatten(1))


Watch = Callable[[Step, int, Margins | Windows], None]


@dataclass(frozen=True)
class Rounding:
    """What rounding leaves where it is more than is expected of a value's own size.

    So where numbers are what is left of much larger ones, as of inputs far from zero that are
    compared with each other. All is measured: see `Piecewise.rounding`.

    Parameters
    ----------
    least : tensor of shape (n,)
        Of each thing that is watched in a pass, in order: the least that can be told apart, or 0.
    is_coarse : bool tensor of shape (n,)
        Whether values are equal to a kink that would not be but for rounding.
    output : float64 tensor of shape (k,)
        Of each output.
    """

    least: Tensor
    is_coarse: Tensor
    output: Tensor


@dataclass(frozen=True)
class Piecewise:
    """A recorded network, and how to tell which piece its units are on.

    Parameters
    ----------
    program : Program
    pieces : mapping of int to Pieces
        By the number of the value that a step makes.
    flats : tensor
        Values at which whole stretches of units rest: 0, and where units are cut off; and their
        negatives, for of what is taken the smallest of the negatives are compared.
    is_direct : bool
        Whether calls are run as they are: the program's own ways are made for float64 on a CPU.
    """

    program: Program
    pieces: dict[int, Pieces]
    flats: Tensor
    is_direct: bool

    @property
    def first(self) -> set[int]:
        """Steps before which nothing bends: what they are told is affine along a segment."""
        bent: set[int] = set()
        for step in self.program.steps:
            if step.output in self.pieces or bent & set(step.inputs):
                bent.add(step.output)
        inputs = {step.output: step.inputs for step in self.program.steps}
        return {output for output in self.pieces if not bent & set(inputs[output])}

    @property
    def places(self) -> dict[int, int]:
        """Which of the program's sites each step is that has pieces."""
        sites = (step for step in self.program.steps if step.site)
        return {step.output: place for place, step in enumerate(sites)}

    def run(
        self,
        inputs: Tensor,
        watch: Watch | None = None,
        rounding: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Carry points (P, *input) through the network; outputs are (P, k).

        `watch` is told of each step whose units have pieces, in order of call, its kinks by their
        number; `rounding` are `Rounding.least` and `.is_coarse` of each point, (P, n).
        """
        seen = itertools.count()

        def look(step: Step, x: Sequence[Tensor]) -> None:
            if watch is not None and step.output in self.pieces:
                for number, found in enumerate(self._looks(step, x)):
                    watch(step, number, _coarser(found, rounding, next(seen)))

        output = run_program(self.program, inputs, look, is_direct=self.is_direct)
        return output.reshape(len(inputs), -1)

    def _looks(self, step: Step, x: Sequence[Tensor]) -> Sequence[Margins | Windows]:
        pieces = self.pieces[step.output]
        if isinstance(pieces, Leaders):
            return [Windows.of(pieces, x, self.flats)]
        return margins_of(pieces, x, self.flats)

    def rounding(self, one: Tensor) -> Rounding:
        """Measure what rounding leaves at a point, (1, *input), by changing all last digits."""
        least, is_coarse, output = [], [], one.new_zeros(1)
        for seen in walk_measured(self.program, one):
            if seen.step.output in self.pieces:
                both = (self._looks(seen.step, x) for x in (seen.inputs, seen.copies[0]))
                for mine, theirs in zip(*both, strict=True):
                    off, coarse = _apart(mine, theirs)
                    beyond = off > BEYOND * mine.noise.amax()
                    least.append(torch.where(beyond, 2 * off, 0.0))
                    is_coarse.append(coarse)
            if seen.step.output == self.program.output:
                output = seen.bound.expand_as(seen.output).flatten()
        eps = torch.finfo(one.dtype).eps
        return Rounding(
            torch.stack([one.new_zeros(()), *least])[1:],
            torch.stack([one.new_zeros((), dtype=torch.bool), *is_coarse])[1:],
            eps * output.double(),
        )


def _apart(mine: Margins | Windows, theirs: Margins | Windows) -> tuple[Tensor, Tensor]:
    """Give the largest difference, and whether a value is at its kink in one of them only."""
    off = peak((mine.values - theirs.values)[None]).flatten()[0]
    if isinstance(mine, Windows):
        return off, torch.zeros_like(off, dtype=torch.bool)
    return off, ((mine.values == mine.kink) & (theirs.values != mine.kink)).any()


def _coarser(
    found: Margins | Windows, rounding: Sequence[Tensor] | None, which: int
) -> Margins | Windows:
    """Take into account what rounding was measured to leave."""
    if rounding is None:
        return found
    least, is_coarse = (column[:, which : which + 1] for column in rounding)
    noise = torch.maximum(found.noise, least)
    if isinstance(found, Margins):
        return replace(found, noise=noise, is_coarse=is_coarse)
    return replace(found, noise=noise, is_coarse=least[:, 0] > 0)


def record_pieces(network: nn.Module, example: Tensor) -> Piecewise:
    """Record a network and find out how to tell which piece its units are on.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode, in float64 or float32.
    example : tensor of shape (1, *input), of the same dtype

    Raises
    ------
    nlbench.UnsupportedOperation
        If an operation is not piecewise affine, or the pieces of its units can't be told apart.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> record_pieces(network, torch.zeros(1, 2)).program.sites
    ('1',)
    """
    program = program_of(network, example.clone())
    pieces = {}
    for step in program.steps:
        if step.rule.bend is not None:
            if step.rule.pieces is None:
                raise UnknownPieces(
                    step.operation, step.place, "the pieces of its units can't be told apart"
                )
            pieces[step.output] = step.rule.pieces
    is_quick = example.dtype == torch.float32 or example.device.type != "cpu"
    rests = {c for p in pieces.values() if isinstance(p, Kinks) for c in p.numbers} | {0.0}
    both = sorted({sign * c for c in rests for sign in (1, -1)})
    flats = torch.tensor(both, dtype=example.dtype, device=example.device)
    return Piecewise(program, pieces, flats, is_quick)


def margins_of(pieces: Kinks | Ranks, x: Sequence[Tensor], flats: Tensor) -> list[Margins]:
    """Give what tells on which side units are, from inputs at P points.

    Parameters
    ----------
    pieces : Kinks or Ranks
    x : sequence of tensor of shape (P, ...)
    flats : tensor
        Values at which whole stretches of units rest.

    Examples
    --------
    >>> ranks = Ranks(lambda x: x[0][:, None], [0])
    >>> margins_of(ranks, [torch.tensor([[3.0, 1.0, 2.0]])], torch.zeros(1))[0].values
    tensor([[ 1., -2., -1.]])
    """
    if isinstance(pieces, Ranks):
        lines = pieces.lines(x)
        # Each rank that is passed on ends where the next begins. Who is among the largest, as far
        # as there, is counted: where two change places there one goes and one comes, so that as
        # many boundaries are crossed between two points as units have gone, at least.
        tops = {top for rank in pieces.ranks for top in (rank, rank + 1)}
        tops &= set(range(1, lines.shape[-1]))
        if not lines.numel() or not tops:
            return []
        ordered = lines.sort(-1, descending=True).values
        found = []
        for top in sorted(tops):
            last, next_ = ordered[..., top - 1 : top], ordered[..., top : top + 1]
            # Where units rest side by side one may go and another come without a boundary.
            resting = torch.isin(last, flats) | torch.isin(next_, flats)
            margin = torch.where(lines >= last, lines - next_, lines - last)
            found.append(margin.masked_fill(resting, 0.0).flatten(1))
        noise = ROUNDING[lines.dtype] * peak(lines.flatten(1))
        return [Margins(torch.cat(found, 1), 0.0, noise, is_paired=True)]
    flat = pieces.value(x)[:, None].flatten(1)
    size = peak(flat)
    return [
        Margins(flat, kink, ROUNDING[flat.dtype] * size.clamp(min=abs(kink)))
        for kink in pieces.numbers
    ]


def crossed(one: Tensor, other: Tensor, is_paired: bool = False) -> Tensor:
    """Tell which units are above at one place and below at the other: packed (..., 2, W) each.

    Of units that change places two by two, those that go are counted.

    Examples
    --------
    >>> there, back = torch.tensor([[5], [2]]), torch.tensor([[2], [5]])
    >>> crossed(there, back).tolist(), crossed(there, back, is_paired=True).tolist()
    ([7], [5])
    """
    (above, below), (above_there, below_there) = one.unbind(-2), other.unbind(-2)
    gone = above & below_there
    return gone if is_paired else gone | below & above_there


_GATHER = 0x0102040810204080
"""Brings the lowest bits of eight bytes together in the highest byte."""


def packed(flags: Tensor) -> Tensor:
    """Put 64 flags into a word: bool (P, U) to int64 (P, U / 64, rounded up).

    Examples
    --------
    >>> packed(torch.tensor([[True, False, True]])).tolist()
    [[5]]
    """
    rows, units = flags.shape
    filled = functional.pad(flags, (0, -units % 64)) if units % 64 else flags.contiguous()
    if not filled.numel():
        return torch.zeros(rows, 0, dtype=torch.int64, device=flags.device)
    eights = filled.view(torch.int64) * _GATHER
    return eights.bitwise_right_shift_(56).to(torch.uint8).view(torch.int64)


_M1, _M2, _M4 = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
_H1 = 0x0101010101010101


def ones(words: Tensor) -> Tensor:
    """Count the flags that are set, over the last axis.

    Examples
    --------
    >>> ones(torch.tensor([[5, -1], [0, 8]])).tolist()
    [66, 1]
    """
    x = words - ((words >> 1) & _M1)
    x = (x & _M2) + ((x >> 2) & _M2)
    x = (x + (x >> 4)) & _M4
    return ((x * _H1) >> 56).sum(-1)


def bits_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """Give row and unit of each flag that is set, row by row; int64 (P, W).

    Examples
    --------
    >>> [index.tolist() for index in bits_of(torch.tensor([[5, 0], [0, -2**63]]))]
    [[0, 0, 1], [0, 2, 127]]
    """
    row, word = words.nonzero().unbind(1)
    # A byte at a time: a word of memory for each of its flags would be 64 times what they take.
    eights = words[row, word].view(torch.uint8).reshape(-1, 8)
    hit, byte = eights.nonzero().unbind(1)
    flags = (eights[hit, byte][:, None] >> torch.arange(8, device=words.device).byte()) & 1
    among, bit = flags.nonzero().unbind(1)
    hit, byte = hit[among], byte[among]
    return row[hit], word[hit] * 64 + byte * 8 + bit


def bits_of_some(words: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `bits_of` does, with places for so many: a GPU's host need not wait for how many.

    Returns
    -------
    row, unit : int64 tensor of shape (most,)
    is_one : bool tensor of shape (most,)
        Whether this place is taken.
    wanted : int64 tensor of shape ()
        Places that all flags would have taken: if more than `most`, some are missing.

    Examples
    --------
    >>> row, unit, is_one, wanted = bits_of_some(torch.tensor([[5, 0], [0, -2**63]]), 4)
    >>> row[is_one].tolist(), unit[is_one].tolist(), int(wanted)
    ([0, 0, 1], [0, 2, 127], 3)
    """
    flat = words.flatten()
    at, filled = _first_of(flat != 0, most)
    shifts = torch.arange(64, device=words.device)
    index = torch.arange(most, device=words.device)
    flags = (flat[at][:, None] >> shifts) & (index < filled)[:, None]
    bit, found = _first_of((flags & 1).flatten() != 0, most)
    word = at[bit // 64]
    columns = max(1, words.shape[1])
    unit = word % columns * 64 + bit % 64
    return word // columns, unit, index < found, torch.maximum(filled, found)


def _first_of(flags: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Give the first places (most,) of flags (n,) that are set, and how many there are."""
    rank = flags.cumsum(0)
    slot = torch.where(flags, (rank - 1).clamp(max=most), most)
    places = torch.zeros(most + 1, dtype=torch.int64, device=flags.device)
    places.scatter_(0, slot, torch.arange(len(flags), device=flags.device))
    return places[:most], flags.sum()
