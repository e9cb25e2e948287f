"""Output files of a study: its page, verdicts, tables and figures."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from nlbench.errors import RequestError
from nlbench.reports.drawing import STYLE, to_svg, use_page_colours
from nlbench.reports.environment import environment
from nlbench.reports.page import render_page
from nlbench.serialization.files import make_folder, read_text, write_atomically

from .figures import use_plain_log_labels
from .study import Findings, Runs, Study

_COLUMNS = ["claim", "published", "here", "agrees", "remark"]
_TEMPLATE = Path(__file__).with_name("templates") / "study.html.j2"


def analyse_in_style(study: Study, runs: Runs) -> Findings:
    """Analyse the runs of a study, drawing its figures in the page's style."""
    with matplotlib.style.context(["default", STYLE]):
        findings = study.analyse(runs)
        for figure in findings.figures.values():
            use_plain_log_labels(figure)
    return findings


def verdict_table(findings: Findings) -> pd.DataFrame:
    """Return the verdicts as a table, one per row.

    Examples
    --------
    >>> from nlbench.studies.framework import Verdict
    >>> verdict_table(Findings([Verdict("x is large", "0.9", "0.8 ± 0.2", True)])).agrees[0]
    'yes'
    """
    rows = [(v.claim, v.published, v.ours, v.word, v.remark) for v in findings.verdicts]
    return pd.DataFrame(rows, columns=_COLUMNS)


def write_findings(name: str, study: Study, findings: Findings, runs: Runs, folder: Path) -> Path:
    """Write a study's page, verdicts, tables and figures, and return the path to the page."""
    make_folder(folder)
    write_atomically(folder / "verdicts.csv", verdict_table(findings).to_csv(index=False))
    for title, table in findings.tables.items():
        write_atomically(folder / f"{_slug(title)}.csv", table.to_csv(index=False))
    for title, figure in findings.figures.items():
        write_atomically(folder / f"{_slug(title)}.png", _png(figure))
    page = folder / "report.html"
    html = render_page(list(runs.values()), head=_head(name, study, findings), title=name)
    write_atomically(page, html.encode("utf-8", errors="replace"))
    return page


def read_verdicts(file: Path) -> pd.DataFrame:
    """Read the verdicts in the common file, if it exists.

    Raise RequestError if it is not a table from `add_verdicts`.
    """
    columns = ["study", "version", *_COLUMNS]
    if not os.path.lexists(file):
        return pd.DataFrame(columns=columns)
    text = read_text(file)
    try:
        table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    except ValueError:
        table = pd.DataFrame()
    if list(table.columns) != columns:
        raise RequestError(
            f"{file} is not a table of verdicts, or is damaged; remove it or choose another --out"
        )
    return table


def add_verdicts(file: Path, name: str, version: str, findings: Findings) -> None:
    """Add a study's verdicts to the common file, replacing those for the same version.

    The columns are ``study, version`` and those of `verdict_table`.
    """
    table = verdict_table(findings)
    table.insert(0, "study", name)
    table.insert(1, "version", version)
    others = read_verdicts(file)
    table = pd.concat([others[(others.study != name) | (others.version != version)], table])
    table = table.sort_values(["study", "version"], kind="stable")
    write_atomically(file, table.to_csv(index=False))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _head(name: str, study: Study, findings: Findings) -> Markup:
    """Render the part of the page above the leaderboard."""
    figures = []
    for number, (title, figure) in enumerate(findings.figures.items()):
        svg = to_svg(figure, prefix=f"study{number}", title=title)
        figures.append({"title": title, "svg": Markup(use_page_colours(svg))})
    view: dict[str, Any] = {
        "question": study.question,
        "source": study.source.citation,
        "headline": findings.headline,
        "remarks": findings.remarks,
        "verdicts": findings.verdicts,
        "figures": figures,
        "tables": [_table(title, table) for title, table in findings.tables.items()],
    }
    template = environment().from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return Markup(template.render(name=name, **view))


def _table(title: str, table: pd.DataFrame) -> dict[str, Any]:
    rows = []
    for row in table.itertuples(index=False):
        rows.append([_text(value) for value in row])
    head = [str(column) for column in table.columns]
    return {"title": title, "file": f"{_slug(title)}.csv", "head": head, "rows": rows}


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())[:60]
