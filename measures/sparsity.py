"""Sparsity: how many more entries are near zero after an activation than before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError, Undefined
from nlbench.measure import MoreMeans, PooledMeasure

from ._change import ChangeAccumulator
from ._sources import affinity_paper

if TYPE_CHECKING:
    from nlbench.probes.sites.site import SiteBatch

__all__ = ["NEAR_ZERO", "Sparsity", "share_near_zero"]

NEAR_ZERO = 1e-3

# Entries that are looked at in one go: what fits into a processor's cache, and what a
# GPU's memory has room for.
CACHED, RESIDENT = 2**19, 2**27

# Types that NumPy has the same comparison for.
NUMPYS = (torch.float32, torch.float64)

# Entries of a sample from which on it is counted by itself.
FEW = 512


@torch.no_grad()
def share_near_zero(values: Tensor) -> Tensor:
    """Share of each sample's entries with a magnitude of at most 1e-3.

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
        For anything but real numbers with a batch axis.
    nlbench.Undefined
        If a sample has no entries.

    Examples
    --------
    >>> share_near_zero(torch.tensor([[0.0, 5e-4, -1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    if values.dim() == 0 or values.is_complex():
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise RequestError(f"got {got}, expected real numbers of shape (n, ...)")
    entries = values[0].numel() if len(values) else 0
    if len(values) and entries == 0:
        raise Undefined("a sample has no entries")
    on_cpu = values.device.type == "cpu"
    share = _share_on_cpu if on_cpu and values.dtype in NUMPYS else _share
    block = CACHED if on_cpu else RESIDENT
    parts = torch.split(values, max(1, block // max(1, entries)))
    return torch.cat([share(part) for part in parts])


def _share_on_cpu(values: Tensor) -> Tensor:
    """NumPy's steps, on one core.

    PyTorch's threads would wait for the last of them at every step of every block, for
    milliseconds on a busy machine; and a pool of one's own waits for PyTorch's, which spin on
    the cores for a while after the network's last step.
    """
    magnitudes = np.abs(values.detach().flatten(1).numpy())
    near = magnitudes <= magnitudes.dtype.type(NEAR_ZERO)
    if near.shape[1] < FEW:
        counts = near.sum(1)
    else:
        # Along an axis they are counted as numbers, one row as bits.
        counts = np.array([np.count_nonzero(row) for row in near])
    share = counts / near.shape[1]
    if len(values):
        share[~np.isfinite(magnitudes.max(1))] = np.nan
    return torch.from_numpy(np.asarray(share, dtype=np.float64))


def _share(values: Tensor) -> Tensor:
    magnitudes = values.flatten(1).abs()
    # Written as numbers: counting truth values takes far longer.
    near = torch.empty_like(magnitudes, dtype=torch.float32)
    torch.le(magnitudes, NEAR_ZERO, out=near)
    counts = near.sum(1)
    # Apple's GPU has no double precision.
    counts = counts.cpu() if counts.device.type == "mps" else counts
    share = counts.double() / near.shape[1]
    if not len(values):
        return share
    # Not by a mask, for which a GPU is waited for.
    is_finite = torch.isfinite(magnitudes.amax(1)).to(share.device)
    return torch.where(is_finite, share, torch.nan)


class Sparsity(PooledMeasure):
    """Share of entries with |x| <= 1e-3 after a site minus the share before.

    On whole activations, not on the reduced ones, averaged over all samples of the run.
    The shares themselves are the statistics ``before`` and ``after``.
    """

    name: ClassVar[str] = "sparsity"
    bounds: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    more_means: ClassVar[MoreMeans] = "neither"
    version: ClassVar[str] = "1"
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order")
    independent_sites: ClassVar[bool] = True
    source: ClassVar[Source] = affinity_paper("appendix E")
    unreduced: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "share_near_zero": share_near_zero
    }

    def samples(self, observation: SiteBatch) -> tuple[Tensor, Tensor]:
        """Take the shares of the unreduced tensors, one a sample."""
        before, after = observation.unreduced["share_near_zero"]
        return before, after

    def accumulator(self) -> ChangeAccumulator:
        """Make what takes in the batches of one site."""
        return ChangeAccumulator()
