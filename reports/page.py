"""One or several runs on one self-contained HTML page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from markupsafe import Markup

from nlbench.errors import RequestError
from nlbench.serialization.files import make_folder, write_atomically

from .agreement import agreement
from .embedded import pack, to_script
from .layout import NamedRun
from .leaderboard import CONFIDENCE, leaderboard, sort_measure
from .linearised import tradeoffs
from .manifest import manifest_view
from .planes import planes_of
from .remarks import differences, gaps, summary_sentence, unfinished, what_was_measured
from .signatures import signature_maps
from .tables import Scores, labelled
from .views import board_view, heatmaps, meanings

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = ["named_runs", "render_page", "together", "write_page", "write_site"]

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(runs: Run | Sequence[Run], output: str | os.PathLike[str]) -> Path:
    """Write runs as one HTML file that needs nothing beside itself.

    The file appears whole or not at all: a reader never sees half a page.

    Parameters
    ----------
    runs : nlbench.store.run_folder.Run or sequence of them
        The rows of several runs are labelled with the run's name.
    output : path
        Where to; missing folders are made, a file that is there is replaced.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    nlbench.RequestError
        If there is no run, or the file can't be written.
    """
    path = Path(output)
    if path.is_dir():
        raise RequestError(f"{path} is a folder; expected the name of an HTML file")
    html = render_page(runs)
    make_folder(path.parent)
    # a name from elsewhere may hold what UTF-8 can't
    write_atomically(path, html.encode("utf-8", errors="replace"))
    return path


def write_site(runs: Run | Sequence[Run], output: str | os.PathLike[str]) -> Path:
    """Write runs as a folder of pages that any server can serve: an index and one page a run.

    Parameters
    ----------
    runs : nlbench.store.run_folder.Run or sequence of them
    output : path
        The folder; pages that are there are replaced.

    Returns
    -------
    pathlib.Path
        The index.

    Raises
    ------
    nlbench.RequestError
        If there is no run, or the files can't be written.
    """
    folder = Path(output)
    given: list[Run] = list(runs) if isinstance(runs, Sequence) else [runs]
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; expected the name of a folder")
    rows = []
    taken = {"index.html"}
    for run, named in zip(given, named_runs(given), strict=True):
        file = _file_name(named.name, taken)
        taken.add(file)
        write_page(run, folder / file)
        rows.append({"file": file, **_indexed(named)})
    rows.sort(key=lambda row: str(row["created"]), reverse=True)
    html = environment().get_template("index.html.j2").render(rows=rows)
    write_atomically(folder / "index.html", html.encode("utf-8", errors="replace"))
    return folder / "index.html"


def _file_name(name: str, taken: Container[str]) -> str:
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    stem = stem.strip("-.")[:80] or "run"
    found, number = f"{stem}.html", 1
    while found in taken:
        number += 1
        found = f"{stem}-{number}.html"
    return found


def _indexed(run: NamedRun) -> dict[str, Any]:
    """What the index says of a run."""
    measures: Mapping[str, Mapping[str, Any]] = run.manifest.get("measures") or {}
    scores = Scores(labelled(run.scores), measures)
    rows = leaderboard(scores, measures, repeats=1)
    first = sort_measure(measures, scores.measures)
    top = rows[0] if rows and first and rows[0].entries[first].status == "ok" else None
    cells = [scores[s.label, name].status for s in scores.subjects for name in scores.measures]
    return {
        "name": run.name,
        "created": str(run.manifest.get("created") or ""),
        "networks": len(rows),
        "measures": ", ".join(scores.measures),
        "top": f"{top.label} by {first}" if top and len(rows) > 1 else "",
        "cells": ", ".join(f"{cells.count(status)} {status}" for status in dict.fromkeys(cells)),
        "unfinished": bool(run.manifest.get("unfinished")),
    }


def render_page(runs: Run | Sequence[Run], *, head: Markup | None = None, title: str = "") -> str:
    """Write runs as HTML text; see `write_page`.

    Parameters
    ----------
    runs : nlbench.store.run_folder.Run or sequence of them
    head : Markup, optional
        What is to stand above the leaderboard.
    title : str
        In place of the runs' names.
    """
    named = named_runs(runs)
    table, measures = together(named)
    probes = list(dict.fromkeys(about.get("probe") for about in measures.values()))
    measures = dict(sorted(measures.items(), key=lambda item: probes.index(item[1].get("probe"))))
    scores = Scores(labelled(table), measures)
    rows = leaderboard(scores, measures)
    missing = gaps(named, scores)
    kinds = _kinds(named)
    maps = signature_maps(rows, scores, measures)
    content = {
        **pack(scores, measures, rows, named),
        "kindOrder": kinds,
        "confidence": CONFIDENCE,
        "maps": maps,
    }
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title or _names(named),
            head=head or Markup(),
            measured=what_was_measured(named, scores, rows),
            sentence=summary_sentence(scores, measures, rows, missing),
            confidence=f"{100 * CONFIDENCE:g}",
            unfinished=unfinished(named),
            differences=differences(named),
            meanings=meanings(measures),
            agreement=heatmaps(agreement(rows, scores, measures), scores.measures, len(rows)),
            lines=any(about.get("probe") == "lines" for about in measures.values()),
            maps=bool(maps),
            planes=[picture for run in named for picture in run.planes],
            tradeoffs=tradeoffs(named),
            gaps=missing,
            manifests=[manifest_view(run) for run in named],
            version=named[0].manifest.get("nlbench", ""),
            data=Markup(to_script(content)),  # no tag can begin inside it
            **board_view(scores, measures, rows, content),
        )
    )


def _names(named: Sequence[NamedRun]) -> str:
    return ", ".join(run.name for run in named) if len(named) < 5 else f"{len(named)} runs"


def environment() -> jinja2.Environment:
    """Environment of the templates; everything but our own style, script and figures is escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["svg"] = Markup
    for name in ("css", "script"):
        file = _TEMPLATES / {"css": "page.css", "script": "page.js"}[name]
        found.globals[name] = Markup(file.read_text(encoding="utf-8"))
    return found


