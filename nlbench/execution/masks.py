"""Arguments of a model that are no inputs to differentiate, interpolate or follow channels of."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.subjects.inputs import ArgumentLayout
from nlbench.subjects.subject import Subject


def refuse_masks(subject: Subject) -> None:
    """Raise if a subject's inputs are numbers with a mask.

    Derivatives and lines would also be those of the mask, and depend on what stands in padding.
    """
    arguments = list(_arguments(subject))
    masks = [name for name, _, values in arguments if _is_mask(name, values)]
    others = [dtype for name, dtype, _ in arguments if name not in masks]
    # Tokens have no derivatives and no lines either, for another reason.
    if masks and others and all(dtype.is_floating_point for dtype in others):
        raise Undefined(
            f"'{masks[0]}' is a mask: a network has no derivatives with respect to inputs with a "
            "padding mask, and there are no lines between them"
        )


def refuse_mixed_types(subject: Subject) -> None:
    """Raise if a subject's inputs are floats with integers or truth values."""
    arguments = list(_arguments(subject))
    floats = [dtype for _, dtype, _ in arguments if dtype.is_floating_point]
    others = [(name, dtype) for name, dtype, _ in arguments if not dtype.is_floating_point]
    if floats and others:
        name, dtype = others[0]
        raise Undefined(
            f"'{name}' is {_dtype_name(dtype)} next to inputs of {_dtype_name(floats[0])}, "
            "expected floats alone for derivatives, lines and channel graphs"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arguments(subject: Subject) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Yield the name, the dtype and the packed values of each of several tensors with samples."""
    model = subject.model
    # The hook that unpacks the arguments.
    hooks = getattr(model, "_forward_pre_hooks", {}).values()
    layouts = (getattr(hook, "layout", None) for hook in hooks)
    layout = next((each for each in layouts if isinstance(each, ArgumentLayout)), None)
    leaves = [leaf for leaf in layout.leaves if leaf.shape is not None] if layout else []
    if len(leaves) < 2:
        return
    names = _argument_names(model)
    sizes = [math.prod(leaf.shape or ()) for leaf in leaves]
    for leaf, values in zip(leaves, torch.split(subject.inputs, sizes, 1), strict=True):
        path = re.findall(r"\w+", leaf.name)
        is_positional = len(path) == 1 and path[0].isdigit() and int(path[0]) < len(names)
        yield names[int(path[0])] if is_positional else path[-1], leaf.dtype, values


def _argument_names(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a model's forward method."""
    try:
        signature = getattr(model, "signature", None) or inspect.signature(model.forward)
        return list(signature.parameters)
    except (TypeError, ValueError, AttributeError):
        return []


def _is_mask(name: str, values: Tensor) -> bool:
    """Return True for an argument with the name of a mask, and two values or one.

    Floats may be packed as integers, which are as many different ones.

    Examples
    --------
    >>> _is_mask("attention_mask", torch.tensor([0.0, -torch.inf])), _is_mask("x", torch.ones(2))
    (True, False)
    """
    if not name.lower().endswith("mask") or not values.numel():
        return False
    return bool(((values == values.amin()) | (values == values.amax())).all())
