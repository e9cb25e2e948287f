"""Which piece every unit of a recorded network is on, at many points at once.

A unit of an operation that is affine in pieces is on one side or the other of each of its
kinks; a window of max pooling is led by one of its members; what is sorted is among the k
largest or not. All are read off the network's values as they pass, and kept in a bit or two a
unit, so that patterns can be compared long after the values are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import UnsupportedOperation

from .dispatch_recorder import Step
from .ops.rule import Kinks, Pieces, Ranks
from .program import Program, record_unchecked

__all__ = [
    "ROUNDING",
    "Piecewise",
    "UnknownPieces",
    "bits_of",
    "bits_of_some",
    "margins_of",
    "ones",
    "packed",
    "record_pieces",
    "sides_of",
]

ROUNDING = {
    torch.float64: 4 * torch.finfo(torch.float64).eps,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
}
"""What rounding leaves of a value, as a share of the largest of its tensor at that point.

In networks of up to 64 layers it is 0.5 to 3 machine epsilons.
"""


class UnknownPieces(UnsupportedOperation):
    """Piecewise affine, but how its units' pieces are told apart is not known."""


@dataclass(frozen=True)
class Piecewise:
    """A recorded network, and how to tell which piece its units are on.

    Parameters
    ----------
    program : Program
    pieces : mapping of int to Pieces
        By the number of the value that a step makes.
    is_direct : bool
        Whether calls are run as they are: the program's own ways are made for float64 on a CPU.
    """

    program: Program
    pieces: dict[int, Pieces]
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
    def rests(self) -> set[float]:
        """Values at which units may rest for a while, other than 0."""
        return {c for p in self.pieces.values() if isinstance(p, Kinks) for c in p.rests}

    def run(
        self, inputs: Tensor, watch: Callable[[Step, Pieces, Sequence[Tensor]], None]
    ) -> Tensor:
        """Carry points (P, *input) through the network; outputs are (P, k).

        `watch` is told the inputs of each step whose units have pieces, in order of call.
        """
        values = {0: inputs}
        for step in self.program.steps:
            x = [values[i] for i in step.inputs]
            if step.output in self.pieces:
                watch(step, self.pieces[step.output], x)
            direct = step.rule.direct if self.is_direct else None
            values[step.output] = (direct or step.rule.apply)(x)
            for value in step.ends:
                del values[value]
        return values[self.program.output].reshape(len(inputs), -1)


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
    program = record_unchecked(network, example.clone())
    pieces = {}
    for step in program.steps:
        if step.rule.bend is not None:
            if step.rule.pieces is None:
                raise UnknownPieces(
                    step.operation, step.place, "the pieces of its units can't be told apart"
                )
            pieces[step.output] = step.rule.pieces
    is_quick = example.dtype == torch.float32 or example.device.type != "cpu"
    return Piecewise(program, pieces, is_quick)


def margins_of(
    pieces: Kinks | Ranks, x: Sequence[Tensor], flats: Tensor
) -> list[tuple[Tensor, float, Tensor]]:
    """Give what tells on which side units are, from inputs at P points.

    Parameters
    ----------
    pieces : Kinks or Ranks
    x : sequence of tensor of shape (P, ...)
    flats : tensor
        Values at which whole stretches of units rest.

    Returns
    -------
    list of (tensor of shape (P, U), float, tensor of shape (P, 1))
        Values, the number that a unit passes as it changes sides, and the size of what they were
        made of, by which rounding is told.

    Examples
    --------
    >>> ranks = Ranks(lambda x: x[0][:, None], (1,))
    >>> margins_of(ranks, [torch.tensor([[3.0, 1.0, 2.0]])], torch.zeros(1))[0][0]
    tensor([[ 1., -2., -1.]])
    """
    if isinstance(pieces, Ranks):
        lines = pieces.lines(x)
        if not lines.numel() or not pieces.tops:
            return []
        ordered = lines.sort(-1, descending=True).values
        found = []
        for top in pieces.tops:
            last, next_ = ordered[..., top - 1 : top], ordered[..., top : top + 1]
            # Where units rest side by side one may go and another come without a boundary.
            resting = torch.isin(last, flats) | torch.isin(next_, flats)
            margin = torch.where(lines >= last, lines - next_, lines - last)
            found.append(margin.masked_fill(resting, 0.0).flatten(1))
        return [(torch.cat(found, 1), 0.0, _size(lines.flatten(1)))]
    flat = [(margin.flatten(1), kink) for margin, kink in pieces.margins(x)]
    return [(margin, kink, _size(margin).clamp(min=abs(kink))) for margin, kink in flat]


def _size(flat: Tensor) -> Tensor:
    """Give the largest magnitude at each of P points, (P, 1)."""
    if not flat.shape[1]:
        return flat.new_zeros(len(flat), 1)
    # Both apart are 20 times as fast as `aminmax` on a CPU.
    return torch.maximum(flat.amax(1, True), -flat.amin(1, True))


def sides_of(flat: Tensor, kink: float, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which of (P, U) units are above a kink and which below, packed; and the noise (P, 1)."""
    noise = ROUNDING[flat.dtype] * size
    return packed(flat > kink + noise), packed(flat < kink - noise), noise


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
    shifts = torch.arange(64, device=words.device)
    flags = (words[row, word][:, None] >> shifts) & 1
    hit, bit = flags.nonzero().unbind(1)
    return row[hit], word[hit] * 64 + bit


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
