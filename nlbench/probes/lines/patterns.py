"""Which piece every unit of a recorded network is on, at many points at once.

A unit of an operation that is affine in pieces is on one side or the other of each of its
kinks; a window of max pooling is led by one of its members. Both are read off the network's
values as they pass, and kept in a bit or two a unit, so that patterns can be compared long
after the values are gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.errors import UnsupportedOperation
from nlbench.probes.ops import known

from .ops.rule import Call, Input, Rule
from .program import Program, _one_output, _program
from .record import Recorder, Step

__all__ = [
    "ROUNDING",
    "Kinks",
    "Leaders",
    "Pieces",
    "Piecewise",
    "UnknownPieces",
    "bits_of",
    "ones",
    "packed",
    "pieces_of",
    "record_pieces",
]

ROUNDING = {
    torch.float64: 4 * torch.finfo(torch.float64).eps,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
}
"""What rounding leaves of a value, as a share of the largest of its tensor at that point.

In networks of up to 64 layers it is 0.5 to 3 machine epsilons.
"""

Margin = tuple[Tensor, float]
"""Values of units, (P, ...), and where they bend."""


@dataclass(frozen=True)
class Kinks:
    """Units each of which bends where a value of its own passes a number.

    Parameters
    ----------
    margins : callable
        From the inputs at P points to those values and numbers.
    rests : tuple of float
        Outputs at which a unit may rest for a while, other than 0.
    """

    margins: Callable[[Sequence[Tensor]], list[Margin]]
    rests: tuple[float, ...] = ()


@dataclass(frozen=True)
class Leaders:
    """Groups of units of which the largest is passed on.

    Parameters
    ----------
    lead : callable
        From the inputs at P points to positions (P, rows, groups) of the leaders, int64, and to
        the values (P, rows, positions) among which they are.
    """

    lead: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


Pieces = Kinks | Leaders
_Maker = Callable[[Call], Pieces | None]


class UnknownPieces(UnsupportedOperation):
    """Piecewise affine, but how its units' pieces are told apart is not known."""


def _at(*kinks: float) -> _Maker:
    return lambda call: _bends(kinks)


def _bends(kinks: Sequence[float]) -> Kinks:
    places = [float(c) for c in kinks if math.isfinite(c)]
    return Kinks(lambda inputs: [(inputs[0], c) for c in places], tuple(places))


def _leaky(call: Call) -> Kinks:
    return _bends([0.0] if float(call.argument(1, "negative_slope", 0.01)) != 1 else [])


def _rrelu(call: Call) -> Kinks:
    slope = (call.argument(1, "lower", 1 / 8) + call.argument(2, "upper", 1 / 3)) / 2
    return _bends([0.0] if slope != 1 else [])


def _prelu(call: Call) -> Kinks:
    slope: Tensor = call.args[1]
    units = (1, -1) + (1,) * (len(call.shape) - 2) if slope.numel() > 1 else ()
    bends = (slope != 1).to(slope.dtype).reshape(units)
    # A channel of slope 1 is linear: at 0 it is on neither side.
    return Kinks(lambda inputs: [(inputs[0] * bends, 0.0)])


def _between(low: Any, high: Any) -> Kinks:
    ends = [float(c) for c in (low, high) if c is not None]
    return _bends([] if len(ends) == 2 and ends[0] >= ends[1] else ends)


def _softshrink(call: Call) -> Kinks:
    width = float(call.argument(1, "lambd", 0.5))
    return _bends([-width, width] if width else [])


def _larger_of_two(call: Call) -> Pieces | None:
    if len(call.args) < 2 or not all(isinstance(a, (Input, Tensor)) for a in call.args[:2]):
        return _largest_along(call)

    def margins(inputs: Sequence[Tensor]) -> list[Margin]:
        first, second = (inputs[a.index] if isinstance(a, Input) else a for a in call.args[:2])
        return [(torch.sub(first, second), 0.0)]

    return Kinks(margins)


