"""One or several runs on one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from markupsafe import Markup

from nlbench.errors import RequestError
from nlbench.files import make_folder, write_atomically

from .board import board, sorted_by, varying_columns
from .layout import NamedRun
from .linearised import tradeoffs
from .manifest import manifest_view
from .paths import path_pictures
from .remarks import differences, gaps, summary_sentence, unfinished
from .sections import board_remarks, board_table, meanings, sections

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = ["render_page", "write_page"]

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


def render_page(runs: Run | Sequence[Run]) -> str:
    """Write runs as HTML text; see `write_page`."""
    named = _named(runs)
    scores, measures = _together(named)
    frame = board(scores, measures)
    names = list(frame.columns.unique("measure"))
    table = board_table(frame, measures)
    missing = gaps(named, scores, frame)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # our own figures, the only text that isn't escaped
    return environment.get_template("report.html.j2").render(
        title=", ".join(run.name for run in named),
        sentence=summary_sentence(named, frame, missing),
        board=table,
        remarks=board_remarks(table),
        constant=varying_columns(frame)[1],
        sorted_by=sorted_by(measures),
        unfinished=unfinished(named),
        differences=differences(named),
        meanings=meanings(measures),
        sections=sections(scores, measures, names),
        pictures=path_pictures(named, scores),
        tradeoffs=tradeoffs(named),
        gaps=missing,
        manifests=[manifest_view(run) for run in named],
    )


def _named(runs: Run | Sequence[Run]) -> list[NamedRun]:
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
        named.append(NamedRun(name, run.scores, run.manifest, _drawings(run)))
    return named


def _drawings(run: Run) -> dict[tuple[str, str, str, int], Mapping[str, Any]]:
    """Drawn path of each subject; its measures of lines share it."""
    found: dict[tuple[str, str, str, int], Mapping[str, Any]] = {}
    for record in run.records:
        if record.probe.get("drawing"):
            found.setdefault(record.identity[:4], record.probe["drawing"])
    return found


def _together(
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
