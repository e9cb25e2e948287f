"""Find which axis of a network's input holds the channels, from what its first layer does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from .axes import at, axis_map

__all__ = ["channel_axes"]

_SECOND = frozenset(
    [f"{name}{axes}d" for name in ("conv", "conv_transpose", "max_pool") for axes in (1, 2, 3)]
    + ["batch_norm", "instance_norm", "group_norm", "prelu"]
)
_LAST = frozenset(("linear", "matmul", "__matmul__", "layer_norm", "multi_head_attention_forward"))


def channel_axes(
    run: Callable[[tuple[Tensor, ...]], object], inputs: tuple[Tensor, ...]
) -> list[int]:
    """Tell for each input which axis the first layer takes as channels.

    The network runs until that is known; what it changes on the way is the caller's to put
    back.

    Parameters
    ----------
    run : callable
        Runs the network on inputs.
    inputs : tuple of tensor
        Each with the batch first.

    Returns
    -------
    list of int
        Axis 1 where no layer says otherwise.

    Examples
    --------
    >>> import torch
    >>> layer, tokens = torch.nn.Linear(4, 2), torch.zeros(1, 3, 4)
    >>> channel_axes(lambda given: layer(given[0] + 1), (tokens,))
    [2]
    """
    finder = _Finder(inputs)
    if finder.sought:
        # A failure of the network itself shows when it is recorded.
        with contextlib.suppress(_Found, Exception), finder:
            run(inputs)
    return [finder.found.get(number, 1) for number in range(len(inputs))]


class _Found(BaseException):
    """Ends a pass; no network catches it by mistake."""


class _Finder(TorchFunctionMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: dict[int, int] = {}
        self.sought = {
            number
            for number, tensor in enumerate(inputs)
            if tensor.ndim > 2 and tensor.is_floating_point()
        }
        # By identity of a tensor: the input it comes of, and where that one's axes are in it.
        self._axes: dict[int, tuple[int, list[int | None]]] = {
            id(inputs[number]): (number, list(range(inputs[number].ndim))) for number in self.sought
        }
        self._alive: list[Tensor] = list(inputs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        name = name if name.startswith("__") else name.removesuffix("_")
        given = [t for t in tree_iter((args, kwargs)) if id(t) in self._axes]
        if name in _SECOND | _LAST:
            for tensor in given:
                self._decide(tensor, tensor.ndim - 1 if name in _LAST else 1)
        output = func(*args, **kwargs)
        for tensor in given:
            number, axes = self._axes[id(tensor)]
            for made in tree_iter(output):
                if isinstance(made, Tensor) and made is not tensor and number not in self.found:
                    moved = axis_map(name, args, kwargs, tensor, made)
                    after = [None if axis is None else at(moved, axis) for axis in axes]
                    self._axes[id(made)] = (number, after)
                    self._alive.append(made)
        return output

    def _decide(self, tensor: Tensor, axis: int) -> None:
        number, axes = self._axes[id(tensor)]
        if number not in self.found:
            self.found[number] = axes.index(axis) if axis in axes else 1
        if self.found.keys() == self.sought:
            raise _Found
