"""Size, colours and common plots for the figures of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777", "#E69F00", "#56B4E9")
"""From Okabe and Ito, "Color Universal Design", 2008, with grey instead of black."""


def page_figure(
    height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """Create a figure as wide as the page with the given height in inches, and its panels.

    Additional options are passed to matplotlib's ``subplots``.

    Examples
    --------
    >>> figure, (left, right) = page_figure(2.9, columns=2)
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Leave room for the page's own font, which may be wider.
    figure = Figure(figsize=(7.2, height), layout=ConstrainedLayoutEngine(w_pad=0.12))
    return figure, figure.subplots(rows, columns, **options)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """Place the legend of one panel below the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def use_plain_log_labels(figure: Figure) -> None:
    """Label logarithmic axes with plain numbers, because the page does not typeset mathematics."""
    from matplotlib.ticker import EngFormatter, LogFormatter, LogLocator, NullFormatter

    large = EngFormatter(sep="")
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatter):
            low, high = axis.get_view_interval()
            if high < 100 * low:  # decades alone would give too few labels
                axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1000 else large(x))
        if isinstance(axis.get_minor_formatter(), LogFormatter):
            axis.set_minor_formatter(NullFormatter())


def draw_groups(
    axes: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str,
    colours: Mapping[str, str] | Sequence[str] = COLOURS,
    **style: Any,
) -> None:
    """Plot one column vs. another, with one colour for each group in the column `by`."""
    for index, (group, rows) in enumerate(table.groupby(by, sort=False)):
        if isinstance(colours, Mapping):
            colour = colours[str(group)]
        else:
            colour = colours[index % len(colours)]
        axes.plot(rows[x], rows[y], "o", color=colour, label=str(group), **style)


def draw_intervals(
    axes: Axes, table: pd.DataFrame, value: str, places: ArrayLike, **style: Any
) -> None:
    """Plot a column, with intervals from ``low`` to ``high``, at the given vertical positions."""
    # Rounding may place a bound on the wrong side of the value.
    width = [(table[value] - table.low).clip(0), (table.high - table[value]).clip(0)]
    axes.errorbar(table[value], places, xerr=width, **style)


def draw_theory(
    theory: tuple[ArrayLike, ArrayLike],
    measured: tuple[ArrayLike, ArrayLike],
    published: tuple[ArrayLike, ArrayLike],
    spread: ArrayLike | None = None,
) -> tuple[Figure, Axes]:
    """Plot theoretical, measured and published affinities, each given as positions and scores."""
    figure, axes = page_figure(2.7)
    axes.plot(*theory, color="0.6", label="closed form")
    axes.errorbar(*measured, yerr=spread, fmt="o", color="C0", label="here")
    axes.plot(*published, "x", color="C1", ms=9, label="published")
    axes.set(ylabel="affinity", ylim=(0, 1.05))
    return figure, axes
