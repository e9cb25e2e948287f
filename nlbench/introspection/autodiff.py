"""Detection of automatic differentiation and of function transforms."""

from __future__ import annotations

import torch
from torch import Tensor


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


def is_vmapped(value: object) -> bool:
    """Return True for a tensor that `torch.func.vmap` maps over.

    Examples
    --------
    >>> is_vmapped(torch.zeros(2))
    False
    """
    is_batched = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", None)
    return isinstance(value, Tensor) and is_batched is not None and bool(is_batched(value))
