"""Data frames and the notebook representation of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup, escape

from nlbench import Signature
from nlbench.errors import RequestError, nearest

from .agreement import agreement, agreement_frame
from .figures import check_measure_name, site_measure
from .fingerprint import strip
from .leaderboard import Row, leaderboard, leaderboard_frame
from .panels import RAMP
from .population import ColourScale, colour_scale, reference_share
from .tables import Scores, read_run
from .text import number, plus_minus

if TYPE_CHECKING:
    from nlbench.measure import Result
    from nlbench.store.run import Run

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
        check_measure_name(name, scores)
    rows = leaderboard(scores.restrict(measures=names), known, together=seeds == "together")
    frame = leaderboard_frame(rows, names, full=full)
    if reference:
        for name in names:
            info = known.get(name, {})
            frame[name, "reference"] = [
                reference_share(row.entries[name].value, name, info) for row in rows
            ]
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
    name = site_measure(scores, measures, measure)
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


def html_of(shown: Run | Result) -> str:
    """Return the notebook representation of a run or a single result."""
    return str(_run_html(shown) if hasattr(shown, "records") else _result_html(shown))


def _run_html(run: Any) -> Markup:
    scores, measures = read_run(run)
    rows = leaderboard(scores, measures)
    if not rows:
        return Markup("<p>{}: no scores have been recorded</p>").format(run.name)
    try:
        name = site_measure(scores, measures, None)
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
        values = [place.value for place in row.entries[name].places]
        drawn = strip(values, colours.scale, title=row.label, colours=RAMP)
        cells.append(Markup('<div style="width:200px">{}</div>').format(drawn))
    for measure in scores.measures:
        entry = row.entries[measure]
        if entry.status != "ok":
            cells.append(Markup('<i title="{}">{}</i>').format(entry.reason, entry.status))
            continue
        ranks = entry.ranks if is_ranked else ""
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
