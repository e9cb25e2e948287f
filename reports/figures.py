"""Figures of runs, for papers and notebooks.

`paper_figure` draws every form in the size at which it stands in a paper: text of 8 points, and
colours that are distinct for colour-blind readers and in grey.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import matplotlib.cm
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from nlbench.errors import RequestError, nearest, shorten
from nlbench.parsers import unique
from nlbench.store.run import Run

from .compare import Difference, compare_runs, compare_scores, mark_significant
from .drawing import PAGE_WIDTH, NotebookFigure, laid_out
from .leaderboard import Row, compared_measures, leaderboard
from .panels import (
    MAX_SERIES,
    RAMP,
    LabelledCells,
    draw_bars,
    draw_distribution,
    draw_path,
    draw_signature,
    draw_standings,
    draw_strips,
    dumbbell_figure,
    legend_label,
    short,
)
from .population import colour_scale
from .tables import Identity, MeasureInfo, NamedRun, Score, Scores, TableSubject, read_run
from .text import direction

FORMS = ("strip", "signature", "board", "compare", "path")
FORMATS = ("pdf", "svg", "png")
WIDTHS = {"column": 3.25, "text": 6.75}
"""Inches: one column of a page with two, and the whole page."""
MAX_ROWS = 40
"""Maximum number of networks or places in one figure; more would be taller than a page."""
_PANEL_WIDTH = 1.05  # inches of a measure's panel in a board, at least


@dataclass(frozen=True)
class FigureData:
    """Data of figures: a run's scores, and the chosen networks and measure.

    Parameters
    ----------
    drawings : mapping of (model, weights, data, seed) to mapping
        The recorded path of each subject that has one.
    names : tuple of str
        Labels, models or globs of the networks to draw; all if empty.
    measure : str, optional
    """

    scores: Scores
    drawings: Mapping[Identity, Mapping[str, Any]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    measure: str | None = None

    @classmethod
    def of(
        cls, run: Run, names: str | Sequence[str] | None = None, measure: str | None = None
    ) -> FigureData:
        """Read a run. Raise if the measure or a network is unknown."""
        scores = read_run(run)
        chosen = (names,) if isinstance(names, str) else tuple(names or ())
        drawings = NamedRun(run.name, {}, tuple(run.records)).drawings
        if measure is not None:
            check_measure_name(measure, scores)
        labels = [name for s in scores.subjects for name in (s.label, s.model)]
        for name in chosen:
            if not _matches(name, *labels):
                hint = nearest(name, unique(labels))
                raise RequestError(f"the run has no subject '{shorten(name)}'{hint}")
        return cls(scores, drawings, chosen, measure)

    def is_chosen(self, *labels: str) -> bool:
        """Return True if one of the labels of a network was chosen."""
        return not self.names or any(_matches(name, *labels) for name in self.names)

    def rows(self, measures: Sequence[str]) -> list[Row]:
        """Return the chosen networks, the most nonlinear first."""
        rows = leaderboard(self.scores.restrict(measures=measures))
        chosen = []
        for row in rows:
            names = [name for subject in row.subjects for name in (subject.label, subject.model)]
            if self.is_chosen(row.label, *names):
                chosen.append(row)
        return chosen

    def subjects(self) -> list[TableSubject]:
        """Return the chosen subjects, in the order of the names, else of the run."""
        every = self.scores.subjects
        named = [s for name in self.names for s in every if _matches(name, s.label, s.model)]
        return unique(named) if self.names else list(every)

    def cells(self, measure: str) -> list[tuple[str, Score]]:
        """Return the label and cell of each chosen network with values at places."""
        cells = [(row.label, row.entries[measure]) for row in self.rows([measure])]
        return [(label, cell) for label, cell in cells if len(cell.place_values)]

    def site_measure(self) -> str:
        """Return the chosen measure, by default the first one of sites that has values."""
        return self.measure or site_measure(self.scores)


def _matches(name: str, *labels: str) -> bool:
    return any(label == name or fnmatch.fnmatchcase(label, name) for label in labels)


def check_measure_name(name: str, scores: Scores) -> None:
    """Raise if a run has no measure of this name."""
    if name not in scores.measures:
        raise RequestError(f"the run has no measure '{name}'{nearest(name, scores.measures)}")


def site_measure(scores: Scores) -> str:
    """Return a measure of sites with values, the first that has a direction."""
    sites = [name for name, info in scores.measures.items() if info.probe == "sites"]
    drawn = [n for n in sites if any(len(scores[s.label, n].place_values) for s in scores.subjects)]
    directed = [n for n in drawn if scores.measures[n].sense]
    if not drawn:
        raise RequestError("the run has no measure of sites with a value")
    return (directed or drawn)[0]


def paper_figure(
    run: Run,
    form: str,
    *,
    measure: str | None = None,
    subject: str | Sequence[str] | None = None,
    other: Run | None = None,
    width: str | float = "column",
    format: str = "pdf",
) -> NotebookFigure:
    """Draw a figure in the size at which it stands in a paper. See `nlbench.Run.figure`."""
    for name, value, known in (("form", form, FORMS), ("format", format, FORMATS)):
        if value not in known:
            raise RequestError(f"{name}: expected {', '.join(known)}, got '{value}'")
    inches = WIDTHS.get(width) if isinstance(width, str) else float(width)
    if inches is None or not 1 <= inches <= 40:
        raise RequestError(f"width: expected column, text or inches from 1 to 40, got '{width}'")
    source = FigureData.of(run, subject, measure)
    if form == "compare":
        difference, names, info = _difference(source, run, other)
        _check_rows(difference.places, "places")
        return dumbbell_figure(difference, names, info, inches, format)
    return laid_out(inches, format, partial(_DRAWINGS[form], source))


def _check_rows(rows: Sequence[object], noun: str) -> None:
    if len(rows) > MAX_ROWS:
        raise RequestError(
            f"{len(rows)} {noun} in one figure; expected at most {MAX_ROWS}: choose some by subject"
        )


def _strip(source: FigureData, figure: Figure, axes: Axes | None = None) -> float:
    """Draw a strip per network, coloured by score, and return the figure's height."""
    name = source.site_measure()
    info = source.scores.measures[name]
    strips = source.cells(name)
    _check_rows(strips, "networks")
    scale = colour_scale(name, info, [v for _, cell in strips for v in cell.place_values])
    if scale is None:
        raise RequestError(f"{name} has no value at any site; expected at least one")
    axes = figure.add_subplot() if axes is None else axes
    draw_strips(axes, strips, scale)
    # The colours, from least to most nonlinear, are below the strips.
    legend = scale.legend()
    mappable = matplotlib.cm.ScalarMappable(Normalize(0, 1), ListedColormap(RAMP))
    bar = figure.colorbar(
        mappable, ax=axes, ticks=[0, 1], orientation="horizontal", aspect=24, shrink=0.7
    )
    bar.ax.set_xticklabels([legend["least"], legend["most"]])
    bar.ax.tick_params(length=0)
    bar.outline.set_linewidth(0.4)
    bar.set_label(f"{name}: darker is {'more nonlinear' if info.sense else 'more'}")
    return 0.75 + 0.2 * max(2, len(strips)) + _names_height(axes)


