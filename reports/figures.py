"""Matplotlib figures of a run, for Python and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nlbench.errors import RequestError

from .notebook_figure import NotebookFigure
from .panels import (
    MAX_SERIES,
    draw_bars,
    draw_distribution,
    draw_signature,
    ecdf,
    legend_label,
    short,
)
from .svg import STYLE, to_svg
from .tables import Series, labelled, per_place
from .text import direction

__all__ = ["MAX_SERIES", "bars", "distribution", "ecdf", "figure_of", "signature", "to_svg"]

Details = Mapping[str, Mapping[str, Any]]

_WIDTH, _HEIGHT = 7.2, 2.7  # inches


def signature(
    scores: pd.DataFrame, measures: Details, names: Sequence[str] | None = None
) -> Figure:
    """Draw nonlinearity signatures: the score of every site in order of call.

    Error bars are the standard deviation over batches. A site without a value is a hollow mark at
    the bottom edge.

    Parameters
    ----------
    scores : DataFrame
        Tidy table, one value per row.
    measures : mapping of str to mapping
        Metadata of each measure.
    names : sequence of str, optional
        Measures to draw, one panel each; by default those of the probe ``sites``.

    Raises
    ------
    nlbench.RequestError
        If none of the measures has a value at a site, or there are more than
        `MAX_SERIES` subjects.

    Examples
    --------
    >>> scores = pd.DataFrame({"model": "a", "weights": "init", "data": "digits", "seed": 0,
    ...     "measure": "affinity", "place": ["relu", "relu:1"], "statistic": "value",
    ...     "value": [0.9, 0.4], "n": 64, "status": "ok", "reason": ""})
    >>> len(signature(scores, {}, ["affinity"]).axes)
    1
    """
    if names is None:
        names = [name for name, about in measures.items() if about.get("probe") == "sites"]
    if not names:
        raise RequestError("the scores have no measure of sites; expected at least one")
    return _figure(scores, measures, names, draw_signature)


def distribution(scores: pd.DataFrame, measures: Details, name: str) -> Figure:
    """Draw the distribution of a measure over paths: one step function per subject.

    Parameters
    ----------
    scores, measures
        As for `signature`.
    name : str
        The measure.

    Raises
    ------
    nlbench.RequestError
        As for `signature`.
    """
    return _figure(scores, measures, [name], draw_distribution)


def bars(scores: pd.DataFrame, measures: Details, name: str) -> Figure:
    """Draw a measure of any probe: one bar per place, side by side for several subjects.

    Parameters
    ----------
    scores, measures
        As for `signature`.
    name : str
        The measure.

    Raises
    ------
    nlbench.RequestError
        As for `signature`.
    """
    return _figure(scores, measures, [name], draw_bars)


def figure_of(scores: pd.DataFrame, measures: Details, name: str) -> Figure:
    """Draw the default figure of a measure's probe."""
    probe = measures.get(name, {}).get("probe")
    if probe == "sites":
        return signature(scores, measures, [name])
    return (distribution if probe == "lines" else bars)(scores, measures, name)


def _series(table: pd.DataFrame, name: str) -> dict[int, Series]:
    """Return the series with a value by the subject's position, which sets its colour."""
    subjects = list(dict.fromkeys(table["subject"]))
    if len(subjects) > MAX_SERIES:
        raise RequestError(f"{len(subjects)} subjects in one figure; expected {MAX_SERIES} at most")
    drawn = {
        subjects.index(series.label): series
        for series in per_place(table, name)
        if series.has_value
    }
    if not drawn:
        raise RequestError(f"{name} has no value at any place; expected at least one")
    return dict(sorted(drawn.items()))


def _figure(
    scores: pd.DataFrame,
    measures: Details,
    names: Sequence[str],
    draw: Callable[[Axes, Mapping[int, Series], Mapping[str, Any]], str],
) -> Figure:
    table = labelled(scores)
    panels = {name: _series(table, name) for name in names}
    with matplotlib.style.context(["default", STYLE]):
        figure = NotebookFigure(layout="constrained")
        legend: dict[str, Any] = {}
        for row, (name, series) in enumerate(panels.items()):
            axes = figure.add_subplot(len(panels), 1, row + 1)
            about = measures.get(name, {})
            label = f"{short(name, 40)}\n{direction(about.get('more_means', 'neither'))}"
            if draw(axes, series, about) == "x":
                axes.set_xlabel(label.replace("\n", ", "))
            else:
                axes.set_ylabel(label)
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
                legend.setdefault(text, handle)
        names_height = sum(_names_height(axes) for axes in figure.axes)
        figure.set_size_inches(_WIDTH, 0.3 + _HEIGHT * len(panels) + names_height)
        _add_legend(figure, legend)
        figure.draw_without_rendering()  # lays out, once, while the style is in force
        figure.set_layout_engine("none")
    return figure


def _names_height(axes: Axes) -> float:
    """Return the height in inches of rotated tick labels."""
    rotated = [label for label in axes.get_xticklabels() if label.get_rotation() == 90]
    return 0.07 * max((len(label.get_text()) for label in rotated), default=0)


def _add_legend(figure: Figure, entries: Mapping[str, Any]) -> None:
    labels = [legend_label(short(text)) for text in entries]
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), 100 // (longest + 6)))
    figure.legend(list(entries.values()), labels, loc="outside upper left", ncols=columns)
