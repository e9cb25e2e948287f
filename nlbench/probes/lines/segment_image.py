"""Images of a segment: the curves that a network's activations follow along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from nlbench.probes.sites.observation import observe_sites
from nlbench.probes.sites.site import SiteBatch

from .segments import Segment, points_at

POINTS_PER_BATCH = 128
MAX_ROUNDING = 1e-3
"""Rounding error of a step's image, relative to its mean length, up to which float32 is used.

The error has a random direction, so the relative error of the length is about half its square.
"""


class SegmentImage:
    """The images of one segment at all sites, computed on first access.

    Parameters
    ----------
    network : callable
        Returns the network in a given dtype.
    ends : (start, end)
    t : tensor of shape (n,)
        Increasing, in [0, 1].
    is_estimate : bool
        True to use float32 where it resolves the steps between the points.
    memory : int, optional
        Bytes that a forward pass may take.
    """

    def __init__(
        self,
        network: Callable[[torch.dtype], nn.Module],
        ends: Segment,
        t: Tensor,
        is_estimate: bool,
        memory: int | None,
    ) -> None:
        self._network, self._t, self._memory = network, t, memory
        self._start, self._end = (x.detach().double() for x in ends)
        self._is_estimate = is_estimate

    @cached_property
    def lengths(self) -> Mapping[str, float]:
        """Length of each site's image, keyed by site.

        The outputs at `t` are joined by straight lines: the length is exact if `t` contains all
        breakpoints of a piecewise-affine network, and a lower bound otherwise.

        Raises
        ------
        nlbench.Undefined
            If sites can't be observed; see `observe_sites`.
        """
        if self._is_estimate:
            lengths = self._lengths_in(torch.float32)
            rounding = self._rounding()
            steps = MAX_ROUNDING / (len(self._t) - 1)
            # A site that is not called in the middle has an unknown rounding error.
            if all(rounding.get(x, math.inf) <= steps * length for x, length in lengths.items()):
                return lengths
        return self._lengths_in(torch.float64)

    def _lengths_in(self, dtype: torch.dtype) -> dict[str, float]:
        lengths: dict[str, float] = {}
        last: dict[str, Tensor] = {}

        def add(batch: SiteBatch) -> None:
            y = batch.y if batch.place not in last else torch.cat([last[batch.place], batch.y])
            steps = torch.linalg.vector_norm(y.diff(dim=0), dim=1, dtype=torch.float64)
            lengths[batch.place] = lengths.get(batch.place, 0.0) + steps.sum().item()
            last[batch.place] = y[-1:].clone()

        self._observe(dtype, torch.split(self._t, POINTS_PER_BATCH), add)
        return lengths

    def _rounding(self) -> dict[str, float]:
        """Return each site's difference between float32 and float64 in the segment's middle."""
        outputs: dict[torch.dtype, dict[str, Tensor]] = {}
        for dtype in (torch.float32, torch.float64):
            outputs[dtype] = {}

            def add(batch: SiteBatch, into: dict[str, Tensor] = outputs[dtype]) -> None:
                into[batch.place] = batch.y.double()

            self._observe(dtype, [self._t.new_full((1,), 0.5)], add)
        single, double = outputs.values()
        return {
            name: float(torch.dist(single[name], double[name]))
            for name in single.keys() & double.keys()
        }

    def _observe(
        self, dtype: torch.dtype, parts: Sequence[Tensor], add: Callable[[SiteBatch], None]
    ) -> None:
        batches = (points_at(self._start, self._end, t).to(dtype) for t in parts)
        observe_sites(self._network(dtype), batches, add, reduction="flatten", memory=self._memory)
