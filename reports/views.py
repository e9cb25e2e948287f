"""Tables for the template of the HTML page: leaderboard, agreement, definitions of measures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from nlbench.citation import manifest_bibtex
from nlbench.question import load_questions

from .agreement import Correlation
from .definitions import definition
from .embedded import PageData
from .fingerprint import Scale, strip
from .layout import NamedRun
from .leaderboard import Row, Standing, is_training, sort_measure
from .remarks import remarks_of
from .tables import Measures
from .text import bounds_text, direction, number, range_text, settings_text

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


def board_view(
    data: PageData, content: Mapping[str, Any], measures: Measures, rows: Sequence[Row]
) -> dict[str, Any]:
    """Build the template variables for the leaderboard.

    Parameters
    ----------
    content : mapping
        What `data` was packed into, with ``kindOrder``.
    """
    packed = content["measures"]
    names = [measure["name"] for measure in packed]
    first = None if is_training(rows) else sort_measure(measures, names)
    strips = _strip_measure(packed, rows)
    groups = [
        [index for index, _ in group]
        for _, group in itertools.groupby(enumerate(packed), key=lambda pair: pair[1]["probe"])
    ]
    directions = {1: "↑ nonlinear", -1: "↓ nonlinear", 0: "no direction"}
    order = {1: "descending", -1: "ascending"}
    columns = [
        {
            "name": m["name"],
            "direction": m["scale"] or directions[m["sense"]],
            "first": index in {group[0] for group in groups},
            "sorted": order[m["sense"]] if m["name"] == first else "",
            "mark": Scale(**m["mark"]) if m["mark"] else None,
        }
        for index, m in enumerate(packed)
    ]
    remarks = [remark for remark in remarks_of(rows, names) if remark.status == "ok"]
    noted = {cell: m for m, r in zip(_MARKS, remarks, strict=False) for cell in r.cells}
    differing = {key for key in ("data", "seed") if len({s[key] for s in content["subjects"]}) > 1}
    shown = []
    for row, line in zip(rows, content["rows"], strict=True):
        cells = []
        for column, cell in zip(columns, line["cells"], strict=True):
            note = noted.get((row.label, column["name"]), "†") if cell["r"] else ""
            style = _mark_style(row.entries[column["name"]], column["mark"])
            cells.append({**cell, "note": note, "style": style})
        shown.append(
            {
                "slug": quote(row.label.encode("utf-8", "replace"), safe=""),
                "name": row.subjects[0].model.rpartition("/")[2] or row.subjects[0].model,
                "details": _details(row, differing),
                "strip": "" if strips is None else _strip(row, data, names[strips], content),
                "cells": cells,
            }
        )
    entries = [entry for row in rows for entry in row.entries.values()]
    return {
        "columns": columns,
        "groups": [
            {"title": _GROUPS.get(packed[group[0]]["probe"], "Other"), "columns": len(group)}
            for group in groups
        ],
        "rows": shown,
        "strip": None if strips is None else packed[strips],
        "kinds": content["kindOrder"],
        "has_errors": any(entry.error > 0 for entry in entries),
        "over_seeds": any(entry.over.endswith("seeds") for entry in entries),
        "remarks": [
            {"mark": mark, "text": f"{remark.measures}: {remark.text}"}
            for mark, remark in zip(_MARKS, remarks, strict=False)
        ],
    }


def _strip_measure(packed: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> int | None:
    """Return the measure of the fingerprints: with a direction, and values for most networks."""
    drawn = [i for i, m in enumerate(packed) if m["probe"] == "sites" and m["strip"]]
    drawn = [i for i in drawn if packed[i]["sense"]] or drawn
    networks = {
        i: sum(len(row.entries[packed[i]["name"]].place_values) > 0 for row in rows) for i in drawn
    }
    return max(drawn, key=networks.__getitem__, default=None)


def _details(row: Row, differing: Collection[str]) -> str:
    """Return the fields, other than the name, in which a row's network differs from others."""
    subject = row.subjects[0]
    provider = subject.model.rpartition("/")[0]
    folded = len(row.subjects) > 1 or subject.checkpoint
    weights = subject.weights_text if folded else subject.weights
    parts = [subject.run, provider, weights, subject.data if "data" in differing else ""]
    if len(row.subjects) > 1:
        parts.append(f"{len(row.subjects)} seeds")
    elif "seed" in differing:
        parts.append(f"seed {subject.seed}")
    return " · ".join(part for part in parts if part)


def _strip(row: Row, data: PageData, measure: str, content: Mapping[str, Any]) -> Markup:
    """Draw the strip of a row.

    If there are too many places, the page omits it.
    """
    entry = row.entries[measure]
    colours = data.colours[measure]
    if not entry.places or colours is None or not data.has_places(row):
        return Markup("")
    order = {kind: min(4, index) for index, kind in enumerate(content["kindOrder"])}
    kinds = [order.get(kind, 0) for kind in data.kinds(row.subjects[0], entry)]
    values = [place.value for place in entry.places]
    title = f"{measure} from input to output: {range_text(values) or 'no value'}"
    return strip(values, colours.scale, kinds, title=title)


def _mark_style(entry: Standing, mark: Scale | None) -> str:
    """Return the CSS variables that position the mark of a ranked value and its interval."""
    if entry.rank is None or mark is None:
        return ""
    position = mark.position(entry.value)
    ends = sorted(mark.position(end) for end in (entry.low, entry.high) if math.isfinite(end))
    low, high = ends or (position, position)
    return f"--p:{position:.3f};--a:{low:.3f};--z:{high:.3f}"


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
                    [
                        _heat_cell(pairs.get((a, b)) or pairs[b, a], names, a, b, kind)
                        if a != b
                        else None
                        for b in shown
                    ]
                    for a in shown
                ],
            }
        )
    return maps


def _heat_cell(c: Correlation, names: Sequence[str], a: str, b: str, kind: str) -> dict[str, Any]:
    """Return the cell of a pair of measures: its texts and its colour."""
    cell = {"pair": f"{names.index(a)},{names.index(b)}", "level": "empty", "text": "–"}
    name = f"{_COEFFICIENTS[kind]} of {a} and {b}"
    size = f"n {c.n} in {c.groups}" if c.groups else f"n {c.n}"
    if not math.isfinite(c.value):
        reason = "too few" if c.n < 3 else "constant"
        return {**cell, "small": (size, reason), "title": f"{name}: {size}, {reason}"}
    title = f"{name}: {number(c.value, 3, signed=True)}, {size}"
    level = min(5, math.ceil(abs(c.value) * 5 - 1e-9))
    colour = f"{'p' if c.value > 0 else 'n'}{level}" if level else ""
    if (c.groups or c.n) < MIN_NETWORKS:
        colour = "few"
        title += f", fewer than {MIN_NETWORKS} networks"
    small = [size]
    if math.isfinite(c.low):
        low, high = (number(end, 2, signed=True) for end in (c.low, c.high))
        if len(names) <= _DENSE:
            small.insert(0, f"{low} to {high}")
        low, high = (number(end, 3, signed=True) for end in (c.low, c.high))
        title += f", interval {low} to {high}"
    text = number(c.value, 2, signed=True)
    return {**cell, "small": small, "title": title, "level": colour, "text": text}
