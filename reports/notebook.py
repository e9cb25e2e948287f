"""Data frames and the notebook representation of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from nlbench import Signature
from nlbench.errors import RequestError, nearest

from .agreement import agreement, agreement_frame
from .environment import environment
from .figures import check_measure_name, site_measure
from .fingerprint import strip
from .leaderboard import Standing, leaderboard, leaderboard_frame
from .panels import RAMP
from .population import colour_scale, reference_share
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
    is_run = hasattr(shown, "records")
    view = _run_view(shown) if is_run else _result_view(shown)
    return environment().get_template("notebook.html.j2").render(**view)


def _run_view(run: Any) -> dict[str, Any]:
    scores, measures = read_run(run)
    rows = leaderboard(scores, measures)
    if not rows:
        return {"problem": f"{run.name}: no scores have been recorded"}
    try:
        name = site_measure(scores, measures, None)
    except RequestError:
        name = ""
    places = [place.value for row in rows if name for place in row.entries[name].places]
    colours = colour_scale(name, measures.get(name, {}), places)
    lines = []
    for row in rows[:_MAX_ROWS]:
        cells = [{"text": row.label, "tag": "b"}]
        if colours:
            values = [place.value for place in row.entries[name].places]
            drawn = strip(values, colours.scale, title=row.label, colours=RAMP)
            cells.append({"text": Markup('<div style="width:200px">{}</div>').format(drawn)})
        cells += [_entry_view(row.entries[n], len(rows) > 1) for n in scores.measures]
        lines.append(cells)
    head = ["network", *([f"fingerprint ({name})"] if colours else []), *scores.measures]
    more = len(rows) - len(lines)
    note = f"and {more} more: run.leaderboard()" if more > 0 else ""
    return {"head": head, "rows": lines, "note": note}


def _entry_view(entry: Standing, is_ranked: bool) -> dict[str, str]:
    if entry.status != "ok":
        return {"text": entry.status, "tag": "i", "title": entry.reason}
    text = plus_minus(entry.value, entry.error)
    ranks = entry.ranks if is_ranked else ""
    return {"text": text, "tag": "span", "title": repr(entry.value), "small": ranks}


def _result_view(result: Any) -> dict[str, Any]:
    if result.status != "ok":
        return {"problem": result.reason, "status": result.status}
    names = list(dict.fromkeys(n for v in result.values for n in v.statistics if ":" not in n))[:8]
    names = names or list(result.summary)
    summary = [{"text": _number_text(result.summary.get(name))} for name in names]
    lines = [[{"text": "all", "tag": "b"}, *summary]]
    for value in result.values[:_MAX_ROWS]:
        cells = [{"text": _number_text(value.statistics.get(name))} for name in names]
        if value.status != "ok" and cells:
            cells[0] = {"text": value.status, "tag": "i", "title": value.reason}
        lines.append([{"text": value.place}, *cells])
    more = len(result.values) - _MAX_ROWS
    note = f"and {more} more places" if more > 0 else ""
    return {"head": ["place", *names], "rows": lines, "note": note}


def _number_text(value: float | None) -> str:
    return "" if value is None else number(value)
