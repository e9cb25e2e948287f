"""Record a network as a straight line of operations.

The network is run once on one input while every operation that PyTorch dispatches is
written down. What depends on the input becomes a step of the program; all else,
parameters included, is a constant. Calls of functions, in-place operations and skip
connections are seen as well as modules, and control flow that depends on shapes is
resolved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, NotFinite, RequestError, UnsupportedOperation
from nlbench.probes.budget import LiveBytes, Load
from nlbench.probes.lines.ops.rule import peak
from nlbench.probes.model_state import (
    double_copy,
    outputs_of,
    precise_device,
    shape_copy,
    typed_copy,
)

from .dispatch_recorder import Recorder, Step

__all__ = [
    "AGREEMENT",
    "ROUNDED",
    "Computed",
    "Program",
    "agree",
    "check_program",
    "double_copy",
    "least_load",
    "load_of",
    "record",
    "record_unchecked",
    "run_alone",
    "run_program",
    "traceable",
    "typed_copy",
    "walk",
    "walk_measured",
]


AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference up to which program and network count as the same function."""
ROUNDED = 1000
"""Rounding errors by which two ways of computing the same may differ."""


@dataclass(frozen=True)
class Program:
    """A network as steps; value 0 is the input.

    Parameters
    ----------
    steps : tuple of Step
    output : int
        Number of the value that the network returns.
    shape : tuple of int
        Of one input.
    """

    steps: tuple[Step, ...]
    output: int
    shape: tuple[int, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the calls that bend, in order of call."""
        return tuple(step.site for step in self.steps if step.site)

    @property
    def width(self) -> int:
        """Most numbers of one point that are alive at once."""
        sizes = {0: torch.Size(self.shape).numel()}
        most = sizes[0]
        for step in self.steps:
            sizes[step.output] = torch.Size(step.shape).numel()
            most = max(most, sum(sizes.values()))
            for value in step.ends:
                del sizes[value]
        return most


def traceable(model: nn.Module, example: Tensor) -> str:
    """Say why a network can't be traced, from a look at its operations alone.

    Nothing is computed where the network allows it: shapes go through it in place of
    numbers, so that it costs as little for a large network as for a small one. What only
    numbers show, such as a weight that is not finite, is found when it is traced.

    Parameters
    ----------
    model : torch.nn.Module
        It is left as it was; it may be on the ``meta`` device.
    example : tensor of shape (1, *input)
        Of which only the shape counts.

    Returns
    -------
    str
        Empty if it is piecewise affine, else the first operation that isn't, its place
        and the reason.

    Examples
    --------
    >>> traceable(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()), torch.zeros(1, 2))
    'gelu at 1: not piecewise affine'
    """
    network = shape_copy(model)
    try:
        record_unchecked(network, torch.empty(example.shape, dtype=torch.float64, device="meta"))
    except UnsupportedOperation as error:
        return str(error)
    except (NlbenchError, RuntimeError, TypeError, ValueError):
        # Something on the way wants numbers.
        try:
            network = double_copy(model)
            device = precise_device(network, example)
            record_unchecked(network, example[:1].to(device, copy=True).double())
        except UnsupportedOperation as error:
            return str(error)
    return ""


def least_load(program: Program, dtype: torch.dtype) -> Load:
    """Tell from shapes alone what a point of a program takes at least.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> program = record_unchecked(network, torch.zeros(1, 4, dtype=torch.float64))
    >>> least_load(program, torch.float64).width
    160
    """
    return _load(program, dtype.itemsize, {}, {})


def record(network: nn.Module, example: Tensor) -> Program:
    """Record a network and check that the program computes what the network does.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode, in float64 or float32, see `typed_copy`.
    example : tensor of shape (m, ...), of the same dtype
        Inputs to check with; the first one is recorded.

    Returns
    -------
    Program

    Raises
    ------
    nlbench.UnsupportedOperation
        If an operation is not piecewise affine, mixes the samples of a batch or reads
        values, or if the program does not reproduce the network.
    nlbench.NotFinite
        If the network's output is not finite.
    nlbench.RequestError
        If the network can't be run on such an input.
    nlbench.Undefined
        If it gives no tensor.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    >>> program = record(network, torch.zeros(1, 2, dtype=torch.float64))
    >>> [step.operation for step in program.steps], program.sites
    (['linear', 'relu'], ('1',))
    """
    program = record_unchecked(network, example[:1].clone())
    check_program(program, network, example)
    return program


def check_program(program: Program, network: nn.Module, example: Tensor) -> None:
    """Refuse a program that does not compute what the network does; see `record`.

    Four points are the most that are carried at once.
    """
    found = _checked_alone(program, example)
    expected = run_alone(network, example)
    same = found.shape == expected.shape and bool(agree(found, expected, expected).all())
    if not same:
        raise UnsupportedOperation(
            "forward", "the network", "the recorded program does not reproduce the network's output"
        )


def record_unchecked(network: nn.Module, one: Tensor) -> Program:
    """Record a network, as `record` does, on one input, which it may change; (1, ...)."""
    recorder = Recorder(network, one)
    output = _one_output(network, one, recorder.recording())
    value = recorder.output_value(output)
    return _program(recorder.program, value, tuple(one.shape[1:]))


def agree(values: Tensor, expected: Tensor, others: Tensor) -> Tensor:
    """Tell which outputs are the same but for rounding.

    An output is allowed 1e-9 of its largest magnitude, but no more than a thousandth of what it
    varies by, and a thousand rounding errors of the largest output. (In single precision the
    first two are 1e-3 and a tenth.)

    Parameters
    ----------
    values, expected : tensor of shape (m, ...)
        To be compared.
    others : tensor of shape (n, ...)
        The same outputs at these places and elsewhere, which say how large they are.

    Returns
    -------
    bool tensor of shape (m, k)
    """
    count = len(values)
    values, expected = values.reshape(count, -1), expected.reshape(count, -1)
    if not expected.numel():
        return torch.ones_like(values, dtype=torch.bool)
    relative, precision = AGREEMENT[expected.dtype], torch.finfo(expected.dtype).eps
    # Of others there may be many: none is copied.
    others = others.reshape(len(others), -1)
    high = torch.maximum(others.amax(0).to(expected.dtype), expected.amax(0))
    low = torch.minimum(others.amin(0).to(expected.dtype), expected.amin(0))
    size, spread = torch.maximum(high, -low), high - low
    varies = 1e-3 if expected.dtype == torch.float64 else 0.1
    tolerance = torch.where(
        spread > 0, torch.minimum(relative * size, varies * spread), relative * size
    )
    tolerance = tolerance.clamp(min=float(ROUNDED * precision * size.max()))
    return (values - expected).abs() <= tolerance


def run_program(program: Program, inputs: Tensor) -> Tensor:
    """Run a program on a batch of inputs, (m, ...)."""
    output = inputs
    with torch.inference_mode():
        for seen in walk(program, inputs):
            if seen.step.output == program.output:
                output = seen.output
    return output


def run_alone(network: nn.Module, inputs: Tensor) -> Tensor:
    """Run a network on each input by itself; (m, ...) to (m, ...).

    Raises
    ------
    nlbench.RequestError, nlbench.Undefined, nlbench.NotFinite
    """
    return torch.cat([_one_output(network, one.clone(), nullcontext()) for one in inputs[:, None]])


def _one_output(network: nn.Module, one: Tensor, context: AbstractContextManager[object]) -> Tensor:
    try:
        with torch.inference_mode(), context:
            output = network(one)
    except NlbenchError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(
            f"the network can't be run on one input of shape {tuple(one.shape)}: {reason}"
        ) from error
    output = outputs_of(output, 1)
    if not output.is_meta and not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite")
    return output


@dataclass(frozen=True)
class Computed:
    """A step as a walk comes to it: what it was given and what it gives, with their errors.

    `copies` are the inputs with other last digits, where errors are measured by them.
    """

    step: Step
    inputs: Sequence[Tensor]
    bounds: Sequence[Tensor]
    output: Tensor
    bound: Tensor
    copies: Sequence[Sequence[Tensor]] = ()


def walk(program: Program, inputs: Tensor) -> Iterator[Computed]:
    """Go through a program step by step with a batch of inputs, (m, *input).

    Nothing is kept that no later step needs.
    """
    values, bounds = {0: inputs}, {0: peak(inputs)}
    for step in program.steps:
        x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
        output = _applied(step, x)
        values[step.output], bounds[step.output] = output, step.rule.bound(x, b, output)
        yield Computed(step, x, b, output, bounds[step.output])
        # Who has looked at them may hold the lists until there are the next.
        x.clear()
        b.clear()
        del output
        for value in step.ends:
            del values[value], bounds[value]


def _applied(step: Step, inputs: Sequence[Tensor]) -> Tensor:
    try:
        output = step.rule.apply(inputs)
    except RuntimeError as error:
        raise step.refusal("it does not take more than one sample") from error
    if output.shape != (len(inputs[0]), *step.shape):
        raise step.refusal("it mixes the samples of a batch")
    return output


def walk_measured(program: Program, inputs: Tensor, copies: int = 1) -> Iterator[Computed]:
    """Go through a program as `walk` does; the errors are measured, and no rule's estimates.

    Beside the batch go copies in which every number that a step is given is changed by about
    its last digit, at random but the same each time. By how much they come to differ is the
    error: one number a unit, or a channel where there are positions, the largest over the
    batch. (Rounding as an experiment: Vignes, "A stochastic arithmetic for reliable scientific
    computation", Mathematics and Computers in Simulation 35, 1993.)
    """
    generator = torch.Generator(inputs.device).manual_seed(0)
    precision = torch.finfo(inputs.dtype).eps

    def nudged(x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=torch.int8)
        return x * (1 + precision * (2 * sign - 1).to(x.dtype))

    several = [{0: inputs}, *({0: nudged(inputs)} for _ in range(copies))]
    for step in program.steps:
        given = [[values[i] for i in step.inputs] for values in several]
        outputs = [_applied(step, given[0]), *(_applied(step, x) for x in given[1:])]
        bounds = [
            _difference(x, [own[i] for own in given[1:]]) / precision
            for i, x in enumerate(given[0])
        ]
        bound = _difference(outputs[0], outputs[1:]) / precision
        yield Computed(step, given[0], bounds, outputs[0], bound, given[1:])
        for x in (*given, bounds):
            x.clear()
        for i, values in enumerate(several):
            values[step.output], outputs[i] = outputs[i] if i == 0 else nudged(outputs[i]), inputs
            for value in step.ends:
                del values[value]


def _difference(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Give the largest difference of each unit, or channel, over the batch: (m, ..., 1)."""
    axes = [0, *range(2, x.ndim)]
    largest = torch.stack([(x - other).abs().amax(axes, keepdim=True) for other in others]).amax(0)
    return largest.expand(len(x), *largest.shape[1:])


def _checked_alone(program: Program, example: Tensor) -> Tensor:
    """Run a program on each example by itself and give the outputs.

    Raises
    ------
    nlbench.UnsupportedOperation
        Of the step that gives other values for an example beside another one.
    """
    count = len(example)
    with torch.inference_mode():
        outputs = [
            _checked_beside(program, example[i : i + 1], example[(i + 1) % count :][:1])
            for i in range(count)
        ]
    return torch.cat(outputs)


def _checked_beside(program: Program, one: Tensor, other: Tensor) -> Tensor:
    precision, output = torch.finfo(one.dtype).eps, one
    steps = zip(walk(program, one), walk(program, torch.cat([other, one])), strict=True)
    for alone, together in steps:
        step, expected = alone.step, alone.output
        if not torch.isfinite(expected).all():
            raise NotFinite(f"the output of {step.operation} at {step.place} is not finite")
        tolerance = AGREEMENT[one.dtype] * expected.abs() + ROUNDED * precision * alone.bound
        # An infinite tolerance is none.
        same = ((together.output[1:] - expected).abs() <= tolerance) & tolerance.isfinite()
        if not bool(same.all()):
            raise step.refusal("it mixes the samples of a batch")
        if step.output == program.output:
            output = expected
    return output


def _program(steps: Sequence[Step], output: int, shape: tuple[int, ...]) -> Program:
    """Leave out what the output doesn't need and note where each value ends."""
    wanted = {output}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.output in wanted:
            ends = tuple({i for i in step.inputs if i not in wanted})
            kept.append(replace(step, ends=ends))
            wanted.update(step.inputs)
    return Program(tuple(reversed(kept)), output, shape)


def load_of(program: Program, inputs: Tensor) -> Load:
    """Measure what a point takes on its way through a program.

    What is computed once and kept is counted if it was not computed before.

    Parameters
    ----------
    program : Program
    inputs : tensor of shape (m, *input)
        Two at least, or what bends is not measured.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> inputs = torch.zeros(2, 4, dtype=torch.float64)
    >>> load_of(record(network, inputs), inputs).width
    320
    """
    bound_bytes, own_bytes = {}, {}
    constants, points = 0, len(inputs)
    with torch.inference_mode(), LiveBytes() as live:
        values, bounds = {0: inputs}, {0: peak(inputs)}
        bound_bytes[0] = -(-_bytes(bounds[0]) // points)
        for step in program.steps:
            x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            before = live.restart()
            output = _applied(step, x)
            bound = step.rule.bound(x, b, output)
            # What is kept of it is neither of the two, and what both took stays.
            made = {t.untyped_storage()._cdata: t.untyped_storage() for t in (output, bound)}
            given = {t.untyped_storage()._cdata for t in (*x, *b)}
            new = sum(storage.nbytes() for key, storage in made.items() if key not in given)
            constants += max(0, live.now - before - new)
            most = live.peak - before
            if step.rule.bend is not None and points > 1 and all(n.isfinite().all() for n in b):
                live.restart()
                step.rule.bend(x, b)
                most = max(most, live.peak - before)
            own_bytes[step.output] = -(-max(0, most - new) // points)
            bound_bytes[step.output] = -(-_bytes(bound) // points)
            values[step.output], bounds[step.output] = output, bound
            for value in step.ends:
                del values[value], bounds[value]
    return _load(program, inputs.element_size(), bound_bytes, own_bytes, constants)


def _load(
    program: Program,
    size: int,
    bounds: Mapping[int, int],
    own: Mapping[int, int],
    constants: int = 0,
) -> Load:
    """Add up what a point takes, given the bytes of each value's bound and of its making."""
    alive = {0: size * torch.Size(program.shape).numel()}
    width = most = alive[0] + bounds.get(0, 0)
    alive[0] = width
    waiting = reserve = 0
    for step in program.steps:
        before, largest = sum(alive.values()), max(alive.values())
        output = size * torch.Size(step.shape).numel()
        alive[step.output] = output + bounds.get(step.output, 0)
        after = sum(alive.values())
        workspace = size * step.rule.workspace
        if step.rule.bend is not None:
            waiting += before
            # Signs, and copies of what bends; or of what new points are interpolated from.
            workspace += max(2 * output, 2 * largest)
        width, reserve = max(width, after), max(reserve, size * step.rule.reserve)
        most = max(most, before + after + max(workspace, own.get(step.output, 0)))
        for value in step.ends:
            del alive[value]
    return Load(width, most, waiting, reserve, constants)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
