"""Probe ``function``: the network as a plain differentiable function of its input."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nlbench.errors import Undefined
from nlbench.introspection.background import rng_restored
from nlbench.introspection.memory import (
    Fitting,
    Found,
    halving,
    is_out_of_memory,
    part_sizes,
    refuse_mixing,
)
from nlbench.introspection.model_state import (
    attributes_kept,
    evaluation_mode,
    outputs_of,
    with_plain_attention,
    without_fast_path,
)
from nlbench.introspection.precision import autocast_now, exact_by_default
from nlbench.probes import Listener, OnStep, ProbeOptions, Resources, Samples

__all__ = ["FunctionBatch", "directional_derivative", "dual", "observe", "observe_function"]


# What the size of a part is called among the sizes that were found to fit.
FOUND = "samples of a derivative"

# How much more a derivative takes than a forward pass: there is a tangent beside every
# tensor, and where there is no forward mode a graph that keeps them.
DERIVATIVE = 4


@dataclass(frozen=True)
class FunctionBatch:
    """A network and one batch of its inputs, as measures get them.

    Parameters
    ----------
    function : callable
        From inputs (n, ...) to outputs (n, k): the model in evaluation mode, whatever comes
        after the batch flattened. It leaves its input as it is, and computes in the precision
        that the probe was called in.
    inputs : tensor of shape (n, ...)
        Floating, on the model's device.
    batch : int
        Number of the batch, from 0.
    most : int, optional
        How many samples fit into memory at once, for `directional_derivative`; None where
        nothing is known.
    """

    function: Callable[[Tensor], Tensor]
    inputs: Tensor
    batch: int
    most: int | None = None


@exact_by_default()
def observe_function(
    model: nn.Module,
    batches: Iterable[Tensor],
    on_observation: Callable[[FunctionBatch], None],
    *,
    memory: int | None = None,
    found: Found | None = None,
) -> int:
    """Show a model, as a function, to a listener with each batch of inputs.

    The model is in evaluation mode meanwhile, and left as it was found. Attention is
    computed step by step, since its fused forms have no second derivatives.

    Parameters
    ----------
    model : torch.nn.Module
    batches : iterable of tensor
        Inputs of the model, on its device.
    on_observation : callable
        Called with a `FunctionBatch` for each batch.
    memory : int, optional
        Bytes that a derivative may take. Two samples are run beforehand to see how many fit.
    found : mutable mapping, optional
        Remembers how many samples of a model fit, for the next time.

    Returns
    -------
    int
        Number of samples seen.

    Raises
    ------
    nlbench.Undefined
        For inputs that are not floating: a network has no derivative with respect to them; for
        a network whose samples depend on each other.

    Examples
    --------
    >>> seen = []
    >>> observe_function(nn.Flatten(), [torch.zeros(5, 2, 3)], seen.append)
    5
    >>> seen[0].function(seen[0].inputs).shape
    torch.Size([5, 6])
    """
    samples = 0
    found = {} if found is None else found
    as_now = autocast_now()
    looked_at: set[bool] = set()
    with evaluation_mode(model), without_fast_path(), with_plain_attention():
        for number, batch in enumerate(batches):
            if not batch.is_floating_point():
                raise Undefined(
                    f"the inputs are {str(batch.dtype).removeprefix('torch.')}: a network has no "
                    "derivative with respect to them"
                )
            most = Fitting(found, model, FOUND, batch, memory, times=DERIVATIVE).most
            in_parts = most is not None and most < len(batch)
            if len(batch) > 1 and in_parts not in looked_at:
                with attributes_kept(model), rng_restored(batch.device):
                    _refuse_mixing(model, batch, most, in_parts)
                looked_at |= {False, in_parts}
            function = _function(model, most, as_now)
            on_observation(FunctionBatch(function, batch, number, most))
            samples += len(batch)
    return samples


def _refuse_mixing(model: nn.Module, batch: Tensor, most: int | None, in_parts: bool) -> None:
    """Refuse a model whose samples are no function's: a derivative is of each by itself."""

    def rows(some: Tensor) -> dict[str, Tensor]:
        return {"the output": _outputs(model, some)}

    if in_parts and most is not None:
        refuse_mixing(rows, batch, most)
    else:
        because = "a derivative is of each sample by itself"
        refuse_mixing(rows, batch, len(batch), because=because, draws=True)


