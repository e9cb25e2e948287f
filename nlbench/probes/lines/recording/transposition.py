"""Calls on transposed tensors, which have their samples along the last axis: ``weight @ x.T``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.introspection.operations import known
from nlbench.introspection.pytree import tree_map
from nlbench.probes.lines.rules.rule import Input, NotAffine

_TRANSPOSING = (
    "T", "adjoint", "mH", "mT", "matrix_H", "moveaxis", "movedim", "numpy_T", "permute",
    "swapaxes", "swapdims", "t", "transpose",
)  # fmt: skip


def is_transposition(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call transposes a matrix.

    Examples
    --------
    >>> x = torch.zeros(1, 3)
    >>> [is_transposition(torch.permute, "permute", (x, order), {}) for order in ((1, 0), (0, 1))]
    [True, False]
    """
    if name not in _TRANSPOSING or not args or args[0].ndim != 2:
        return False
    matrix = torch.arange(6).reshape(2, 3)
    return torch.equal(func(matrix, *args[1:], **kwargs), matrix.mT)


def with_samples_first(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the equivalent call on matrices that are not transposed.

    Parameters
    ----------
    name : str
        Name of the operation.
    args, kwargs
        Arguments with `Input` in place of the transposed tensors.

    Raises
    ------
    NotAffine
        If the call is neither elementwise nor a product with a constant on the left.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, 2.0]])
    >>> with_samples_first("mm", (weight, Input(0)), {})
    ((Input(index=0), tensor([[1.],
            [2.]])), {})
    """
    if name in ("mm", "matmul", "addmm"):
        *summand, first, second = args
        if not isinstance(second, Input) or isinstance(first, Input) or first.ndim != 2:
            raise NotAffine("it mixes the samples of a batch")
        return (*map(_transpose, summand), second, first.mT), dict(kwargs)
    selects = name in ("max", "min") and not isinstance(args[1], (Input, Tensor))
    if not known(name).acts or selects:
        raise NotAffine("it moves or drops the batch axis")
    return tuple(tree_map(_transpose, list(args))), tree_map(_transpose, dict(kwargs))


def _transpose(argument: Any) -> Any:
    if not isinstance(argument, Tensor) or argument.numel() == 1:
        return argument
    if argument.ndim != 2:
        raise NotAffine("it mixes the samples of a batch")
    return argument.mT
