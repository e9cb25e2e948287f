"""The leaderboard of subjects: as a table, and printed in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import rich.box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import labelled, subject_columns
from .text import column_decimals, count, direction, one_line, value_with_std

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = [
    "MissingCell",
    "board",
    "cell_texts",
    "missing_cells",
    "print_boards",
    "sorted_by",
    "varying_columns",
]

_FIELDS = ("value", "std", "n", "status", "reason")
_NO_RECORD = {"status": "absent", "reason": "nothing is recorded"}


@dataclass(frozen=True)
class MissingCell:
    """A cell of a board that has no number.

    Parameters
    ----------
    subject, measure : str
    status : str
        ``undefined``, ``skipped``, ``failed``, or ``absent`` where nothing is recorded.
    reason : str
    run : str
        Empty where the scores are of one run.
    """

    subject: str
    measure: str
    status: str
    reason: str
    run: str = ""


def board(scores: pd.DataFrame, measures: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Set subjects side by side, the most nonlinear by the first measure on top.

    Parameters
    ----------
    scores : DataFrame
        Tidy, one number a row; a column ``run`` tells the runs apart where there are
        several.
    measures : mapping of str to mapping
        What is known of each measure, in the order of the columns; ``more_means`` of
        the first decides the order of the rows. Where it is ``neither`` the rows stay in
        the order of the scores.

    Returns
    -------
    DataFrame
        One row a subject, its index the subject's columns and its label. Columns
        ``(measure, field)`` with the fields ``value``, ``std`` (over places; NaN
        where there is but one), ``n``, ``status`` and ``reason``. Subjects without a
        number come last.

    Raises
    ------
    nlbench.RequestError
        If the scores lack a column or have a number twice.

    Examples
    --------
    >>> scores = pd.DataFrame({"model": ["a", "b"], "weights": "init", "data": "digits",
    ...     "seed": 0, "measure": "affinity", "place": "", "statistic": "value",
    ...     "value": [0.9, 0.4], "n": 64, "status": "ok", "reason": ""})
    >>> table = board(scores, {"affinity": {"more_means": "less nonlinear"}})
    >>> table["affinity", "value"].tolist()
    [0.4, 0.9]
    """
    table = labelled(scores)
    keys = [*subject_columns(table), "subject"]
    names = list(dict.fromkeys([*measures, *table["measure"]]))
    subjects = list(table[keys].drop_duplicates().itertuples(index=False, name=None))
    cells = _summaries(table)
    rows = [
        [cells.get((subject[-1], name), _NO_RECORD).get(f) for name in names for f in _FIELDS]
        for subject in subjects
    ]
    columns = pd.MultiIndex.from_product([names, _FIELDS], names=["measure", "field"])
    index = pd.MultiIndex.from_tuples(subjects, names=keys) if subjects else None
    frame = pd.DataFrame(rows, index=index, columns=columns, dtype=object)
    for name in names:
        for field in ("value", "std", "n"):
            frame[name, field] = pd.to_numeric(frame[name, field])
    first = sorted_by(measures)
    if first is None or first not in names:
        return frame
    ascending = measures[first].get("more_means") == "less nonlinear"
    return frame.sort_values((first, "value"), ascending=ascending, kind="stable")