def _function(
    model: nn.Module, most: int | None, precision: Callable[[], AbstractContextManager[None]]
) -> Callable[[Tensor], Tensor]:
    """A model as a function, of at most so many samples at a time."""

    def function(inputs: Tensor) -> Tensor:
        with precision():
            if most is None or len(inputs) <= most:
                return _outputs(model, inputs)
            parts = torch.split(inputs, part_sizes(len(inputs), most))
            return torch.cat([_outputs(model, part) for part in parts])

    return function


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    # A copy: a first layer that works in place would change the caller's data.
    output = outputs_of(model(inputs.clone()), len(inputs))
    if not output.is_floating_point():
        kind = str(output.dtype).removeprefix("torch.")
        raise Undefined(f"the model gives {kind}, which has no derivative")
    return output.flatten(1) if output.dim() > 1 else output[:, None]


def directional_derivative(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    directions: Tensor,
    *,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of a function and its derivative along one direction a sample.

    Forward-mode differentiation, in one run of the function; where an operation has none,
    the derivative of the vector-Jacobian product with respect to its vector. Where memory
    runs out the samples are halved until they fit.

    Parameters
    ----------
    function : callable
        From (n, ...) to (n, k), sample by sample.
    inputs, directions : tensor of shape (n, ...)
    most : int, optional
        Samples at a time; see `FunctionBatch`.

    Returns
    -------
    outputs, derivatives : tensor of shape (n, k)
        f(x_i) and J(x_i) v_i, without a graph.

    Raises
    ------
    nlbench.Undefined
        Naming the operation that can be differentiated in neither way.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> directional_derivative(torch.square, x, torch.tensor([[1.0, -1.0]]))[1]
    tensor([[ 2., -4.]])
    """

    def attempt(size: int) -> tuple[Tensor, Tensor]:
        sizes = part_sizes(len(inputs), size)
        pairs = zip(torch.split(inputs, sizes), torch.split(directions, sizes), strict=True)
        found = [_differentiated(function, part, along) for part, along in pairs]
        outputs, derivatives = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(derivatives)

    if not len(inputs):
        return _differentiated(function, inputs, directions)
    tried = min(most or len(inputs), len(inputs))
    result, size = halving(attempt, tried, inputs.device)
    if size < tried == len(inputs):
        # Whoever says how many fit has seen to it that samples are computed apart.
        refuse_mixing(lambda some: {"the output": _rows(function(some))}, inputs, size)
    return result


def _rows(outputs: Tensor) -> Tensor:
    return outputs.detach().reshape(len(outputs), -1)


def _differentiated(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    try:
        with forward_ad.dual_level():
            moving = dual(inputs.detach(), directions.detach())
            # PyTorch's own annotations are missing here.
            primal, tangent = forward_ad.unpack_dual(function(moving))  # type: ignore[no-untyped-call]
        if tangent is None:
            tangent = torch.zeros_like(primal)
        return primal.detach(), tangent.detach()
    except RuntimeError as error:
        missing = _FORWARD.search(str(error))
        if missing is None:
            raise
    operation = missing.group(1) or "an autograd function of the model's own"
    return _through_vector_jacobian_products(function, inputs, directions, operation)


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Pair a value with its tangent, inside `torch.autograd.forward_ad.dual_level`."""
    _load_rules()
    made: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return made


@functools.cache
def _load_rules() -> None:
    """Have PyTorch load its rules of differentiation, of which it warns itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script.*")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


# What PyTorch says of an operation, or of a user's autograd function, without forward mode.
_FORWARD = re.compile(r"forward AD with (\S+)|forward mode AD", re.IGNORECASE)


def _through_vector_jacobian_products(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor, operation: str
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad(), _without_cudnn():
        given = inputs.detach().clone().requires_grad_()
        output = function(given)
        vector = torch.zeros_like(output, requires_grad=True)
        try:
            (product,) = torch.autograd.grad(output, given, vector, create_graph=True)
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
    """Have PyTorch compute recurrent layers itself: cuDNN's have no derivative in evaluation mode.

    Not by `torch.backends.cudnn.flags`, which would set TF32's flags too.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def observe(
    model: nn.Module,
    samples: Samples,
    options: ProbeOptions,
    listeners: Sequence[Listener],
    resources: Resources,
    step: OnStep,
    facts: dict[str, Any],
) -> None:
    """Show a subject's model as a function, with batches of its samples in a random order."""

    def on_observation(observation: FunctionBatch) -> None:
        for listener in listeners:
            listener.update(observation)

    def batches() -> Iterator[Tensor]:
        for batch in samples.shuffled(int(options["batch"])):
            yield batch.to(resources.device)
            step()

    facts["samples"] = observe_function(
        model, batches(), on_observation, memory=resources.memory, found=resources.found
    )
