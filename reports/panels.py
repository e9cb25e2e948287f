"""What the figures of a report are made of: marks, step functions and bars in one panel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from nlbench.errors import RequestError, one_line

from .tables import Series
from .text import count

__all__ = [
    "MOST_SERIES",
    "draw_bars",
    "draw_distribution",
    "draw_signature",
    "ecdf",
    "legend_label",
    "short",
]

# Okabe and Ito, "Color Universal Design", 2008; grey in place of their yellow, which
# is lost on white paper. Marks and dashes repeat the distinction without colour.
_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#777777",
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1, 1.5)))
MOST_SERIES = len(_COLORS)  # more than that in one figure can't be told apart
_MOST_NAMES, _LONGEST_NAME = 24, 36
_MOST_CAPS = 40  # beyond, the ends of error bars blur and make up half of the file


def ecdf(values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Empirical distribution function: where it jumps, and how high it is then.

    Parameters
    ----------
    values : array of shape (n,)
        At least one finite number.

    Returns
    -------
    x : array of shape (m,)
        The distinct values, increasing.
    share : array of shape (m,)
        Share of the values that are at most x; the last is 1.

    Raises
    ------
    nlbench.RequestError
        If there is no value or one is not finite.

    Examples
    --------
    >>> x, share = ecdf([2.0, 1.0, 2.0, 5.0])
    >>> x.tolist(), share.tolist()
    ([1.0, 2.0, 5.0], [0.25, 0.75, 1.0])
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise RequestError(f"a distribution needs finite values, got {numbers}; expected n ≥ 1")
    x, times = np.unique(numbers, return_counts=True)
    return x, np.cumsum(times) / numbers.size


def draw_signature(axes: Axes, series: Mapping[int, Series], about: Mapping[str, Any]) -> str:
    """Draw one mark a site and subject; say which axis carries the measure."""
    hollow: Counter[int] = Counter()
    for index, one in series.items():
        depth = np.arange(1, len(one.places) + 1)
        values = np.array([place.value for place in one.places])
        stds = np.array([place.statistics.get("std", math.nan) for place in one.places])
        style: dict[str, Any] = {
            "color": _COLORS[index],
            "marker": _MARKS[index],
            "markersize": 4.5,
            "markeredgewidth": 0.9,
        }
        label = legend_label(one.label)
        axes.errorbar(
            depth,
            values,
            np.nan_to_num(stds),
            label=label,
            linewidth=0.9,
            capsize=1.8 if len(depth) <= _MOST_CAPS else 0,
            **style,
        )
        gone = depth[np.isnan(values)]
        heights = [0.04 * hollow[site] for site in gone]  # one above the other, of the panel
        hollow.update(gone)
        if len(gone):
            (marks,) = axes.plot(
                gone,
                heights,
                transform=axes.get_xaxis_transform(),
                linestyle="",
                clip_on=False,
                zorder=5,
                **style,
                markerfacecolor="white",
            )
            marks.set_in_layout(False)
    drawn = list(series.values())
    _use_bounds(axes, drawn, about.get("bounds", (None, None)))
    _name_places(axes, drawn, "site, in order of call")
    return "y"


def draw_distribution(axes: Axes, series: Mapping[int, Series], about: Mapping[str, Any]) -> str:
    """Draw one step function a subject; say which axis carries the measure."""
    everything: list[float] = []
    for index, one in series.items():
        values = [place.value for place in one.places if math.isfinite(place.value)]
        if not values:
            continue
        everything += values
        x, share = ecdf(values)
        whole = len(values) == len(one.places)
        paths = count(len(values), "path") if whole else f"{len(values)} of {len(one.places)} paths"
        axes.step(
            [x[0], *x],
            [0.0, *share],
            where="post",
            color=_COLORS[index],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.5,
            label=f"{legend_label(one.label)} ({paths})",
        )
    if min(everything) > 0 and max(everything) > 50 * min(everything):
        axes.set_xscale("log")
        # plain numbers: matplotlib's powers of ten are in its own markup
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of paths")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    return "x"


def draw_bars(axes: Axes, series: Mapping[int, Series], about: Mapping[str, Any]) -> str:
    """Draw one bar a place and subject; say which axis carries the measure."""
    width = 0.8 / len(series)
    for position, (index, one) in enumerate(series.items()):
        offset = (position - (len(series) - 1) / 2) * width
        depth = np.arange(1, len(one.places) + 1) + offset
        values = [place.value for place in one.places]
        axes.bar(depth, values, width, color=_COLORS[index], label=legend_label(one.label))
    axes.axhline(0, color="black", linewidth=0.8)
    _name_places(axes, list(series.values()), "place")
    return "y"


def short(name: str, most: int = 80) -> str:
    """Bring a name to a length that fits into a figure, and to characters that XML can hold.

    Examples
    --------
    >>> short("features.denseblock1.denselayer1.relu", 20)
    'features.d…yer1.relu'
    """
    clean = one_line(name) or "�"  # a name that nothing can show
    if len(clean) <= most:
        return clean
    tail = (most - 1) // 2
    return f"{clean[: most - 1 - tail]}…{clean[-tail:]}"


def legend_label(label: str) -> str:
    """Keep a label in the legend: matplotlib hides those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _use_bounds(axes: Axes, series: Sequence[Series], bounds: Iterable[float | None]) -> None:
    """Show the whole range of a bounded measure, unless its values fill little of it."""
    low, high = bounds
    values = [place.value for one in series for place in one.places if math.isfinite(place.value)]
    if low is None or high is None or max(values) - min(values) < 0.25 * (high - low):
        return
    margin = 0.04 * (high - low)
    axes.set_ylim(min(low, *values) - margin, max(high, *values) + margin)


def _name_places(axes: Axes, series: Sequence[Series], otherwise: str) -> None:
    """Write the names of places below the axis where they are few and shared."""
    longest = max(len(one.places) for one in series)
    names = [place.name for place in series[0].places]
    shared = all([place.name for place in one.places] == names for one in series)
    axes.set_xlim(0.5, longest + 0.5)
    if shared and longest <= _MOST_NAMES:
        shown = [short(name, _LONGEST_NAME) for name in names]
        upright = longest * max(map(len, shown)) > 90
        axes.set_xticks(range(1, longest + 1), shown, rotation=90 if upright else 0)
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel(otherwise)
