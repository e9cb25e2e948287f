"""Export formats for a run's tables: CSV, Markdown, LaTeX and Parquet."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from nlbench.errors import RequestError, one_line, without_controls
from nlbench.serialization.files import spreadsheet_safe, spreadsheet_text, write_atomically

from .leaderboard import Row, leaderboard, sense_of
from .tables import Scores
from .text import interval_decimals, number
from .views import ranks_text

if TYPE_CHECKING:
    from nlbench.store.run import Run

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "–": "--", "±": r"$\pm$", "∞": r"$\infty$", "·": r"$\cdot$",
}  # fmt: skip


def to_csv(table: pd.DataFrame) -> str:
    """Convert a table to CSV that is safe to open in a spreadsheet.

    Strings and column names that could be parsed as formulas are prefixed with an apostrophe,
    which `read_csv` removes.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([spreadsheet_safe(str(name)) for name in table.columns])
    for row in table.itertuples(index=False, name=None):
        writer.writerow([_csv_cell(value) for value in row])
    return stream.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        return spreadsheet_safe(value)
    return "" if value is None or value != value else value


def read_csv(file: str | os.PathLike[str] | io.StringIO) -> pd.DataFrame:
    """Read a table written by `to_csv`.

    Examples
    --------
    >>> table = pd.DataFrame({"=model": ["=1+1", "b"], "value": [-0.5, 2.0]})
    >>> read_csv(io.StringIO(to_csv(table))).equals(table)
    True
    """
    table = pd.read_csv(file, keep_default_na=True)
    table.columns = [spreadsheet_text(str(name)) for name in table.columns]
    for name in table.columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            table[name] = [spreadsheet_text(v) if isinstance(v, str) else v for v in table[name]]
    return table


def to_parquet(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a table as Parquet.

    Raises
    ------
    nlbench.RequestError
        If pyarrow is not installed.
    """
    stream = io.BytesIO()
    try:
        table.to_parquet(stream, engine="pyarrow", index=False)
    except ImportError as error:
        raise RequestError(
            "Parquet requires the package pyarrow; pip install 'nlbench[parquet]'"
        ) from error
    write_atomically(Path(path), stream.getvalue())
    return Path(path)


def latex_text(text: str) -> str:
    r"""Escape text for LaTeX.

    Examples
    --------
    >>> latex_text("mobilenet_v3 & 50 %")
    'mobilenet\\_v3 \\& 50 \\%'
    """
    return "".join(_LATEX.get(c, c) for c in without_controls(text))


def to_latex(run: Run, *, ranks: bool = True) -> str:
    r"""Convert a run's leaderboard to a LaTeX table with booktabs rules.

    Parameters
    ----------
    ranks : bool
        Add the interval for the rank to each value.

    Returns
    -------
    str
        A ``tabular``, which requires ``\usepackage{booktabs}``.
    """
    head, rows = _texts(run, ranks)
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"  \toprule",
        *(f"  {' & '.join(map(latex_text, line))} \\\\" for line in [head]),
        r"  \midrule",
        *(f"  {' & '.join(map(latex_text, line))} \\\\" for line in rows),
        r"  \bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def to_markdown(run: Run, *, ranks: bool = True) -> str:
    """Convert a run's leaderboard to a Markdown table; see `to_latex`."""
    head, rows = _texts(run, ranks)
    return markdown_table(head, rows)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a Markdown table, with the first column left-aligned and the others right-aligned."""
    lines = [_markdown_line(head), "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *map(_markdown_line, rows)]) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    texts = (
        one_line(c).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for c in cells
    )
    return f"| {' | '.join(texts)} |"


def _texts(run: Run, ranks: bool) -> tuple[list[str], list[list[str]]]:
    measures: Mapping[str, Mapping[str, Any]] = run.manifest.get("measures", {})
    scores = Scores(run.scores, measures)
    rows = leaderboard(scores, measures)
    columns = [_column(rows, name, measures.get(name, {}), ranks) for name in scores.measures]
    lines = [[row.label, *(c[i] for c in columns)] for i, row in enumerate(rows)]
    return ["network", *scores.measures], lines


def _column(rows: Sequence[Row], name: str, info: Mapping[str, Any], ranks: bool) -> list[str]:
    entries = [row.entries[name] for row in rows]
    decimals = interval_decimals(entries)
    texts = []
    for entry in entries:
        text = number(entry.value, decimals) if entry.status == "ok" else entry.status
        interval = ranks_text(entry.best, entry.worst) if sense_of(info) and len(rows) > 1 else ""
        has_rank = ranks and interval and entry.status == "ok"
        texts.append(f"{text} ({interval})" if has_rank else text)
    return texts
