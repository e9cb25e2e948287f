"""Contents of the template of the HTML page: leaderboard, cards, agreement, definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nlbench.citation import manifest_bibtex
from nlbench.parsers import unique

from .agreement import Correlation
from .embedded import PageData
from .fingerprint import Scale
from .leaderboard import Row, is_training, sort_measure
from .population import find_population
from .remarks import collect_remarks
from .tables import MeasureInfo, Measures, NamedRun, Score
from .text import error_legend, number, range_text, short_decimals, unknown_errors

_WIDTH = 300.0
_MARGIN = 12.0


def strip_fields(cell: Score, colours: Scale | None) -> list[dict[str, Any]]:
    """Return the cells of a measure's strip, one per activation, in call order."""
    decimals = short_decimals(cell.place_values)
    fields = []
    for place in cell.places:
        level = "x" if colours is None else colours.level(place.value)
        fields.append(
            {
                "label": ".".join(place.name.split(".")[-2:]),
                "text": place.status if level == "x" else number(place.value, decimals),
                "level": f"q{level}",
                "dark": level in "6789",
                "remark": place.reason or f"{place.name}: {place.text}",
            }
        )
    return fields


def card_axis(row: Row, measure: str, info: MeasureInfo) -> dict[str, Any]:
    """Return the positions of a value, its interval, its places and the reference networks.

    The axis holds all of them. It is empty without a direction, or if it would have no extent.
    """
    entry = row.entries[measure]
    population = find_population(measure, info)
    # The places of a mean over seeds are not the seeds' own.
    places = entry.place_values.tolist() if len(row.subjects) == 1 else []
    sense = info.sense
    others = [] if population is None else list(population.values)
    affine = math.nan if population is None else population.affine
    shown = places if len(places) <= 60 else []
    ends = [v for v in (entry.low, entry.high) if math.isfinite(v)]
    finite = [v for v in (entry.value, *ends, affine, *others, *shown) if math.isfinite(v)]
    low = min(finite)
    high = max(finite)
    if not sense or not high > low:
        return {}
    scale = Scale(low, high, low > 0 and high > 50 * low, sense)
    least, most = (low, high) if sense > 0 else (high, low)

    def x(values: Iterable[float]) -> list[float]:
        return [round(_MARGIN + scale.position(v) * (_WIDTH - 2 * _MARGIN), 1) for v in values]

    return {
        "value": x([entry.value])[0],
        "ends": x(ends) if len(ends) == 2 and ends[0] < ends[1] else [],
        "places": x(shown),
        "others": x(others),
        "begin": f"{number(least)} affine" if least == affine else number(least),
        "end": f"more nonlinear {number(most)}",
        "text": entry.text,
    }


def cite_sentence(row: Row, measures: Measures, facts: Sequence[str]) -> str:
    """Return a citable sentence with a network's values that ends with `facts` about the run."""
    texts = []
    units: dict[str, None] = {}
    for name, entry in row.entries.items():
        info = measures[name]
        if entry.status == "ok" and info.sense:
            scale = info.scale
            note = f" ({scale})" if scale else ""
            texts.append(f"{name} {entry.text}{note}")
            if entry.error > 0:
                units.setdefault(entry.over)
    legend = f"± standard error over {', '.join(units)}" if units else ""
    parts = "; ".join(part for part in (legend, *facts) if part)
    data = row.subjects[0].data
    on = "" if data == "given" else f" on {data}"  # "given": passed to `nlbench.evaluate`
    return f"{row.label}{on}: {', '.join(texts)} ({parts})."


_COEFFICIENTS = {
    "spearman": "Spearman's ρ over networks",
    "kendall": "Kendall's τ over networks",
    "pearson": "Pearson's r over activations within networks",
}

MAX_MARKS = 8  # for remarks; further remarks are only in the cells' records
MIN_NETWORKS = 5
"""Number of networks below which a correlation has no colour."""
_DENSE = 7  # with more measures, a heatmap shows intervals only in tooltips


def bibtex(runs: Sequence[NamedRun], measures: Measures) -> str:
    """Return the BibTeX entries of nlbench and of the measures."""
    entries = [manifest_bibtex(run.manifest) for run in runs]
    entries += [info.bibtex for info in measures.values()]
    return "\n\n".join(unique(entry.strip() for entry in entries if entry.strip()))


