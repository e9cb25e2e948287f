"""Transforms: what is done to a freshly built model before a checkpoint's weights fit it.

A checkpoint names its transform in the metadata of its safetensors header:
``transform``, a name in the entry-point group ``nlbench.transforms``, and
``transform_options``, a JSON object of keyword arguments. A transform is called as
``transform(model, example=inputs, **options)`` and gives the model that the weights fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, RequestError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["header_of", "transformed"]


def header_of(path: Path) -> dict[str, str]:
    """Read the metadata of a checkpoint; none where it is no readable safetensors file.

    Examples
    --------
    >>> header_of(Path("no-such-file"))
    {}
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError):
        return {}  # Whoever loads the weights says what is wrong with the file.


def transformed(
    model: nn.Module, metadata: Mapping[str, str], example: Callable[[], Any]
) -> nn.Module:
    """Apply the transform that a checkpoint's metadata names; the model itself if none.

    Parameters
    ----------
    model : torch.nn.Module
        Freshly built, on the CPU.
    metadata : mapping of str to str
        Of the checkpoint.
    example : callable
        Gives inputs of the model; called only if there is a transform.

    Raises
    ------
    nlbench.NlbenchError
        If the transform isn't registered, its options can't be read, or it doesn't fit.
    """
    name = metadata.get("transform", "")
    if not name:
        return model
    text = metadata.get("transform_options", "{}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    shown = repr(text if len(text) <= 80 else f"{text[:80]}…")
    if not isinstance(options, dict):
        raise RequestError(f"transform_options is {shown}, expected a JSON object")
    transform = registry.load("transforms", name)
    try:
        made = transform(model, example=example(), **options)
    except NlbenchError as error:
        raise RequestError(f"transform '{name}': {error}") from error
    except TypeError as error:
        raise RequestError(f"transform '{name}' with options {shown}: {error}") from error
    import torch

    if not isinstance(made, torch.nn.Module):
        raise PluginError(
            f"transform '{name}' gives a {type(made).__name__}, expected torch.nn.Module"
        )
    return made
