"""The PReLU layers of sparsified networks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.introspection.wrapped_calls import count_call


class SparsePReLU(nn.PReLU):
    """A PReLU, initially a ReLU, whose units can be frozen with slope 1.

    Parameters
    ----------
    units : int
        Number of channels.
    layerwise : bool
        Use one slope for all channels.
    axis : int
        Channel axis of the input.

    Attributes
    ----------
    weight : parameter of shape (units,), or (1,) if layerwise
        The slopes, initially 0.
    frozen : bool buffer of the same shape
        True where the slope is 1 regardless of `weight`, which gets no gradient there.

    Examples
    --------
    >>> layer = SparsePReLU(2)
    >>> layer.frozen[1] = True
    >>> layer(torch.tensor([[-1.0, -1.0]])).tolist()
    [[-0.0, -1.0]]
    """

    frozen: Tensor

    def __init__(self, units: int, *, layerwise: bool = False, axis: int = 1) -> None:
        super().__init__(1 if layerwise else units, init=0.0)
        self.units, self.layerwise, self.axis = units, layerwise, axis
        self.register_buffer("frozen", torch.zeros(len(self.weight), dtype=torch.bool))

    @property
    def linear_units(self) -> int:
        """Number of channels with slope 1."""
        return int((self.slopes() == 1).sum()) * (self.units if self.layerwise else 1)

    def slopes(self) -> Tensor:
        """Return the effective slopes, of shape (units,), or (1,) if layerwise."""
        return self.weight.masked_fill(self.frozen, 1.0)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply each negative value by the slope of its channel."""
        if self.layerwise or self.axis == 1:
            return F.prelu(input, self.slopes())
        moved = F.prelu(input.movedim(self.axis, 1), self.slopes())
        return moved.movedim(1, self.axis)

    def extra_repr(self) -> str:
        """Return the number of channels and the options that differ from the defaults."""
        axis = "" if self.axis == 1 else f", axis={self.axis}"
        return f"{self.units}{', layerwise=True' if self.layerwise else ''}{axis}"


class PReLUPerCall(nn.Module):
    """Replacement for a ReLU that is called several times, with one PReLU per call.

    Parameters
    ----------
    calls : iterable of SparsePReLU
        In call order.
    """

    def __init__(self, calls: Iterable[SparsePReLU]) -> None:
        super().__init__()
        for index, call in enumerate(calls):
            self.add_module(str(index), call)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the PReLU for this call."""
        index = count_call(self)
        if str(index) not in self._modules:
            raise RequestError(
                f"a ReLU is called {index + 1} times in one forward pass, but was called "
                f"{len(self._modules)} times on the example passed to sparsify"
            )
        output: Tensor = getattr(self, str(index))(input)
        return output
