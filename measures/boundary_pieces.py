"""Boundary pieces: the number of pieces of the decision boundary that a path crosses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.measure import Value
from nlbench.probes.lines import SegmentEstimate, SegmentTrace

from .papers import bibtex
from .path_measure import PathMeasure, PathSums


def boundary_crossings(trace: SegmentTrace | SegmentEstimate) -> Tensor:
    """Find where the predicted class changes along a segment.

    The class is the one with the largest logit, or the sign of a single logit. On an affine piece,
    the maximum of the logits is the upper envelope of k straight lines; each of its corners is a
    crossing of one piece of the decision boundary.

    Parameters
    ----------
    trace : SegmentTrace or SegmentEstimate
        Exact for a trace. For an estimate, values are interpolated linearly between points.

    Returns
    -------
    tensor of shape (c,), float64
        Crossings t in [0, 1], in increasing order. Equal logits don't change the class.

    References
    ----------
    P. Piwek, A. Klukowski and T. Hu, "Exact Count of Boundary Pieces of ReLU Classifiers:
    Towards the Proper Complexity Measure for Classification", UAI 2023.

    Examples
    --------
    >>> from nlbench.probes.lines import trace_segment
    >>> trace = trace_segment(torch.nn.Identity(), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1]))
    >>> boundary_crossings(trace)
    tensor([0.7500], dtype=torch.float64)
    """
    t = trace.t.cpu().double()
    values = trace.values.cpu().double()
    if values.shape[1] == 1:
        values = torch.cat([values, torch.zeros_like(values)], 1)
    largest, classes = values.max(1)
    top = int(classes[0])
    crossings = []
    # While `top` is among the largest logits, the class does not change.
    for vertex in range(1, len(t)):
        if values[vertex, top] == largest[vertex]:
            continue
        left, right = values[vertex - 1], values[vertex]
        fraction = 0.0
        while right[top] < right.max():
            gap = left[top] - left
            gain = (right - left) - (right[top] - left[top])
            meets = torch.where(gain > 0, gap / gain, torch.inf).clamp(min=fraction)
            fraction = float(meets.min())
            # Where several lines meet, the steepest is the largest beyond that point.
            top = int(torch.where(meets == fraction, gain, -torch.inf).argmax())
            crossings.append(float(torch.lerp(t[vertex - 1], t[vertex], min(fraction, 1.0))))
    return torch.tensor(crossings, dtype=torch.float64)


@dataclass(frozen=True)
class _PathBoundaries(PathSums):
    """Sums over the segments of a path."""

    crossings: tuple[int, ...]
    length: float


class BoundaryPieces(PathMeasure):
    r"""Number of pieces of the decision boundary that a path crosses.

    It counts the changes of the class with the largest logit. The statistics of a path are
    ``value``; ``per_length``, per unit of length, omitted for length 0; ``length``;
    ``segment0``, ``segment1``, …, the crossings on each segment. With k classes a segment may cross
    up to k - 1 pieces even if the network is affine, so the measure has no direction.

    Definition
    ----------
    .. math::

        \#\{t : \operatorname{argmax}_j f_j(x(t)) \text{ changes}\} ,

    or, for a single logit, the number of its sign changes.

    Units
    -----
    Crossings per path.

    Undefined
    ---------
    Inputs that can't be interpolated; a stochastic network.

    Cost
    ----
    The cost of the trace or estimate, plus O(logits) per crossing.

    Limits
    ------
    With k classes a segment may cross up to k - 1 pieces even if the network is affine. Paths that
    stay within one class cross none, however nonlinear the network.

    Published code
    --------------
    It counts the pieces of the whole boundary; nlbench counts those along paths.
    """

    name = "boundary-pieces"
    more_means = "neither"
    means = ("per_length",)
    source = Source(
        'P. Piwek, A. Klukowski, T. Hu, "Exact Count of Boundary Pieces of ReLU Classifiers: '
        'Towards the Proper Complexity Measure for Classification", UAI 2023',
        "boundary pieces, along paths",
        bibtex("piwek2023exact"),
    )

    def measure_segment(self, trace: SegmentTrace | SegmentEstimate) -> _PathBoundaries:
        """Count the crossings of one segment."""
        return _PathBoundaries((len(boundary_crossings(trace)),), trace.length)

    def compute_value(self, place: str, path: _PathBoundaries) -> Value:
        """Return the number of crossings of a path."""
        total = float(sum(path.crossings))
        statistics = {"value": total}
        if path.length > 0:
            statistics["per_length"] = total / path.length
        statistics["length"] = path.length
        return Value(place, statistics, len(path.crossings), parts={"segment": path.crossings})
