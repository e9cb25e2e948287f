"""Entropy: how an activation changes the spread of a sample's features over their range."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite
from nlbench.measure import MoreMeans, PooledMeasure

from ._change import ChangeAccumulator
from ._prepared import Samples, prepare, prepared
from ._sources import affinity_paper

if TYPE_CHECKING:
    from nlbench.probes.sites.site import SiteBatch

__all__ = ["Entropy", "histogram_entropy"]

# Features that are counted in one go, each with an index of eight bytes.
BLOCK = 2**22


@torch.no_grad()
def histogram_entropy(values: Samples) -> Tensor:
    """Entropy, in nats, of the histogram of each sample's features.

    The histogram has as many equal bins as there are features, between the sample's
    smallest and largest one, which belongs to the last bin. All samples are counted at
    once.

    Parameters
    ----------
    values : tensor of shape (n, d)
        Samples, any real type. The work is done in float64.

    Returns
    -------
    tensor of shape (n,), float64
        In [0, log d]; 0 for a sample whose features are all equal.

    Raises
    ------
    nlbench.Undefined
        If there are no features.
    nlbench.NotFinite
        For NaN or infinities, or a range beyond float64.
    nlbench.RequestError
        For another shape.

    Examples
    --------
    >>> histogram_entropy(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 9.0]])).exp()
    tensor([4.0000, 1.7548], dtype=torch.float64)
    """
    features = prepared(values, "values").values
    d = features.shape[1]
    parts = [_entropies(part) for part in torch.split(features, max(1, BLOCK // d))]
    return torch.cat(parts)


def _entropies(values: Tensor) -> Tensor:
    n, d = values.shape
    low = values.amin(1, keepdim=True)
    width = values.amax(1, keepdim=True) - low
    if not torch.isfinite(width).all():
        raise NotFinite("the range of the values is too large for float64")
    bins = ((values - low) / torch.where(width > 0, width, 1.0) * d).long().clamp_(max=d - 1)
    bins += torch.arange(n, device=values.device)[:, None] * d
    counts = torch.bincount(bins.flatten(), minlength=n * d).view(n, d).to(values.dtype)
    entropies = math.log(d) - torch.xlogy(counts, counts).sum(1) / d
    # One full bin has exactly none, but for rounding.
    return torch.where(width[:, 0] > 0, entropies, 0.0)


class Entropy(PooledMeasure):
    """Histogram entropy of a sample's features after a site minus before, in nats.

    Of the reduced features, averaged over all samples of the run; ``before`` and
    ``after`` are the mean entropies themselves. A sample whose features are all equal
    has entropy 0.
    """

    name: ClassVar[str] = "entropy"
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "1"
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")

    def samples(self, observation: SiteBatch) -> tuple[Tensor, Tensor]:
        """Take the entropies, one a sample."""
        x, y = observation.shared(prepare)
        return histogram_entropy(x), histogram_entropy(y)

    def accumulator(self) -> ChangeAccumulator:
        """Make what takes in the batches of one site."""
        return ChangeAccumulator()
