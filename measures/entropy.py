"""Entropy: the change in the histogram entropy of a sample's features at an activation."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.measure import MoreMeans, PooledMeasure
from nlbench.probes.sites.site import SiteBatch

from .papers import affinity_paper
from .statistics.mean_change import ChangeAccumulator
from .statistics.prepared import Samples, prepare_batch, prepare_samples
from .statistics.samples import EPSILON, varying

# Features counted at once, each with an index of eight bytes.
CHUNK_FEATURES = 2**22

# Maximum error of a feature in float64, relative to the width of a bin.
MAX_BIN_NOISE = 1e-2


@torch.no_grad()
def histogram_entropy(values: Samples) -> Tensor:
    """Compute the entropy, in nats, of the histogram of each sample's features.

    H = -Σ_b (c_b / d) log(c_b / d), where c_b counts the features in bin b of d equal bins between
    the sample's smallest and largest feature. The last bin includes the largest feature.

    Parameters
    ----------
    values : tensor of shape (n, d)
        Samples, any real type. Computed in float64.

    Returns
    -------
    tensor of shape (n,), float64
        In [0, log d]; 0 for a sample with equal features.

    Raises
    ------
    nlbench.Undefined
        If there are no features, or those of a sample differ only by their dtype's rounding error.
    nlbench.NotFinite
        If a value is NaN or infinite, or the range overflows.
    nlbench.RequestError
        If the shape is not (n, d).

    References
    ----------
    Q. Bouniot et al., "From Alexnet to Transformers: Measuring the Non-linearity of Deep
    Neural Networks with Affine Optimal Transport", CVPR 2025, appendix E.

    Examples
    --------
    >>> histogram_entropy(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 9.0]])).exp()
    tensor([4.0000, 1.7548], dtype=torch.float64)
    """
    samples = prepare_samples(values, "values")
    d = samples.shape[1]
    chunks = torch.split(samples.values, max(1, CHUNK_FEATURES // d))
    return torch.cat([_entropies(chunk, samples.rounding) for chunk in chunks])


def _entropies(values: Tensor, rounding: float) -> Tensor:
    n, d = values.shape
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    width = high - low
    if not torch.isfinite(width).all():
        raise NotFinite("the range of the values is too large for float64")
    if unknown := int(((width > 0) & ~varying(low, high, rounding)).sum()):
        is_double = rounding <= EPSILON
        name = "float64's rounding" if is_double else "float32's rounding: try --precision float64"
        raise Undefined(f"the features of {unknown} samples are equal within {name}")
    if rounding <= EPSILON:
        peaks = torch.maximum(low.abs(), high.abs())
        errors = rounding * peaks / math.sqrt(12)
        if unresolved := int(((width > 0) & (errors > MAX_BIN_NOISE * width / d)).sum()):
            raise Undefined(f"the bins of {unresolved} samples are too close to float64's rounding")
    bins = ((values - low) / torch.where(width > 0, width, 1.0) * d).long().clamp_(max=d - 1)
    bins += torch.arange(n, device=values.device)[:, None] * d
    counts = torch.bincount(bins.flatten(), minlength=n * d).view(n, d).to(values.dtype)
    entropies = math.log(d) - torch.xlogy(counts, counts).sum(1) / d
    # The entropy of a single bin is exactly zero, without rounding.
    return torch.where(width[:, 0] > 0, entropies, 0.0)


class Entropy(PooledMeasure):
    r"""Change in the histogram entropy of a sample's features by an activation, in nats.

    Computed from the reduced features, and averaged over all samples of the run; ``before`` and
    ``after`` are the mean entropies. A sample with equal features has entropy 0.

    Definition
    ----------
    For a sample's d features, in d equal bins between its smallest and largest feature,

    .. math::

        \operatorname{mean}_i [H(y_i) - H(x_i)], \qquad H = -\sum_b p_b \log p_b ,

    over samples i, where :math:`p_b` is the fraction of the features in bin b.

    Units
    -----
    Nats.

    Undefined
    ---------
    No samples, or features of a sample that differ only by their dtype's rounding error.

    Cost
    ----
    One forward pass for all sites, O(n d) per site.

    Limits
    ------
    An affine map changes it too, since it is a property of single samples. The number of bins grows
    with the number of channels, so sites of different widths are not comparable.
    """

    name: ClassVar[str] = "entropy"
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "2"
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order", "units")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")

    def samples(self, observation: SiteBatch) -> tuple[Tensor, Tensor]:
        """Return the entropies before and after, one per sample."""
        x, y = observation.shared(prepare_batch)
        return histogram_entropy(x), histogram_entropy(y)

    def accumulator(self) -> ChangeAccumulator:
        """Create the accumulator for one site."""
        return ChangeAccumulator()
