"""Length distortion: how much longer the image of a path is than the path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from nlbench.citation import Source
from nlbench.measure import MoreMeans, Value
from nlbench.options import Option
from nlbench.probes.lines import SegmentEstimate, SegmentTrace, TracedSegment

from .papers import bibtex
from .path_measure import PathMeasure, PathSums


def image_length(trace: SegmentTrace | SegmentEstimate) -> float:
    """Return the length of the curve that the outputs follow along a segment.

    Returns
    -------
    float
        Exact for a trace. For an estimate, a lower bound from linear interpolation between points.

    References
    ----------
    B. Hanin, R. Jeong and D. Rolnick, "Deep ReLU Networks Preserve Expected Length", ICLR 2022.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> ends = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 3.0])
    >>> image_length(trace_segment(torch.nn.ReLU(), *ends))
    4.5
    """
    return float(torch.linalg.vector_norm(trace.values.diff(dim=0), dim=1).sum())


@dataclass(frozen=True)
class _PathImage(PathSums):
    """Lengths of a path and of its images. `coarse` uses only every other node."""

    segments: int
    length: float
    image: float
    coarse: float
    sites: Mapping[str, float]


class LengthDistortion(PathMeasure):
    r"""Length of a path's image divided by the length of the path.

    ``value`` refers to the network's outputs and ``site:NAME`` to the outputs of each activation,
    with all positions flattened. Both are exact for traces. If breakpoints are estimated or the
    network is smooth, ``value`` is a lower bound from straight lines between nodes, and
    ``numerical_error`` its difference from the value with half as many nodes; lengths at sites are
    extrapolated from grids. An affine network also changes lengths, so the measure has no
    direction.

    Definition
    ----------
    .. math::

        \frac{\int_0^1 \|\tfrac{d}{dt} f(x(t))\| \, dt}{\int_0^1 \|\tfrac{d}{dt} x(t)\| \, dt}

    Units
    -----
    Units of the output over those of the input.

    Undefined
    ---------
    Inputs that can't be interpolated; a path of length 0.

    Cost
    ----
    The cost of the trace or estimate. Sites need another forward pass for each breakpoint of a
    trace, or at least 65 per segment of an estimate, in float32 where that resolves the steps.

    Limits
    ------
    It depends on the scale of the weights. With He initialisation the expected length of a ReLU
    network does not grow with depth (Hanin et al.); with larger weights it grows exponentially.
    """

    name = "length-distortion"
    version: ClassVar[str] = "3"
    more_means: ClassVar[MoreMeans] = "neither"
    scale: ClassVar[str] = "grows with the outputs"
    options: ClassVar[Mapping[str, Option]] = {
        "sites": Option(True, "also measure the outputs of each activation"),
    }
    means = ("image", "length", "numerical_error")
    parts = ("site",)
    source = Source(
        'B. Hanin, R. Jeong, D. Rolnick, "Deep ReLU Networks Preserve Expected Length", ICLR 2022',
        "length distortion; of trajectories first in Raghu et al., ICML 2017",
        bibtex("hanin2022deep"),
    )

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> _PathImage:
        """Measure one segment and its image in the outputs."""
        image = coarse = image_length(trace)
        if isinstance(trace, SegmentEstimate):
            half = torch.arange(len(trace.t)) % 2 == 0
            half[-1] = True
            coarse = image_length(replace(trace, t=trace.t[half], values=trace.values[half]))
        return _PathImage(1, trace.length, image, coarse, {})

    def measure_observation(self, observation: TracedSegment) -> _PathImage:
        """Measure one segment and its images in the outputs and at all sites."""
        image = self.measure_segment(observation.trace)
        if observation.image is None or not self.settings["sites"]:
            return image
        return replace(image, sites=observation.image.lengths)

    def compute_value(self, place: str, path: _PathImage) -> Value:
        """Return the length distortion of a path."""
        if path.length == 0:
            return Value.missing(place, "undefined", "the path has length 0", path.segments)
        statistics = {"value": path.image / path.length, "image": path.image, "length": path.length}
        # Fewer nodes give a longer image only by rounding.
        if path.coarse < path.image:
            statistics["numerical_error"] = (path.image - path.coarse) / path.length
        sites = {name: length / path.length for name, length in path.sites.items()}
        return Value(place, statistics, path.segments, parts={"site": sites})
