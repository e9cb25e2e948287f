"""Sparsity: the change in the fraction of entries near zero at an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.measure import MoreMeans, PooledMeasure
from nlbench.probes.sites.site import SiteBatch

from .papers import affinity_paper
from .statistics.mean_change import ChangeAccumulator

NEAR_ZERO = 1e-3

# Entries processed at a time, to fit into a CPU's cache or a GPU's memory.
CPU_CHUNK_ENTRIES = 2**19
GPU_CHUNK_ENTRIES = 2**27

NUMPY_TYPES = (torch.float32, torch.float64)

# Minimum number of entries per sample for which NumPy counts row by row.
MIN_ROW_ENTRIES = 512


@torch.no_grad()
def fraction_near_zero(values: Tensor) -> Tensor:
    """Compute the fraction of each sample's entries with a magnitude of at most 1e-3.

    Parameters
    ----------
    values : tensor of shape (n, ...)
        An activation's input or output, unreduced, of any real floating type.

    Returns
    -------
    tensor of shape (n,), float64
        In [0, 1]; NaN for a sample with an entry that is not finite.

    Raises
    ------
    nlbench.RequestError
        If the tensor is not real or has no batch axis.
    nlbench.Undefined
        If a sample has no entries.

    References
    ----------
    Q. Bouniot et al., "From Alexnet to Transformers: Measuring the Non-linearity of Deep
    Neural Networks with Affine Optimal Transport", CVPR 2025, appendix E.

    Examples
    --------
    >>> fraction_near_zero(torch.tensor([[0.0, 5e-4, -1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    if values.dim() == 0 or values.is_complex():
        received = f"{values.dtype} of shape {tuple(values.shape)}"
        raise RequestError(f"got {received}, expected real numbers of shape (n, ...)")
    entries = values[0].numel() if len(values) else 0
    if len(values) and entries == 0:
        raise Undefined("a sample has no entries")
    on_cpu = values.device.type == "cpu"
    compute = _fraction_by_numpy if on_cpu and values.dtype in NUMPY_TYPES else _fraction
    limit = CPU_CHUNK_ENTRIES if on_cpu else GPU_CHUNK_ENTRIES
    chunks = torch.split(values, max(1, limit // max(1, entries)))
    return torch.cat([compute(chunk) for chunk in chunks])


def _fraction_by_numpy(values: Tensor) -> Tensor:
    """Compute the fractions on one core.

    PyTorch's threads would synchronise at every operation on every chunk, which takes milliseconds
    on a busy machine, and other threads would compete with PyTorch's, which spin for a while after
    the network's last operation.
    """
    magnitudes = np.abs(values.detach().flatten(1).numpy())
    near = magnitudes <= magnitudes.dtype.type(NEAR_ZERO)
    if near.shape[1] < MIN_ROW_ENTRIES:
        counts = near.sum(1)
    else:
        # Along an axis NumPy converts booleans to integers; for single rows it doesn't.
        counts = np.array([np.count_nonzero(row) for row in near])
    fractions = counts / near.shape[1]
    if len(values):
        fractions[~np.isfinite(magnitudes.max(1))] = np.nan
    return torch.from_numpy(np.asarray(fractions, dtype=np.float64))


def _fraction(values: Tensor) -> Tensor:
    magnitudes = values.flatten(1).abs()
    # Converted to floats, since summing booleans is far slower.
    near = torch.empty_like(magnitudes, dtype=torch.float32)
    torch.le(magnitudes, NEAR_ZERO, out=near)
    counts = near.sum(1)
    # Apple's GPU has no double precision.
    counts = counts.cpu() if counts.device.type == "mps" else counts
    fractions = counts.double() / near.shape[1]
    if not len(values):
        return fractions
    # Indexing by a mask would synchronise with the GPU.
    is_finite = torch.isfinite(magnitudes.amax(1)).to(fractions.device)
    return torch.where(is_finite, fractions, torch.nan)


class Sparsity(PooledMeasure):
    r"""Change in the fraction of entries within 1e-3 of zero by an activation.

    Computed from unreduced activations, and averaged over all samples of the run. The statistics
    ``before`` and ``after`` are the two fractions.

    Definition
    ----------
    .. math::

        \frac{\#\{|y_i| \le 10^{-3}\} - \#\{|x_i| \le 10^{-3}\}}{\#\{x_i\}}

    over all entries of the unreduced tensors.

    Units
    -----
    None; the threshold of 1e-3 is in units of the activation.

    Undefined
    ---------
    Samples without entries.

    Cost
    ----
    One forward pass for all sites, and one pass over each unreduced tensor.

    Limits
    ------
    Only activations with a flat part at 0 change it; for a smooth activation it is nearly 0,
    however nonlinear. It depends on the units of the activation.
    """

    name: ClassVar[str] = "sparsity"
    bounds: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    more_means: ClassVar[MoreMeans] = "neither"
    scale: ClassVar[str] = "depends on the units of activations"
    version: ClassVar[str] = "2"
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")
    unreduced: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "fraction_near_zero": fraction_near_zero
    }

    def samples(self, observation: SiteBatch) -> tuple[Tensor, Tensor]:
        """Return the fractions for the unreduced tensors, one per sample."""
        before, after = observation.unreduced["fraction_near_zero"]
        return before, after

    def accumulator(self) -> ChangeAccumulator:
        """Create the accumulator for one site."""
        return ChangeAccumulator()
