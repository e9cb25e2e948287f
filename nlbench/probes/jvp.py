"""Forward-mode differentiation, as the probes `lines` and `function` use it."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["dual"]


def dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Pair a value with its tangent, inside `torch.autograd.forward_ad.dual_level`."""
    _load_rules()
    return _paired(value, tangent)


@functools.cache
def _load_rules() -> None:
    """Have PyTorch load its rules of differentiation, of which it warns itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script.*")
        _paired(torch.zeros(1), torch.zeros(1))


def _paired(value: Tensor, tangent: Tensor) -> Tensor:
    # PyTorch's own annotations are missing here.
    made: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return made
