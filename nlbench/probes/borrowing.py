"""Use somebody's model for a while and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nlbench.errors import RequestError

__all__ = ["evaluation_mode", "refuse_unobservable", "without_fast_path"]


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
