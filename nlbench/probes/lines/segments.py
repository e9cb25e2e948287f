"""Straight segments: validation of their ends, their lengths and points on them."""

from __future__ import annotations

import torch
from torch import Tensor

from nlbench.errors import NotFinite, RequestError

Segment = tuple[Tensor, Tensor]
"""Start and end, both of shape (*input)."""


def check_ends(starts: Tensor, ends: Tensor) -> None:
    """Validate the ends (n, *input) of segments."""
    if starts.shape != ends.shape:
        raise RequestError(
            f"a segment from shape {tuple(starts.shape[1:])} to {tuple(ends.shape[1:])}, "
            "expected the same shape"
        )
    if starts.ndim < 2:
        raise RequestError("the segment's ends are scalars, expected at least one dimension")
    for name, end in (("start", starts), ("end", ends)):
        if not end.is_floating_point():
            raise RequestError(f"the segment's {name} has dtype {end.dtype}, expected floats")
        if end.is_meta:
            raise RequestError(f"the segment's {name} is on the device meta: it has no values")
        if not torch.isfinite(end).all():
            raise NotFinite(f"the segment's {name} is not finite")


def segment_lengths(starts: Tensor, ends: Tensor) -> list[float]:
    """Return the Euclidean lengths of segments (n, *input).

    They are accurate even where squares underflow or overflow.

    Examples
    --------
    >>> starts, ends = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> segment_lengths(starts, ends)
    [5.0, 0.0]
    """
    starts = starts.double().flatten(1)
    ends = ends.double().flatten(1)
    if not starts.numel():
        return [0.0] * len(starts)
    size = torch.maximum(starts.abs().amax(1), ends.abs().amax(1))
    divisor = torch.where(size > 0, size, 1.0)[:, None]
    return (size * torch.linalg.vector_norm(ends / divisor - starts / divisor, dim=1)).tolist()


def points_at(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Return the points (m, *input) on a segment at t (m,).

    Examples
    --------
    >>> points_at(torch.zeros(1), torch.ones(1), torch.tensor([0.0, 0.5])).tolist()
    [[0.0], [0.5]]
    """
    return torch.lerp(start, end, t.to(start.dtype).reshape(-1, *[1] * start.ndim))
