"""Panels for matplotlib figures: each form of drawing is drawn by one function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from nlbench.errors import RequestError, one_line

from .drawing import PAGE_WIDTH, NotebookFigure, laid_out, to_svg, use_page_colours
from .fingerprint import Scale
from .population import colour_scale
from .tables import MeasureInfo, Score
from .text import count, direction, range_text

if TYPE_CHECKING:
    from .compare import Difference
    from .leaderboard import Standing

# Okabe and Ito, "Color Universal Design", 2008, with grey instead of yellow, which is invisible on
# white. Markers and dashes also distinguish the series without colour.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#777777")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1, 1.5)))
_QUIET = "#777777"
_RULE = "#dddddd"
# Colour levels for the page's strips in the light theme, from least to most nonlinear.
RAMP = ("#f4f1f8", "#e2e6f2", "#c9d8ea", "#abc8e1", "#87b2d6", "#6099c8", "#3878b0", "#23639e",
        "#10457e", "#05234f")  # fmt: skip
MAX_SERIES = len(_COLORS)  # more series in one figure couldn't be distinguished
MAX_PLACES = 80
MAX_NAMES = 24
"""Maximum number of places that are named at the axis."""
_MAX_NAME_LENGTH = 36
_MAX_CAPS = 40  # with more error bars, the caps blur and make up half of the file
_STRIP_HEIGHT = 0.74
LabelledCells = Mapping[int, tuple[str, Score]]
"""Label and cell of each subject, keyed by the subject's index, which determines its colour."""


def draw_signature(axes: Axes, cells: LabelledCells, info: MeasureInfo) -> str:
    """Plot one marker per site and subject with its interval. Return the measure's axis."""
    hollow: Counter[int] = Counter()
    for index, (label, cell) in cells.items():
        depth = np.arange(1, len(cell.places) + 1)
        values = np.array([place.value for place in cell.places])
        style: dict[str, Any] = {
            "color": _COLORS[index],
            "marker": _MARKS[index],
            "markersize": 4.0 if len(depth) <= _MAX_CAPS else 2.5,
            "markeredgewidth": 0.8,
        }
        axes.errorbar(
            depth,
            values,
            _reach(values, [place.interval for place in cell.places]),
            label=legend_label(label),
            linewidth=0.9,
            capsize=1.6 if len(depth) <= _MAX_CAPS else 0,
            **style,
        )
        missing = depth[np.isnan(values)]
        heights = [0.04 * hollow[site] for site in missing]  # stacked, as fractions of the panel
        hollow.update(missing)
        if len(missing):
            (marks,) = axes.plot(
                missing,
                heights,
                transform=axes.get_xaxis_transform(),
                linestyle="",
                clip_on=False,
                zorder=5,
                **style,
                markerfacecolor="white",
            )
            marks.set_in_layout(False)
    drawn = [cell for _, cell in cells.values()]
    _use_bounds(axes, drawn, info.bounds)
    _name_places(axes, drawn, f"{info.noun}, in call order")
    return "y"


