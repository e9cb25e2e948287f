"""How one side of an activation call becomes samples by channels, (n, d)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nlbench.errors import Undefined

__all__ = ["REDUCTIONS", "reduce_site"]


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
