"""Figure of one path: logits along it with their chords, and the breakpoints of each site."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nlbench.errors import RequestError, one_line

from .panels import legend_label, short
from .svg import STYLE

__all__ = ["draw_path"]

_LINE, _CHORD, _ABOVE, _BELOW, _BARS = "#0072B2", "#444444", "#56B4E9", "#E69F00", "#444444"
_WIDTH = 7.2  # inches
_PANEL, _REST = 1.15, 0.95
_ROW, _FLAT_ROW, _MAX_TALL_ROWS = 0.26, 0.17, 10  # inches, inches, rows
_MAX_NAME_LENGTH = 30


def draw_path(drawing: Mapping[str, Any]) -> Figure:
    """Draw one path: a panel per logit, and below them a row of breakpoints per site.

    Parameters
    ----------
    drawing : mapping
        The fact ``drawing`` that the probe ``lines`` records.

    Raises
    ------
    nlbench.RequestError
        If the record is damaged.

    Examples
    --------
    >>> drawing = {"place": "path0", "method": "exact", "lengths": [2.0], "logits": [0],
    ...     "curves": [["0 1 0"]], "crossings": 1, "sites": ["relu"], "breakpoints": ["0 1 0"]}
    >>> [axes.get_ylabel() for axes in draw_path(drawing).axes]
    ['logit 0', '']
    """
    try:
        lengths = np.array(drawing["lengths"], dtype=np.float64)
        curves = [[_numbers(row) for row in rows] for rows in drawing["curves"]]
        bars = [_numbers(row) for row in drawing.get("breakpoints", ())]
        logits, sites = list(drawing["logits"]), list(drawing.get("sites", ()))
        _check_parts(lengths, logits, curves, sites, bars)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"the record's drawing of a path is damaged: {error}") from error
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    row = _ROW if len(bars) <= _MAX_TALL_ROWS else _FLAT_ROW
    heights = [_PANEL] * len(logits) + [row * len(bars)] * bool(bars)
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(_WIDTH, _REST + sum(heights)), layout="constrained")
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        ).ravel()
        for column, logit in enumerate(logits):
            _draw_logit(panels[column], starts, [rows[column] for rows in curves])
            panels[column].set_ylabel(f"logit {logit}")
        if bars:
            _draw_breakpoints(panels[-1], starts[-1], sites, bars)
        panels[-1].set_xlim(0, starts[-1] or 1.0)
        panels[-1].set_xlabel(f"distance along {one_line(drawing['place'])}, in units of the input")
        figure.align_ylabels(panels[: len(logits)])
        handles, labels = panels[0].get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True))
        figure.legend(
            list(entries.values()),
            [legend_label(label) for label in entries],
            loc="outside upper left",
            ncols=4,
        )
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def _check_parts(
    lengths: NDArray[np.float64],
    logits: Sequence[object],
    curves: Sequence[Sequence[NDArray[np.float64]]],
    sites: Sequence[object],
    bars: Sequence[NDArray[np.float64]],
) -> None:
    rows = [row for segment in curves for row in segment]
    fits = (
        len(curves) == len(lengths) > 0
        and len(sites) == len(bars)
        and all(len(segment) == len(logits) > 0 for segment in curves)
        and all(len(row) for row in (*rows, *bars))
    )
    if not fits:
        raise ValueError("the lengths of its parts differ")


def _numbers(row: str) -> NDArray[np.float64]:
    return np.array(row.split(), dtype=np.float64)


def _draw_logit(
    axes: Axes, starts: NDArray[np.float64], curves: Sequence[NDArray[np.float64]]
) -> None:
    ends = list(itertools.pairwise(starts))
    x = np.concatenate([np.linspace(*pair, len(f)) for pair, f in zip(ends, curves, strict=True)])
    f = np.concatenate(curves)
    chord = np.concatenate([np.linspace(f[0], f[-1], len(f)) for f in curves])
    for where, color, label in ((f >= chord, _ABOVE, "above"), (f <= chord, _BELOW, "below")):
        axes.fill_between(x, f, chord, where, color=color, alpha=0.45, linewidth=0, label=label)
    at_anchors = [curves[0][0], *(curve[-1] for curve in curves)]
    axes.plot(starts, at_anchors, color=_CHORD, linewidth=0.9, dashes=(4, 2), label="chords")
    axes.plot(x, f, color=_LINE, linewidth=1.2, label="network")
    gap = np.full(len(starts) - 2, np.nan)
    axes.plot(
        np.stack([starts[1:-1], starts[1:-1], gap], 1).ravel(),
        np.stack([np.zeros_like(gap), np.ones_like(gap), gap], 1).ravel(),
        transform=axes.get_xaxis_transform(),
        color="#dddddd",
        linewidth=0.7,
        zorder=0,
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.tick_params(bottom=False)


def _draw_breakpoints(
    axes: Axes, length: float, sites: Sequence[str], bars: Sequence[NDArray[np.float64]]
) -> None:
    for row, counts in enumerate(bars):
        edges = np.linspace(0, length or 1.0, len(counts) + 1)
        heights = 0.86 * counts / max(1.0, counts.max())
        x, y = _outline(edges, heights)
        axes.fill(x, row + 0.93 - y, color=_BARS, linewidth=0)
        axes.annotate(
            f"{int(counts.sum()):,}",
            (1, row + 0.5),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_ylim(len(bars), 0)
    names = [short(name, _MAX_NAME_LENGTH) for name in sites]
    axes.set_yticks(np.arange(len(bars)) + 0.5, names, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title("breakpoints of each site", loc="left", fontsize=8, pad=3)


def _outline(
    edges: NDArray[np.float64], heights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outline of a histogram without redundant corners."""
    ends = np.append(np.nonzero(np.diff(heights))[0], len(heights) - 1)
    begins = np.concatenate([[0], ends[:-1] + 1])
    x = np.stack([edges[begins], edges[ends + 1]], 1).ravel()
    y = np.repeat(heights[ends], 2)
    return np.concatenate([[edges[0]], x, [edges[-1]]]), np.concatenate([[0.0], y, [0.0]])
