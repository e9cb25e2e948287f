"""A recorded network that reports the pieces that its units are on while it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines.recording.program import Program, ProgramStep, run_program, walk_measured
from nlbench.probes.lines.recording.recorder import record_program
from nlbench.probes.lines.rules.pieces import Kinks, KnownPieces, MaxGroups
from nlbench.probes.lines.rules.rounding import peak

from .patterns import Margins, Windows, find_margins

COARSE_ROUNDING = 2
"""Ratio of the measured to the expected rounding error above which the measured error is used."""

PatternCallback = Callable[[ProgramStep, int, Margins | Windows], None]
"""Receives a step, the index of a kink, and the pattern of the step's units."""


class UnknownPieces(UnsupportedOperation):
    """A piecewise-affine operation whose pieces can't be distinguished."""


@dataclass(frozen=True)
class MeasuredRounding:
    """Rounding errors of patterns and outputs at one point, measured by perturbing last digits.

    They exceed the errors expected from the magnitude of a value where values are small differences
    of large numbers, for example differences between inputs far from zero.

    Parameters
    ----------
    min_tolerance : tensor of shape (n,)
        Minimum tolerance of each pattern in a forward pass, in call order; 0 where the expected one
        is used.
    is_coarse : bool tensor of shape (n,)
        True where a value equals its kink only because of rounding.
    output_error : float64 tensor of shape (k,)
        Rounding error of each output.
    """

    min_tolerance: Tensor
    is_coarse: Tensor
    output_error: Tensor


@dataclass(frozen=True)
class PiecewiseNetwork:
    """A recorded network, with the pieces of its units.

    Parameters
    ----------
    program : Program
    pieces : mapping of int to KnownPieces
        Keyed by the index of the value that a step computes.
    resting_values : tensor
        Values at which many units rest: 0 and the bounds of clipped units. Their negatives are
        included, since minima are computed as maxima of negatives.
    use_direct : bool
        True to run PyTorch's own calls instead of the rules' implementations, which are for float64
        on a CPU.
    shared : frozenset of int
        Values computed from overlapping windows, directly or not.
    """

    program: Program
    pieces: dict[int, KnownPieces]
    resting_values: Tensor
    use_direct: bool
    shared: frozenset[int] = frozenset()

    @property
    def may_coincide(self) -> bool:
        """True if units that are not copies may cross at the same position.

        They do so after overlapping windows, and where units saturate or act as the identity. They
        don't in plain ReLU networks.
        """
        for step in self.program.steps:
            piece = self.pieces.get(step.output)
            is_plain = step.operation == "relu" or isinstance(piece, MaxGroups)
            if piece is not None and (step.output in self.shared or not is_plain):
                return True
        return False

    @property
    def first_steps(self) -> set[int]:
        """Steps with pieces whose inputs are affine along a segment: no earlier step bends."""
        kinked: set[int] = set()
        for step in self.program.steps:
            if step.output in self.pieces or kinked & set(step.inputs):
                kinked.add(step.output)
        inputs = {step.output: step.inputs for step in self.program.steps}
        return {output for output in self.pieces if not kinked & set(inputs[output])}

    @property
    def site_index(self) -> dict[int, int]:
        """Index into the program's sites for each step with pieces."""
        sites = (step for step in self.program.steps if step.site)
        return {step.output: index for index, step in enumerate(sites)}

    def run(
        self,
        inputs: Tensor,
        callback: PatternCallback | None = None,
        rounding: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Run the network at points (P, *input) and return the outputs (P, k).

        Parameters
        ----------
        callback : callable, optional
            Called with each pattern, in call order.
        rounding : sequence of tensor, optional
            `min_tolerance` and `is_coarse` for each point, (P, n).
        """
        count = itertools.count()

        def report(step: ProgramStep, x: Sequence[Tensor]) -> None:
            if callback is not None and step.output in self.pieces:
                for kink, pattern in enumerate(self._patterns(step, x)):
                    callback(step, kink, _raise_tolerance(pattern, rounding, next(count)))

        output = run_program(self.program, inputs, report, use_direct=self.use_direct)
        return output.reshape(len(inputs), -1)

    def _patterns(self, step: ProgramStep, x: Sequence[Tensor]) -> Sequence[Margins | Windows]:
        pieces = self.pieces[step.output]
        if isinstance(pieces, MaxGroups):
            return [Windows.of(pieces, x, self.resting_values)]
        return find_margins(pieces, x, self.resting_values)

    def measure_rounding(self, point: Tensor) -> MeasuredRounding:
        """Measure rounding errors at a point (1, *input) by perturbing all last digits."""
        min_tolerance = []
        is_coarse = []
        output_error = point.new_zeros(1)
        for computed in walk_measured(self.program, point):
            if computed.step.output in self.pieces:
                patterns = self._patterns(computed.step, computed.inputs)
                perturbed = self._patterns(computed.step, computed.copies[0])
                for pattern, other in zip(patterns, perturbed, strict=True):
                    difference, coarse = _difference(pattern, other)
                    exceeds = difference > COARSE_ROUNDING * pattern.tolerance.amax()
                    min_tolerance.append(torch.where(exceeds, 2 * difference, 0.0))
                    is_coarse.append(coarse)
            if computed.step.output == self.program.output:
                output_error = computed.bound.expand_as(computed.output).flatten()
        eps = torch.finfo(point.dtype).eps
        return MeasuredRounding(
            torch.stack([point.new_zeros(()), *min_tolerance])[1:],
            torch.stack([point.new_zeros((), dtype=torch.bool), *is_coarse])[1:],
            eps * output_error.double(),
        )


def _difference(pattern: Margins | Windows, perturbed: Margins | Windows) -> tuple[Tensor, Tensor]:
    """Return the largest difference, and whether the perturbation moves a value off its kink."""
    difference = pattern.values - perturbed.values
    if isinstance(pattern, Margins) and pattern.is_paired:
        # Resting units have no margin, and perturbed units don't rest.
        difference = difference.masked_fill((pattern.values == 0) | (perturbed.values == 0), 0.0)
    largest = peak(difference[None]).flatten()[0]
    if isinstance(pattern, Windows) or pattern.is_paired:
        return largest, torch.zeros_like(largest, dtype=torch.bool)
    kink = pattern.kink
    return largest, ((pattern.values == kink) & (perturbed.values != kink)).any()


def _raise_tolerance(
    pattern: Margins | Windows, rounding: Sequence[Tensor] | None, index: int
) -> Margins | Windows:
    """Raise the tolerance of a pattern to the measured one."""
    if rounding is None:
        return pattern
    min_tolerance, is_coarse = (column[:, index : index + 1] for column in rounding)
    tolerance = torch.maximum(pattern.tolerance, min_tolerance)
    if isinstance(pattern, Margins):
        return replace(pattern, tolerance=tolerance, is_coarse=is_coarse)
    return replace(pattern, tolerance=tolerance, is_coarse=min_tolerance[:, 0] > 0)


def record_pieces(network: nn.Module, example: Tensor) -> PiecewiseNetwork:
    """Record a network together with the pieces of its units.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode, in float64 or float32.
    example : tensor of shape (1, *input), of the same dtype

    Raises
    ------
    nlbench.UnsupportedOperation
        If an operation is not piecewise affine, or the pieces of its units can't be distinguished.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> record_pieces(network, torch.zeros(1, 2)).program.sites
    ('1',)
    """
    program = record_program(network, example.clone())
    pieces: dict[int, KnownPieces] = {}
    for step in program.steps:
        if isinstance(step.rule.pieces, KnownPieces):
            pieces[step.output] = step.rule.pieces
        elif step.rule.pieces is not None:
            raise UnknownPieces(
                step.operation, step.place, "the pieces of its units can't be distinguished"
            )
    use_direct = example.dtype == torch.float32 or example.device.type != "cpu"
    kinks = {c for p in pieces.values() if isinstance(p, Kinks) for c in p.thresholds} | {0.0}
    signed = sorted({sign * c for c in kinks for sign in (1, -1)})
    resting = torch.tensor(signed, dtype=example.dtype, device=example.device)
    shared = _values_behind_overlap(program, pieces)
    return PiecewiseNetwork(program, pieces, resting, use_direct, shared)


def _values_behind_overlap(program: Program, pieces: Mapping[int, KnownPieces]) -> frozenset[int]:
    shapes = {0: program.shape} | {step.output: step.shape for step in program.steps}
    shared: set[int] = set()
    for step in program.steps:
        piece = pieces.get(step.output)
        inputs = [shapes[i] for i in step.inputs]
        if (
            not shared.isdisjoint(step.inputs)
            or ("avg_pool" in step.operation and _averages_overlap(step, inputs[0]))
            or (isinstance(piece, MaxGroups) and _windows_overlap(piece, inputs))
        ):
            shared.add(step.output)
    return frozenset(shared)


def _averages_overlap(step: ProgramStep, shape: Sequence[int]) -> bool:
    """Return True if several averages depend on one of the 16 values in the middle."""
    size = math.prod(shape[-2:])
    middle = torch.arange(min(16, size)) + max(0, size - 16) // 2
    values = torch.zeros(len(middle), math.prod(shape), dtype=torch.float64)
    values[torch.arange(len(middle)), middle] = 1.0
    averages = step.rule.apply([values.reshape(-1, *shape)])
    return int(averages.flatten(1).count_nonzero(1).amax()) > 1


def _windows_overlap(groups: MaxGroups, shapes: Sequence[Sequence[int]]) -> bool:
    """Return True if a value is a member of several windows."""
    indices = [1 + torch.arange(math.prod(s), dtype=torch.float64).reshape(1, *s) for s in shapes]
    members = groups.members(indices).abs().long().flatten(0, 2).sort(1).values
    is_first = torch.ones_like(members, dtype=torch.bool)
    is_first[:, 1:] = members.diff(dim=1) != 0
    return bool((members[is_first].bincount() > 1).any())
