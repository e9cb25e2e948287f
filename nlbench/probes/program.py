"""Record a network as a straight line of operations.

The network is run once on one input while every operation that PyTorch dispatches is
written down. What depends on the input becomes a step of the program; all else,
parameters included, is a constant. Calls of functions, in-place operations and skip
connections are seen as well as modules, and control flow that depends on shapes is
resolved.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nlbench.errors import NlbenchError, NotFinite, RequestError, UnsupportedOperation

from .recorder import Recorder, Step

__all__ = ["Program", "check_outputs", "double_copy", "record", "run_alone", "run_program"]

AGREEMENT = 1e-9
"""Relative difference up to which program and network count as the same function."""
CANCELLED = 1e-13
"""What rounding may leave of values that cancel, relative to the largest on the way."""


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


def double_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode and float64; the model itself is left alone.

    Where a device has no float64 the copy is on the CPU.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted or can't be copied.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) or kind == "OptimizedModule":
            raise RequestError(
                f"{name or 'the model'} is a {kind}, whose operations can't be observed; "
                "pass the module it was made from"
            )
    try:
        twin = copy.deepcopy(model).eval()
    except (RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(f"the model can't be copied: {reason}") from error
    if any(t.device.type == "mps" for t in itertools.chain(twin.parameters(), twin.buffers())):
        twin = twin.cpu()
    return twin.double()


def record(network: nn.Module, example: Tensor) -> Program:
    """Record a network and check that the program computes what the network does.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode and float64, see `double_copy`.
    example : float64 tensor of shape (m, ...)
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
    first = example[:1].clone()
    recorder = Recorder(network, first)
    with recorder.hooked():
        output = _one_output(network, first, recorder)
    program = _program(recorder.steps, recorder.output_value(output), tuple(example.shape[1:]))
    with torch.inference_mode():
        together = _all_values(program, example)
        for i in range(len(example)):
            _same_steps(program, together, _all_values(program, example[i : i + 1]), i)
    check_outputs(program, network, example)
    return program


def check_outputs(program: Program, network: nn.Module, inputs: Tensor) -> Tensor:
    """Run both on inputs, (m, ...), and give the outputs, (m, ...), if they agree.

    Raises
    ------
    nlbench.UnsupportedOperation
        If they don't.
    """
    expected = run_alone(network, inputs)
    with torch.inference_mode():
        values = _all_values(program, inputs)
        if not agree(values[program.output], expected, _largest(values)):
            raise UnsupportedOperation(
                "forward", "the network", "the recorded program does not reproduce its output"
            )
    return expected


def run_program(program: Program, inputs: Tensor) -> Tensor:
    """Run a program on a batch of inputs, (m, ...)."""
    with torch.inference_mode():
        return _all_values(program, inputs)[program.output]


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
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
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
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite")
    return output


def _all_values(program: Program, inputs: Tensor) -> dict[int, Tensor]:
    """Value of every step for a batch; names the step that can't take one."""
    values = {0: inputs}
    for step in program.steps:
        try:
            output = step.rule.apply([values[i] for i in step.inputs])
        except RuntimeError as error:
            raise step.refusal("it does not take more than one sample") from error
        if output.shape != (len(inputs), *step.shape):
            raise step.refusal("it mixes the samples of a batch")
        values[step.output] = output
    return values


def _same_steps(
    program: Program, together: Mapping[int, Tensor], alone: Mapping[int, Tensor], row: int
) -> None:
    largest = _largest(alone)
    for step in program.steps:
        if not torch.isfinite(alone[step.output]).all():
            raise NotFinite(f"the output of {step.operation} at {step.place} is not finite")
        if not agree(together[step.output][row : row + 1], alone[step.output], largest):
            raise step.refusal("it mixes the samples of a batch")


def _largest(values: Mapping[int, Tensor]) -> float:
    return max(float(x.abs().max()) for x in values.values() if x.numel())


def agree(found: Tensor, expected: Tensor, largest: float) -> bool:
    """Tell whether two results are the same but for rounding.

    `largest` is the largest magnitude met on the way: what cancels leaves noise in
    proportion to it.
    """
    if found.shape != expected.shape:
        return False
    if not found.numel():
        return True
    scale = max(float(found.abs().max()), float(expected.abs().max()))
    return bool((found - expected).abs().max() <= AGREEMENT * scale + CANCELLED * largest)


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
