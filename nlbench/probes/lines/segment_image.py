"""Images of a segment: the curves that a network's activations follow along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from nlbench.probes.sites.site import SiteBatch
from nlbench.probes.sites.sites_observation import observe_sites, refuse_undefined

from .segments import Segment, points_at

MIN_BATCH = 8
MAX_BATCH = 256
BATCH_VALUES = 2**19
"""Number of points run at a time, and of their outputs at all sites, which stay in cache."""
FIRST_STEPS = 64
MAX_STEPS = 1024
"""Numbers of steps of the coarsest and finest grids from which lengths are extrapolated."""
TOLERANCE = 1e-2
"""Relative change in an extrapolated length at which refinement stops; the error is smaller."""
MAX_ROUNDING = 1e-3
"""Maximum rounding error of a step's image for which float32 is used, relative to the mean step.

The error has a random direction, so the relative error of the length is about half its square.
"""


class SegmentImage:
    """The images of one segment at all sites, computed on first access.

    `network` returns the network in a dtype: float32 if that is allowed and resolves the steps
    between the points. Without breakpoints, which include both ends, lengths are extrapolated from
    grids.
    """

    def __init__(
        self,
        network: Callable[[torch.dtype], nn.Module],
        ends: Segment,
        breakpoints: Tensor | None,
        may_use_float32: bool,
        memory: int | None,
    ) -> None:
        self._network = network
        self._breakpoints = breakpoints
        self._memory = memory
        self._start, self._end = (x.detach().double() for x in ends)
        self._may_use_float32 = may_use_float32
        self._midpoints: dict[torch.dtype, dict[str, Tensor]] = {}

    @cached_property
    def lengths(self) -> Mapping[str, float]:
        """Length of each site's image, keyed by site.

        The outputs at breakpoints are joined by straight lines; the length is exact if these are
        all the breakpoints of a piecewise-affine network. Without breakpoints, it is extrapolated
        from grids, which are refined until the extrapolated lengths change by at most 1 %, up to
        1,024 steps.
        """
        if self._breakpoints is not None:
            lengths = self._lengths_at(self._breakpoints, (1,))
            return {site: length for site, (length,) in lengths.items()}
        steps = FIRST_STEPS
        while True:
            grid = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=self._start.device)
            lengths = self._lengths_at(grid, (1, 2, 4, 8))
            fine = {site: _extrapolated(by_stride[:3]) for site, by_stride in lengths.items()}
            coarse = {site: _extrapolated(by_stride[1:4]) for site, by_stride in lengths.items()}
            has_converged = all(abs(fine[x] - coarse[x]) <= TOLERANCE * fine[x] for x in fine)
            if has_converged or steps == MAX_STEPS:
                return fine
            steps *= 2

    def _lengths_at(self, t: Tensor, strides: Sequence[int]) -> dict[str, list[float]]:
        """Return each site's lengths of polylines through every n-th point, for each stride n."""
        if self._may_use_float32:
            lengths = self._lengths_in(torch.float32, t, strides)
            max_rounding = MAX_ROUNDING / (len(t) - 1)
            # The rounding error of a site that is not called at the midpoint is unknown.
            if all(
                self._rounding.get(site, math.inf) <= max_rounding * length[0]
                for site, length in lengths.items()
            ):
                return lengths
            self._may_use_float32 = False
        return self._lengths_in(torch.float64, t, strides)

    def _lengths_in(
        self, dtype: torch.dtype, t: Tensor, strides: Sequence[int]
    ) -> dict[str, list[float]]:
        lengths: dict[str, list[float]] = {}
        last: dict[tuple[str, int], Tensor] = {}
        points: dict[str, int] = {}

        def add(batch: SiteBatch) -> None:
            first = points.get(batch.place, 0)
            points[batch.place] = first + len(batch.y)
            by_stride = lengths.setdefault(batch.place, [0.0] * len(strides))
            for i, stride in enumerate(strides):
                y = batch.y[-first % stride :: stride]
                key = (batch.place, stride)
                if key in last:
                    y = torch.cat([last[key], y])
                steps = torch.linalg.vector_norm(y.diff(dim=0), dim=1, dtype=torch.float64)
                by_stride[i] += steps.sum().item()
                last[key] = y[-1:].clone()

        values = sum(output.numel() for output in self._at_midpoint(dtype).values())
        batch = max(MIN_BATCH, min(MAX_BATCH, BATCH_VALUES // max(1, values)))
        self._observe(dtype, torch.split(t, batch), add)
        return lengths

    @cached_property
    def _rounding(self) -> dict[str, float]:
        """Distance between the float32 and float64 outputs at the segment's midpoint, by site."""
        single, double = (self._at_midpoint(dtype) for dtype in (torch.float32, torch.float64))
        return {
            name: float(torch.dist(single[name], double[name]))
            for name in single.keys() & double.keys()
        }

    def _at_midpoint(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return each site's output at the segment's midpoint."""
        if dtype not in self._midpoints:
            outputs: dict[str, Tensor] = {}

            def add(batch: SiteBatch) -> None:
                outputs[batch.place] = batch.y.double()

            self._observe(dtype, [self._start.new_full((1,), 0.5)], add)
            self._midpoints[dtype] = outputs
        return self._midpoints[dtype]

    def _observe(
        self, dtype: torch.dtype, parts: Sequence[Tensor], add: Callable[[SiteBatch], None]
    ) -> None:
        batches = (points_at(self._start, self._end, t).to(dtype) for t in parts)
        observe_sites(
            self._network(dtype),
            batches,
            add,
            reduction="flatten",
            memory=self._memory,
            on_undefined=refuse_undefined,
        )


def _extrapolated(lengths: Sequence[float]) -> float:
    """Extrapolate a curve's length from polylines with step sizes h, 2 h and 4 h.

    A polyline is too short by a term proportional to h, due to steps with a kink, and one in h².
    """
    fine, half, quarter = lengths
    return max(fine, (8 * fine - 6 * half + quarter) / 3)
