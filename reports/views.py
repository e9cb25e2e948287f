"""Tables for the template of the HTML page: leaderboard, agreement, definitions of measures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from nlbench.citation import manifest_bibtex
from nlbench.question import load_questions

from .agreement import Correlation
from .definitions import definition
from .embedded import entry_texts
from .fingerprint import Scale, strip
from .layout import NamedRun
from .leaderboard import Measures, Row, Standing, is_training, sort_measure
from .remarks import remarks_of
from .tables import Scores, mean_cell
from .text import (
    bounds_text,
    count,
    direction,
    number,
    range_text,
    settings_text,
    uncertain_decimals,
)

_GROUPS = {
    "sites": "Activations",
    "lines": "Lines through input space",
    "graph": "Channel graph",
    "function": "Function as a whole",
}
_COEFFICIENTS = {
    "spearman": "Spearman's ρ over networks",
    "kendall": "Kendall's τ over networks",
    "pearson": "Pearson's r over activations within networks",
}

_MARKS = "abcdefgh"  # for remarks; further remarks are only in the cells' records
MIN_NETWORKS = 5
"""Number of networks below which a correlation has no colour."""
_DENSE = 7  # with more measures, a heatmap shows intervals only in tooltips


def meanings(measures: Measures) -> list[dict[str, str]]:
    """Return the definition of each measure from its plugin's metadata."""
    definitions = []
    for index, (name, info) in enumerate(measures.items()):
        source = info.get("source") or {}
        definitions.append(
            {
                "name": name,
                "description": str(info.get("description", "")).strip(),
                "formula": definition(name, info, f"formula{index}"),
                "probe": str(info.get("probe", "")),
                "direction": direction(info.get("more_means", "neither")),
                "scale": str(info.get("scale") or ""),
                "bounds": bounds_text(info.get("bounds") or (None, None)),
                "options": settings_text(info.get("options") or {}),
                "citation": source.get("citation", ""),
                "equation": source.get("equation", ""),
            }
        )
    return definitions


def questions(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the questions that the measures of a page answer, with cost and caution."""
    return [
        {
            "text": question.text,
            "measures": [name for name in question.measures if name in names],
            "others": [name for name in question.measures if name not in names],
            "notes": f"{question.cost}; {question.caution}".replace("`", ""),
        }
        for question in load_questions().values()
    ]


def bibtex(runs: Sequence[NamedRun], measures: Measures) -> str:
    """Return the BibTeX entries of nlbench and of the measures."""
    entries = [manifest_bibtex(run.manifest) for run in runs]
    entries += [str((info.get("source") or {}).get("bibtex") or "") for info in measures.values()]
    return "\n\n".join(dict.fromkeys(entry.strip() for entry in entries if entry.strip()))


@dataclass(frozen=True)
class BoardCell:
    """One cell of the leaderboard on the static page.

    Parameters
    ----------
    text : str
        The value, rounded to its interval.
    exact : str
        The value at full precision.
    small : str
        Standard error and interval for the rank.
    place : str
        CSS variables that position the mark and its interval.
    note : str
        Footnote mark that refers to the remark below the table.
    """

    status: str
    text: str = ""
    exact: str = ""
    small: str = ""
    place: str = ""
    remark: str = ""
    note: str = ""


def board_view(
    scores: Scores, measures: Measures, rows: Sequence[Row], content: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the template variables for the leaderboard.

    Parameters
    ----------
    content : mapping
        Output of `nlbench.reports.embedded.pack`.
    """
    names = list(scores.measures)
    packed = content["measures"]
    first = None if is_training(rows) else sort_measure(measures, names)
    strips = _strip_measure(packed, scores)
    order = _group(packed)
    starts = {group[0] for group in order}
    directions = {1: "↑ nonlinear", -1: "↓ nonlinear", 0: "no direction"}
    columns = [
        {
            "name": name,
            "direction": packed[i]["scale"] or directions[sense],
            "first": i in starts,
            "sorted": ("descending" if sense > 0 else "ascending") if name == first else "",
        }
        for i, name in enumerate(names)
        for sense in [packed[i]["sense"]]
    ]
    decimals = {
        name: uncertain_decimals(
            (row.entries[name].value for row in rows), (row.entries[name].error for row in rows)
        )
        for name in names
    }
    marks = [Scale(**m["mark"]) if m["mark"] else None for m in packed]
    remarks = [remark for remark in remarks_of(rows, names) if remark.status == "ok"]
    noted = {cell: m for m, r in zip(_MARKS, remarks, strict=False) for cell in r.cells}
    shown = [
        {
            "index": index,
            "slug": quote(row.label.encode("utf-8", "replace"), safe=""),
            "name": row.subjects[0].model.rpartition("/")[2] or row.subjects[0].model,
            "details": _details(row, scores),
            "strip": ""
            if strips is None
            else _strip(row, scores, strips, content, content["rows"][index]["subjects"][0]),
            "cells": [
                _board_cell(
                    row.entries[name], decimals[name], marks[i], noted.get((row.label, name), "†")
                )
                for i, name in enumerate(names)
            ],
        }
        for index, row in enumerate(rows)
    ]
    entries = [entry for row in rows for entry in row.entries.values()]
    return {
        "columns": columns,
        "groups": [
            {"title": _GROUPS.get(packed[group[0]]["probe"], "Other"), "columns": len(group)}
            for group in order
        ],
        "rows": shown,
        "strips": strips is not None,
        "strip_name": "" if strips is None else names[strips],
        "ramp": _ramp(packed[strips]) if strips is not None else {},
        "kinds": _kinds(content["kindOrder"]),
        "has_errors": any(entry.error > 0 for entry in entries),
        "over_seeds": any(entry.over.endswith("seeds") for entry in entries),
        "remarks": [
            {"mark": mark, "text": f"{remark.measures}: {remark.text}"}
            for mark, remark in zip(_MARKS, remarks, strict=False)
        ],
    }


def _strip_measure(packed: Sequence[Mapping[str, Any]], scores: Scores) -> int | None:
    """Return the measure of the fingerprints: with a direction, and values for most networks."""
    drawn = [i for i, m in enumerate(packed) if m["probe"] == "sites" and m["strip"]]
    drawn = [i for i in drawn if packed[i]["sense"]] or drawn

    def networks(index: int) -> int:
        name = packed[index]["name"]
        return sum(len(scores[s.label, name].place_values) > 0 for s in scores.subjects)

    return max(drawn, key=networks, default=None)


def _group(packed: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group neighbouring measures that use the same probe."""
    return [
        [index for index, _ in group]
        for _, group in itertools.groupby(enumerate(packed), key=lambda pair: pair[1]["probe"])
    ]


def _details(row: Row, scores: Scores) -> str:
    """Return the fields, other than the name, in which a row's network differs from others."""
    subject = row.subjects[0]
    provider = subject.model.rpartition("/")[0]
    varies = {
        key: len({getattr(other, key) for other in scores.subjects}) > 1 for key in ("data", "seed")
    }
    folded = len(row.subjects) > 1 or subject.checkpoint
    weights = subject.weights_text if folded else subject.weights
    parts = [subject.run, provider, weights, subject.data if varies["data"] else ""]
    if len(row.subjects) > 1:
        parts.append(f"{len(row.subjects)} seeds")
    elif varies["seed"]:
        parts.append(f"seed {subject.seed}")
    return " · ".join(part for part in parts if part)


def _strip(
    row: Row, scores: Scores, measure: int, content: Mapping[str, Any], index: int
) -> Markup:
    info = content["measures"][measure]
    mean = mean_cell([scores[subject.label, info["name"]] for subject in row.subjects])
    values = [place.value for place in mean.places]
    cell = content["cells"][index][measure]
    # If there are too many places, the page omits their names.
    if not values or "p" not in cell:
        return Markup("")
    order = {kind: index for index, kind in enumerate(content["kindOrder"])}
    kinds = [min(4, order.get(kind, 0)) for kind in content["kinds"][cell["p"]]]
    title = f"{row.label}: {info['name']} at {count(len(values), info['noun'])} in call order"
    if spread := range_text(values):
        title += f", range {spread}"
    scale = {key: info["strip"][key] for key in ("low", "high", "log", "sense")}
    return strip(values, Scale(**scale), kinds, title=title)


def _ramp(info: Mapping[str, Any]) -> dict[str, str]:
    scale = info["strip"]
    word = "more nonlinear" if info["sense"] else "more"
    return {
        "least": f"{info['name']} {scale['least']}",
        "most": f"{scale['most']}, {word} ({scale['source']})",
    }


def _kinds(kinds: Sequence[str]) -> list[dict[str, str]]:
    """Return the legend for the marks below a strip; empty if there is a single kind."""
    if len(kinds) < 2:
        return []
    marks = ("", "M0 3h20v5h-20z", "M0 3h9v5h-9z", "M11 3h9v5h-9z", "M6 3h8v5h-8z")
    shown = [{"name": kind, "mark": marks[i]} for i, kind in enumerate(kinds[:4])]
    if len(kinds) > 4:
        shown.append({"name": ", ".join(kinds[4:]), "mark": marks[4]})
    return shown


def _board_cell(entry: Standing, decimals: int | None, mark: Scale | None, note: str) -> BoardCell:
    if entry.status != "ok" or not math.isfinite(entry.value):
        status = entry.status if entry.status != "ok" else "undefined"
        return BoardCell(status, remark=entry.reason or "no finite number")
    place = ""
    if entry.rank is not None and mark is not None:
        ends = [mark.position(entry.low), mark.position(entry.high)]
        ends = sorted(end for end in ends if math.isfinite(end)) or [mark.position(entry.value)] * 2
        place = f"--p:{mark.position(entry.value):.3f};--a:{ends[0]:.3f};--z:{ends[-1]:.3f}"
    value, error, _, _ = entry_texts(entry, decimals)
    small = " · ".join(part for part in (error, ranks_text(entry.best, entry.worst)) if part)
    return BoardCell(
        "ok", value, repr(entry.value), small, place, entry.reason, note if entry.reason else ""
    )


def ranks_text(best: int | None, worst: int | None) -> str:
    """Format the interval for a rank.

    Examples
    --------
    >>> ranks_text(1, 3), ranks_text(2, 2), ranks_text(None, None)
    ('1–3', '2', '')
    """
    if best is None or worst is None:
        return ""
    return str(best) if best == worst else f"{best}–{worst}"


@dataclass(frozen=True)
class HeatCell:
    """One cell of a heatmap, for a pair of measures."""

    pair: str
    text: str
    small: tuple[str, ...]
    level: str
    title: str


def heatmaps(
    coefficients: Mapping[str, Mapping[tuple[str, str], Correlation]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Build a heatmap over pairs of measures for each coefficient that has a value."""
    maps = []
    for kind, pairs in coefficients.items():
        if not any(math.isfinite(c.value) for c in pairs.values()):
            continue
        shown = [name for name in names if any(name in pair for pair in pairs)]
        maps.append(
            {
                "kind": kind,
                "caption": _COEFFICIENTS[kind],
                "names": shown,
                "rows": [
                    [_heat_cell(pairs, names, a, b, kind) if a != b else None for b in shown]
                    for a in shown
                ],
            }
        )
    return maps


def _heat_cell(
    pairs: Mapping[tuple[str, str], Correlation], names: Sequence[str], a: str, b: str, kind: str
) -> HeatCell:
    c = pairs.get((a, b)) or pairs[b, a]
    pair = f"{names.index(a)},{names.index(b)}"
    name = f"{_COEFFICIENTS[kind]} of {a} and {b}"
    size = f"n {c.n}" if not c.groups else f"n {c.n} in {c.groups}"
    if not math.isfinite(c.value):
        reason = "too few" if c.n < 3 else "constant"
        return HeatCell(pair, "–", (size, reason), "empty", f"{name}: {size}, {reason}")
    few = (c.groups or c.n) < MIN_NETWORKS
    level = 0 if few else min(5, math.ceil(abs(c.value) * 5 - 1e-9))
    title = f"{name}: {_signed(c.value, 3)}, {size}"
    if few:
        title += f", fewer than {MIN_NETWORKS} networks"
    small = [size]
    if math.isfinite(c.low):
        if len(names) <= _DENSE:
            small.insert(0, f"{_signed(c.low, 2)} to {_signed(c.high, 2)}")
        title += f", interval {_signed(c.low, 3)} to {_signed(c.high, 3)}"
    colour = "" if level == 0 else f"{'p' if c.value > 0 else 'n'}{level}"
    return HeatCell(pair, _signed(c.value, 2), tuple(small), "few" if few else colour, title)


def _signed(value: float, decimals: int) -> str:
    return number(value, decimals, signed=True)
