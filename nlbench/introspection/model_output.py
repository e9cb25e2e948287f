"""Validation of a model's output."""

from __future__ import annotations

from torch import Tensor

from nlbench.errors import Undefined


def validated_tensor(output: object) -> Tensor:
    """Validate that a model's output is a tensor, and return it.

    Examples
    --------
    >>> import torch
    >>> validated_tensor((torch.ones(1), torch.ones(1)))
    Traceback (most recent call last):
    nlbench.errors.Undefined: the model returns a tuple, expected a tensor
    """
    if not isinstance(output, Tensor):
        raise Undefined(f"the model returns a {type(output).__name__}, expected a tensor")
    return output


def validated_outputs(output: object, samples: int) -> Tensor:
    """Validate that a model's output has one row per sample, and return it.

    Raises
    ------
    nlbench.Undefined
        If the output is not a tensor, or has a different number of rows.

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
    return tensor
