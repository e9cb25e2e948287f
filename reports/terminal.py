"""Printing of the leaderboard to a terminal, limited to its width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlbench.errors import one_line
from nlbench.store.run import Run

from .exports import board_texts
from .leaderboard import Row, is_training, leaderboard, sort_measure
from .remarks import collect_remarks, list_gpus
from .tables import Measures, read_run
from .text import count, direction, error_legend, functional_calls, unknown_errors, value_text

_MAX_ROWS = 40
_TAIL_ROWS = 10  # number of least nonlinear rows among those shown if not all fit
_MAX_REMARKS = 12


def print_leaderboard(run: Run, console: Console) -> None:
    """Print a run's leaderboard with as many measures as fit into the console's width."""
    scores = read_run(run)
    rows = leaderboard(scores)
    measures = scores.measures
    size = f"{count(len(rows), 'network')}, {count(len(measures), 'measure')}"
    print_line(console, f"{run.name}: {size}")
    if not rows:
        print_line(console, "no scores have been recorded")
        return
    subjects, constant = _varying(rows)
    if len(rows) == 1:
        constant = ", ".join([f"model {subjects['model'][0]}", *filter(None, [constant])])
    if constant:
        print_line(console, constant)
    if len(rows) == 1:
        console.print("", _network_table(rows[0], measures), "", sep="\n")
        facts = [record.probe.facts.get("where") for record in run.records]
        for calls in {functional_calls(where): None for where in facts if where}:
            print_line(console, calls)
    else:
        _print_board(console, rows, measures, subjects)
    if legend := error_legend(entry for row in rows for entry in row.entries.values()):
        print_line(console, legend)
    if unknown := unknown_errors(row.entries for row in rows):
        print_line(console, unknown)
    gpus = list_gpus(run.manifest)
    if len(gpus) > 1:
        print_line(console, f"measured on GPUs whose rounding may differ: {', '.join(gpus)}")
    remarks = collect_remarks(rows, measures)
    for remark in remarks[:_MAX_REMARKS]:
        status = "" if remark.status == "ok" else f"{remark.status}: "
        print_line(console, f"{remark.measures}, {remark.networks}: {status}{remark.text}")
    if len(remarks) > _MAX_REMARKS:
        more = count(len(remarks) - _MAX_REMARKS, "more remark")
        print_line(console, f"and {more}, in scores.csv and on the page")


def _print_board(
    console: Console, rows: Sequence[Row], measures: Measures, subjects: Mapping[str, Sequence[str]]
) -> None:
    """Print several networks by measures: as many as fit next to the subjects, at least one."""
    names = list(rows[0].entries)
    columns = {name: [name, *texts] for name, texts in subjects.items()}
    limit = max(12, console.width // 3)
    remaining = console.width - sum(min(_width(texts), limit) for texts in columns.values())
    _, lines = board_texts(rows)
    left_out = []
    for name, texts in zip(names, zip(*lines, strict=True), strict=True):
        info = measures[name]
        scale = info.scale
        head = f"{one_line(name)}\n{direction(info.more_means, scale)}"
        width = _width([head, *texts])
        if len(columns) > len(subjects) and width > remaining:
            left_out.append(name)
            continue
        columns[f"measure {name}"] = [head, *texts]
        remaining -= width
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for key, (head, *_) in columns.items():
        if key in subjects:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(Text(head), justify="right", no_wrap=True)
    # If not all rows fit, the most and the least nonlinear are shown.
    hidden = max(0, len(rows) - _MAX_ROWS)
    start = len(rows) - _TAIL_ROWS - hidden
    for index, texts in enumerate(list(zip(*columns.values(), strict=True))[1:]):
        if hidden and index == start:
            table.add_row(*("⋮" for _ in columns))
        if not hidden or not start <= index < start + hidden:
            table.add_row(*map(Text, texts))
    console.print("", table, "", sep="\n")
    first = sort_measure(measures)
    if first is not None:
        order = f"sorted by {first}, most nonlinear first"
        order = "checkpoints by step" if is_training(rows) else order
        has_ranks = any(e.best is not None for row in rows for e in row.entries.values())
        print_line(console, f"{order}; rank intervals in brackets" if has_ranks else order)
    if left_out:
        print_line(console, f"not shown: {', '.join(left_out)}")
    if hidden:
        print_line(console, f"not shown: {count(hidden, 'subject')} in the middle")
    if left_out or hidden:
        note = "a wider terminal shows more; the page and scores.csv show everything"
        print_line(console, note)


def _network_table(row: Row, measures: Measures) -> Table:
    """Return a table with one line per measure of a network."""
    table = Table("", "", "", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1), show_header=False)
    table.columns[0].no_wrap = True
    table.columns[1].overflow = table.columns[2].overflow = "fold"
    for name, entry in row.entries.items():
        info = measures[name]
        notes = direction(info.more_means, info.scale)
        table.add_row(*map(Text, (one_line(name), value_text(entry, info), notes)))
    return table


def print_line(console: Console, text: str, indent: str = "") -> None:
    """Print a text on one line, which the terminal may wrap."""
    console.print(Text(indent + one_line(text)), soft_wrap=True)


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


def _width(texts: Sequence[str]) -> int:
    # The width includes the padding on both sides and the gap to the next column.
    return 3 + max(cell_len(line) for text in texts for line in text.split("\n"))