def named_runs(runs: Run | Sequence[Run]) -> list[NamedRun]:
    """Give each run a name that no other has, and take out of its records what pages show."""
    given: list[Run] = list(runs) if isinstance(runs, Sequence) else [runs]
    if not given:
        raise RequestError("no run to report; expected at least one")
    named: list[NamedRun] = []
    for run in given:
        name = str(run.name) or "run"
        taken = {other.name for other in named}
        number = 2
        while name in taken:
            name = f"{run.name} ({number})"
            number += 1
        named.append(NamedRun(name, run.scores, run.manifest, **_beside(run)))
    return named


def _beside(run: Run) -> dict[str, Any]:
    """What the records say that isn't in the table."""
    drawings: dict[tuple[str, str, str, int], Mapping[str, Any]] = {}
    kinds: dict[tuple[str, str, str, int], dict[str, str]] = {}
    remarks: dict[tuple[str, str, str, int], dict[str, None]] = {}
    costs: dict[tuple[str, str, str, int, str], dict[str, float]] = {}
    for record in run.records:
        subject = record.identity[:4]
        shown = record.probe.facts
        if shown.get("drawing"):  # the measures of lines share it
            drawings.setdefault(subject, shown["drawing"])
        kinds.setdefault(subject, {}).update(shown.get("kinds", {}))
        said = remarks.setdefault(subject, {})
        for site, remark in shown.get("remarks", {}).items():
            said[f"{site}: {remark}"] = None
        if shown.get("unseen"):
            said[f"not seen inside {', '.join(shown['unseen'])}"] = None
        cost = dict(getattr(record, "costs", None) or {})
        costs[record.identity] = {"seconds": getattr(record, "seconds", 0.0), **cost}
    return {
        "drawings": drawings,
        "kinds": kinds,
        "costs": costs,
        "remarks": {subject: tuple(said) for subject, said in remarks.items()},
        "planes": planes_of(run.path) if run.path else (),
    }


def _kinds(runs: Sequence[NamedRun]) -> list[str]:
    """Kinds of activation, the most frequent first."""
    counted = Counter(
        kind for run in runs for sites in run.kinds.values() for kind in sites.values() if kind
    )
    return [kind for kind, _ in counted.most_common()]


def together(
    runs: Sequence[NamedRun],
) -> tuple[pd.DataFrame, dict[str, Mapping[str, Any]]]:
    """Scores under each other, and each measure as the first run that has it tells it."""
    measures: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        for name, about in (run.manifest.get("measures") or {}).items():
            measures.setdefault(name, about)
    if len(runs) == 1:
        return runs[0].scores, measures
    tables = [run.scores.assign(run=run.name) for run in runs if len(run.scores)]
    return (pd.concat(tables, ignore_index=True) if tables else runs[0].scores), measures
