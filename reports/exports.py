"""Export formats for a run's tables: CSV, Markdown, LaTeX and Parquet."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, one_line, strip_controls
from nlbench.serialization.files import csv_text, spreadsheet_text, write_atomically
from nlbench.store.run import Run

from .leaderboard import Row, leaderboard
from .tables import Measures, read_run
from .text import entry_decimals, number

if TYPE_CHECKING:
    import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "–": "--", "−": "$-$", "±": r"$\pm$", "∞": r"$\infty$", "·": r"$\cdot$",
}  # fmt: skip


_TABLE = r"""\begin{{table}}
  \centering
  \caption{{{caption}}}
  \begin{{tabular}}{{{columns}}}
    \toprule
    {head} \\
    \midrule
{body}    \bottomrule
  \end{{tabular}}
\end{{table}}
"""


def to_csv(table: pd.DataFrame) -> str:
    """Convert a table to CSV that is safe to open in a spreadsheet.

    Strings and column names that could be parsed as formulas are prefixed with an apostrophe,
    which `read_csv` removes.
    """
    return csv_text(map(str, table.columns), table.itertuples(index=False, name=None))


def read_csv(file: str | os.PathLike[str] | io.StringIO) -> pd.DataFrame:
    """Read a table written by `to_csv`.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"=model": ["=1+1", "b"], "value": [-0.5, 2.0]})
    >>> read_csv(io.StringIO(to_csv(table))).equals(table)
    True
    """
    import pandas as pd

    table = pd.read_csv(file, keep_default_na=True)
    table.columns = [spreadsheet_text(str(name)) for name in table.columns]
    for name in table.columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            table[name] = [spreadsheet_text(v) if isinstance(v, str) else v for v in table[name]]
    return table


def to_parquet(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a table as Parquet."""
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
    return "".join(_LATEX.get(c, c) for c in strip_controls(text))


def to_latex(run: Run, *, ranks: bool = True, error: bool = False) -> str:
    """Convert a run's leaderboard to a LaTeX table, which requires the package booktabs.

    Arrows in the head point to the more nonlinear end; the caption says what ± is.
    """
    scores = read_run(run)
    return latex_table(leaderboard(scores), scores.measures, ranks=ranks, error=error)


def latex_table(
    rows: Sequence[Row], measures: Measures, *, ranks: bool = True, error: bool = True
) -> str:
    """Convert a leaderboard to a LaTeX table, see `to_latex`."""
    names, lines = board_texts(rows, ranks=ranks, error=error)
    arrows = {1: r" $\uparrow$", -1: r" $\downarrow$", 0: ""}
    heads = [latex_text(n) + arrows[measures[n].sense] for n in names]
    body = []
    for row, line in zip(rows, lines, strict=True):
        body.append([latex_text(text) for text in (row.label, *line)])
    caption = latex_text(_caption(rows, measures, ranks, error))
    return _TABLE.format(
        caption=caption,
        columns="l" + "r" * len(names),
        head=" & ".join(["network", *heads]),
        body="".join(f"    {' & '.join(line)} \\\\\n" for line in body),
    )


def _caption(rows: Sequence[Row], measures: Measures, ranks: bool, error: bool) -> str:
    """Explain the arrows, ± and the brackets, and state the number of samples."""
    entries = [e for row in rows for e in row.entries.values() if e.status == "ok"]
    parts = ["Nonlinearity; arrows point to the more nonlinear end."]
    units = dict.fromkeys(e.over for e in entries if error and e.error > 0)
    if units:
        parts.append(f"± is the standard error over {', '.join(units)}.")
    if ranks and any(e.best is not None for e in entries) and len(rows) > 1:
        parts.append("In brackets: interval of the rank.")
    scales = {n: info.scale for n, info in measures.items() if info.scale}
    parts += [
        f"{name} {scale}." for name, scale in scales.items() if rows and name in rows[0].entries
    ]
    counted = [name for name, info in measures.items() if info.probe not in ("lines", "graph")]
    cells = [row.entries[name] for row in rows for name in counted if name in row.entries]
    samples = sorted({e.n for e in cells if e.status == "ok" and e.n})
    if samples:
        low = f"{samples[0]:,} to " if len(samples) > 1 else ""
        parts.append(f"n = {low}{samples[-1]:,} samples.")
    return " ".join(parts)


def to_markdown(run: Run, *, ranks: bool = True) -> str:
    """Convert a run's leaderboard to a Markdown table. See `to_latex`."""
    rows = leaderboard(read_run(run))
    names, lines = board_texts(rows, ranks=ranks)
    body = [[row.label, *line] for row, line in zip(rows, lines, strict=True)]
    return markdown_table(["network", *names], body)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a Markdown table, with the first column left-aligned and the others right-aligned."""
    lines = [_markdown_line(head), "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *map(_markdown_line, rows)]) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    texts = (
        one_line(c).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;") for c in cells
    )
    return f"| {' | '.join(texts)} |"


def board_texts(
    rows: Sequence[Row], *, ranks: bool = True, error: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Return the measures of a leaderboard, and its values as text, with errors or rounded alike.

    With `ranks`, they are followed by the intervals for the ranks in brackets.
    """
    names = list(rows[0].entries) if rows else []
    decimals = {}
    for name in names:
        decimals[name] = entry_decimals([row.entries[name] for row in rows])
    lines: list[list[str]] = [[] for _ in rows]
    for row, line in zip(rows, lines, strict=True):
        for name in names:
            entry = row.entries[name]
            text = number(entry.value, decimals[name]) if entry.status == "ok" else entry.status
            if error and entry.status == "ok" and entry.error > 0:
                text = entry.text
            has_rank = ranks and len(rows) > 1 and entry.status == "ok" and entry.ranks
            line.append(f"{text} ({entry.ranks})" if has_rank else text)
    return names, lines
