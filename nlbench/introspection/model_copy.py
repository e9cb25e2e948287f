"""Copies of a model: in another type, on another device, or without numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError, first_line

from .model_state import refuse_unobservable

__all__ = ["cpu_copy", "double_copy", "precise_device", "shape_copy", "tensors_of", "typed_copy"]


def double_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode and float64; see `typed_copy`."""
    return typed_copy(model, torch.float64)


def typed_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model, in eval mode and another dtype.

    From a device without float64 (`precise_device`) the model is copied to the CPU, also in
    float32, since its outputs are processed in double precision.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied, has complex numbers or is on the
        ``meta`` device.

    Examples
    --------
    >>> model = nn.Linear(2, 2).half()
    >>> typed_copy(model, torch.float64).weight.dtype, model.weight.dtype
    (torch.float64, torch.float16)
    """
    _refuse_uncopyable(model)
    if any(t.is_meta for t in tensors_of(model)):
        raise RequestError("the model is on the device meta: it has shapes, but no weights")
    twin = _copied(model, {id(t): t.detach().clone() for t in _computed(model)})
    if any(t.device.type in _WITHOUT_FLOAT64 for t in tensors_of(twin)):
        twin = twin.cpu()
    return twin.to(dtype)


_WITHOUT_FLOAT64 = ("mps",)


def precise_device(model: nn.Module, inputs: Tensor) -> torch.device:
    """Return the device of a model's copy in double precision.

    It is the device of the model, or of its inputs if it has no parameters. The CPU replaces
    Apple's GPU, which has no float64.

    Examples
    --------
    >>> precise_device(nn.Linear(2, 3), torch.zeros(1, 2))
    device(type='cpu')
    """
    device = next((t.device for t in tensors_of(model)), inputs.device)
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def cpu_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the CPU, in eval mode, without a copy on its own device.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, or can't be copied.

    Examples
    --------
    >>> cpu_copy(nn.Linear(2, 3)).weight.device
    device(type='cpu')
    """
    refuse_unobservable(model)
    tensors = (*tensors_of(model), *_tensor_attributes(model))
    return _copied(model, {id(t): _on_cpu(t) for t in tensors})


def _on_cpu(tensor: Tensor) -> Tensor:
    moved = tensor.detach().cpu().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def shape_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the ``meta`` device, in eval mode, floats as float64.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied or has complex numbers.

    Examples
    --------
    >>> shape_copy(nn.Linear(2, 3)).weight.device, shape_copy(nn.Linear(2, 3)).weight.shape
    (device(type='meta'), torch.Size([3, 2]))
    """
    _refuse_uncopyable(model)
    tensors = [*tensors_of(model), *_computed(model)]
    return _copied(model, {id(t): _shape_of(t) for t in tensors})


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def _refuse_uncopyable(model: nn.Module) -> None:
    refuse_unobservable(model)
    # Conversion to floats would drop imaginary parts.
    if any(t.is_complex() for t in tensors_of(model)):
        raise RequestError("the model has complex numbers, expected real ones")


def _copied(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """Copy a model in eval mode, with tensors, by identity, replaced by others."""
    try:
        return copy.deepcopy(model, replaced).eval()
    except (RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise RequestError(f"the model can't be copied: {reason}") from error


def _tensor_attributes(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are plain attributes of modules."""
    return (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))


def _computed(model: nn.Module) -> list[Tensor]:
    """List the tensor attributes that have a gradient graph, which PyTorch refuses to copy.

    Older weight normalisation stores its product so, and computes it before each forward pass.
    """
    return [tensor for tensor in _tensor_attributes(model) if not tensor.is_leaf]


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor on the ``meta`` device, floats in float64."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty
