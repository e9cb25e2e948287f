"""What a page shows of each measure: its meaning, its figures, its tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .board import cell_texts, varying_columns
from .figures import MOST_SERIES, figure_of
from .layout import Cell, Table
from .svg import to_svg
from .tables import Series, labelled, per_place
from .text import bounds_text, column_decimals, direction, number, settings_text

__all__ = ["Meaning", "Section", "board_remarks", "board_table", "meanings", "sections"]


@dataclass(frozen=True)
class Meaning:
    """What a measure is, in the words of its plugin."""

    name: str
    description: str
    probe: str
    direction: str
    bounds: str
    version: str
    options: str
    citation: str
    equation: str
    bibtex: str


@dataclass(frozen=True)
class Section:
    """What is shown of one measure: figures, summary and a table of places a subject."""

    name: str
    probe: str
    figures: tuple[str, ...]
    caption: str
    summary: Table
    note: str
    places: tuple[tuple[str, Table], ...]


def meanings(measures: Mapping[str, Mapping[str, Any]]) -> list[Meaning]:
    """Say what each measure is."""
    found = []
    for name, about in measures.items():
        source = about.get("source") or {}
        found.append(
            Meaning(
                name=name,
                description=str(about.get("description", "")).strip(),
                probe=str(about.get("probe", "")),
                direction=direction(about.get("more_means", "neither")),
                bounds=bounds_text(about.get("bounds") or (None, None)),
                version=str(about.get("version", "")),
                options=settings_text(about.get("options") or {}),
                citation=source.get("citation", ""),
                equation=source.get("equation", ""),
                bibtex=source.get("bibtex", "").strip(),
            )
        )
    return found


def board_table(frame: pd.DataFrame, measures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Lay out a board: subjects, named by what differs, by measures."""
    keys = list(varying_columns(frame)[0])
    names = list(frame.columns.unique("measure"))
    head = [Cell(key) for key in keys]
    head += [Cell(n, remark=direction(measures.get(n, {}).get("more_means", ""))) for n in names]
    columns = [[Cell(str(v), str(v)) for v in frame.index.get_level_values(key)] for key in keys]
    for name in names:
        cells = zip(
            cell_texts(frame, name),
            frame[name, "value"],
            frame[name, "status"],
            frame[name, "reason"],
            strict=True,
        )
        columns.append([_board_cell(*cell) for cell in cells])
    return Table(tuple(head), tuple(zip(*columns, strict=True)), len(keys))


def _board_cell(text: str, value: float, status: str, reason: str) -> Cell:
    """One number of a board; a dagger says that there is a remark on it."""
    marked = f"{text} †" if status == "ok" and reason else text
    return Cell(marked, _sort(value), status, reason)


def board_remarks(table: Table) -> list[str]:
    """Say what the daggers of a board stand for."""
    heads = [head.text for head in table.head]
    return list(
        dict.fromkeys(
            f"{heads[column]} {cell.remark}"
            for row in table.rows
            for column, cell in enumerate(row)
            if column >= table.names and cell.status == "ok" and cell.remark
        )
    )


