"""What is kept of one side of an activation call: its reduction, and numbers of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .reduction import reduce_site

__all__ = ["Function", "Side", "Unreduced", "capture", "joined"]

Function = Callable[[Tensor], Tensor]

# Bytes of an activation that are gone through at a time: what a function makes of them stays
# small, and on a CPU it finds them in the cache.
_PIECE = {"cpu": 2**22}
_PIECE_ELSEWHERE = 2**28


@dataclass(frozen=True)
class Side:
    """The input or the output of one activation call, without its whole tensor.

    Parameters
    ----------
    reduced : tensor of shape (n, d)
    numbers : mapping of str to tensor of shape (n,), or the error met
    """

    reduced: Tensor
    numbers: Mapping[str, Tensor | Exception]


def capture(tensor: Tensor, axis: int, reduction: str, functions: Mapping[str, Function]) -> Side:
    """Take what is kept of an activation's tensor (n, ...).

    Parameters
    ----------
    tensor : tensor of shape (n, ...)
    axis : int
        Where the channels are.
    reduction : str
        See `nlbench.probes.reduction.reduce_site`.
    functions : mapping of str to callable
        From the tensor, or some of its samples, to one number a sample.

    Examples
    --------
    >>> side = capture(torch.ones(5, 3, 2, 2), 1, "spatial", {"sum": lambda x: x.sum((1, 2, 3))})
    >>> side.reduced.shape, side.numbers["sum"]
    (torch.Size([5, 3]), tensor([12., 12., 12., 12., 12.]))
    """
    if not functions or tensor.ndim == 0:
        return Side(reduce_site(tensor, axis, reduction), {})
    return joined(
        [
            Side(
                reduce_site(piece, axis, reduction),
                {name: _applied(function, piece) for name, function in functions.items()},
            )
            for piece in _pieces(tensor)
        ]
    )


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    most = _PIECE.get(tensor.device.type, _PIECE_ELSEWHERE)
    sample = max(1, tensor.numel() // max(1, len(tensor)) * tensor.element_size())
    size = max(1, most // sample)
    return (tensor,) if size >= len(tensor) else torch.split(tensor, size)


def _applied(function: Function, tensor: Tensor) -> Tensor | Exception:
    """Apply a measure's function; what it raises concerns only who reads the result."""
    try:
        numbers = function(tensor)
        if numbers.shape != (len(tensor),):
            shape = tuple(numbers.shape)
            raise ValueError(f"it gives shape {shape}, expected one number a sample")
        # A view would keep the activation alive, or change with it.
        return numbers.detach().clone()
    except Exception as error:
        return error.with_traceback(None)


def joined(sides: Sequence[Side]) -> Side:
    """Put what was kept of some of the samples after one another."""
    if len(sides) == 1:
        return sides[0]
    numbers = {}
    for name in sides[0].numbers:
        parts = [side.numbers[name] for side in sides]
        errors = [part for part in parts if isinstance(part, Exception)]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        numbers[name] = errors[0] if errors else torch.cat(tensors)
    return Side(torch.cat([side.reduced for side in sides]), numbers)


class Unreduced(Mapping[str, tuple[Tensor, Tensor]]):
    """What functions made of a whole input and a whole output; an error when it is read.

    Parameters
    ----------
    x, y : mapping of str to tensor of shape (n,), or the error met
    """

    def __init__(
        self, x: Mapping[str, Tensor | Exception], y: Mapping[str, Tensor | Exception]
    ) -> None:
        self._x, self._y = x, y

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        before, after = self._x[name], self._y[name]
        if isinstance(before, Exception):
            raise before
        if isinstance(after, Exception):
            raise after
        return before, after

    def __iter__(self) -> Iterator[str]:
        return iter(self._x)

    def __len__(self) -> int:
        return len(self._x)

    def renamed(self, names: Mapping[str, str]) -> Unreduced:
        """Give the same results under other names: those that `names` maps to."""
        return Unreduced(
            {name: self._x[known] for name, known in names.items()},
            {name: self._y[known] for name, known in names.items()},
        )
