"""Descriptions of inputs that a layer refuses, in place of PyTorch's messages."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .function_calls import tensors_in


def describe_refusal(error: BaseException, model: nn.Module | None = None) -> str:
    """Describe what the layer that raised an error takes, and what it gets.

    Return an empty text if the error has another cause, or the layer is not known. The model is by
    default the outermost module that was called.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(6, 2))
    >>> try:
    ...     model(torch.zeros(4, 7))
    ... except RuntimeError as error:
    ...     print(describe_refusal(error))
    the layer 0 (Linear) takes inputs of shape (..., 6), and gets (4, 7)
    """
    calls = list(_calls(error))
    for layer, x in calls:
        expected, given = _type_mismatch(layer, x) or _shape_mismatch(layer, x) or ("", "")
        if expected:
            root = model or calls[-1][0]
            names = (name for name, module in root.named_modules() if module is layer)
            name = f"the layer {next(names, '')}".strip()
            return f"{name} ({type(layer).__name__}) takes {expected}, and gets {given}"
    return ""


def _calls(error: BaseException) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the modules whose calls an error has left, the innermost first, and their inputs."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        values = frame.f_locals
        module = values.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(module, nn.Module):
            arguments = (*values.get("args", ()), *values.get("kwargs", {}).values())
            yield from ((module, x) for x in itertools.islice(tensors_in(arguments), 1))


def _type_mismatch(layer: nn.Module, x: Tensor) -> tuple[str, str] | None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        count = layer.num_embeddings
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            return f"integers from 0 to {count - 1}", _name(x.dtype)
        low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
        if low < 0 or high >= count:
            return f"integers from 0 to {count - 1}", f"integers from {low} to {high}"
        return None
    weight = next(layer.parameters(recurse=False), x)
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return None
    return f"{_name(weight.dtype)} numbers", f"{_name(x.dtype)}; convert the inputs or the network"


def _shape_mismatch(layer: nn.Module, x: Tensor) -> tuple[str, str] | None:
    shape = tuple(x.shape)
    kernel: Any = getattr(layer, "kernel_size", None)
    channels = getattr(layer, "in_channels", None)
    if isinstance(channels, int) and isinstance(kernel, tuple):
        axes = {1: "length", 2: "height, width", 3: "depth, height, width"}.get(len(kernel), "...")
        is_valid = len(shape) == len(kernel) + 2 and shape[1] == channels
        return None if is_valid else (f"inputs of shape (n, {channels}, {axes})", str(shape))
    if isinstance(layer, nn.RNNBase):
        axes = "n, steps" if layer.batch_first else "steps, n"
        is_valid = len(shape) in (2, 3) and shape[-1] == layer.input_size
        return None if is_valid else (f"inputs of shape ({axes}, {layer.input_size})", str(shape))
    for name in ("in_features", "input_size", "embed_dim"):
        size = getattr(layer, name, None)
        if isinstance(size, int) and shape[-1:] != (size,):
            return f"inputs of shape (..., {size})", str(shape)
    size = getattr(layer, "num_features", None)
    if isinstance(size, int) and shape[1:2] != (size,):
        return f"inputs of shape (n, {size}, ...)", str(shape)
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