def _reach(values: ArrayLike, intervals: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Return the lengths of error bars below and above values, 0 where the error is unknown."""
    centre = np.asarray(values, dtype=np.float64)
    ends = np.array(intervals, dtype=np.float64).reshape(-1, 2).T
    return np.nan_to_num(np.abs(ends - centre)).clip(0)


def draw_distribution(axes: Axes, cells: LabelledCells, info: MeasureInfo) -> str:
    """Plot one step function per subject. Return the axis that shows the measure."""
    all_values: list[float] = []
    for index, (label, cell) in cells.items():
        values = cell.place_values.tolist()
        if not values:
            continue
        all_values += values
        total = len(cell.places)
        paths = count(total, "path") if len(values) == total else f"{len(values)} of {total} paths"
        axes.ecdf(
            values,
            color=_COLORS[index],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.5,
            label=f"{legend_label(label)} ({paths})",
        )
    _use_log_scale(axes, all_values)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of paths")
    axes.grid(axis="y", color=_RULE, linewidth=0.6)
    return "x"


def _use_log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic horizontal axis if positive values span more than a factor of 50."""
    if min(values) > 0 and max(values) > 50 * min(values):
        axes.set_xscale("log")
        # Use plain numbers because math markup is disabled.
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def draw_bars(axes: Axes, cells: LabelledCells, info: MeasureInfo) -> str:
    """Plot one bar per place and subject. Return the axis that shows the measure."""
    width = 0.8 / len(cells)
    for position, (index, (label, cell)) in enumerate(cells.items()):
        offset = (position - (len(cells) - 1) / 2) * width
        depth = np.arange(1, len(cell.places) + 1) + offset
        values = [place.value for place in cell.places]
        axes.bar(depth, values, width, color=_COLORS[index], label=legend_label(label))
    axes.axhline(0, color="black", linewidth=0.8)
    _name_places(axes, [cell for _, cell in cells.values()], "place")
    return "y"


def draw_curve(axes: Axes, x: ArrayLike, y: ArrayLike) -> None:
    """Plot a curve with a mark at each point, on an axis that begins at zero."""
    axes.plot(x, y, color=_COLORS[0], marker=_MARKS[0], markersize=3.5, linewidth=1.2,
              clip_on=False)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_RULE, linewidth=0.6)


def draw_strips(axes: Axes, strips: Sequence[tuple[str, Score]], scale: Scale) -> None:
    """Draw a strip per network, from input to output, hatched where there is no value.

    The places of a single network are named if they are few.
    """
    for row, (_, cell) in enumerate(strips):
        width = 1 / max(1, len(cell.places))
        # Fraction of a strip's cell that is left empty, if there are few.
        gap = 0.12 * width if len(cell.places) <= MAX_NAMES else 0.0
        boxes: dict[int, list[Path]] = {}
        for site, place in enumerate(cell.places):
            name = scale.level(place.value)
            level = -1 if name == "x" else int(name)
            box = np.asarray(Path.unit_rectangle().vertices) * (width - gap, _STRIP_HEIGHT)
            corner = (site * width + gap / 2, row - _STRIP_HEIGHT / 2)
            boxes.setdefault(level, []).append(Path(box + corner, Path.unit_rectangle().codes))
        for level, paths in sorted(boxes.items()):
            # The palest level is outlined, since it is hardly visible on white.
            style: dict[str, Any] = {"facecolor": RAMP[level], "edgecolor": RAMP[max(level, 2)]}
            if level < 0:
                style = {"facecolor": "white", "edgecolor": "#999999", "hatch": "//////"}
            width_of_line = 0.4 if level < 2 else 0.0
            axes.add_patch(
                PathPatch(Path.make_compound_path(*paths), linewidth=width_of_line, **style)
            )
    axes.set_yticks(range(len(strips)), [short(label, 34) for label, _ in strips])
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    places = strips[0][1].places
    if len(strips) > 1 or len(places) > MAX_NAMES:
        axes.set_xticks([])
        axes.set_xlabel("input → output")
        return
    middles = [(site + 0.5) / len(places) for site in range(len(places))]
    names = [short(place.name, _MAX_NAME_LENGTH) for place in places]
    axes.set_xticks(middles, names, rotation=90)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("activation, input → output")


def draw_standings(axes: Axes, entries: Sequence[Standing]) -> None:
    """Plot the value of a measure for each network with its interval, the first one on top."""
    values = np.array([entry.value for entry in entries])
    known = np.flatnonzero(np.isfinite(values)).tolist()
    ends = [(entries[row].low, entries[row].high) for row in known]
    axes.errorbar(
        values[known],
        known,
        xerr=_reach(values[known], ends),
        linestyle="",
        color=_COLORS[0],
        marker=_MARKS[0],
        markersize=3.5,
        linewidth=1.2,
    )
    for row in sorted({*range(len(entries))} - {*known}):
        axes.text(
            0.5, row, entries[row].status, transform=axes.get_yaxis_transform(), ha="center",
            va="center", color=_QUIET, style="italic",
        )  # fmt: skip
    if len(known):
        _use_log_scale(axes, values[known].tolist())
    else:
        axes.set_xticks([])
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.set_ylim(len(entries) - 0.5, -0.5)
    _style_rows(axes, "y")


