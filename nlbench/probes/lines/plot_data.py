"""One path in few numbers, to be drawn: a few logits along it, and where each site bends it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from .estimate import SegmentEstimate

if TYPE_CHECKING:
    from .lines import TracedSegment

__all__ = ["BINS", "Sketch"]


BINS = 160
"""Along the whole path, in which breakpoints are counted."""
LOGITS = 3
ROWS = 24
SEGMENTS = 64
_POINTS, _MOST_POINTS = 480, 160
_DIGITS = 5


class Sketch:
    """Gathers the observations of one path, of which a drawing is made.

    Parameters
    ----------
    segments : int
        Of the path; of more than 64 the first 64 are drawn.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import observe_paths
    >>> sketch = Sketch(2)
    >>> for observation in observe_paths(torch.nn.ReLU(), torch.tensor([[[-1.0], [1.0], [-1.0]]])):
    ...     sketch.add(observation)
    >>> drawing = sketch.content()
    >>> drawing["place"], drawing["lengths"], drawing["crossings"], drawing["logits"]
    ('path0', [2.0, 2.0], 2, [0])
    """

    def __init__(self, segments: int) -> None:
        self._segments = min(segments, SEGMENTS)
        self._points = min(_POINTS // self._segments, _MOST_POINTS) + 1
        self._observations: list[TracedSegment] = []
        self._curves: list[NDArray[np.float64]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all that is drawn of the path has been seen."""
        return len(self._observations) == self._segments

    def add(self, observation: TracedSegment) -> None:
        """Take in the next segment, unless all that is drawn is there."""
        if not self.is_complete:
            self._curves.append(_curve(observation, self._points))
            self._observations.append(observation)

    def content(self) -> dict[str, Any]:
        """Give the drawing: plain values, long rows of numbers as text.

        ``place``; ``method``; ``lengths`` of the segments; ``crossings``, their sum;
        ``logits``, those that stray furthest from their chords; ``curves``, a row a segment
        and logit, at even steps from end to end; and, if there are breakpoints, ``sites``
        and ``breakpoints``, a row a site of how many there are in each of 160 equal parts of
        the drawn path. Neighbouring sites share a row if there are more than 24.
        """
        curves = np.stack(self._curves)
        chords = np.linspace(curves[:, 0], curves[:, -1], curves.shape[1], axis=1)
        lengths = np.array([observation.trace.length for observation in self._observations])
        strayed = lengths @ np.abs(curves - chords).mean(1)
        # Equal ones in order of their number, so that the choice is the same everywhere.
        logits = sorted(np.argsort(-strayed, kind="stable")[:LOGITS].tolist())
        methods = dict.fromkeys(observation.trace.method for observation in self._observations)
        drawing = {
            "place": self._observations[0].place,
            "method": ", ".join(methods),
            "lengths": [float(f"{length:.6g}") for length in lengths],
            "logits": logits,
            "curves": [[_row(curve[:, j]) for j in logits] for curve in curves],
        }
        return drawing | self._breakpoints(lengths)

    def _breakpoints(self, lengths: NDArray[np.float64]) -> dict[str, Any]:
        traces = [observation.trace for observation in self._observations]
        sites: dict[str, NDArray[np.int64]] = {}
        starts = np.concatenate([[0.0], np.cumsum(lengths)])
        for trace, start, length in zip(traces, starts, lengths, strict=False):
            if isinstance(trace, SegmentEstimate):
                return {}
            at = (start + trace.t[1:-1].cpu().numpy() * length) / (starts[-1] or 1.0)
            part = np.minimum((at * BINS).astype(np.int64), BINS - 1)
            origins = trace.origins[1:-1].cpu().numpy()
            for index, name in enumerate(trace.sites):
                counts = np.bincount(part[origins == index], minlength=BINS)
                sites[name] = sites.get(name, 0) + counts
        rows = list(_grouped(list(sites.items())))
        return {
            "crossings": int(sum(counts.sum() for _, counts in rows)),
            "sites": [name for name, _ in rows],
            "breakpoints": [" ".join(map(str, counts.tolist())) for _, counts in rows],
        }


def _curve(observation: TracedSegment, points: int) -> NDArray[np.float64]:
    """Values (points, k) of the network at even steps along a segment."""
    t, values = observation.trace.t.cpu().numpy(), observation.trace.values.cpu().numpy()
    even = np.linspace(0, 1, points)
    if isinstance(observation.trace, SegmentEstimate):
        t, first = np.unique(t, return_index=True)  # of the shortest intervals, nodes coincide
        return np.asarray(PchipInterpolator(t, values[first])(even))
    left = np.clip(np.searchsorted(t, even, side="right") - 1, 0, len(t) - 2)
    share = ((even - t[left]) / (t[left + 1] - t[left]))[:, None]
    return np.asarray((1 - share) * values[left] + share * values[left + 1])


def _grouped(
    sites: Sequence[tuple[str, NDArray[np.int64]]],
) -> Iterable[tuple[str, NDArray[np.int64]]]:
    """Put neighbouring sites together until they fit."""
    cuts = np.linspace(0, len(sites), min(len(sites), ROWS) + 1).round().astype(int)
    for first, last in itertools.pairwise(cuts.tolist()):
        names = [name for name, _ in sites[first:last]]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield name, np.sum([counts for _, counts in sites[first:last]], axis=0)


def _row(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.{_DIGITS}g}" for number in numbers)
