"""How much memory a forward pass takes, by what one sample takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .layout import tensors_in

__all__ = ["bytes_a_sample"]

# Kernels need room of their own, and a batch's tensors are not freed at once.
_MARGIN = 1.5


class _Tally(TorchFunctionMode):
    """Adds up the tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = list(tensors_in((output,)))
        if made:
            self._live += [weakref.ref(tensor) for tensor in made]
            sizes: dict[int, int] = {}
            for reference in list(self._live):
                if (tensor := reference()) is None:
                    self._live.remove(reference)
                else:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, sum(sizes.values()))
        return output


def bytes_a_sample(model: nn.Module, samples: Tensor) -> int:
    """Estimate what a forward pass takes for each of its samples.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    samples : tensor of shape (n, ...)
        The model is run on them; two are enough, and safer than one, whose axis a network may
        drop by ``squeeze``.

    Returns
    -------
    int
        Bytes: one and a half times the most that live together, never 0.

    Examples
    --------
    >>> import torch
    >>> bytes_a_sample(nn.Sequential(nn.Linear(4, 1000), nn.ReLU()), torch.zeros(2, 4))
    12024
    """
    tally = _Tally()
    with tally:
        model(samples.clone())
    return max(1, int(_MARGIN * tally.peak / len(samples)))
