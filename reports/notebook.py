"""Data frames, figures and the notebook representation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.style
import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from nlbench import Signature
from nlbench.errors import RequestError, nearest, one_line

from .agreement import agreement, agreement_frame
from .figures import figure_of
from .fingerprint import strip
from .leaderboard import Row, leaderboard, leaderboard_frame, sense_of
from .notebook_figure import STYLE, NotebookFigure
from .population import ColourScale, colour_scale, reference_share
from .tables import Scores, mean_cell, read_run
from .text import number, plus_minus
from .views import ranks_text

if TYPE_CHECKING:
    from nlbench.measure import Result
    from nlbench.store.run import Run

# Colour levels for the page's strips in the light theme, from least to most nonlinear.
COLOURS = ("#f4f1f8", "#e2e6f2", "#c9d8ea", "#abc8e1", "#87b2d6", "#6099c8", "#3878b0", "#23639e",
           "#10457e", "#05234f")  # fmt: skip
_MAX_ROWS = 30


def leaderboard_of(
    run: Run,
    measures: Sequence[str] | None = None,
    *,
    seeds: str = "together",
    full: bool = False,
    reference: bool = False,
) -> pd.DataFrame:
    """Rank a run's subjects; see `nlbench.Run.leaderboard`.

    Raises
    ------
    nlbench.RequestError
        If the run doesn't contain a measure.
    """
    if seeds not in ("together", "apart"):
        raise RequestError(f"seeds='{seeds}', expected 'together' or 'apart'")
    scores, known = read_run(run)
    names = list(scores.measures) if measures is None else list(measures)
    for name in names:
        _check_name(name, scores.measures, "measure")
    rows = leaderboard(scores.of_measures(names), known, together=seeds == "together")
    frame = leaderboard_frame(rows, names, full=full)
    if reference:
        for name in names:
            info = known.get(name, {})
            frame[name, "reference"] = [reference_share(r, name, info) for r in rows]
    return frame[names]


def agreement_of(run: Run) -> pd.DataFrame:
    """Correlate all pairs of a run's measures.

    Returns
    -------
    DataFrame
        Columns ``coefficient, measure, other, value, low, high, n, networks``. Spearman's and
        Kendall's are over networks, Pearson's over sites within networks, all oriented so that
        larger values mean more nonlinear.
    """
    scores, measures = read_run(run)
    return agreement_frame(agreement(leaderboard(scores, measures), scores, measures))


def signature_of(run: Run, subject: str | None = None, measure: str | None = None) -> Signature:
    """Return a network's signature.

    Parameters
    ----------
    subject : str, optional
        Label of the subject in the leaderboard, or its model's name if that is unique. Optional if
        the run has a single subject.
    measure : str, optional
        By default the first measure of sites that has values.

    Raises
    ------
    nlbench.RequestError
        If the subject or measure is unknown or ambiguous.
    """
    scores, measures = read_run(run)
    name = _site_measure(scores, measures, measure)
    chosen = _subject(scores, subject)
    for record in run.records:
        if record.identity == (*chosen.identity, name):
            kinds = record.probe.facts.get("kinds")
            return Signature.of(record.result, kinds=kinds, name=chosen.label)
    raise RequestError(f"the run has no {name} for {chosen.label}")


def _subject(scores: Scores, name: str | None) -> Any:
    matches = [s for s in scores.subjects if name in (None, s.label)]
    matches = matches or [s for s in scores.subjects if name == s.model]
    if len(matches) == 1:
        return matches[0]
    labels = dict.fromkeys(name for s in scores.subjects for name in (s.label, s.model))
    if not matches:
        raise RequestError(f"the run has no subject '{name}'{nearest(str(name), labels)}")
    problem = "no subject given" if name is None else f"'{name}' is ambiguous"
    names = ", ".join(s.label for s in matches[:8])
    raise RequestError(f"{problem}; expected one of {len(matches)}: {names}")


def _check_name(name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        raise RequestError(f"the run has no {what} '{name}'{nearest(name, names)}")


def _site_measure(
    scores: Scores, measures: Mapping[str, Mapping[str, Any]], name: str | None
) -> str:
    if name is not None:
        _check_name(name, scores.measures, "measure")
        return name
    sites = [n for n in scores.measures if measures.get(n, {}).get("probe") == "sites"]
    drawn = [n for n in sites if any(len(scores[s.label, n].place_values) for s in scores.subjects)]
    directed = [n for n in drawn if sense_of(measures.get(n, {}))]
    if not drawn:
        raise RequestError("the run has no measure of sites with a value")
    return (directed or drawn)[0]


def fingerprint_of(run: Run, measure: str | None = None) -> Figure:
    """Plot the fingerprint of each network: a strip over its depth, coloured by score.

    Parameters
    ----------
    measure : str, optional
        By default the first measure of sites that has values.

    Returns
    -------
    matplotlib.figure.Figure
        The most nonlinear network on top; sites without a value are hatched.

    Raises
    ------
    nlbench.RequestError
        If no site has a value.
    """
    scores, measures = read_run(run)
    name = _site_measure(scores, measures, measure)
    rows = leaderboard(scores.of_measures([name]), measures)
    drawn = [
        (row.label, mean_cell([scores[s.label, name] for s in row.subjects]).places) for row in rows
    ]
    drawn = [(label, places) for label, places in drawn if places]
    values = [place.value for _, places in drawn for place in places]
    colouring = colour_scale(name, measures.get(name, {}), values)
    if colouring is None:
        raise RequestError(f"{name} has no value at any site; expected at least one")
    scale = colouring.scale
    colours = LinearSegmentedColormap.from_list("nonlinear", COLOURS)
    with matplotlib.style.context(["default", STYLE]):
        figure = NotebookFigure(figsize=(7.2, 0.9 + 0.28 * len(drawn)), layout="constrained")
        axes = figure.add_subplot()
        for row, (_, places) in enumerate(drawn):
            edges = np.linspace(0, 1, len(places) + 1)
            for begin, end, place in zip(edges[:-1], edges[1:], places, strict=True):
                position = scale.position(place.value)
                style: dict[str, Any] = {"color": colours(position)}
                if math.isnan(position):
                    style = {"facecolor": "white", "edgecolor": "#999999", "hatch": "////"}
                axes.barh(row, end - begin, 0.74, left=begin, linewidth=0, **style)
        axes.set_yticks(range(len(drawn)), [one_line(label) for label, _ in drawn])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("relative depth: input to output")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        legend = colouring.legend()
        mappable = matplotlib.cm.ScalarMappable(Normalize(0, 1), colours)
        bar = figure.colorbar(mappable, ax=axes, ticks=[0, 1], aspect=max(8, 4 * len(drawn)))
        bar.ax.set_yticklabels([legend["least"], legend["most"]])
        bar.set_label(
            f"{name}, darker: {'more nonlinear' if sense_of(measures.get(name, {})) else 'more'}"
        )
    return figure


def plot_of(run: Run, measure: str) -> Figure:
    """Plot a measure's values by place: signatures, distributions over paths, or bars.

    Raises
    ------
    nlbench.RequestError
        If the run has no value of the measure or too many subjects.
    """
    scores, measures = read_run(run)
    _check_name(measure, scores.measures, "measure")
    return figure_of(run.scores, measures, measure)


def html_of(shown: Run | Result) -> str:
    """Return the notebook representation of a run or a single result."""
    return str(_run_html(shown) if hasattr(shown, "records") else _result_html(shown))


def _run_html(run: Any) -> Markup:
    scores, measures = read_run(run)
    rows = leaderboard(scores, measures)
    if not rows:
        return Markup("<p>{}: no scores have been recorded</p>").format(run.name)
    try:
        name = _site_measure(scores, measures, None)
        places = [p.value for s in scores.subjects for p in scores[s.label, name].places]
        colours = colour_scale(name, measures.get(name, {}), places)
    except RequestError:
        name, colours = "", None
    head = ["network", *([f"fingerprint ({name})"] if colours else []), *scores.measures]
    body = [_row_html(row, scores, name, colours, len(rows) > 1) for row in rows[:_MAX_ROWS]]
    more = len(rows) - len(body)
    note = Markup("<p>and {} more: run.leaderboard()</p>").format(more) if more > 0 else ""
    return _table_html(head, body) + note


def _row_html(
    row: Row,
    scores: Scores,
    name: str,
    colours: ColourScale | None,
    is_ranked: bool,
) -> list[Markup]:
    cells = [Markup("<b>{}</b>").format(row.label)]
    if colours:
        mean = mean_cell([scores[subject.label, name] for subject in row.subjects])
        values = [place.value for place in mean.places]
        drawn = strip(values, colours.scale, title=row.label, colours=dict(enumerate(COLOURS)))
        cells.append(Markup('<div style="width:200px">{}</div>').format(drawn))
    for measure in scores.measures:
        entry = row.entries[measure]
        if entry.status != "ok":
            cells.append(Markup('<i title="{}">{}</i>').format(entry.reason, entry.status))
            continue
        ranks = ranks_text(entry.best, entry.worst) if is_ranked else ""
        text = Markup('<span title="{!r}">{}</span>').format(
            entry.value, plus_minus(entry.value, entry.error)
        )
        cells.append(text + Markup(" <small>({})</small>").format(ranks) if ranks else text)
    return cells


def _result_html(result: Any) -> Markup:
    if result.status != "ok":
        return Markup("<p><i>{}</i>: {}</p>").format(result.status, result.reason)
    names = list(dict.fromkeys(n for v in result.values for n in v.statistics if ":" not in n))[:8]
    summary = [Markup("<b>all</b>")]
    summary += [escape(_number_text(result.summary.get(n))) for n in names]
    rows = [summary]
    for value in result.values[:_MAX_ROWS]:
        cells = [escape(_number_text(value.statistics.get(n))) for n in names]
        if value.status != "ok" and cells:
            cells[0] = Markup('<i title="{}">{}</i>').format(value.reason, value.status)
        rows.append([escape(value.place), *cells])
    if not names:
        names, rows = (
            list(result.summary),
            [[Markup("<b>all</b>"), *(escape(number(v)) for v in result.summary.values())]],
        )
    more = len(result.values) - _MAX_ROWS
    note = Markup("<p>and {} more places</p>").format(more) if more > 0 else Markup("")
    return _table_html(["place", *names], rows) + note


def _number_text(value: float | None) -> str:
    return "" if value is None else number(value)


def _table_html(head: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    def line(tag: str, cells: Sequence[Any]) -> Markup:
        style = ("text-align:left", "text-align:right")
        return Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup(f'<{tag} style="{style[place > 0]}">{{}}</{tag}>').format(cell)
                for place, cell in enumerate(cells)
            )
        )

    return Markup("<table><thead>{}</thead><tbody>{}</tbody></table>").format(
        line("th", head), Markup("").join(line("td", row) for row in rows)
    )
