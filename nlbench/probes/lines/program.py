"""Record a network as a straight line of operations.

The network is run once on one input while every operation that PyTorch dispatches is
written down. What depends on the input becomes a step of the program; all else,
parameters included, is a constant. Calls of functions, in-place operations and skip
connections are seen as well as modules, and control flow that depends on shapes is
resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, NotFinite, RequestError, UnsupportedOperation
from nlbench.probes.budget import Load
from nlbench.probes.lines.ops.rule import noise_of, peak
from nlbench.probes.model_state import double_copy, shape_copy, tensors_of, typed_copy

from .record import Recorder, Step
from .trace import SegmentTrace

__all__ = [
    "Program",
    "check_trace",
    "check_values",
    "double_copy",
    "load_of",
    "record",
    "refusal",
    "run_alone",
    "run_program",
    "typed_copy",
]


AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference up to which program and network count as the same function."""
CANCELLED = {torch.float64: 1e-12, torch.float32: 1e-4}
"""What rounding may leave of values that cancel, relative to the bound of their terms."""


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


def refusal(model: nn.Module, example: Tensor) -> str:
    """Say why a model can't be recorded; see `nlbench.probes.lines.traceable`."""
    network = shape_copy(model)
    try:
        _recorded(network, torch.empty(example.shape, dtype=torch.float64, device="meta"))
    except UnsupportedOperation as error:
        return str(error)
    except (NlbenchError, RuntimeError, TypeError, ValueError):
        # Something on the way wants numbers.
        try:
            network = double_copy(model)
            device = next((t.device for t in tensors_of(network)), example.device)
            _recorded(network, example[:1].to(device, torch.float64, copy=True))
        except UnsupportedOperation as error:
            return str(error)
    return ""


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
        If the network can't be run on such an input or returns no tensor.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    >>> program = record(network, torch.zeros(1, 2, dtype=torch.float64))
    >>> [step.operation for step in program.steps], program.sites
    (['linear', 'relu'], ('1',))
    """
    program = _recorded(network, example[:1].clone())
    with torch.inference_mode():
        together, _ = _all_values(program, example)
        for i in range(len(example)):
            _same_steps(program, together, example[i : i + 1], i)
    values = run_program(program, example)
    check_values(program, network, example, values, values, "the recorded program does")
    return program


def _recorded(network: nn.Module, one: Tensor) -> Program:
    recorder = Recorder(network, one)
    output = _one_output(network, one, recorder.recording())
    value = recorder.output_value(output)
    return _program(recorder.program, value, tuple(one.shape[1:]))


def check_values(
    program: Program,
    network: nn.Module,
    inputs: Tensor,
    values: Tensor,
    others: Tensor,
    what: str = "the traced values do",
    *,
    slack: float = 0.0,
) -> None:
    """Compare values with what the network gives on each input by itself.

    An output is allowed 1e-9 of its largest magnitude, and 1e-12 of the terms that it was
    summed from, which may be larger than their sum.

    Parameters
    ----------
    program : Program
        Of the network.
    network : torch.nn.Module
    inputs : tensor of shape (m, *input)
    values : tensor of shape (m, ...)
        To be compared with the network's output.
    others : tensor of shape (n, ...)
        Values of the same outputs elsewhere, which say how large they are.
    what : str
        The subject of the error.
    slack : float
        What any output is allowed beside.

    Raises
    ------
    nlbench.UnsupportedOperation
        If they differ.
    """
    expected = run_alone(network, inputs)
    with torch.inference_mode():
        found, bounds = _all_values(program, inputs)
        count, output = len(inputs), found[program.output]
        bound = bounds[program.output].expand_as(output).reshape(count, -1)
        expected, values = expected.reshape(count, -1), values.reshape(count, -1)
        same = expected.shape == values.shape
        if same and values.numel():
            others = others.reshape(len(others), -1)
            scale = torch.maximum(others.abs().amax(0), expected.abs().amax(0))
            tolerance = AGREEMENT[inputs.dtype] * scale + CANCELLED[inputs.dtype] * bound
            same = _within(values, expected, tolerance + slack)
        if not same:
            raise UnsupportedOperation(
                "forward", "the network", f"{what} not reproduce the network's output"
            )


def run_program(program: Program, inputs: Tensor) -> Tensor:
    """Run a program on a batch of inputs, (m, ...)."""
    with torch.inference_mode():
        return _all_values(program, inputs)[0][program.output]


def run_alone(network: nn.Module, inputs: Tensor) -> Tensor:
    """Run a network on each input by itself; (m, ...) to (m, ...).

    Raises
    ------
    nlbench.RequestError, nlbench.NotFinite
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
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise RequestError(f"the network returns a {kind}, expected one tensor (batch, logits)")
    if output.ndim == 0 or len(output) != 1:
        shape = tuple(output.shape)
        raise RequestError(f"the network returns shape {shape} for one input, expected (1, logits)")
    if not output.is_meta and not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite")
    return output


