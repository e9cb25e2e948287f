"""Directional derivatives of networks, by forward-mode differentiation where it is supported."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.errors import Undefined
from nlbench.introspection.autodiff import input_gradient
from nlbench.introspection.batch_independence import check_batch_independence
from nlbench.introspection.memory import halve_on_oom, is_out_of_memory, microbatch_sizes

# PyTorch's error message if an operation, a custom autograd function or a sparse tensor lacks
# forward mode.
_NO_FORWARD_MODE = re.compile(
    r"forward AD with (\S+)|forward mode AD|aten::_efficientzerotensor", re.IGNORECASE
)

DerivativeMode = Literal["forward", "reverse"]

_SHIFT = 1e-2
"""Distance of the points of `check_derivative` from the samples, relative to the inputs' size."""
_STEPS = (1e-4, 1e-5, 1e-6)
"""Steps of finite differences, relative to the inputs' size."""
_RELATIVE_TOLERANCE = 1e-3
_SPREAD_FACTOR = 4
_ROUNDINGS = 2**12


def directional_derivative(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    directions: Tensor,
    *,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute f(x_i) and J(x_i) v_i, (n, k), for one direction v_i per sample.

    Forward-mode differentiation runs the function once. If an operation doesn't support it, the
    vector-Jacobian product is differentiated with respect to the vector instead. At most `limit`
    samples are run per call; if memory runs out, their number is halved.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> directional_derivative(torch.square, x, torch.tensor([[1.0, -1.0]]))[1]
    tensor([[ 2., -4.]])
    """

    def attempt(size: int) -> tuple[Tensor, Tensor]:
        sizes = microbatch_sizes(len(inputs), size)
        pairs = zip(torch.split(inputs, sizes), torch.split(directions, sizes), strict=True)
        results = [_differentiate(function, part, along) for part, along in pairs]
        outputs, derivatives = zip(*results, strict=True)
        return torch.cat(outputs), torch.cat(derivatives)

    if not len(inputs):
        return _differentiate(function, inputs, directions)
    first = min(limit or len(inputs), len(inputs))
    result, size = halve_on_oom(attempt, first, inputs.device)
    if size < first == len(inputs):
        # A caller with a limit has checked that samples are independent.
        check_batch_independence(lambda part: {"the output": _rows(function(part))}, inputs, size)
    return result


def check_derivative(
    function: Callable[[Tensor], Tensor], inputs: Tensor, *, mode: DerivativeMode
) -> None:
    """Raise if what PyTorch computes as the derivative is not the derivative of the function.

    The derivative of a random combination of float64 outputs along one random direction per sample
    is compared with central differences of three step sizes. They are taken near the samples, not
    at them, since samples often lie on kinks: ties of equal pixels, or values of exactly zero. A
    difference between the steps, due to curvature, kinks or rounding, raises the tolerance. A
    sample counts only if it fails at two points.

    Examples
    --------
    >>> check_derivative(torch.sin, torch.ones(1, 2, dtype=torch.float64), mode="reverse")
    """
    generator = torch.Generator().manual_seed(0)
    size = inputs.abs().mean()
    if not size > 0:
        size = torch.ones_like(size)
    suspects = inputs
    for _ in range(2):
        shift, direction = (
            torch.randn(suspects.shape, dtype=torch.float64, generator=generator).to(inputs) * size
            for _ in range(2)
        )
        suspects = suspects[
            _is_wrong(function, suspects + _SHIFT * shift, direction, mode, generator)
        ]
        if not len(suspects):
            return
    raise Undefined(
        "its backward is not its derivative: what PyTorch computes as the network's derivative "
        "differs from finite differences"
    )


def _is_wrong(
    function: Callable[[Tensor], Tensor],
    points: Tensor,
    directions: Tensor,
    mode: DerivativeMode,
    generator: torch.Generator,
) -> Tensor:
    """Return a mask (n,) of the points where the derivative differs from finite differences."""
    with torch.no_grad():
        weights = torch.randn(function(points).shape, dtype=torch.float64, generator=generator)
        weights = weights.to(points)
        steps = torch.tensor(_STEPS, dtype=torch.float64, device=points.device)
        ends = []
        for h in _STEPS:
            step = h * directions
            ends.append((function(points + step), function(points - step)))
    if mode == "forward":
        derivative = (weights * directional_derivative(function, points, directions)[1]).sum(1)
    else:
        with torch.enable_grad():
            x = points.detach().clone().requires_grad_()
            gradient = input_gradient(function(x), x, weights)
        derivative = (gradient * directions).flatten(1).sum(1)
    differences = torch.stack([(weights * (above - below)).sum(1) for above, below in ends])
    differences = differences / (2 * steps[:, None])
    magnitude = torch.stack([(weights * above).abs().sum(1) for above, _ in ends]).amax(0)
    spread = differences.amax(0) - differences.amin(0)
    tolerance = (
        _RELATIVE_TOLERANCE * torch.maximum(derivative.abs(), differences[1].abs())
        + _SPREAD_FACTOR * spread
        + _ROUNDINGS * torch.finfo(torch.float64).eps * magnitude / steps[1]
    )
    error = (differences[1] - derivative).abs()
    # NaN where the function leaves its domain.
    is_wrong: Tensor = error > tolerance
    return is_wrong & torch.isfinite(differences).all(0)


def _rows(outputs: Tensor) -> Tensor:
    return outputs.detach().reshape(len(outputs), -1)


def _differentiate(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    try:
        with forward_ad.dual_level():
            pair = dual(inputs.detach(), directions.detach())
            primal, tangent = forward_ad.unpack_dual(function(pair))  # type: ignore[no-untyped-call]
        if tangent is None:
            tangent = torch.zeros_like(primal)
        return primal.detach(), tangent.detach()
    except RuntimeError as error:
        unsupported = _NO_FORWARD_MODE.search(str(error))
        if unsupported is None:
            raise
    operation = unsupported.group(1) or "an autograd function of the model's own"
    return _differentiate_twice(function, inputs, directions, operation)


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Pair a value with its tangent.

    Call this function inside `torch.autograd.forward_ad.dual_level`.
    """
    _load_rules()
    return forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]


@functools.cache
def _load_rules() -> None:
    """Load PyTorch's differentiation rules, suppressing the resulting warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script.*")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


def _differentiate_twice(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor, operation: str
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad(), _without_cudnn():
        x = inputs.detach().clone().requires_grad_()
        output = function(x)
        vector = torch.zeros_like(output, requires_grad=True)
        try:
            (product,) = torch.autograd.grad(output, x, vector, create_graph=True)
            (derivative,) = torch.autograd.grad(product, vector, directions)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Undefined(
                f"{operation} has neither a forward-mode nor a second derivative in PyTorch"
            ) from error
    return output.detach(), derivative.detach()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Disable cuDNN, whose recurrent layers have no derivative in evaluation mode.

    `torch.backends.cudnn.flags` would also change the TF32 flags.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before
