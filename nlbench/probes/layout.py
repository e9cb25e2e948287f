"""Which axis of an activation holds the channels, and how a site's tensor becomes (n, d).

A shape alone doesn't say: (8, 56, 56, 96) is channels-last in ConvNeXt, and
(8, 197, 768) is tokens by channels in a vision transformer but channels by length
after a 1-D convolution. What made the tensor does say, so the axis is followed
from one operation to the next while the network runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined

__all__ = ["REDUCTIONS", "ChannelAxes", "reduce_site"]

# Operations whose output has its channels second, whatever came in.
_CHANNELS_SECOND = {
    f"{name}{d}d"
    for d in (1, 2, 3)
    for name in (
        "conv",
        "conv_transpose",
        "max_pool",
        "avg_pool",
        "lp_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
    )
} | {"batch_norm", "instance_norm", "group_norm"}
# Operations whose output has its channels last.
_CHANNELS_LAST = {"linear", "embedding", "multi_head_attention_forward", "bilinear"}
# Operations after which nothing is known.
_FORGET = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "scaled_dot_product_attention"}


class ChannelAxes:
    """Remembers the channel axis of every live tensor; see `follow`."""

    def __init__(self) -> None:
        self._axes: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> int:
        """Give the channel axis: the one followed, else the usual one for the shape.

        Unknown 3-D tensors are taken as (batch, tokens, channels), all others as
        (batch, channels, ...).
        """
        known = self._axes.get(tensor)
        if known is not None and known < tensor.ndim:
            return known
        return 2 if tensor.ndim == 3 else 1

    def follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: object
    ) -> None:
        """Note the channel axis of an operation's output.

        Parameters
        ----------
        name : str
            The operation's name.
        args, kwargs
            What it was called with.
        output
            What it gave; a tuple's first tensor is followed, and all tensors of a list.
        """
        if isinstance(output, tuple) and name in _CHANNELS_LAST:
            output = output[0]
        outputs = output if isinstance(output, tuple | list) else (output,)
        source = _first_tensor(args, kwargs)
        known = None if source is None else self._axes.get(source)
        for tensor in outputs:
            if not isinstance(tensor, Tensor) or tensor.ndim < 3:
                continue
            axis = _axis_after(name, args, kwargs, source, known, tensor)
            if axis is not None:
                self._axes[tensor] = axis


def _axis_after(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    source: Tensor | None,
    known: int | None,
    output: Tensor,
) -> int | None:
    if name in _CHANNELS_SECOND:
        return 1
    if name in _CHANNELS_LAST:
        return output.ndim - 1
    if name == "layer_norm":
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return output.ndim - 1 if len(shape) == 1 else known
    if name in _FORGET or source is None or known is None:
        return None
    if name == "permute":
        order = [int(axis) % source.ndim for axis in _permutation(args, kwargs)]
        return order.index(known)
    if name in ("transpose", "swapaxes", "swapdims", "transpose_"):
        first, second = (int(axis) % source.ndim for axis in _pair(args, kwargs))
        return {first: second, second: first}.get(known, known)
    if name in ("flatten", "view", "reshape", "unflatten"):
        return _axis_after_reshape(source, known, output)
    return known if output.ndim == source.ndim else None


def _axis_after_reshape(source: Tensor, known: int, output: Tensor) -> int | None:
    size = source.shape[known]
    if known == source.ndim - 1:
        return output.ndim - 1 if output.shape[-1] == size else None
    kept = known < output.ndim and output.shape[: known + 1] == source.shape[: known + 1]
    return known if kept else None


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, tuple | list) and argument and isinstance(argument[0], Tensor):
            return argument[0]
    return None


def _permutation(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    if "dims" in kwargs:
        dims: Sequence[int] = kwargs["dims"]
        return dims
    return args[1] if isinstance(args[1], tuple | list) else args[1:]


def _pair(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    first = kwargs.get("dim0", kwargs.get("axis0", args[1] if len(args) > 1 else 0))
    second = kwargs.get("dim1", kwargs.get("axis1", args[2] if len(args) > 2 else 0))
    return first, second


def _spatial(tensor: Tensor, axis: int) -> Tensor:
    others = tuple(d for d in range(1, tensor.ndim) if d != axis)
    return tensor.mean(others) if others else tensor


def _flatten(tensor: Tensor, axis: int) -> Tensor:
    return tensor.flatten(1)


def _published(tensor: Tensor, axis: int) -> Tensor:
    if tensor.ndim == 4:
        return tensor.mean((2, 3))
    if tensor.ndim == 3:
        return tensor.mean(2)
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
        Never the tensor itself, so that an in-place activation can't change it.

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
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if tensor.ndim == 1:
        return tensor[:, None].clone()
    reduced = REDUCTIONS[reduction](tensor, axis)
    same_memory = reduced.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return reduced.clone() if same_memory else reduced