def sorted_by(measures: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Name the measure by which a board is sorted; None where the first has no direction."""
    first = next(iter(measures), None)
    if first is None or measures[first].get("more_means", "neither") == "neither":
        return None
    return first


def _summaries(table: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    values = table[(table["statistic"] == "value") & (table["status"] == "ok")]
    places = values[values["place"] != ""].groupby(["subject", "measure"]).size()
    single = set(places[places == 1].index)
    rows = table[table["place"] == ""]
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    columns = ["subject", "measure", "statistic", "value", "n", "status", "reason"]
    for subject, name, statistic, value, n, status, reason in rows[columns].itertuples(index=False):
        if statistic == "value" or (statistic == "std" and (subject, name) not in single):
            cell = cells.setdefault((subject, name), {})
            cell[statistic] = value if status == "ok" else math.nan
            if statistic == "value":
                cell |= {"n": n, "status": status, "reason": reason}
    return {key: cell if "status" in cell else _NO_RECORD for key, cell in cells.items()}


def cell_texts(frame: pd.DataFrame, name: str) -> list[str]:
    """Write a measure's column of a board: a number with its spread, else the status."""
    values, stds = frame[name, "value"], frame[name, "std"]
    decimals = column_decimals([*values, stds.max()])
    return [
        value_with_std(value, std, decimals) if status == "ok" else str(status)
        for value, std, status in zip(values, stds, frame[name, "status"], strict=True)
    ]


def varying_columns(frame: pd.DataFrame) -> tuple[dict[str, list[str]], str]:
    """Split a subject's columns: those that differ, and one line that says the rest."""
    texts = {
        str(name): [str(value) for value in frame.index.get_level_values(str(name))]
        for name in frame.index.names
        if name not in (None, "subject")
    }
    shown = {n: column for n, column in texts.items() if n == "model" or len(set(column)) > 1}
    rest = {n: column[0] for n, column in texts.items() if n not in shown and column[0]}
    return shown, ", ".join(f"{name} {value}" for name, value in rest.items())


def missing_cells(frame: pd.DataFrame) -> list[MissingCell]:
    """List the cells of a board that have no number, in the order of the board."""
    if frame.empty:
        return []
    labels = frame.index.get_level_values("subject")
    runs = frame.index.get_level_values("run") if "run" in frame.index.names else [""] * len(frame)
    return [
        MissingCell(label, name, row[name, "status"], row[name, "reason"], run)
        for run, label, (_, row) in zip(runs, labels, frame.iterrows(), strict=True)
        for name in frame.columns.unique("measure")
        if row[name, "status"] != "ok"
    ]


def _remarks(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Subject, measure and remark of the numbers that need one."""
    return [
        (str(label), str(name), str(row[name, "reason"]))
        for label, (_, row) in zip(
            frame.index.get_level_values("subject"), frame.iterrows(), strict=True
        )
        for name in frame.columns.unique("measure")
        if row[name, "status"] == "ok" and row[name, "reason"]
    ]


def print_boards(run: Run, console: Console) -> None:
    """Print a run's board, in as many tables as the width needs.

    Parameters
    ----------
    run : nlbench.store.run_folder.Run
    console : rich.console.Console
        Where to; its width decides how many measures share a table.
    """
    measures: Mapping[str, Mapping[str, Any]] = run.manifest.get("measures", {})
    frame = board(run.scores, measures)
    names = list(frame.columns.unique("measure"))
    what = f"{count(len(frame), 'subject')}, {count(len(names), 'measure')}"
    console.print(Text(f"{one_line(run.name)}: {what}"), soft_wrap=True)
    if frame.empty:
        console.print(Text("no scores are recorded"))
        return
    subjects, constant = varying_columns(frame)
    shown = {name: [one_line(text) for text in texts] for name, texts in subjects.items()}
    if constant:
        console.print(Text(one_line(constant)), soft_wrap=True)
    heads = {name: _head(name, measures.get(name, {})) for name in names}
    columns = {name: [heads[name], *cell_texts(frame, name)] for name in names}
    for group in _groups(columns, shown, console.width):
        console.print()
        console.print(_table(shown, {name: columns[name] for name in group}))
    console.print()
    first = sorted_by(measures)
    if first is not None and len(frame) > 1:
        console.print(Text(f"sorted by {one_line(first)}, most nonlinear first"), soft_wrap=True)
    for label, name, remark in _remarks(frame):
        console.print(Text(one_line(f"{name}, {label}: {remark}")), soft_wrap=True)
    for cell in missing_cells(frame):
        line = f"{cell.measure}, {cell.subject}: {cell.status}: {cell.reason}"
        console.print(Text(one_line(line)), soft_wrap=True)


def _head(name: str, details: Mapping[str, Any]) -> str:
    return f"{one_line(name)}\n{direction(details.get('more_means', 'neither'))}"


def _width(texts: Sequence[str]) -> int:
    # Padding on both sides, and the space that parts it from the next column.
    return 3 + max(cell_len(line) for text in texts for line in text.split("\n"))


def _groups(
    columns: Mapping[str, Sequence[str]], shown: Mapping[str, Sequence[str]], width: int
) -> Iterator[list[str]]:
    """Split measures into groups that fit beside the subject's columns."""
    widest = max(12, width // 3)
    room = width - sum(min(_width([name, *texts]), widest) for name, texts in shown.items())
    group: list[str] = []
    left = room
    for name, texts in columns.items():
        if group and _width(texts) > left:
            yield group
            group, left = [], room
        group.append(name)
        left -= _width(texts)
    yield group


def _table(shown: Mapping[str, Sequence[str]], columns: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=True)
    for name in shown:
        table.add_column(name, overflow="fold")
    for head, *_ in columns.values():
        table.add_column(Text(head), justify="right", no_wrap=True)
    body = [*shown.values(), *(texts for _, *texts in columns.values())]
    for row in zip(*body, strict=True):
        table.add_row(*(Text(text) for text in row))
    return table
