"""Data frames and the notebook representation of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nlbench import Signature
from nlbench.errors import RequestError
from nlbench.measure import Result
from nlbench.parsers import unique
from nlbench.store.run import Run

from .agreement import agreement, agreement_frame
from .environment import render
from .figures import FigureData, check_measure_name, site_measure
from .leaderboard import leaderboard, leaderboard_frame
from .panels import RAMP
from .population import colour_scale, reference_fraction
from .tables import MeasureInfo, read_run

_MAX_ROWS = 30


def rank_subjects(
    run: Run,
    measures: Sequence[str] | None = None,
    *,
    seeds: str = "together",
    full: bool = False,
    reference: bool = False,
) -> pd.DataFrame:
    """Rank a run's subjects. See `nlbench.Run.leaderboard`."""
    if seeds not in ("together", "apart"):
        raise RequestError(f"seeds='{seeds}', expected 'together' or 'apart'")
    scores = read_run(run)
    names = list(scores.measures) if measures is None else list(measures)
    for name in names:
        check_measure_name(name, scores)
    rows = leaderboard(scores.restrict(measures=names), together=seeds == "together")
    frame = leaderboard_frame(rows, names, full=full)
    if reference:
        for name in names:
            info = scores.measures[name]
            frame[name, "reference"] = [
                reference_fraction(row.entries[name].value, name, info) for row in rows
            ]
    return frame[names]


def correlate_pairs(run: Run) -> pd.DataFrame:
    """Correlate all pairs of a run's measures, oriented so that larger means more nonlinear.

    Spearman's and Kendall's coefficients are over networks, Pearson's over sites within networks.
    """
    scores = read_run(run)
    return agreement_frame(agreement(leaderboard(scores), scores))


def make_signature(run: Run, subject: str | None = None, measure: str | None = None) -> Signature:
    """Return the signature of a network, given by its label or, if that is unique, its model.

    The defaults are the only subject, and the first measure of sites that has values.
    """
    source = FigureData.of(run, subject, measure)
    name = source.site_measure()
    matches = source.subjects()
    if len(matches) != 1:
        problem = "no subject given" if subject is None else f"'{subject}' is ambiguous"
        labels = ", ".join(s.label for s in matches[:8])
        raise RequestError(f"{problem}; expected one of {len(matches)}: {labels}")
    label = matches[0].label
    for record in run.records:
        if record.identity == (*matches[0].identity, name):
            kinds = record.probe.facts.get("kinds")
            return Signature.of(record.result, kinds=kinds, name=label)
    raise RequestError(f"the run has no {name} for {label}")


def render_html(shown: Run | Result) -> str:
    """Return the notebook representation of a run or a single result."""
    return _result_html(shown) if hasattr(shown, "summary") else _run_html(shown)


def _run_html(run: Any) -> str:
    scores = read_run(run)
    rows = leaderboard(scores)
    if not rows:
        return render("notebook.html.j2", problem=f"{run.name}: no scores have been recorded")
    try:
        name = site_measure(scores)
    except RequestError:
        name = ""
    places = [place.value for row in rows if name for place in row.entries[name].places]
    scale = colour_scale(name, scores.measures.get(name, MeasureInfo()), places)
    more = len(rows) - _MAX_ROWS
    return render(
        "notebook.html.j2",
        head=["network", *([f"fingerprint ({name})"] if scale else []), *scores.measures],
        rows=rows[:_MAX_ROWS],
        measure=name,
        scale=scale,
        ramp=RAMP,
        is_ranked=len(rows) > 1,
        note=f"and {more} more: run.leaderboard()" if more > 0 else "",
    )


def _result_html(result: Any) -> str:
    if result.status != "ok":
        return render("notebook.html.j2", problem=result.reason, status=result.status)
    names = unique(n for v in result.values for n in v.statistics if ":" not in n)[:8]
    names = names or list(result.summary)
    more = len(result.values) - _MAX_ROWS
    return render(
        "notebook.html.j2",
        head=["place", *names],
        result=result,
        values=result.values[:_MAX_ROWS],
        note=f"and {more} more places" if more > 0 else "",
    )
