"""Look at the softmax inside PyTorch's fused attention, without replacing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FUSED_ATTENTION", "softmaxes_of"]


FUSED_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}

OnSoftmax = Callable[[Tensor, Tensor, int], None]


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the kernels that compute a softmax, whole or hidden inside attention."""

    def __init__(self, on_softmax: OnSoftmax) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_softmax = on_softmax

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs)
        if name in ("_softmax", "_safe_softmax"):
            axis = int(args[1]) % args[0].ndim
            self._on_softmax(args[0], output, axis)
        elif name.startswith("_scaled_dot_product") and "math" not in name:
            given = {argument.name: value for argument, value in _bound(func, args)} | kwargs
            x = _logits(given)
            self._on_softmax(x, torch.softmax(x, -1), x.ndim - 1)
        return output


def _bound(func: Any, args: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(func._schema.arguments, args, strict=False)


def _logits(given: dict[str, Any]) -> Tensor:
    """Compute what a fused kernel takes the softmax of: (batch, heads, queries, keys)."""
    query, key = given["query"], given["key"]
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    logits: Tensor = query @ key.transpose(-2, -1) * scale
    bias = given.get("attn_mask", given.get("attn_bias"))
    if bias is not None:
        logits = logits + bias if bias.dtype != torch.bool else logits.masked_fill(~bias, -math.inf)
    if given.get("is_causal"):
        above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -math.inf)
    return logits


@contextmanager
def softmaxes_of(on_softmax: OnSoftmax) -> Iterator[None]:
    """Tell of each softmax that is computed: its input, its output and its axis.

    The kernels that run are the ones that would run anyway; where one of them does not show
    its softmax, it is computed beside it from what the kernel was given.

    Examples
    --------
    >>> q = torch.randn(1, 2, 5, 4)
    >>> with softmaxes_of(lambda x, y, axis: print(y.shape, axis)):
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.Size([1, 2, 5, 5]) 3
    """
    with _Kernels(on_softmax):
        yield
