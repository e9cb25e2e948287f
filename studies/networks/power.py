"""Powers as activations that the probes recognise as sites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nlbench import register_op


class _Power(torch.autograd.Function):
    # A separate operation, since squares and cubes elsewhere in a network are not activations.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        return x**order

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.order = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.order * x ** (ctx.order - 1), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (x,) = ctx.saved_tensors
        moved: Tensor = tangent * ctx.order * x ** (ctx.order - 1)
        return moved


class Power(nn.Module):
    """Elementwise power of integer order.

    Examples
    --------
    >>> Power(3)(torch.tensor([2.0, -1.0])).tolist()
    [8.0, -1.0]
    """

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        """Raise each element to the power."""
        raised: Tensor = _Power.apply(x, self.order)
        return raised

    def extra_repr(self) -> str:
        """Return the order."""
        return str(self.order)


register_op(_Power, kind="power", modules=(Power,))
