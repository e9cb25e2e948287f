"""Matplotlib figures for a run, for Python and notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nlbench.errors import RequestError

from .notebook_figure import STYLE, NotebookFigure
from .panels import (
    MAX_SERIES,
    draw_bars,
    draw_distribution,
    draw_signature,
    legend_label,
    short,
)
from .tables import Series, labelled, per_place
from .text import direction

_WIDTH, _HEIGHT = 7.2, 2.7  # inches


def figure_of(scores: pd.DataFrame, measures: Mapping[str, Mapping[str, Any]], name: str) -> Figure:
    """Plot a measure's value at each place: a signature, a distribution over paths, or bars.

    Raises
    ------
    nlbench.RequestError
        If there is no value at any place, or there are more than `MAX_SERIES` subjects.

    Examples
    --------
    >>> scores = pd.DataFrame({"model": "a", "weights": "init", "data": "digits", "seed": 0,
    ...     "measure": "affinity", "place": ["relu", "relu:1"], "statistic": "value",
    ...     "value": [0.9, 0.4], "n": 64, "status": "ok", "reason": ""})
    >>> len(figure_of(scores, {"affinity": {"probe": "sites"}}, "affinity").axes)
    1
    """
    info = measures.get(name, {})
    drawings = {"sites": draw_signature, "lines": draw_distribution}
    draw = drawings.get(str(info.get("probe")), draw_bars)
    series = _series(labelled(scores), name)
    with matplotlib.style.context(["default", STYLE]):
        figure = NotebookFigure(layout="constrained")
        axes = figure.add_subplot()
        label = f"{short(name, 40)}\n{direction(info.get('more_means', 'neither'))}"
        if draw(axes, series, info) == "x":
            axes.set_xlabel(label.replace("\n", ", "))
        else:
            axes.set_ylabel(label)
        figure.set_size_inches(_WIDTH, 0.3 + _HEIGHT + _names_height(axes))
        handles, texts = axes.get_legend_handles_labels()
        labels = [legend_label(short(text)) for text in texts]
        columns = max(1, min(len(labels), 100 // (max(map(len, labels)) + 6)))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        figure.draw_without_rendering()  # computes the layout while the style is in effect
        figure.set_layout_engine("none")
    return figure


def _series(table: pd.DataFrame, name: str) -> dict[int, Series]:
    """Return the series with values, keyed by the subject's index, which determines its colour."""
    subjects = list(dict.fromkeys(table["subject"]))
    if len(subjects) > MAX_SERIES:
        raise RequestError(f"{len(subjects)} subjects in one figure; expected at most {MAX_SERIES}")
    drawn = {
        subjects.index(series.label): series
        for series in per_place(table, name)
        if any(math.isfinite(place.value) for place in series.places)
    }
    if not drawn:
        raise RequestError(f"{name} has no value at any place; expected at least one")
    return dict(sorted(drawn.items()))


def _names_height(axes: Axes) -> float:
    """Return the height in inches of rotated tick labels."""
    rotated = [label for label in axes.get_xticklabels() if label.get_rotation() == 90]
    return 0.07 * max((len(label.get_text()) for label in rotated), default=0)
