"""Panels for matplotlib figures: signatures, distributions and bars."""

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

# Okabe and Ito, "Color Universal Design", 2008, with grey instead of yellow, which is invisible on
# white. Markers and dashes also distinguish the series without colour.
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
MAX_SERIES = len(_COLORS)  # more series in one figure couldn't be distinguished
_MAX_NAMES, _MAX_NAME_LENGTH = 24, 36
_MAX_CAPS = 40  # with more error bars, the caps blur and make up half of the file


def ecdf(values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the empirical distribution function.

    Parameters
    ----------
    values : array of shape (n,)
        Finite numbers, at least one.

    Returns
    -------
    x : array of shape (m,)
        The distinct values in increasing order.
    fraction : array of shape (m,)
        Fraction of the values that are at most x; the last one is 1.

    Raises
    ------
    nlbench.RequestError
        If `values` is empty or contains a non-finite value.

    Examples
    --------
    >>> x, fraction = ecdf([2.0, 1.0, 2.0, 5.0])
    >>> x.tolist(), fraction.tolist()
    ([1.0, 2.0, 5.0], [0.25, 0.75, 1.0])
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise RequestError(f"expected at least one value, all finite; got {numbers}")
    x, times = np.unique(numbers, return_counts=True)
    return x, np.cumsum(times) / numbers.size


def draw_signature(axes: Axes, series: Mapping[int, Series], info: Mapping[str, Any]) -> str:
    """Plot one marker per site and subject; return the axis that shows the measure."""
    hollow: Counter[int] = Counter()
    for index, subject in series.items():
        depth = np.arange(1, len(subject.places) + 1)
        values = np.array([place.value for place in subject.places])
        stds = np.array([place.statistics.get("std", math.nan) for place in subject.places])
        style: dict[str, Any] = {
            "color": _COLORS[index],
            "marker": _MARKS[index],
            "markersize": 4.5,
            "markeredgewidth": 0.9,
        }
        label = legend_label(subject.label)
        axes.errorbar(
            depth,
            values,
            np.nan_to_num(stds),
            label=label,
            linewidth=0.9,
            capsize=1.8 if len(depth) <= _MAX_CAPS else 0,
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
    drawn = list(series.values())
    _use_bounds(axes, drawn, info.get("bounds", (None, None)))
    _name_places(axes, drawn, "site, in call order")
    return "y"


def draw_distribution(axes: Axes, series: Mapping[int, Series], info: Mapping[str, Any]) -> str:
    """Plot one step function per subject; return the axis that shows the measure."""
    all_values: list[float] = []
    for index, subject in series.items():
        values = [place.value for place in subject.places if math.isfinite(place.value)]
        if not values:
            continue
        all_values += values
        x, fraction = ecdf(values)
        total = len(subject.places)
        paths = count(total, "path") if len(values) == total else f"{len(values)} of {total} paths"
        axes.step(
            [x[0], *x],
            [0.0, *fraction],
            where="post",
            color=_COLORS[index],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.5,
            label=f"{legend_label(subject.label)} ({paths})",
        )
    if min(all_values) > 0 and max(all_values) > 50 * min(all_values):
        axes.set_xscale("log")
        # Use plain numbers because math markup is disabled.
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of paths")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    return "x"


def draw_bars(axes: Axes, series: Mapping[int, Series], info: Mapping[str, Any]) -> str:
    """Plot one bar per place and subject; return the axis that shows the measure."""
    width = 0.8 / len(series)
    for position, (index, subject) in enumerate(series.items()):
        offset = (position - (len(series) - 1) / 2) * width
        depth = np.arange(1, len(subject.places) + 1) + offset
        values = [place.value for place in subject.places]
        axes.bar(depth, values, width, color=_COLORS[index], label=legend_label(subject.label))
    axes.axhline(0, color="black", linewidth=0.8)
    _name_places(axes, list(series.values()), "place")
    return "y"


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


def _use_bounds(axes: Axes, series: Sequence[Series], bounds: Iterable[float | None]) -> None:
    """Show the full range of a bounded measure if its values span a quarter of it."""
    low, high = bounds
    values = [
        place.value for entry in series for place in entry.places if math.isfinite(place.value)
    ]
    if low is None or high is None or max(values) - min(values) < 0.25 * (high - low):
        return
    margin = 0.04 * (high - low)
    axes.set_ylim(min(low, *values) - margin, max(high, *values) + margin)


def _name_places(axes: Axes, series: Sequence[Series], axis_label: str) -> None:
    """Label the axis with the names of the places if they are few and shared by all series."""
    longest = max(len(entry.places) for entry in series)
    names = [place.name for place in series[0].places]
    shared = all([place.name for place in entry.places] == names for entry in series)
    axes.set_xlim(0.5, longest + 0.5)
    if shared and longest <= _MAX_NAMES:
        shown = [short(name, _MAX_NAME_LENGTH) for name in names]
        rotated = longest * max(map(len, shown)) > 90
        axes.set_xticks(range(1, longest + 1), shown, rotation=90 if rotated else 0)
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel(axis_label)
