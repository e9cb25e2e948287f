"""A look at one path: logits along it with their chords, and where each site bends the network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nlbench.errors import RequestError

from .layout import NamedRun
from .panels import legend_label, short
from .svg import STYLE, to_svg
from .tables import labelled, subject_columns
from .text import count, number, one_line

__all__ = ["MOST_PICTURES", "Picture", "draw_path", "path_pictures"]

MOST_PICTURES = 12  # of a page, each some 50 kB

_LINE, _CHORD, _ABOVE, _BELOW, _BARS = "#0072B2", "#444444", "#56B4E9", "#E69F00", "#444444"
_WIDTH = 7.2  # inches
_PANEL, _REST = 1.15, 0.95
_ROW, _FLAT_ROW, _FEW = 0.26, 0.17, 10
_LONGEST_NAME = 30


@dataclass(frozen=True)
class Picture:
    """The drawn path of a subject.

    Parameters
    ----------
    label : str
        The subject.
    svg, caption : str
    """

    label: str
    svg: str
    caption: str


def path_pictures(runs: Sequence[NamedRun], scores: pd.DataFrame) -> list[Picture]:
    """Draw the path that each subject's records hold, for the first `MOST_PICTURES` of them.

    Parameters
    ----------
    runs : sequence of NamedRun
    scores : DataFrame
        Of all runs together, which names the subjects.
    """
    found: list[Picture] = []
    for label, drawing in itertools.islice(_drawings(runs, scores), MOST_PICTURES):
        title = f"{drawing['place']} of {label}"
        svg = to_svg(draw_path(drawing), prefix=f"path-{len(found)}", title=title)
        found.append(Picture(label, _with_short_paths(svg), _caption(drawing)))
    return found


def _drawings(
    runs: Sequence[NamedRun], scores: pd.DataFrame
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Drawing of each subject under the subject's label, in the order of the runs."""
    table = labelled(scores)
    keys = subject_columns(table)
    rows = table[[*keys, "subject"]].drop_duplicates().itertuples(index=False, name=None)
    labels = {tuple(map(str, row[:-1])): str(row[-1]) for row in rows}
    for run in runs:
        for identity, drawing in run.drawings.items():
            name = (run.name, *identity) if "run" in keys else identity
            label = labels.get(tuple(map(str, name)))
            if label is not None:
                yield label, drawing


def _caption(drawing: Mapping[str, Any]) -> str:
    lengths = drawing["lengths"]
    said = f"{drawing['place']}: {count(len(lengths), 'segment')}, {number(sum(lengths))} long"
    if "breakpoints" in drawing:
        how = "" if drawing["method"] == "exact" else f" ({drawing['method']})"
        return f"{said}, {count(drawing['crossings'], 'breakpoint')}{how}."
    return f"{said}; the network is not piecewise affine and has no breakpoints."


def draw_path(drawing: Mapping[str, Any]) -> Figure:
    """Draw one path: a panel a logit, and below them a row of breakpoints a site.

    Parameters
    ----------
    drawing : mapping
        As the probe ``lines`` records it under ``drawing``.

    Raises
    ------
    nlbench.RequestError
        If it isn't one.

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
    row = _ROW if len(bars) <= _FEW else _FLAT_ROW
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
        raise ValueError("its parts don't go together")


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
    names = [short(name, _LONGEST_NAME) for name in sites]
    axes.set_yticks(np.arange(len(bars)) + 0.5, names, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title("breakpoints of each site", loc="left", fontsize=8, pad=3)


def _outline(
    edges: NDArray[np.float64], heights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outline of a histogram, without the corners that lie on a straight line."""
    ends = np.append(np.nonzero(np.diff(heights))[0], len(heights) - 1)
    begins = np.concatenate([[0], ends[:-1] + 1])
    x = np.stack([edges[begins], edges[ends + 1]], 1).ravel()
    y = np.repeat(heights[ends], 2)
    return np.concatenate([[edges[0]], x, [edges[-1]]]), np.concatenate([[0.0], y, [0.0]])


_PATH = re.compile(r' d="([MLz\d\s.e+-]*)"')


def _with_short_paths(svg: str) -> str:
    """Write polygons in steps of a tenth of a point: a quarter of the bytes, the same picture."""
    return _PATH.sub(lambda match: f' d="{_in_steps(match[1])}"', svg)


def _in_steps(path: str) -> str:
    written, here = [], (0, 0)
    for command, numbers in re.findall(r"([MLz])([^MLz]*)", path):
        if command == "z":
            written.append("z")
            continue
        x, y = (round(10 * float(value)) for value in numbers.split())
        right, down = x - here[0], y - here[1]
        if command == "M":
            written.append(f"M{_tenths(x)} {_tenths(y)}")
        elif down == 0:
            written.append(f"h{_tenths(right)}")
        elif right == 0:
            written.append(f"v{_tenths(down)}")
        else:
            written.append(f"l{_tenths(right)}{'' if down < 0 else ' '}{_tenths(down)}")
        here = (x, y)
    return "".join(written)


def _tenths(number: int) -> str:
    text = f"{abs(number) / 10:g}".removeprefix("0") or "0"
    return f"-{text}" if number < 0 else text
