"""A study's findings written down: its page, its verdicts and tables as files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.style
import pandas as pd
from markupsafe import Markup

from nlbench.reports.page import environment, render_page
from nlbench.reports.svg import STYLE, in_page_colours, to_svg
from nlbench.serialization.files import make_folder, write_atomically

from .study import Findings, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["add_verdicts", "analysed", "verdict_table", "write_findings"]


def analysed(study: Study, runs: Mapping[str, Run]) -> Findings:
    """Let a study analyse its runs, with its figures in the style of the page's own."""
    with matplotlib.style.context(["default", STYLE]):
        return study.analyse(runs)


def verdict_table(findings: Findings) -> pd.DataFrame:
    """Verdicts as a table, one a row.

    Examples
    --------
    >>> from nlbench.studies.study import Verdict
    >>> verdict_table(Findings([Verdict("x is large", "0.9", "0.8 ± 0.2", True)])).agrees[0]
    'yes'
    """
    rows = [(v.claim, v.published, v.ours, v.word, v.remark) for v in findings.verdicts]
    return pd.DataFrame(rows, columns=["claim", "published", "here", "agrees", "remark"])


def write_findings(
    name: str, study: Study, findings: Findings, runs: Mapping[str, Run], folder: Path
) -> Path:
    """Write the page, ``verdicts.csv``, a CSV file a table and a PNG file a figure into a folder.

    Returns
    -------
    pathlib.Path
        The page.
    """
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


def add_verdicts(file: Path, name: str, version: str, findings: Findings) -> None:
    """Put a study's verdicts among those of the others, in place of what it said before.

    Parameters
    ----------
    file : Path
        With the columns ``study, version`` and those of `verdict_table`.
    name : str
        The study's.
    version : str
        ``full`` or ``quick``, and what was chosen beside it: each has rows of its own.
    findings : Findings
    """
    mine = verdict_table(findings)
    mine.insert(0, "study", name)
    mine.insert(1, "version", version)
    if file.is_file():
        others = pd.read_csv(file, dtype=str, keep_default_na=False)
        mine = pd.concat([others[(others.study != name) | (others.version != version)], mine])
    mine = mine.sort_values(["study", "version"], kind="stable")
    write_atomically(file, mine.to_csv(index=False))


def _png(figure: Figure) -> bytes:
    import matplotlib.style

    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _head(name: str, study: Study, findings: Findings) -> Markup:
    """What stands above the leaderboard."""
    figures = [
        {
            "title": title,
            "svg": Markup(in_page_colours(to_svg(figure, prefix=f"study{number}", title=title))),
        }
        for number, (title, figure) in enumerate(findings.figures.items())
    ]
    view: dict[str, Any] = {
        "question": study.question,
        "source": study.source.citation,
        "remarks": findings.remarks,
        "verdicts": findings.verdicts,
        "figures": figures,
        "tables": [
            {
                "title": title,
                "file": f"{_slug(title)}.csv",
                "head": [str(column) for column in table.columns],
                "rows": [[_text(value) for value in row] for row in table.itertuples(index=False)],
            }
            for title, table in findings.tables.items()
        ],
    }
    return Markup(environment().get_template("study.html.j2").render(name=name, **view))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())[:60]
