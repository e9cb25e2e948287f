"""Images of a segment: the curves that a network's activations follow along it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from nlbench.probes.sites.observation import observe_sites
from nlbench.probes.sites.site import SiteBatch

from .segments import Segment, points_at

POINTS_PER_BATCH = 128


class SegmentImage:
    """The images of one segment at all sites, measured in float64 when a measure asks for them.

    Parameters
    ----------
    network : callable
        Returns the network in float64.
    ends : (start, end)
    t : tensor of shape (n,)
        Increasing, in [0, 1].
    memory : int, optional
        Bytes that a forward pass may take.
    """

    def __init__(
        self, network: Callable[[], nn.Module], ends: Segment, t: Tensor, memory: int | None
    ) -> None:
        self._network, self._ends, self._t, self._memory = network, ends, t, memory

    @cached_property
    def lengths(self) -> Mapping[str, float]:
        """Length of each site's outputs, joined by straight lines between points, by name.

        Exact if `t` contains all breakpoints of a piecewise-affine network, and a lower bound
        otherwise.

        Raises
        ------
        nlbench.Undefined
            If sites can't be observed; see `observe_sites`.
        """
        lengths: dict[str, float] = {}
        last: dict[str, Tensor] = {}

        def add(batch: SiteBatch) -> None:
            y = batch.y if batch.place not in last else torch.cat([last[batch.place], batch.y])
            length = torch.linalg.vector_norm(y.diff(dim=0), dim=1).sum().item()
            lengths[batch.place] = lengths.get(batch.place, 0.0) + length
            last[batch.place] = y[-1:].clone()

        start, end = (x.detach().double() for x in self._ends)
        batches = (points_at(start, end, t) for t in torch.split(self._t, POINTS_PER_BATCH))
        observe_sites(self._network(), batches, add, reduction="flatten", memory=self._memory)
        return lengths