def _sort(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def sections(
    scores: pd.DataFrame, measures: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> list[Section]:
    """Work out figures and tables of each measure that says something."""
    table = labelled(scores)
    return [_section(table, measures, name, index) for index, name in enumerate(names)]


def _section(
    table: pd.DataFrame, measures: Mapping[str, Mapping[str, Any]], name: str, index: int
) -> Section:
    series = per_place(table, name)
    probe = str(measures.get(name, {}).get("probe", ""))
    drawn = [one for one in series if one.has_value]
    if probe not in ("sites", "lines") and all(len(one.places) == 1 for one in drawn):
        drawn = []  # one bar a subject would repeat the board
    places = [(one.label, _places_table(one, probe)) for one in series]
    places += _parts_tables(table, name)
    return Section(
        name=name,
        probe=probe,
        figures=tuple(_figures(table, measures, name, drawn, f"figure-{index}")),
        caption=_caption(drawn, probe),
        summary=_summary(table, name),
        note=_note(table, name),
        places=tuple(places),
    )


def _figures(
    table: pd.DataFrame,
    measures: Mapping[str, Mapping[str, Any]],
    name: str,
    drawn: Sequence[Series],
    prefix: str,
) -> Iterator[str]:
    """As many figures as subjects need; each subject has the same colour all over the page."""
    subjects = list(dict.fromkeys(table["subject"]))
    for start in range(0, len(subjects), MOST_SERIES):
        group = subjects[start : start + MOST_SERIES]
        labels = [one.label for one in drawn if one.label in group]
        if labels:
            figure = figure_of(table[table["subject"].isin(group)], measures, name)
            title = f"{name} of {', '.join(labels)}"
            yield to_svg(figure, prefix=f"{prefix}-{start}", title=title)


def _caption(series: Sequence[Series], probe: str) -> str:
    places = [place for one in series for place in one.places]
    if probe == "lines":
        return "Share of paths whose value is at most x, one step function a subject."
    if probe != "sites":
        return "One bar a place."
    said = "The score of every site, in order of call."
    if any(place.statistics.get("std", 0) > 0 for place in places):
        said += " Bars: one standard deviation over batches."
    if any(math.isnan(place.value) for place in places):
        said += " Hollow marks at the bottom edge: no value; the reason is in the table."
    return said


def _note(table: pd.DataFrame, name: str) -> str:
    numbered = _numbered(set(table.loc[table["measure"] == name, "statistic"]))
    if not numbered:
        return ""
    stems = ", ".join(sorted({one.rstrip("0123456789") for one in numbered}))
    return f"Numbered values ({stems}) are in the run's table of scores."


def _summary(table: pd.DataFrame, name: str) -> Table:
    rows = table[(table["measure"] == name) & (table["place"] == "") & (table["status"] == "ok")]
    found: dict[str, dict[str, float]] = {}
    for label, statistic, value in rows[["subject", "statistic", "value"]].itertuples(index=False):
        found.setdefault(label, {})[statistic] = float(value)
    return _statistics_table("subject", list(found.items()), [])


def _parts_tables(table: pd.DataFrame, name: str) -> list[tuple[str, Table]]:
    """What a summary splits into: statistics called ``KIND:NAME``, a table a subject and kind."""
    rows = table[(table["measure"] == name) & (table["place"] == "") & (table["status"] == "ok")]
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for label, statistic, value in rows[["subject", "statistic", "value"]].itertuples(index=False):
        kind, colon, part = statistic.partition(":")
        if colon:
            found.setdefault((label, kind), []).append((part, float(value)))
    return [(label, _parts_table(kind, parts)) for (label, kind), parts in found.items()]


def _parts_table(kind: str, parts: Sequence[tuple[str, float]]) -> Table:
    total = math.fsum(value for _, value in parts)
    decimals = column_decimals([value for _, value in parts])
    return Table(
        (Cell(kind), Cell("value"), Cell("share")),
        tuple(
            (
                Cell(part),
                Cell(number(value, decimals), _sort(value)),
                Cell(f"{100 * value / total:.1f} %" if total else "", _sort(value)),
            )
            for part, value in parts
        ),
    )


def _places_table(one: Series, probe: str) -> Table:
    kind = {"sites": "site", "lines": "path"}.get(probe, "place")
    values = [(place.name, place.statistics) for place in one.places]
    extra = [
        (Cell(f"{place.n:,}", str(place.n)), _remark(place.status, place.reason))
        for place in one.places
    ]
    return _statistics_table(kind, values, extra)


def _remark(status: str, reason: str) -> Cell:
    text = reason if status == "ok" else f"{status}: {reason}"
    return Cell(text, text, status)


def _numbered(names: Collection[str]) -> set[str]:
    """Find the statistics that are one number a logit: ``logit0``, ``logit1``, and so on."""
    stems = {name[:-1] for name in names if name.endswith("0") and not name[-2:-1].isdigit()}
    return {name for name in names if name[-1:].isdigit() and name.rstrip("0123456789") in stems}


def _statistics_table(
    kind: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    extra: Sequence[tuple[Cell, Cell]],
) -> Table:
    """One row a name, one column a statistic; ``logit0`` and ``site:relu`` are left out."""
    numbered = _numbered({name for _, found in rows for name in found})
    names = dict.fromkeys(
        n for _, found in rows for n in found if n not in numbered and ":" not in n
    )
    names = {n: None for n in ("value", "std") if n in names} | names
    columns = [[Cell(name) for name, _ in rows]]
    most = column_decimals([found.get("value", math.nan) for _, found in rows])
    for statistic in names:
        values = [found.get(statistic, math.nan) for _, found in rows]
        decimals = column_decimals(values)
        if statistic == "std" and decimals is not None and most is not None:
            decimals = min(decimals, most)  # a spread is not known more finely than its value
        texts = ["" if math.isnan(v) else number(v, decimals) for v in values]
        columns.append([Cell(text, _sort(v)) for text, v in zip(texts, values, strict=True)])
    head = [kind, *names]
    with_reasons = any(reason.text for _, reason in extra)
    if extra:
        head.append("n")
        columns.append([n for n, _ in extra])
    if with_reasons:
        head.append("reason")
        columns.append([reason for _, reason in extra])
    return Table(tuple(Cell(text) for text in head), tuple(zip(*columns, strict=True)))