def draw_measure(
    source: FigureData, figure: Figure, axes: Axes | None = None, measure: str = ""
) -> float:
    """Draw a measure's value at each place, and return the figure's height."""
    name = measure or source.site_measure()
    info = source.scores.measures[name]
    cells = _labelled_cells(source, name)
    axes = figure.add_subplot() if axes is None else axes
    drawings = {"sites": draw_signature, "lines": draw_distribution}
    draw = drawings.get(info.probe, draw_bars)
    label = f"{short(name, 40)}\n{direction(info.more_means)}"
    if draw(axes, cells, info) == "x":
        axes.set_xlabel(label.replace("\n", ", "))
    else:
        axes.set_ylabel(label)
    height = 1.9 + _names_height(axes)
    handles, texts = axes.get_legend_handles_labels()
    labels = [legend_label(short(text, 50)) for text in texts]
    longest = max(map(len, labels)) + 6
    columns = max(1, min(len(labels), int(14 * figure.get_figwidth()) // longest))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)
    return height + 0.16 * math.ceil(len(labels) / columns)


def _labelled_cells(source: FigureData, name: str) -> LabelledCells:
    """Return the cells of the chosen subjects with values. A subject's index is its colour."""
    subjects = source.subjects()
    if len(subjects) > MAX_SERIES:
        raise RequestError(f"{len(subjects)} subjects in one figure; expected at most {MAX_SERIES}")
    cells = [(subject.label, source.scores[subject.label, name]) for subject in subjects]
    drawn = {index: cell for index, cell in enumerate(cells) if len(cell[1].place_values)}
    if not drawn:
        raise RequestError(f"{name} has no value at any place; expected at least one")
    return drawn


def _names_height(axes: Axes) -> float:
    """Return the height in inches of rotated tick labels."""
    rotated = [label for label in axes.get_xticklabels() if label.get_rotation() == 90]
    return 0.07 * max((len(label.get_text()) for label in rotated), default=0)


def _board(source: FigureData, figure: Figure) -> float:
    """Draw networks by measures, as many as fit the width. Return the figure's height."""
    directed = compared_measures(source.scores.measures)
    names = [source.measure] if source.measure else directed
    rows = source.rows(names)
    _check_rows(rows, "networks")
    names = [n for n in names if any(math.isfinite(row.entries[n].value) for row in rows)]
    if not names:
        raise RequestError("the run has no measure with a direction and a value")
    labels = [short(row.label, 30) for row in rows]
    room = figure.get_figwidth() - 0.065 * max(map(len, labels))
    names = names[: max(1, int(room / _PANEL_WIDTH))]
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        draw_standings(axes, [row.entries[name] for row in rows])
        words = direction(source.scores.measures[name].more_means)
        axes.set_xlabel(f"{short(name, 20)}\n{words.replace('more ', '')}")
    panels[0].set_yticks(range(len(rows)), labels)
    return 0.7 + 0.18 * max(3, len(rows))


def _difference(
    source: FigureData, run: Run, other: Run | None
) -> tuple[Difference, tuple[str, str], MeasureInfo]:
    """Return the difference to draw: of two networks, or of one network in two runs."""
    if other is not None:
        comparison = compare_runs(run, other)
        measures = dict.fromkeys(d.measure for d in comparison.differences)
        name = source.measure or site_measure(source.scores.restrict(measures=measures))
        named = [d for d in comparison.differences if d.measure == name]
        chosen = [d for d in named if source.is_chosen(d.subject)]
        if len(chosen) != 1:
            raise RequestError(
                f"{len(chosen)} networks have {name} in both runs; expected one: choose it by "
                f"subject, of {', '.join(d.subject for d in chosen[:4]) or 'none'}"
            )
        return chosen[0], comparison.names, comparison.measures[name]
    name = source.site_measure()
    subjects = source.subjects()
    if len(subjects) != 2:
        raise RequestError(
            f"compare: {len(subjects)} networks; expected two by subject, or another run"
        )
    first, second = (source.scores[s.label, name] for s in subjects)
    (difference,) = mark_significant([compare_scores("", name, first, second)])
    return difference, (subjects[0].label, subjects[1].label), source.scores.measures[name]


def _path(source: FigureData, figure: Figure) -> float:
    """Draw the outputs along one path. Return the figure's height."""
    chosen = [s for s in source.subjects() if s.identity in source.drawings]
    if not chosen:
        raise RequestError("no path was recorded; expected a run with a measure of lines")
    if len(chosen) > 1:
        raise RequestError(f"path: {len(chosen)} networks; expected one by subject")
    drawing = source.drawings[chosen[0].identity]
    counts = drawing.get("breakpoints") or ()
    ratios = [0.85] * len(drawing["logits"]) + ([0.3 + 0.13 * len(counts)] if counts else [])
    panels = figure.subplots(
        len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios}
    )[:, 0]
    draw_path(panels.tolist(), drawing)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    figure.align_ylabels()
    return 0.6 + sum(ratios)


_DRAWINGS: dict[str, Callable[[FigureData, Figure], float]] = {
    "strip": _strip,
    "signature": draw_measure,
    "board": _board,
    "path": _path,
}


def plot_fingerprint(run: Run, measure: str | None = None, ax: Axes | None = None) -> Figure:
    """Plot each network as a strip along its depth. See `nlbench.Run.fingerprint`."""
    source = FigureData.of(run, measure=measure)
    return _into(ax, partial(_strip, source, axes=ax))


def plot_places(run: Run, measure: str, ax: Axes | None = None) -> Figure:
    """Plot a measure's values by place. See `nlbench.Run.plot`."""
    source = FigureData.of(run, measure=measure)
    return _into(ax, partial(draw_measure, source, axes=ax, measure=measure))


def _into(ax: Axes | None, draw: Callable[[Any], float]) -> Figure:
    """Draw into the figure of the given axes, or into a new one for a notebook."""
    if ax is None:
        return laid_out(PAGE_WIDTH, "png", draw)
    draw(ax.figure)
    return ax.figure  # type: ignore[return-value]
