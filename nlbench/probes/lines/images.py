"""Images of a segment: the curves that a network's activations follow along it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from nlbench.introspection.model_copy import double_copy
from nlbench.probes.sites.observation import observe_sites
from nlbench.probes.sites.site import SiteBatch

from .segments import points_at

POINTS_PER_BATCH = 128


class SiteImages:
    """Lengths of the images of segments, in float64.

    Parameters
    ----------
    model : torch.nn.Module
        Copied when the first length is needed.
    memory : int, optional
        Bytes that a forward pass may take.
    """

    def __init__(self, model: nn.Module, memory: int | None = None) -> None:
        self._model, self._memory = model, memory

    @cached_property
    def _copy(self) -> nn.Module:
        return double_copy(self._model)

    def lengths(self, start: Tensor, end: Tensor, t: Tensor) -> dict[str, float]:
        """Return the length of each site's image, as a polygonal chain through the points.

        Exact if `t` contains all breakpoints of a piecewise-affine network, and a lower bound
        otherwise.

        Parameters
        ----------
        start, end : tensor of shape (*input)
        t : tensor of shape (n,)
            Increasing, in [0, 1].

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

        ends = start.detach().double(), end.detach().double()
        batches = (points_at(*ends, part) for part in torch.split(t, POINTS_PER_BATCH))
        observe_sites(self._copy, batches, add, reduction="flatten", memory=self._memory)
        return lengths


class SegmentImage:
    """The images of one segment at all sites, measured on first access."""

    def __init__(self, images: SiteImages, start: Tensor, end: Tensor, t: Tensor) -> None:
        self._images, self._points = images, (start, end, t)

    @cached_property
    def lengths(self) -> Mapping[str, float]:
        """Length of each site's image, by name; see `SiteImages.lengths`."""
        return self._images.lengths(*self._points)