def _all_values(program: Program, inputs: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Value of every step for a batch, and its bound; names the step that can't take one."""
    values, bounds = {0: inputs}, {0: peak(inputs)}
    landing = noise_of(inputs.dtype) / CANCELLED[inputs.dtype]
    for step in program.steps:
        x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
        try:
            output = step.rule.apply(x)
        except RuntimeError as error:
            raise step.refusal("it does not take more than one sample") from error
        if output.shape != (len(inputs), *step.shape):
            raise step.refusal("it mixes the samples of a batch")
        values[step.output] = output
        bounds[step.output] = step.rule.bound(x, b, output)
        if step.rule.land:
            # A trace has such units on their kink: off by noise, which the next steps carry on.
            landed = (step.rule.land(x, b) != output) * b[0] * landing
            bounds[step.output] = torch.maximum(bounds[step.output], landed)
    return values, bounds


def _same_steps(program: Program, together: dict[int, Tensor], one: Tensor, row: int) -> None:
    alone, bounds = _all_values(program, one)
    for step in program.steps:
        expected, bound = alone[step.output], bounds[step.output]
        if not torch.isfinite(expected).all():
            raise NotFinite(f"the output of {step.operation} at {step.place} is not finite")
        if not _within(
            together[step.output][row : row + 1], expected, AGREEMENT[one.dtype] * bound
        ):
            raise step.refusal("it mixes the samples of a batch")


def _within(found: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    # An infinite tolerance is none.
    return bool((((found - expected).abs() <= tolerance) & tolerance.isfinite()).all())


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


def load_of(program: Program, inputs: Tensor, *, carried: int = 1) -> Load:
    """Measure what a point takes on its way through a program.

    Parameters
    ----------
    program : Program
    inputs : tensor of shape (m, *input)
    carried : int
        How many tensors are carried for each one of the program's.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> inputs = torch.zeros(2, 4, dtype=torch.float64)
    >>> load_of(record(network, inputs), inputs).width
    320
    """
    size = inputs.element_size()
    with torch.inference_mode():
        values, bounds = {0: inputs}, {0: peak(inputs)}
        width = step_bytes = _bytes(values) + _bytes(bounds)
        waiting = reserve = 0
        for step in program.steps:
            x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            before = _bytes(values) + _bytes(bounds)
            output = step.rule.apply(x)
            values[step.output], bounds[step.output] = output, step.rule.bound(x, b, output)
            after = _bytes(values) + _bytes(bounds)
            own = len(inputs) * size * step.rule.workspace
            reserve = max(reserve, size * step.rule.reserve)
            if step.rule.bend is not None:
                waiting += before
                # Signs, and copies of what bends.
                own += 2 * _bytes({0: output})
            width, step_bytes = max(width, after), max(step_bytes, before + after + own)
            for value in step.ends:
                del values[value], bounds[value]
    points = len(inputs)
    width, step_bytes, waiting = (-(-size // points) for size in (width, step_bytes, waiting))
    return Load(carried * width, carried * step_bytes, carried * waiting, carried * reserve)


def _bytes(tensors: dict[int, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


CHECKED = 5
"""In how many regions, besides the widest, a trace is compared with the network."""


def check_trace(program: Program, network: nn.Module, points: Tensor, trace: SegmentTrace) -> None:
    """Compare a trace with the network itself, at both ends and inside a few regions.

    Parameters
    ----------
    program : nlbench.probes.lines.program.Program
        Of the network.
    network : torch.nn.Module
        In the dtype of the points.
    points : tensor of shape (2, *input)
        The segment's ends.
    trace : nlbench.probes.lines.trace.SegmentTrace

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network gives other values.
    """
    spread = torch.arange(CHECKED) * trace.regions // CHECKED + trace.regions // (2 * CHECKED)
    widest = trace.t.diff().argmax().reshape(1)
    left = torch.unique(torch.cat([spread.to(widest.device), widest]))
    # Between sampled breakpoints the network is not the line through its values.
    right = left if trace.method == "sampling" else left + 1
    t = torch.cat([trace.t[[0, -1]], (trace.t[left] + trace.t[right]) / 2])
    values = torch.cat([trace.values[[0, -1]], (trace.values[left] + trace.values[right]) / 2])
    weight = t.reshape(-1, *[1] * (points.ndim - 1)).to(points.dtype)
    inputs = torch.lerp(points[:1], points[1:], weight)
    check_values(program, network, inputs, values, trace.values, slack=_slack(trace))


def _slack(trace: SegmentTrace) -> float:
    """How far a walk's values may be off: by its t, and by what it passed over."""
    if trace.method != "adaptive":
        return 0.0
    steepest = float((trace.values.diff(dim=0) / trace.t.diff()[:, None]).abs().max())
    passed = trace.notes["sensitivity"] if trace.notes["shorter_than_sensitivity"] else 0.0
    return (2 * passed + 16 * trace.precision) * steepest