def _largest_along(call: Call) -> Pieces | None:
    axis = call.argument(1, "dim")
    if isinstance(axis, (list, tuple)) and len(axis) == 1:
        axis = axis[0]
    if not isinstance(axis, int) or not isinstance(call.args[0], Input):
        return None
    sign = -1 if call.name in ("amin", "min") else 1

    def lead(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        members = sign * inputs[0].movedim(axis, -1)
        members = members.reshape(len(members), -1, members.shape[-1])
        return members.argmax(-1, keepdim=True), members

    return Leaders(lead)


def _max_pool(call: Call) -> Leaders:
    axes = int(call.name.partition("pool")[2][0])
    if call.name.startswith("adaptive"):
        pool = getattr(functional, f"adaptive_max_pool{axes}d")
        settings: dict[str, Any] = {"output_size": call.shape[-axes:]}
    else:
        pool = getattr(functional, f"max_pool{axes}d")
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        given = dict(zip(names, call.args[1:], strict=False)) | dict(call.kwargs)
        settings = {name: given[name] for name in names if name in given}
        if not settings.get("stride"):
            settings.pop("stride", None)

    def lead(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x = inputs[0]
        if x.ndim == axes + 1:  # Without an axis of channels.
            x = x.unsqueeze(1)
        positions: Tensor = pool(x, return_indices=True, **settings)[1]
        return positions.flatten(2), x.flatten(2)

    return Leaders(lead)


_PIECES: dict[str, _Maker] = {
    **dict.fromkeys(("relu", "abs", "absolute"), _at(0.0)),
    "relu6": _at(0.0, 6.0),
    "leaky_relu": _leaky,
    "rrelu": _rrelu,
    "prelu": _prelu,
    "hardsigmoid": _at(-3.0, 3.0),
    "softshrink": _softshrink,
    "hardtanh": lambda c: _between(c.argument(1, "min_val", -1.0), c.argument(2, "max_val", 1.0)),
    **dict.fromkeys(
        ("clamp", "clip", "clamp_min"),
        lambda c: _between(c.argument(1, "min"), c.argument(2, "max")),
    ),
    "clamp_max": lambda c: _between(None, c.argument(1, "max")),
    "threshold": lambda c: _bends([float(c.args[1])]),
    **dict.fromkeys(("maximum", "minimum", "max", "min", "fmax", "fmin"), _larger_of_two),
    **dict.fromkeys(("amax", "amin"), _largest_along),
    **{f"{kind}max_pool{axes}d": _max_pool for kind in ("", "adaptive_") for axes in (1, 2, 3)},
}


def pieces_of(call: Call) -> Pieces | None:
    """Say how the pieces of a call's units are told apart; None if that isn't known."""
    maker = _PIECES.get(call.name)
    if maker:
        return maker(call)
    # An operation that somebody registered with its kinks.
    found = known(call.name)
    return None if found is None or found.kinks is None else _bends(found.kinks)


@dataclass(frozen=True)
class Piecewise:
    """A recorded network, and how to tell which piece its units are on.

    Parameters
    ----------
    program : Program
    pieces : mapping of int to Pieces
        By the number of the value that a step makes.
    direct : mapping of int to Call
        Of convolutions, which are run as they are called: the program's own way of running them
        is made for double precision.
    """

    program: Program
    pieces: dict[int, Pieces]
    direct: dict[int, Call]

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
            call = self.direct.get(step.output)
            values[step.output] = step.rule.apply(x) if call is None else call.apply(x)
            for value in step.ends:
                del values[value]
        return values[self.program.output].reshape(len(inputs), -1)


class _CallRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Keeps the calls of the steps that it writes down."""

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        super().__init__(network, example)
        self.calls: dict[int, Call] = {}
        self._call: Call | None = None

    def _add(self, call: Call, traced: list[Tensor], result: Any, written: list[Tensor]) -> None:
        self._call = call
        super()._add(call, traced, result, written)
        self._call = None

    def _add_step(self, name: str, inputs: Sequence[int], rule: Rule, output: Tensor) -> None:
        super()._add_step(name, inputs, rule, output)
        if self._call is not None:
            made = {**vars(self._call), "shape": tuple(output.shape)}
            self.calls[self.steps[-1].output] = Call(**made)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")


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
    one = example.clone()
    recorder = _CallRecorder(network, one)
    output = _one_output(network, one, recorder.recording())
    value = recorder.output_value(output)
    program = _program(recorder.program, value, tuple(example.shape[1:]))
    pieces, direct = {}, {}
    is_quick = example.dtype == torch.float32 or example.device.type != "cpu"
    for step in program.steps:
        call = recorder.calls.get(step.output)
        if step.rule.bend is not None:
            found = pieces_of(call) if call else None
            if found is None:
                raise UnknownPieces(
                    step.operation, step.place, "the pieces of its units can't be told apart"
                )
            pieces[step.output] = found
        elif call is not None and step.operation in _CONVOLUTIONS and is_quick:
            direct[step.output] = call
    return Piecewise(program, pieces, direct)


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
