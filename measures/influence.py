"""Influence: how much a place changes the direction and the length of its tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Accumulator, PooledMeasure

from .papers import bibtex
from .statistics.prepared import Samples, prepare_pair


def block_influence(x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over rows of 1 - cos(x, y).

    Parameters
    ----------
    x, y : tensor of shape (n, d)
        Any real type. Computed in float64. Rows of zeros have no direction and are skipped.

    Returns
    -------
    tensor, scalar, float64
        In [0, 2]: 0 if no row changes its direction.

    Raises
    ------
    nlbench.Undefined
        If the input or the output of every row is zero.
    nlbench.NotFinite
        If a value is NaN or infinite.
    nlbench.RequestError
        If the shapes differ.

    References
    ----------
    X. Men et al., "ShortGPT: Layers in Large Language Models are More Redundant Than You
    Expect", Findings of ACL 2025, equation (1).

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> block_influence(x, torch.tensor([[3.0, 0.0], [1.0, 0.0]])).item()
    0.5
    """
    distances, _ = _changes(x, y)
    return _mean(distances, "an input or an output")


def relative_change(x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over rows of ‖y - x‖ / ‖x‖. See `block_influence`.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> round(relative_change(x, torch.tensor([[3.0, 0.0], [0.0, 1.0]])).item(), 9)
    1.25
    """
    _, changes = _changes(x, y)
    return _mean(changes, "an input")


def _mean(values: Tensor, what: str) -> Tensor:
    if not len(values):
        raise Undefined(f"all rows have {what} of zeros")
    return values.mean()


def _changes(x: Samples, y: Samples) -> tuple[Tensor, Tensor]:
    """Return 1 - cos and ‖y - x‖ / ‖x‖ of the rows where they are defined."""
    x, y = prepare_pair(x, y)
    # In units of each row's largest entry, so that no square underflows or overflows.
    peak = torch.maximum(x.values.abs(), y.values.abs()).amax(1, keepdim=True)
    used = peak[:, 0] > 0
    a = x.values[used] / peak[used]
    b = y.values[used] / peak[used]
    norms = torch.linalg.vector_norm(a, dim=1), torch.linalg.vector_norm(b, dim=1)
    both = (norms[0] > 0) & (norms[1] > 0)
    first = norms[0] > 0
    unit_a = a[both] / norms[0][both, None]
    unit_b = b[both] / norms[1][both, None]
    # Half the squared distance between unit vectors, which avoids cancellation for small angles.
    distances = (unit_a - unit_b).square().sum(1) / 2
    changes = torch.linalg.vector_norm((b - a)[first], dim=1) / norms[0][first]
    return distances, changes


class _InfluenceAccumulator(Accumulator):
    """Sums over rows, in O(1) memory."""

    def __init__(self) -> None:
        self._counts = [0, 0]
        self._sums = [0.0, 0.0]

    @torch.no_grad()
    def add(self, x: Samples, y: Samples) -> None:
        for index, values in enumerate(_changes(x, y)):
            self._counts[index] += len(values)
            self._sums[index] += values.sum().item()

    def merged(self, other: _InfluenceAccumulator) -> _InfluenceAccumulator:
        """Return the accumulator of the batches of both."""
        merged = _InfluenceAccumulator()
        merged._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        merged._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        return merged

    def statistics(self) -> dict[str, float]:
        if not self._counts[0]:
            raise Undefined("all rows have an input or an output of zeros")
        distance, change = (s / n for s, n in zip(self._sums, self._counts, strict=True))
        return {"value": distance, "relative_change": change}


class Influence(PooledMeasure):
    r"""Influence: mean over tokens of the cosine distance between a layer's input and output.

    It is the block influence by which ShortGPT ranks blocks for removal: 0 for a block that changes
    no token's direction. `relative_change` is the mean of ‖y - x‖ / ‖x‖. Both refer to the residual
    stream, not to its layer norm, and neither measures nonlinearity.

    Definition
    ----------
    .. math::

        1 - \operatorname{mean}_i \frac{\langle x_i, y_i \rangle}{\|x_i\| \, \|y_i\|}

    over rows i whose input and output are not zero.

    Units
    -----
    None.

    Undefined
    ---------
    The input or the output of every row is zero.

    Cost
    ----
    One forward pass for all places, O(rows · d) per place.

    Limits
    ------
    A rotation is linear but has a nonzero influence. An offset common to all rows masks changes.
    """

    name: ClassVar[str] = "influence"
    # 2: of several outputs of a block, the stream counts, not the first.
    version: ClassVar[str] = "2"
    bounds: ClassVar[tuple[float, float]] = (0.0, 2.0)
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        "X. Men, M. Xu, Q. Zhang, Q. Yuan, B. Wang, H. Lin, Y. Lu, X. Han and W. Chen, ShortGPT: "
        "Layers in Large Language Models are More Redundant Than You Expect, Findings of ACL 2025",
        "equation (1), block influence",
        bibtex("men2025shortgpt"),
    )

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        return _InfluenceAccumulator()
