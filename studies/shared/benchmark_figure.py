"""The figure for the benchmark of measures: criteria by measures."""

from __future__ import annotations

import math
from collections.abc import Collection

import pandas as pd
from matplotlib.figure import Figure

from nlbench.studies.framework.figures import COLOURS, draw_intervals, page_figure

from .ladder_cells import REFERENCE
from .ladders import LADDERS, QUESTIONS
from .orders import WORDS


def mean_orders(order: pd.DataFrame, question: str) -> pd.DataFrame:
    """Average each measure's tau over those ladders of a question on which it is judged.

    Returns
    -------
    DataFrame
        Columns ``tau, low, high`` by measure. The half-width is the mean over the ladders, which is
        conservative because ladders share networks and samples.
    """
    names = [name for name, ladder in LADDERS.items() if ladder.question == question]
    judged = order[order.ladder.isin(names) & order["what it does"].isin(WORDS)]
    judged = judged[judged.measure != REFERENCE]
    return judged.groupby("measure")[["tau", "low", "high"]].mean()


def benchmark_figure(
    order: pd.DataFrame, precision: pd.DataFrame, measured: Collection[str]
) -> Figure:
    """Plot each measure's mean tau and its interval for each question, and its cost.

    Bundled results, for measures that this study did not run, have hollow markers.
    """
    by_question = {question: mean_orders(order, question) for question in QUESTIONS}
    taus = pd.DataFrame({question: means.tau for question, means in by_question.items()})
    names = list(taus.fillna(0).sum(axis=1).sort_values(ascending=False, kind="stable").index)
    figure, panels = page_figure(1.1 + 0.22 * len(names), columns=len(QUESTIONS) + 1, sharey=True)
    for axes, (question, means), colour in zip(panels, by_question.items(), COLOURS, strict=False):
        for is_own in (True, False):
            rows = means[means.index.isin(list(measured)) == is_own]
            places = [names.index(name) for name in rows.index]
            fill = colour if is_own else "white"
            style = {"fmt": "o", "color": colour, "mfc": fill, "markersize": 4}
            draw_intervals(axes, rows, "tau", places, **style)
        axes.axvline(0, color="0.7", lw=0.8)
        axes.set(xlim=(-1.08, 1.08), xlabel="mean τ")
        axes.set_title(question, fontsize=8)
    seconds = precision.groupby("measure")["seconds to 2 %"].median()
    known = [(row, seconds[name]) for row, name in enumerate(names) if name in seconds.index]
    known = [(row, value) for row, value in known if value > 0 and math.isfinite(value)]
    panels[-1].barh([row for row, _ in known], [value for _, value in known], color="0.75")
    panels[-1].set(xscale="log", xlabel="seconds")
    panels[-1].set_title("cost to 2 %", fontsize=8)
    panels[0].set_yticks(range(len(names)), names, fontsize=7.5)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure
