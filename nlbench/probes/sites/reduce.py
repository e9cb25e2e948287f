"""How one side of an activation call becomes samples by channels, (n, d)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.errors import Undefined

__all__ = ["REDUCTIONS", "Function", "Side", "Unreduced", "capture", "joined", "reduce_site"]


def _spatial(tensor: Tensor, axis: int) -> Tensor:
    others = tuple(d for d in range(1, tensor.ndim) if d != axis)
    return _mean(tensor, others) if others else tensor


def _mean(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    # Summed in the wider type without a copy of the whole tensor.
    return tensor.mean(axes, dtype=_reduced_type(tensor))


def _reduced_type(tensor: Tensor) -> torch.dtype:
    is_wide = tensor.dtype in (torch.float32, torch.float64) or tensor.is_complex()
    return tensor.dtype if is_wide else torch.float32


def _flatten(tensor: Tensor, axis: int) -> Tensor:
    return tensor.flatten(1)


def _published(tensor: Tensor, axis: int) -> Tensor:
    if tensor.ndim == 4:
        return _mean(tensor, (2, 3))
    if tensor.ndim == 3:
        return _mean(tensor, (2,))
    return tensor.flatten(1)


REDUCTIONS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "spatial": _spatial,
    "flatten": _flatten,
    "published": _published,
}


def reduce_site(tensor: Tensor, axis: int, reduction: str = "spatial") -> Tensor:
    """Bring one side of an activation call to (n, d).

    Parameters
    ----------
    tensor : tensor of shape (n, ...)
    axis : int
        Where the channels are; only ``spatial`` uses it.
    reduction : {"spatial", "flatten", "published"}
        ``spatial``: mean over all positions or tokens, keeping channels. ``flatten``:
        all but the batch. ``published``: mean over the last two axes of a 4-D tensor and
        the last one of a 3-D tensor, whatever they are, as the affinity paper's code does.

    Returns
    -------
    tensor of shape (n, d)
        At least single precision. Never the tensor itself, so that an in-place activation
        can't change it.

    Raises
    ------
    nlbench.Undefined
        If the tensor has no batch axis.

    Examples
    --------
    >>> reduce_site(torch.ones(5, 7, 4, 4), axis=1).shape
    torch.Size([5, 7])
    """
    if tensor.ndim == 0:
        raise Undefined("the activation is a single number, without a batch")
    if tensor.ndim == 1:
        return tensor[:, None].to(_reduced_type(tensor), copy=True)
    reduced = REDUCTIONS[reduction](tensor, axis).to(_reduced_type(tensor))
    if reduced.is_meta:
        return reduced
    same_memory = reduced.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return reduced.clone() if same_memory else reduced


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
        See `nlbench.probes.sites.reduce.reduce_site`.
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

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Unreduced:
        """Give the results of a function of the results."""
        x, y = (
            {k: v if isinstance(v, Exception) else function(v) for k, v in side.items()}
            for side in (self._x, self._y)
        )
        return Unreduced(x, y)

    def renamed(self, names: Mapping[str, str]) -> Unreduced:
        """Give the same results under other names: those that `names` maps to."""
        return Unreduced(
            {name: self._x[known] for name, known in names.items()},
            {name: self._y[known] for name, known in names.items()},
        )
