"""Attention without fused kernels, and the softmaxes inside fused ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .function_calls import DispatchMode


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let transformer layers call each activation separately.

    In evaluation mode, PyTorch computes a whole `torch.nn.TransformerEncoderLayer` in one kernel,
    which hides its activations and rounds differently.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def disable_fused_attention() -> AbstractContextManager[None]:
    """Disable fused attention, since fused kernels lack second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)


class SoftmaxInterceptor(DispatchMode):
    """Dispatch mode that reports each softmax, including those inside PyTorch's fused attention.

    `on_softmax` is called with the input, output and axis of each. Kernels are chosen as without
    it: the softmax in a fused kernel is computed a second time, from the kernel's arguments.

    Examples
    --------
    >>> q = torch.randn(1, 2, 5, 4)
    >>> with SoftmaxInterceptor(lambda x, y, axis: print(y.shape, axis)):
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.Size([1, 2, 5, 5]) 3
    """

    def __init__(self, on_softmax: Callable[[Tensor, Tensor, int], None]) -> None:
        super().__init__()
        self._on_softmax = on_softmax

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs)
        if name in ("_softmax", "_safe_softmax"):
            self._on_softmax(args[0], output, int(args[1]) % args[0].ndim)
        elif name.startswith("_scaled_dot_product") and "math" not in name:
            names = (argument.name for argument in func._schema.arguments)
            x = _logits({**dict(zip(names, args, strict=False)), **kwargs})
            self._on_softmax(x, torch.softmax(x, -1), x.ndim - 1)
        return output


def _logits(arguments: dict[str, Any]) -> Tensor:
    """Compute the logits (batch, heads, queries, keys) of a fused attention kernel."""
    query = arguments["query"]
    key = arguments["key"]
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = arguments.get("scale") or 1 / math.sqrt(query.shape[-1])
    logits: Tensor = query @ key.transpose(-2, -1) * scale
    bias = arguments.get("attn_mask", arguments.get("attn_bias"))
    if bias is not None:
        logits = logits + bias if bias.dtype != torch.bool else logits.masked_fill(~bias, -math.inf)
    if arguments.get("is_causal"):
        above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -math.inf)
    return logits
