"""Data for plotting a path on a run's page, as plain values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nlbench.probes.probe import DrawnBreakpoints, PathDrawing

from .trace import SegmentEstimate, SegmentTrace, TracedSegment

BINS = 160
"""Number of equal parts into which a path is divided to count breakpoints."""
MAX_LOGITS = 3
MAX_ROWS = 24
MAX_SEGMENTS = 64
STEPS_PER_PATH = 480
MAX_STEPS_PER_SEGMENT = 160
SIGNIFICANT_DIGITS = 5


def make_drawing(observations: Sequence[TracedSegment]) -> PathDrawing:
    """Return the data for plotting a path or its first few segments, with rows of numbers as text.

    Keys are ``place``, ``method``, ``lengths`` of the segments, ``logits`` (those furthest from
    their chords), ``curves`` (one row per segment and logit, at evenly spaced points) and, for
    traces, ``sites``, ``breakpoints`` (one row per site, with the number in each of 160 equal parts
    of the plotted path) and ``crossings``, their sum. If there are more than 24 sites, neighbouring
    sites share a row.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import observe_paths
    >>> path = torch.tensor([[[-1.0], [1.0], [-1.0]]])
    >>> drawing = make_drawing(list(observe_paths(torch.nn.ReLU(), path)))
    >>> drawing["place"], drawing["lengths"], drawing["crossings"], drawing["logits"]
    ('path0', [2.0, 2.0], 2, [0])
    """
    points = min(STEPS_PER_PATH // len(observations), MAX_STEPS_PER_SEGMENT) + 1
    curves = np.stack([_curve(observation.trace, points) for observation in observations])
    chords = np.linspace(curves[:, 0], curves[:, -1], curves.shape[1], axis=1)
    lengths = np.array([observation.trace.length for observation in observations])
    deviation = lengths @ np.abs(curves - chords).mean(1)
    # Ties are broken by index, so that the choice is the same on all machines.
    logits = sorted(np.argsort(-deviation, kind="stable")[:MAX_LOGITS].tolist())
    methods = dict.fromkeys(observation.trace.method for observation in observations)
    curve_texts = []
    for curve in curves:
        curve_texts.append([_text(curve[:, j]) for j in logits])
    drawing: PathDrawing = {
        "place": observations[0].place,
        "method": ", ".join(methods),
        "lengths": [float(f"{length:.6g}") for length in lengths],
        "logits": logits,
        "curves": curve_texts,
    }
    breakpoints = _breakpoints([observation.trace for observation in observations], lengths)
    return {**drawing, **breakpoints}


def _breakpoints(
    traces: Sequence[SegmentTrace | SegmentEstimate], lengths: NDArray[np.float64]
) -> DrawnBreakpoints:
    sites: dict[str, NDArray[np.int64]] = {}
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    for trace, start, length in zip(traces, starts, lengths, strict=False):
        if isinstance(trace, SegmentEstimate):
            return {}
        position = (start + trace.t[1:-1].cpu().numpy() * length) / (starts[-1] or 1.0)
        part = np.minimum((position * BINS).astype(np.int64), BINS - 1)
        origins = trace.origins[1:-1].cpu().numpy()
        for index, name in enumerate(trace.sites):
            counts = np.bincount(part[origins == index], minlength=BINS)
            sites[name] = sites.get(name, 0) + counts
    rows = list(_group_sites(list(sites.items())))
    return {
        "crossings": int(sum(counts.sum() for _, counts in rows)),
        "sites": [name for name, _ in rows],
        "breakpoints": [" ".join(map(str, counts.tolist())) for _, counts in rows],
    }


def _curve(trace: SegmentTrace | SegmentEstimate, points: int) -> NDArray[np.float64]:
    """Evaluate the network at evenly spaced points of a segment: (points, k)."""
    t = trace.t.cpu().numpy()
    values = trace.values.cpu().numpy()
    grid = np.linspace(0, 1, points)
    if trace.method == "quadrature":
        # It takes 0.15 s to import.
        from scipy.interpolate import PchipInterpolator

        t, first = np.unique(t, return_index=True)  # Nodes of very short intervals coincide.
        return np.asarray(PchipInterpolator(t, values[first])(grid))
    left = np.clip(np.searchsorted(t, grid, side="right") - 1, 0, len(t) - 2)
    weight = ((grid - t[left]) / (t[left + 1] - t[left]))[:, None]
    return np.asarray((1 - weight) * values[left] + weight * values[left + 1])


def _group_sites(
    sites: Sequence[tuple[str, NDArray[np.int64]]],
) -> Iterable[tuple[str, NDArray[np.int64]]]:
    """Merge neighbouring sites into at most `MAX_ROWS` rows."""
    cuts = np.linspace(0, len(sites), min(len(sites), MAX_ROWS) + 1).round().astype(int)
    for first, last in itertools.pairwise(cuts.tolist()):
        names = [name for name, _ in sites[first:last]]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield name, np.sum([counts for _, counts in sites[first:last]], axis=0)


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.{SIGNIFICANT_DIGITS}g}" for number in numbers)