def board_view(
    data: PageData, content: Mapping[str, Any], measures: Measures, rows: Sequence[Row]
) -> dict[str, Any]:
    """Build the template variables for the leaderboard from the packed data."""
    packed = content["measures"]
    shown = {measure["name"]: measures[measure["name"]] for measure in packed}
    # The measure of the fingerprints has a direction, and values for most networks.
    drawn = [m for m in packed if m["probe"] == "sites" and m["strip"]]
    drawn = [m for m in drawn if m["sense"]] or drawn
    networks = {
        m["name"]: sum(len(row.entries[m["name"]].place_values) > 0 for row in rows) for m in drawn
    }
    fingerprint = max(drawn, key=lambda m: networks[m["name"]], default=None)
    remarks = [remark for remark in collect_remarks(rows, shown) if remark.status == "ok"][
        :MAX_MARKS
    ]
    subjects = content["subjects"]
    differing = {key for key in ("data", "seed") if len({s[key] for s in subjects}) > 1}
    entries = [entry for row in rows for entry in row.entries.values()]
    return {
        "rows": rows,
        "packed": packed,
        "cells": [line["cells"] for line in content["rows"]],
        "marks": [_marks(rows, m["name"], m["sense"]) for m in packed],
        "groups": [list(g) for _, g in itertools.groupby(packed, key=lambda m: m["probe"])],
        "sorted_by": None if is_training(rows) else sort_measure(measures),
        "details": [_details(row, differing) for row in rows],
        "strips": [_strip(row, data, fingerprint, content) for row in rows],
        "strip": fingerprint,
        "kinds": content["kindOrder"],
        "error_legend": error_legend(entries),
        "unknown_errors": unknown_errors(row.entries for row in rows),
        "remarks": remarks,
        "notes": {cell: "abcdefgh"[i] for i, remark in enumerate(remarks) for cell in remark.cells},
    }


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


def _strip(
    row: Row, data: PageData, measure: Mapping[str, Any] | None, content: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the values, scale, title and activation functions of a row's strip.

    There are none if the page omits the places, since there are too many.
    """
    if measure is None or not data.has_places(row):
        return ()
    name = measure["name"]
    entry = row.entries[name]
    colours = data.colours[name]
    if not entry.places or colours is None:
        return ()
    order = {kind: min(4, index) for index, kind in enumerate(content["kindOrder"])}
    kinds = [order.get(kind, 0) for kind in data.kinds(row.subjects[0], entry)]
    values = [place.value for place in entry.places]
    title = f"{name} from input to output: {range_text(values) or 'no value'}"
    return values, colours, title, kinds


def _marks(rows: Sequence[Row], measure: str, sense: int) -> list[str]:
    """Return the CSS variables that position the mark of each ranked value and its interval."""
    entries = [row.entries[measure] for row in rows]
    scale = Scale.of((end for e in entries for end in (e.value, e.low, e.high)), sense)
    styles = []
    for entry in entries:
        style = ""
        if entry.rank is not None and scale is not None:
            position = scale.position(entry.value)
            ends = [scale.position(end) for end in (entry.low, entry.high) if math.isfinite(end)]
            low, high = sorted(ends) or (position, position)
            style = f"--p:{position:.3f};--a:{low:.3f};--z:{high:.3f}"
        styles.append(style)
    return styles


def heatmaps(
    coefficients: Mapping[str, Mapping[tuple[str, str], Correlation]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Build a heatmap over pairs of measures for each coefficient that has a value."""
    maps = []
    for kind, pairs in coefficients.items():
        if any(math.isfinite(c.value) for c in pairs.values()):
            cells = {(a, b): _heat_cell(c, names, a, b, kind) for (a, b), c in pairs.items()}
            cells |= {(b, a): _heat_cell(c, names, b, a, kind) for (a, b), c in pairs.items()}
            shown = [name for name in names if any(name in pair for pair in pairs)]
            caption = _COEFFICIENTS[kind]
            maps.append({"kind": kind, "caption": caption, "names": shown, "cells": cells})
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
