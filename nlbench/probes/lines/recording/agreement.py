"""Comparison of a recorded program with its network.

Two ways of computing the same function differ by rounding. The tolerance depends on the magnitudes
of the values and, for single steps, on the rules' error estimates.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, UnsupportedOperation
from nlbench.introspection.batch_independence import equal_but_for_rounding

from .program import Program, walk
from .recorder import run_once

RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference up to which program and network count as the same function."""
RANGE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 0.1}
"""Difference up to which they count as the same, relative to an output's range over inputs."""
TOLERANCE_EPS = 1000
"""Difference that is always tolerated, in machine epsilons."""


def check_program(program: Program, network: nn.Module, example: Tensor) -> None:
    """Raise if a program doesn't compute the network's output on examples (m, ...).

    At most four points are computed at a time.
    """
    count = len(example)
    with torch.inference_mode():
        output = torch.cat(
            [
                _run_with_another(program, example[i : i + 1], example[(i + 1) % count :][:1])
                for i in range(count)
            ]
        )
    expected = run_alone(network, example)
    if output.shape != expected.shape or not bool(agree(output, expected).all()):
        raise UnsupportedOperation(
            "forward", "the network", "the recorded program does not reproduce the network's output"
        )


def _run_with_another(program: Program, sample: Tensor, other: Tensor) -> Tensor:
    """Run a program on a sample. Raise if a step's output depends on another sample."""
    precision = torch.finfo(sample.dtype).eps
    output = sample
    pairs = zip(walk(program, sample), walk(program, torch.cat([other, sample])), strict=True)
    for alone, together in pairs:
        step = alone.step
        expected = alone.output
        if not torch.isfinite(expected).all():
            raise NotFinite(f"the output of {step.operation} at {step.place} is not finite")
        tolerance = RELATIVE_TOLERANCE[sample.dtype] * expected.abs()
        # A unit that is zero up to rounding may be active in one of the two only.
        bound = torch.maximum(alone.bound, together.bound[-1:])
        tolerance = tolerance + TOLERANCE_EPS * precision * bound
        same = equal_but_for_rounding(together.output[1:], expected, tolerance)
        # If the error bound is infinite, nothing can be checked.
        if not bool((same & tolerance.isfinite()).all()):
            raise step.refusal("it mixes the samples of a batch")
        if step.output == program.output:
            output = expected
    return output


def run_alone(network: nn.Module, inputs: Tensor) -> Tensor:
    """Run a network on each input separately, and return the outputs (m, ...)."""
    outputs = [run_once(network, example.clone(), nullcontext()) for example in inputs[:, None]]
    return torch.cat(outputs)


def agree(values: Tensor, expected: Tensor) -> Tensor:
    """Return a mask (m, k) of the outputs (m, ...) that are equal up to rounding."""
    count = len(values)
    values = values.reshape(count, -1)
    expected = expected.reshape(count, -1)
    if not expected.numel():
        return torch.ones_like(values, dtype=torch.bool)
    tolerance = output_tolerance(expected.amin(0), expected.amax(0))
    return equal_but_for_rounding(values, expected, tolerance)


def output_tolerance(low: Tensor, high: Tensor) -> Tensor:
    """Return the tolerance for outputs (..., k) with the given smallest and largest values.

    Outputs may differ by 1e-9 of their largest magnitude or a thousandth of their range, whichever
    is smaller, but always by a thousand machine epsilons times the largest output. In single
    precision, the first two tolerances are 1e-3 and 0.1.
    """
    dtype = high.dtype
    size = torch.maximum(high, -low)
    width = high - low
    tolerance = RELATIVE_TOLERANCE[dtype] * size
    tolerance = torch.where(
        width > 0, torch.minimum(tolerance, RANGE_TOLERANCE[dtype] * width), tolerance
    )
    smallest = TOLERANCE_EPS * torch.finfo(dtype).eps * size.amax(-1, keepdim=True)
    return torch.maximum(tolerance, smallest)


def is_same(values: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return True if outputs agree to within `RELATIVE_TOLERANCE` of the largest expected output.

    `dtype` is the dtype that the network computes in; its output may have another.
    """
    if values.shape != expected.shape:
        return False
    scale = expected.abs().amax() if expected.numel() else expected.new_ones(())
    return bool(equal_but_for_rounding(values, expected, RELATIVE_TOLERANCE[dtype] * scale).all())
