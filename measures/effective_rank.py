"""Effective rank: the exponential of the entropy of an activation's singular values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import Accumulator, MoreMeans

from .papers import bibtex
from .statistics.moments import PairsAccumulator, PairsMeasure
from .statistics.prepared import Samples, prepare_samples


def effective_rank(y: Samples) -> Tensor:
    """Compute the effective rank exp(-Σ p_i log p_i) of samples.

    Here p_i = σ_i / Σ σ, with the singular values σ_i of the samples minus their mean.

    Parameters
    ----------
    y : tensor of shape (n, d)
        Samples, any real type. Computed in float64.

    Returns
    -------
    tensor, scalar, float64
        Effective number of dimensions, between 1 and the rank, which is at most min(n - 1, d).

    Raises
    ------
    nlbench.Undefined
        If there are fewer than two samples, or all are equal.
    nlbench.NotFinite
        If a value is NaN or infinite.

    References
    ----------
    O. Roy and M. Vetterli, "The Effective Rank: A Measure of Effective Dimensionality",
    EUSIPCO 2007, definition 1.

    Examples
    --------
    >>> corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    >>> round(effective_rank(corners).item(), 9)
    2.0
    """
    y = prepare_samples(y, "y")
    _check_count(len(y))
    y.check_varies("output")
    return _compute_rank(torch.linalg.svdvals(y.scaled.detach()))


def _check_count(n: int) -> None:
    if n < 2:
        raise Undefined(f"n = {n}: at least 2 samples are needed")


def _compute_rank(values: Tensor) -> Tensor:
    return torch.special.entr(values / values.sum()).sum().exp()


class _RankAccumulator(PairsAccumulator):
    def statistics(self) -> Mapping[str, float]:
        _check_count(self.pairs.n)
        moments = self.pairs.moments
        if moments is None:
            return {"value": effective_rank(self.pairs.rows()[1]).item()}
        moments.check_varies("output")
        squares = torch.linalg.eigvalsh(moments.unify_units().yy)
        return {"value": _compute_rank(squares.clamp(min=0).sqrt()).item()}


class EffectiveRank(PairsMeasure):
    r"""Effective rank of an activation's output: its number of dimensions, weighted by their size.

    Computed from the singular values of all samples of the run, minus their mean. It measures
    dimension, not nonlinearity, and has no direction.

    Definition
    ----------
    .. math::

        \exp\Bigl(-\sum_i p_i \log p_i\Bigr), \qquad p_i = \sigma_i / \textstyle\sum_j \sigma_j ,

    where :math:`\sigma_i` are the singular values of the output minus its mean.

    Units
    -----
    Dimensions, from 1 to min(n - 1, d).

    Undefined
    ---------
    A constant output, or a single sample.

    Cost
    ----
    One forward pass for all sites; per site O(n d min(n, d)), and all samples in memory.

    Limits
    ------
    It measures dimension, not nonlinearity. It is at most n - 1, so too small for few samples.
    """

    name: ClassVar[str] = "effective-rank"
    bounds: ClassVar[tuple[float, float]] = (1.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units", "offsets", "rotations")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = Source(
        'O. Roy, M. Vetterli, "The Effective Rank: A Measure of Effective Dimensionality", '
        "EUSIPCO 2007",
        "definition 1, of the centred samples",
        bibtex("roy2007effective"),
    )

    def accumulator(self) -> Accumulator:
        """Create the accumulator for one site."""
        return _RankAccumulator()
