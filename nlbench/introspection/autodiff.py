"""Automatic differentiation: gradients, and detection of it and of function transforms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from nlbench.errors import Undefined, first_line

from .memory import is_out_of_memory


def is_differentiated(*values: Tensor) -> bool:
    """Return True if PyTorch has to track the derivatives of any of the values.

    Examples
    --------
    >>> is_differentiated(torch.zeros(2)), is_differentiated(torch.zeros(2, requires_grad=True))
    (False, True)
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in values):
        return True
    # Within torch.func.grad no tensor has storage, not even one without a derivative.
    is_active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return is_active is not None and bool(is_active())


@contextmanager
def undefined_without_gradient() -> Iterator[None]:
    """Convert errors to `nlbench.Undefined`, around what runs without errors but for a gradient."""
    try:
        yield
    except Undefined:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Undefined(f"PyTorch can't differentiate the network: {first_line(error)}") from error


@contextmanager
def direct_checkpoints() -> Iterator[None]:
    """Call checkpointed parts of networks directly.

    A reentrant `torch.utils.checkpoint` refuses gradients with respect to chosen inputs.
    """
    before = vars(CheckpointFunction).get("apply")
    CheckpointFunction.apply = staticmethod(lambda function, preserve, *args: function(*args))
    try:
        yield
    finally:
        if before is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = before


def input_gradient(
    outputs: Tensor, inputs: Tensor, vector: Tensor | None = None, *, retain_graph: bool = False
) -> Tensor:
    """Compute the gradient of outputs, or their product with a vector, with respect to inputs.

    Examples
    --------
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> input_gradient(x.square().sum(), x)
    tensor([2., 4.])
    """
    gradient = None
    if outputs.requires_grad:
        with undefined_without_gradient():
            (gradient,) = torch.autograd.grad(
                outputs, inputs, vector, retain_graph=retain_graph, allow_unused=True
            )
    if gradient is None:
        raise Undefined("the output does not depend on the input, or is detached from it")
    return gradient
