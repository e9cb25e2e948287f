"""Validation of a model's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nlbench.errors import Undefined, enumerate_names

from . import pytree


def output_parts(output: object) -> dict[str, Any]:
    """Return the parts of a model's output by key, position or attribute.

    Examples
    --------
    >>> output_parts({"out": 1}), output_parts((2, 3)), output_parts(4)
    ({'out': 1}, {'0': 2, '1': 3}, {})
    """
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {str(position): value for position, value in enumerate(output)}
    attributes = vars(output) if hasattr(output, "__dict__") else {}
    return {name: value for name, value in attributes.items() if not name.startswith("_")}


def validated_tensor(output: object) -> Tensor:
    """Validate that a model's output is a tensor of real numbers, and return it.

    Examples
    --------
    >>> import torch
    >>> validated_tensor((torch.ones(1), torch.ones(1)))
    Traceback (most recent call last):
    nlbench.errors.Undefined: the model returns a tuple of 0, 1, expected a tensor; choose one \
with the setting model.output=NAME, or compute one with model.output=FILE.py:FUNCTION
    """
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            kind = str(output.dtype).removeprefix("torch.")
            raise Undefined(f"the model returns {kind}, expected real numbers")
        return output
    kind = type(output).__name__
    names = list(output_parts(output))
    inside = f" of {enumerate_names(names)}" if names else ""
    raise Undefined(
        f"the model returns a {kind}{inside}, expected a tensor; choose one with the setting "
        "model.output=NAME, or compute one with model.output=FILE.py:FUNCTION"
    )


def validated_outputs(output: object, samples: int) -> Tensor:
    """Validate that a model's output has one row of real numbers per sample, and return it.

    Examples
    --------
    >>> import torch
    >>> validated_outputs(torch.ones(3, 2), 3).shape
    torch.Size([3, 2])
    """
    tensor = validated_tensor(output)
    if tensor.dim() == 0 or len(tensor) != samples:
        inputs = "one input" if samples == 1 else f"{samples} inputs"
        raise Undefined(
            f"the model returns shape {tuple(tensor.shape)} for {inputs}, expected one output "
            "per input along the first axis"
        )
    if samples and not tensor.numel():
        raise Undefined(f"the model returns shape {tuple(tensor.shape)}, which has no numbers")
    return tensor


def output_rows(output: object, count: int) -> Tensor:
    """Return a model's output for `count` samples as a matrix (n, k)."""
    try:
        tensors = [validated_outputs(output, count)]
    except Undefined:
        # Measures of activations need no single output.
        leaves = filter(torch.is_tensor, pytree.tree_leaves(output))
        tensors = [leaf for leaf in leaves if leaf.ndim and len(leaf) == count]
    return torch.cat([tensor.detach().reshape(count, -1) for tensor in tensors], 1)