def draw_dumbbells(axes: Axes, rows: Sequence[Difference], names: tuple[str, str]) -> None:
    """Plot two values with their intervals at each place, joined by a bar, and their difference.

    A row without a place is the whole network, and stands apart from the others.
    """
    heights = np.arange(len(rows)) + np.array([0.0 if d.place else 0.4 for d in rows])
    ends = [(d.first.value, d.second.value) for d in rows]
    axes.hlines(heights, *zip(*ends, strict=True), color="#cccccc", linewidth=2.5, zorder=1)
    for side, label in enumerate(names):
        estimates = [(d.first, d.second)[side] for d in rows]
        values = [e.value for e in estimates]
        axes.errorbar(
            values,
            heights,
            xerr=_reach(values, [e.interval for e in estimates]),
            linestyle="",
            color=_COLORS[side],
            marker=_MARKS[side],
            markersize=4.0,
            linewidth=1.2,
            label=legend_label(short(label)),
        )
    for height, d in zip(heights, rows, strict=True):
        axes.annotate(
            d.estimate.text,
            (1.0, height),
            (4, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color="black" if d.is_significant else _QUIET,
            weight="normal" if d.place else "bold",
            annotation_clip=False,
        )
    labels = [short(d.place, 28) if d.place else "whole network" for d in rows]
    axes.set_yticks(heights, labels)
    axes.set_ylim(heights[-1] + 0.6, -0.6)
    _style_rows(axes, "x")


def _style_rows(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Draw a grid instead of the axis at the left."""
    axes.grid(axis=grid, color=_RULE, linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def draw_path(panels: Sequence[Axes], drawing: Mapping[str, Any]) -> None:
    """Plot logits along a path with their chords, one panel each, and the breakpoints below.

    The drawing is that of `nlbench.probes.lines.drawing`.
    """
    lengths = drawing["lengths"]
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    for position, (axes, logit) in enumerate(zip(panels, drawing["logits"], strict=False)):
        for start, length, segment in zip(starts, lengths, drawing["curves"], strict=False):
            curve = np.array(segment[position].split(), dtype=np.float64)
            chord = np.linspace(curve[0], curve[-1], len(curve))
            x = start + np.linspace(0, length, len(curve))
            is_first = start == 0
            axes.fill_between(x, curve, chord, curve > chord, color="#8fb2d4", linewidth=0)
            axes.fill_between(x, curve, chord, curve < chord, color="#e8c3a9", linewidth=0)
            chord_label, label = ("chords", "network") if is_first else (None, None)
            axes.plot(x, chord, linestyle=(0, (4, 2)), color=_QUIET, linewidth=0.8,
                      label=chord_label)  # fmt: skip
            axes.plot(x, curve, color=_COLORS[0], linewidth=1.1, label=label)
            axes.axvline(start, color=_RULE, linewidth=0.6, zorder=0)
        axes.set_ylabel(f"output {logit}")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    if counts := drawing.get("breakpoints"):
        table = np.array([row.split() for row in counts], dtype=np.float64)
        table /= np.maximum(1, table.max(1, keepdims=True))
        axes = panels[len(drawing["logits"])]
        edges = np.linspace(0, starts[-1], table.shape[1] + 1)
        for row, heights in enumerate(table):
            axes.stairs(row + 0.4 - 0.8 * heights, edges, baseline=row + 0.4, fill=True,
                        color=_QUIET)  # fmt: skip
        names = [short(name, 24) for name in drawing["sites"]]
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_ylabel("breakpoints")
    panels[-1].set_xlim(0, starts[-1])
    panels[-1].set_xlabel(f"distance along {drawing['place']}, in input units")


def short(name: str, length: int = 80) -> str:
    """Shorten a name for a figure and remove characters that are invalid in XML.

    Examples
    --------
    >>> short("features.denseblock1.denselayer1.relu", 20)
    'features.d…yer1.relu'
    """
    clean = one_line(name) or "�"
    if len(clean) <= length:
        return clean
    tail = (length - 1) // 2
    return f"{clean[: length - 1 - tail]}…{clean[-tail:]}"


def legend_label(label: str) -> str:
    """Prefix labels that begin with an underscore, which matplotlib would hide, with a space."""
    return f" {label}" if label.startswith("_") else label


def _use_bounds(axes: Axes, cells: Sequence[Score], bounds: Iterable[float | None]) -> None:
    """Show the full range of a bounded measure if its values span a quarter of it."""
    low, high = bounds
    values = np.concatenate([cell.place_values for cell in cells]).tolist()
    if low is None or high is None or max(values) - min(values) < 0.25 * (high - low):
        return
    margin = 0.04 * (high - low)
    axes.set_ylim(min(low, *values) - margin, max(high, *values) + margin)


def _name_places(axes: Axes, cells: Sequence[Score], axis_label: str) -> None:
    """Label the axis, with the names of the places if they are few and shared by all series."""
    longest = max(len(cell.places) for cell in cells)
    names = [place.name for place in cells[0].places]
    shared = all([place.name for place in cell.places] == names for cell in cells)
    axes.set_xlim(0.5, longest + 0.5)
    axes.set_xlabel(axis_label)
    if shared and longest <= MAX_NAMES:
        shown = [short(name, _MAX_NAME_LENGTH) for name in names]
        inches = axes.figure.bbox.width / axes.figure.dpi
        rotated = longest * max(map(len, shown)) > 12 * inches
        axes.set_xticks(range(1, longest + 1), shown, rotation=90 if rotated else 0)
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))


def dumbbell_figure(
    difference: Difference,
    names: tuple[str, str],
    info: MeasureInfo,
    width: float = PAGE_WIDTH,
    format: str = "svg",
) -> NotebookFigure:
    """Draw the values of two networks at each place, joined by a bar, and their difference.

    The axis holds all intervals. Of more than 80 places, those that changed most are drawn.
    """
    drawn = [d for d in difference.places if math.isfinite(d.change)]
    if len(drawn) > MAX_PLACES:
        least = sorted((abs(d.change) for d in drawn), reverse=True)[MAX_PLACES - 1]
        drawn = [d for d in drawn if abs(d.change) >= least]
    if math.isfinite(difference.change):
        drawn.append(difference)
    if not drawn:
        raise RequestError(f"{difference.measure}: no place has a value in both networks")

    def draw(figure: Figure) -> float:
        axes = figure.add_subplot()
        draw_dumbbells(axes, drawn, names)
        words = direction(info.more_means)
        axes.set_xlabel(f"{difference.measure} ({words})")
        columns = 2 if sum(map(len, names)) < 11 * width else 1
        figure.legend(loc="outside upper left", ncols=columns)
        return 0.8 + 0.19 * len(drawn) + 0.16 * (2 // columns)

    return laid_out(width, format, draw)


def comparison_panel(
    difference: Difference, names: tuple[str, str], info: MeasureInfo, index: int
) -> dict[str, Any]:
    """Return the figure as SVG in the page's colours, and the strips of both networks.

    The strips have one scale, with its legend; there are none without places.
    """
    title = f"{difference.measure} of {names[0]} and {names[1]} at each place"
    svg = to_svg(dumbbell_figure(difference, names, info), prefix=f"plot{index}", title=title)
    panel: dict[str, Any] = {"plot": Markup(use_page_colours(svg)), "strips": []}
    sides = [
        [place.first.value for place in difference.places],
        [place.second.value for place in difference.places],
    ]
    scale = colour_scale(difference.measure, info, [v for side in sides for v in side])
    if scale is not None:
        titles = [
            f"{n}, {info.range_noun} {range_text(v)}" for n, v in zip(names, sides, strict=True)
        ]
        panel["strips"] = [(v, scale, t) for v, t in zip(sides, titles, strict=True)]
        panel["legend"] = scale.legend()
    return panel
