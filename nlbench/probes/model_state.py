"""Use somebody's model for a while and give it back as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nlbench.errors import RequestError

__all__ = [
    "attributes_kept",
    "double_copy",
    "evaluation_mode",
    "refuse_unobservable",
    "shape_copy",
    "tensors_of",
    "typed_copy",
    "without_fast_path",
]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; put every module back after.

    Buffers that the forward pass changes, such as a counter of calls, get their values back.
    One that it replaces by another shape is a cache that has grown, and stays.
    """
    was_training = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        try:
            model.eval()
        except NotImplementedError as error:
            # What `torch.export` gives was fixed in the mode that it was exported in.
            raise RequestError(
                f"the model ({type(model).__name__}) can't be put into evaluation mode: {error}; "
                "pass the module it was made from"
            ) from error
        with torch.no_grad():
            yield
    finally:
        for module, flag in was_training.items():
            module.training = flag
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                _put_back(module, name, buffer, before)


def _put_back(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    now = module._buffers.get(name)
    if now is None or now.shape != before.shape or now.dtype != before.dtype or now.is_meta:
        return
    if buffer.shape == before.shape and not torch.equal(buffer, before):
        buffer.copy_(before)
    # A model moved to another device meanwhile keeps its new buffers.
    if now.device == buffer.device:
        module._buffers[name] = buffer


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Have transformer layers call their activations one by one.

    In evaluation PyTorch replaces a whole `torch.nn.TransformerEncoderLayer` by one kernel,
    whose activations nobody can see and whose output differs by rounding.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def refuse_unobservable(model: nn.Module) -> None:
    """Refuse a model of which a part is compiled or scripted, or runs in other threads.

    Raises
    ------
    nlbench.RequestError
        Naming the part.
    """
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or (
            getattr(module, "_compiled_call_impl", None) is not None
        )
        if isinstance(module, torch.jit.ScriptModule) or is_compiled:
            what = "compiled" if is_compiled else "scripted"
            raise RequestError(
                f"{name or 'the model'} is {what}, so its activations can't be observed; "
                "pass the module it was made from"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RequestError(
                f"{name or 'the model'} is a DataParallel on several devices, each with a thread "
                "of its own, so its activations can't be observed; pass its .module"
            )


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


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a pass sets on modules, such as a mask that is made once and kept.

    A network run without numbers would keep a mask without numbers. Values that an attribute's
    tensor holds are not looked after.

    Examples
    --------
    >>> model = nn.Identity()
    >>> with attributes_kept(model):
    ...     model.mask = [1]
    >>> hasattr(model, "mask")
    False
    """
    before = [(module, _copied_attributes(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            for name, (value, content) in attributes.items():
                # The same containers again: others, as handles of hooks, refer to them.
                if isinstance(value, dict):
                    value.clear()
                    value.update(content)
                elif isinstance(value, list):
                    value[:] = content
                vars(module)[name] = value


def _copied_attributes(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, copy.copy(value) if isinstance(value, dict | list) else None)
        for name, value in attributes.items()
    }
