"""A program: a network's forward pass as a sequence of operations.

Value 0 is the input; step i reads earlier values and computes value i. Each step has the rule of
its operation (see `nlbench.probes.lines.rules.rule`), which acts on many points at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines.rules.rounding import peak
from nlbench.probes.lines.rules.rule import Rule


@dataclass(frozen=True)
class ProgramStep:
    """One operation of a program."""

    operation: str  # PyTorch's name, without the trailing underscore of an in-place variant
    place: str  # dotted name of the module whose forward calls it
    inputs: tuple[int, ...]  # indices of the values that it reads
    output: int  # index of the value that it computes
    rule: Rule
    shape: tuple[int, ...]  # shape of the output at one point
    site: str = ""  # name of the activation call; empty if the step doesn't bend
    ends: tuple[int, ...] = ()  # values that no later step reads

    def refusal(self, why: str) -> UnsupportedOperation:
        """Return an error that names this step and the reason."""
        return UnsupportedOperation(self.operation, self.place, why)


@dataclass(frozen=True)
class Program:
    """A network as a sequence of steps. Value 0 is the input."""

    steps: tuple[ProgramStep, ...]
    output: int  # index of the value that the network returns
    shape: tuple[int, ...]  # shape of one input

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the calls that bend, in call order."""
        return tuple(step.site for step in self.steps if step.site)

    @property
    def bending_units(self) -> int:
        """Number of units that bend, which is of the order of the regions on a segment."""
        return sum(math.prod(step.shape) for step in self.steps if step.site)


def run_program(
    program: Program,
    inputs: Tensor,
    callback: Callable[[ProgramStep, Sequence[Tensor]], None] | None = None,
    *,
    use_direct: bool = False,
) -> Tensor:
    """Run a program on a batch of inputs, (m, ...) to (m, ...).

    `callback` is called with each step and its inputs before the step is run. With `use_direct`,
    PyTorch's own call is run where a rule computes it differently.
    """
    values = {0: inputs}
    for step in program.steps:
        x = [values[i] for i in step.inputs]
        if callback is not None:
            callback(step, x)
        direct = step.rule.direct if use_direct else None
        output = (direct or step.rule.apply)(x)
        check_points(step, output, len(inputs))
        values[step.output] = output
        for value in step.ends:
            del values[value]
    return values[program.output]


@dataclass(frozen=True)
class ComputedStep:
    """A step computed by a walk: its inputs and output, with their rounding errors."""

    step: ProgramStep
    inputs: Sequence[Tensor]
    bounds: Sequence[Tensor]
    output: Tensor
    bound: Tensor


@dataclass(frozen=True)
class MeasuredStep:
    """A step computed by a measured walk: its inputs and output, and perturbed copies of them."""

    step: ProgramStep
    inputs: Sequence[Tensor]
    copies: Sequence[Sequence[Tensor]]  # the inputs with perturbed last digits
    output: Tensor
    output_copies: Sequence[Tensor]  # output for each of the copies
    sizes: Sequence[float]  # relative size of the perturbation of each copy
    group: int  # number of consecutive points that share their errors

    @property
    def bounds(self) -> list[Tensor]:
        """Measured errors of the inputs."""
        errors = []
        for i, x in enumerate(self.inputs):
            copies = [copy[i] for copy in self.copies]
            errors.append(self._largest_difference(x, copies))
        return errors

    @property
    def bound(self) -> Tensor:
        """Measured error of the output."""
        return self._largest_difference(self.output, self.output_copies)

    def _largest_difference(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the largest relative difference over each group, (P, ...), by unit or channel.

        The difference from each of `others` is divided by its size.
        """
        differences = torch.stack(
            [(x - other).abs_() / size for other, size in zip(others, self.sizes, strict=True)]
        )
        grouped = differences.reshape(len(others), -1, self.group, *x.shape[1:])
        axes = [0, 2, *range(4, grouped.ndim)]
        largest: Tensor = grouped.amax(axes, keepdim=True)[0]
        return largest.expand(-1, self.group, *largest.shape[2:]).flatten(0, 1)


def walk(program: Program, inputs: Tensor) -> Iterator[ComputedStep]:
    """Yield the steps of a program as they are computed for a batch of inputs, (m, *input).

    The errors are the rules' estimates. Values that no later step needs are freed.
    """
    values = {0: inputs}
    bounds = {0: peak(inputs)}
    for step in program.steps:
        x = [values[i] for i in step.inputs]
        b = [bounds[i] for i in step.inputs]
        output = apply_step(step, x)
        values[step.output], bounds[step.output] = output, step.rule.bound(x, b, output)
        yield ComputedStep(step, x, b, output, bounds[step.output])
        # The caller may hold the lists until the next step.
        x.clear()
        b.clear()
        del output
        for value in step.ends:
            del values[value], bounds[value]


def apply_step(step: ProgramStep, inputs: Sequence[Tensor]) -> Tensor:
    """Run a step. Raise if it doesn't preserve the batch axis."""
    try:
        output = step.rule.apply(inputs)
    except RuntimeError as error:
        raise step.refusal("it does not take more than one sample") from error
    check_points(step, output, len(inputs[0]))
    return output


def check_points(step: ProgramStep, output: Tensor, count: int) -> None:
    """Raise unless a step's output has its shape at each of `count` points."""
    if output.shape != (count, *step.shape):
        raise step.refusal("it mixes the samples of a batch")


def walk_measured(
    program: Program, inputs: Tensor, copies: int = 1, group: int | None = None
) -> Iterator[MeasuredStep]:
    """Yield the steps of a program as `walk` does, with measured rounding errors.

    Copies of the batch are also computed, with the last digits of each step's inputs perturbed
    randomly but reproducibly. The error is the largest resulting difference over a group of
    consecutive points, by default the batch, per unit, or per channel if there are positions.
    (J. Vignes, "A stochastic arithmetic for reliable scientific computation", Mathematics and
    Computers in Simulation 35, 1993.)

    In the first copy each value changes by one epsilon, up or down. Terms that cancel often cancel
    there as well, although a kernel's order of summation decides the sign of what is left of them.
    In further copies the changes are therefore odd multiples of epsilon, up to seven, and the
    difference is divided by their root mean square.
    """
    generator = torch.Generator(inputs.device).manual_seed(0)
    precision = torch.finfo(inputs.dtype).eps
    multiples = [2, *[8] * (copies - 1)]

    def perturbed(x: Tensor, among: int) -> Tensor:
        draw = torch.randint(
            0, among, x.shape, generator=generator, device=x.device, dtype=torch.int8
        )
        factor = draw.to(x.dtype).mul_(2 * precision).add_(1 - precision * (among - 1))
        return factor.mul_(x)

    # 21 is the mean of 1, 9, 25 and 49.
    sizes = [precision * (1 if among == 2 else math.sqrt(21)) for among in multiples]
    runs = [{0: inputs}, *({0: perturbed(inputs, among)} for among in multiples)]
    for step in program.steps:
        x = []
        for values in runs:
            x.append([values[i] for i in step.inputs])
        outputs = [apply_step(step, x[0]), *(apply_step(step, copy) for copy in x[1:])]
        yield MeasuredStep(step, x[0], x[1:], outputs[0], outputs[1:], sizes, group or len(inputs))
        for tensors in x:
            tensors.clear()
        for i, values in enumerate(runs):
            values[step.output] = outputs[i] if i == 0 else perturbed(outputs[i], multiples[i - 1])
            outputs[i] = inputs
            for value in step.ends:
                del values[value]
