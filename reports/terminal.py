"""Printing of the leaderboard to a terminal, limited to its width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlbench.errors import one_line

from .leaderboard import Row, is_training, leaderboard, sort_measure
from .remarks import gpus_of, remarks_of
from .tables import read_run
from .text import (
    ERROR_LEGEND,
    count,
    direction,
    entry_decimals,
    functional_calls,
    short_value_text,
    value_text,
)

if TYPE_CHECKING:
    from nlbench.store.run import Run

_MAX_ROWS = 40
_TAIL_ROWS = 10  # number of least nonlinear rows among those shown if not all fit
_MAX_REMARKS = 12


def print_leaderboard(run: Run, console: Console) -> None:
    """Print a run's leaderboard with as many measures as fit into the console's width."""
    scores, measures = read_run(run)
    rows = leaderboard(scores, measures)
    size = f"{count(len(rows), 'network')}, {count(len(scores.measures), 'measure')}"
    _line(console, f"{run.name}: {size}")
    if not rows:
        _line(console, "no scores have been recorded")
        return
    subjects, constant = _varying(rows)
    if len(rows) == 1:
        constant = ", ".join([f"model {subjects['model'][0]}", *filter(None, [constant])])
    if constant:
        _line(console, constant)
    if len(rows) == 1:
        console.print()
        console.print(_network_table(rows[0], measures))
        console.print()
        facts = [record.probe.facts.get("where") for record in run.records]
        for calls in {functional_calls(where): None for where in facts if where}:
            _line(console, calls)
    else:
        _print_board(console, rows, measures, subjects)
    if any(entry.error > 0 for row in rows for entry in row.entries.values()):
        _line(console, ERROR_LEGEND)
    gpus = gpus_of(run.manifest)
    if len(gpus) > 1:
        _line(console, f"measured on GPUs whose rounding may differ: {', '.join(gpus)}")
    remarks = remarks_of(rows, scores.measures)
    for remark in remarks[:_MAX_REMARKS]:
        status = "" if remark.status == "ok" else f"{remark.status}: "
        _line(console, f"{remark.measures}, {remark.networks}: {status}{remark.text}")
    if len(remarks) > _MAX_REMARKS:
        more = count(len(remarks) - _MAX_REMARKS, "more remark")
        _line(console, f"and {more}, in scores.csv and on the page")


def _print_board(
    console: Console,
    rows: Sequence[Row],
    measures: Mapping[str, Mapping[str, Any]],
    subjects: Mapping[str, Sequence[str]],
) -> None:
    """Print several networks by measures."""
    names = list(rows[0].entries)
    columns = {name: _column(name, rows, measures.get(name, {})) for name in names}
    shown = _fitting_measures(columns, subjects, console.width)
    picked = _pick_rows(len(rows))
    console.print()
    console.print(_table(subjects, {name: columns[name] for name in shown}, picked))
    console.print()
    first = sort_measure(measures, names)
    if first is not None:
        order = f"sorted by {first}, most nonlinear first"
        order = "checkpoints by step" if is_training(rows) else order
        has_ranks = any(e.best is not None for row in rows for e in row.entries.values())
        _line(console, f"{order}; rank intervals in brackets" if has_ranks else order)
    for hidden in _hidden(names, shown, len(rows), len(picked)):
        _line(console, hidden)


def _network_table(row: Row, measures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with one line per measure of a network."""
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, entry in row.entries.items():
        info = measures.get(name, {})
        notes = direction(info.get("more_means", "neither"), str(info.get("scale") or ""))
        table.add_row(Text(one_line(name)), Text(value_text(entry, info)), Text(notes))
    return table


def _line(console: Console, text: str) -> None:
    console.print(Text(one_line(text)), soft_wrap=True)


def _varying(rows: Sequence[Row]) -> tuple[dict[str, list[str]], str]:
    """Split the fields of subjects into varying columns and a line with the constant ones."""
    texts = {
        "model": [one_line(row.subjects[0].model) for row in rows],
        "weights": [one_line(row.subjects[0].weights_text) for row in rows],
        "data": [one_line(row.subjects[0].data) for row in rows],
        "seed": [_seeds(row) for row in rows],
    }
    shown = {n: column for n, column in texts.items() if n == "model" or len(set(column)) > 1}
    rest = {n: column[0] for n, column in texts.items() if n not in shown and column[0]}
    return shown, ", ".join(f"{name} {value}" for name, value in rest.items())


def _seeds(row: Row) -> str:
    seeds = [subject.training_seed for subject in row.subjects]
    return ", ".join(map(str, seeds)) if len(seeds) < 4 else f"{len(seeds)} seeds"


def _column(name: str, rows: Sequence[Row], info: Mapping[str, Any]) -> list[str]:
    """Return the header and the cells for a measure's column."""
    scale = str(info.get("scale") or "")
    head = f"{one_line(name)}\n{direction(info.get('more_means', 'neither'), scale)}"
    decimals = entry_decimals(rows, name)
    return [head, *(short_value_text(row.entries[name], decimals) for row in rows)]


def _width(texts: Sequence[str]) -> int:
    # The width includes the padding on both sides and the gap to the next column.
    return 3 + max(cell_len(line) for text in texts for line in text.split("\n"))


def _fitting_measures(
    columns: Mapping[str, Sequence[str]], subjects: Mapping[str, Sequence[str]], width: int
) -> list[str]:
    """Return the measures that fit next to the subject columns, at least one."""
    limit = max(12, width // 3)
    remaining = width - sum(min(_width([name, *texts]), limit) for name, texts in subjects.items())
    shown: list[str] = []
    for name, texts in columns.items():
        if not shown or _width(texts) <= remaining:
            shown.append(name)
            remaining -= _width(texts)
    return shown


def _pick_rows(rows: int) -> list[int]:
    """Return the indices of the rows to show: all, or the most and the least nonlinear."""
    if rows <= _MAX_ROWS:
        return list(range(rows))
    return [*range(_MAX_ROWS - _TAIL_ROWS), *range(rows - _TAIL_ROWS, rows)]


def _hidden(measures: Sequence[str], shown: Sequence[str], rows: int, picked: int) -> list[str]:
    """Return lines describing the hidden measures and subjects."""
    lines = []
    left_out = [name for name in measures if name not in shown]
    if left_out:
        lines.append(f"not shown: {', '.join(left_out)}")
    if picked < rows:
        lines.append(f"not shown: {count(rows - picked, 'subject')} in the middle")
    if lines:
        lines.append("a wider terminal shows more; the page and scores.csv show everything")
    return lines


def _table(
    subjects: Mapping[str, Sequence[str]],
    columns: Mapping[str, Sequence[str]],
    picked: Sequence[int],
) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=True)
    for name in subjects:
        table.add_column(name, overflow="fold")
    for head, *_ in columns.values():
        table.add_column(Text(head), justify="right", no_wrap=True)
    body = [*subjects.values(), *(texts for _, *texts in columns.values())]
    for place, row in enumerate(picked):
        if place and row != picked[place - 1] + 1:
            table.add_row(*("⋮" for _ in body))
        table.add_row(*(Text(column[row]) for column in body))
    return table
