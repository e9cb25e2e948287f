"""Copies of a model: in eval mode and another dtype, or of the shapes of its tensors alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError

from .sites import refuse_unobservable

__all__ = ["double_copy", "shape_copy", "tensors_of", "typed_copy"]


def double_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode and float64; see `typed_copy`."""
    return typed_copy(model, torch.float64)


def typed_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model, in eval mode and another dtype; the model itself is left alone.

    Where a device has no float64 the copy is on the CPU.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied, has complex numbers or has
        none at all, as on the ``meta`` device.

    Examples
    --------
    >>> model = nn.Linear(2, 2).half()
    >>> typed_copy(model, torch.float64).weight.dtype, model.weight.dtype
    (torch.float64, torch.float16)
    """
    _check(model)
    if any(t.is_meta for t in tensors_of(model)):
        raise RequestError("the model is on the device meta: it has shapes, but no weights")
    twin = _copied(model, _computed_attributes(model))
    if dtype == torch.float64 and any(t.device.type == "mps" for t in tensors_of(twin)):
        twin = twin.cpu()
    return twin.to(dtype)


def shape_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode, with shapes in place of numbers, floats as float64.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied or has complex numbers.

    Examples
    --------
    >>> shape_copy(nn.Linear(2, 3)).weight.device, shape_copy(nn.Linear(2, 3)).weight.shape
    (device(type='meta'), torch.Size([3, 2]))
    """
    _check(model)
    tensors = [*tensors_of(model), *_computed(model)]
    return _copied(model, {id(t): _shape_of(t) for t in tensors})


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Give a model's parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def _check(model: nn.Module) -> None:
    refuse_unobservable(model)
    # To convert them to floats drops their imaginary parts.
    if any(t.is_complex() for t in tensors_of(model)):
        raise RequestError("the model has complex numbers, expected real ones")


def _copied(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """Copy a model in eval mode, with some of its tensors, by identity, replaced by others."""
    try:
        return copy.deepcopy(model, replaced).eval()
    except (RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(f"the model can't be copied: {reason}") from error


def _computed_attributes(model: nn.Module) -> dict[int, Tensor]:
    """Copies of tensors that modules keep though they were computed, by identity.

    PyTorch refuses to copy them. Older weight normalisation leaves its product so, and
    computes it again before each forward pass.
    """
    return {id(t): t.detach().clone() for t in _computed(model)}


def _computed(model: nn.Module) -> list[Tensor]:
    kept = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))
    return [t for t in kept if not t.is_leaf]


def _shape_of(tensor: Tensor) -> Tensor:
    """Give a tensor without numbers, floats in float64."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty
