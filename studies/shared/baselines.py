"""Baseline measures for the benchmark of measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.errors import Undefined
from nlbench.measure import site_measure

if TYPE_CHECKING:
    from torch import Tensor


@site_measure(
    name="elementwise-residual",
    bounds=(0.0, 1.0),
    more_means="more nonlinear",
    source="ours, a baseline of the benchmark of measures (docs/benchmark.md)",
    independent_sites=True,
)
def elementwise_residual(x: Tensor, y: Tensor) -> Tensor:
    """Fraction of an activation's output not explained by any affine map per channel.

    Examples
    --------
    >>> import torch
    >>> x = torch.linspace(-1, 1, 101)[:, None]
    >>> y = torch.cat([2 * x + 1, x.square()], 1)
    >>> round(elementwise_residual.function(x.repeat(1, 2), y).item(), 3)
    0.064
    """
    if len(x) < 3 or x.shape != y.shape:
        raise Undefined("expected at least 3 samples, and outputs of the same shape as the inputs")
    x, y = x.double(), y.double()
    x, y = x - x.mean(0), y - y.mean(0)
    total = y.square().sum()
    if total == 0:
        raise Undefined("constant output")
    explained = (x * y).sum(0).square() / x.square().sum(0).clamp(min=1e-300)
    return (1 - explained.sum() / total).clamp(0, 1)
