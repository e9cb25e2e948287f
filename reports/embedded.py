"""The data embedded in the page: the packed tidy table, its texts and the metadata of the runs.

All numbers are formatted here; the page's script sorts, filters and draws.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from nlbench.errors import RequestError
from nlbench.serialization.files import read_text

from .estimates import change
from .fingerprint import Scale, level_of
from .layout import NamedRun
from .leaderboard import Measures, Row, Standing, family_of, sense_of
from .population import ColourScale, colour_scale, reference_share
from .relative import RELATIVE
from .tables import Scores, TableCell, TableSubject, mean_cell
from .text import (
    count,
    interval_text,
    number,
    place_noun,
    plus_minus,
    range_text,
    settings_text,
    uncertain_decimals,
)

COLUMNS = (
    "run", "model", "weights", "data", "seed", "measure", "place", "statistic", "value", "n",
    "status", "reason",
)  # fmt: skip

SCORES_SCRIPT = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_FACTS = (
    "weights_hash", "parameters", "preprocessing", "split", "samples", "sample_hash",
    "weights_metadata", "data_options", "mode", "omega",
)  # fmt: skip

MAX_PLACE_VALUES = 70_000
"""Maximum number of values by place on one page, at about 20 bytes each."""
MAX_DIFFERENCES = 4_000
"""Maximum number of differences between two rows on one page."""
_SHARED_STATISTICS = ("value", "error", "std", "min", "max", "median", "spread")


def pack(
    scores: Scores, measures: Measures, rows: Sequence[Row], runs: Sequence[NamedRun]
) -> dict[str, Any]:
    """Pack everything that a page shows or exports into JSON-compatible values.

    Numbered statistics of places (one per logit or segment) and their parts (``site:NAME``) are
    omitted: there are many of them, and the page doesn't show them.
    """
    positions = {subject.label: index for index, subject in enumerate(scores.subjects)}
    by_name = {run.name: run for run in runs}
    with_places = _subjects_with_places(scores, rows)
    lists = _PlaceLists()
    traces: dict[str, int] = {}
    colours = {
        name: colour_scale(
            name,
            measures.get(name, {}),
            (v for s in scores.subjects for v in scores[s.label, name].place_values),
        )
        for name in scores.measures
    }
    decimals = {
        name: uncertain_decimals(
            (row.entries[name].value for row in rows), (row.entries[name].error for row in rows)
        )
        for name in scores.measures
    }
    return {
        "measures": [
            _measure(name, measures.get(name, {}), rows, scores, colours[name])
            for name in scores.measures
        ],
        "counts": _count_texts(scores),
        "statistics": _statistics_legend(scores),
        "differences": _differences(rows, scores.measures),
        "subjects": [
            _subject(subject, by_name.get(subject.run, runs[0])) for subject in scores.subjects
        ],
        "rows": [
            {
                "label": row.label,
                "subjects": [positions[subject.label] for subject in row.subjects],
                "cells": [_entry(row.entries[name], decimals[name]) for name in scores.measures],
                "reference": [
                    _percent_text(reference_share(row, name, measures.get(name, {})))
                    for name in scores.measures
                ],
                "means": _means(row, scores, by_name, with_places, lists, colours),
            }
            for row in rows
        ],
        "cells": [
            [
                _cell(
                    scores[subject.label, name],
                    subject,
                    name,
                    by_name,
                    lists if subject.label in with_places else None,
                    traces,
                    colours[name],
                )
                for name in scores.measures
            ]
            for subject in scores.subjects
        ],
        "names": lists.names,
        "kinds": lists.kinds,
        "runs": [run.name for run in runs],
        "settings": [_settings(run.manifest) for run in runs],
        "traces": list(traces),
    }


def _settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Format the options of each measure and its probe."""
    probes = manifest.get("probes") or {}
    texts = {}
    for name, info in (manifest.get("measures") or {}).items():
        probe = str(info.get("probe", ""))
        own, shared = (
            settings_text(info.get("options") or {}),
            settings_text(probes.get(probe) or {}),
        )
        parts = (f"version {info.get('version', '')}", own, shared and f"probe {probe}: {shared}")
        texts[name] = "; ".join(part for part in parts if part)
    return texts


def _subjects_with_places(scores: Scores, rows: Sequence[Row]) -> set[str]:
    """Return the subjects whose places fit on the page: the first seeds by rank, then the rest."""
    order = [row.subjects[0] for row in rows]
    order += [subject for row in rows for subject in row.subjects[1:]]
    chosen, remaining = set(), MAX_PLACE_VALUES
    for subject in order:
        cells = (scores[subject.label, name] for name in scores.measures)
        # A place has a text and a colour besides its numbers.
        remaining -= sum(len(place.statistics) + 1 for cell in cells for place in cell.places)
        if remaining < 0:
            break
        chosen.add(subject.label)
    return chosen


def places_left_out(content: Mapping[str, Any]) -> list[str]:
    """Return a list with a sentence on subjects whose places are omitted; empty if none are."""
    subjects = sum(any("x" in cell for cell in cells) for cells in content["cells"])
    if not subjects:
        return []
    return [f"Values by place for {count(subjects, 'network')} are only in scores.csv."]


class _PlaceLists:
    """Distinct lists of places, shared by the measures of a probe."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.kinds: list[list[str]] = []
        self._indices: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}

    def index(self, names: tuple[str, ...], kinds: tuple[str, ...]) -> int:
        key = (names, kinds)
        if key not in self._indices:
            self._indices[key] = len(self.names)
            self.names.append(list(names))
            self.kinds.append(list(kinds) if any(kinds) else [])
        return self._indices[key]


def _measure(
    name: str,
    info: Mapping[str, Any],
    rows: Sequence[Row],
    scores: Scores,
    colours: ColourScale | None,
) -> dict[str, Any]:
    sense = sense_of(info)
    entries = [row.entries[name] for row in rows]
    ends = [end for e in entries for end in (e.value, e.low, e.high)]
    mark = Scale.of(ends, sense)
    bounds = [None if b is None or math.isinf(b) else b for b in info.get("bounds") or (None,) * 2]
    axis = Scale.of(
        (
            end
            for subject in scores.subjects
            for cell in [scores[subject.label, name]]
            for place in cell.places
            for end in (place.value, *cell.place_estimate(place).interval)
        ),
        1,
    )
    return {
        "name": name,
        "probe": str(info.get("probe", "")),
        "noun": place_noun(info),
        "sense": sense,
        "mark": mark and asdict(mark),
        "strip": colours and {**asdict(colours.scale), **colours.legend()},
        "axis": axis and [axis.low, axis.high, axis.log],
        "description": str(info.get("description", "")).strip(),
        "bounds": bounds,
        "scale": str(info.get("scale") or ""),
        "derived": name in RELATIVE,
    }


def _count_texts(scores: Scores) -> dict[int, str]:
    """Format all numbers of samples on the page."""
    counts = {scores[s.label, name].n for s in scores.subjects for name in scores.measures}
    return {n: f"{n:,}" for n in sorted(counts)}


_STATISTICS = {
    "above": "the part where the output lies above its chord",
    "below": "the part where the output lies below its chord",
    "variation": "total variation of the difference from the chord",
    "numerical_error": "bound for the error of the method",
    "over_range": "divided by the range of the outputs on the path",
    "over_chord": "divided by the change of the outputs along the chords",
    "length": "length of the path, in input units",
    "per_length": "divided by the length of the path",
    "per_segment": "divided by the number of segments",
    "segments": "number of segments of a path",
    "slope_changes": "breakpoints at which the slope of an output changes",
    "at_least": "lower bound of the number",
    "permuted": "the value for permuted outputs, which no map of the inputs predicts",
    "residual": "mean norm of the difference from the linear map",
    "null": "the value for unrelated rows of the same numbers",
    "identity": "the value of the identity in place of the best map",
    "adjusted": "the in-sample value, adjusted for the number of inputs",
    "per_token": "mean over rows, each divided by its own norm",
    "top_share": "fraction of the squared norm in the largest rows",
    "units": "number of units",
    "active": "number of units that are nonlinear",
    "linear_share": "fraction of units that are linear",
    "log10_paths": "decimal logarithm of the number of paths",
}
"""Statistics of measures besides their value."""


def _statistics_legend(scores: Scores) -> dict[str, str]:
    """Describe the other statistics on the page, as far as they are known."""
    cells = [scores[s.label, name] for s in scores.subjects for name in scores.measures]
    shown = {name for cell in cells for name in cell.statistics}
    return {name: text for name, text in _STATISTICS.items() if name in shown}


def _percent_text(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else ""


def _differences(rows: Sequence[Row], measures: Sequence[str]) -> list[list[list[str]]]:
    """Format the differences of all rows from the first ones: by base, row and measure.

    The number of bases is limited, since there is a text for each pair of rows.
    """
    bases = min(len(rows), MAX_DIFFERENCES // max(1, len(rows) * len(measures)))
    return [
        [[_difference_text(base, row, name) for name in measures] for row in rows]
        for base in rows[:bases]
    ]


def _difference_text(base: Row, row: Row, measure: str) -> str:
    first = base.entries[measure]
    second = row.entries[measure]
    if base is row or not math.isfinite(first.value) or not math.isfinite(second.value):
        return ""
    found = change(first.estimate, second.estimate)
    return plus_minus(found.value, found.error, signed=True)


def _means(
    row: Row,
    scores: Scores,
    runs: Mapping[str, NamedRun],
    with_places: Collection[str],
    lists: _PlaceLists,
    colours: Mapping[str, ColourScale | None],
) -> list[dict[str, Any] | None]:
    """Pack the means over seeds at each place, if there are several seeds."""
    if len(row.subjects) < 2 or not all(s.label in with_places for s in row.subjects):
        return []
    run = runs.get(row.subjects[0].run) or next(iter(runs.values()))
    means: list[dict[str, Any] | None] = []
    for name in scores.measures:
        cells = [scores[subject.label, name] for subject in row.subjects]
        mean = mean_cell(cells)
        means.append(None)
        if mean.unit == "seeds" and mean.places:
            packed = _pack_places(
                mean, row.subjects[0], run, lists, colours[name], ("value", "error")
            )
            means[-1] = {"s": "ok", "n": mean.n, "seeds": len(cells), **packed}
    return means


def _subject(subject: TableSubject, run: NamedRun) -> dict[str, Any]:
    facts = run.subjects.get(subject.identity, {})
    return {
        "label": subject.label,
        "run": subject.run,
        "model": subject.model,
        "weights": subject.weights,
        "data": subject.data,
        "seed": subject.seed,
        "family": family_of(subject.model),
        "facts": {
            key.replace("_", " "): _fact_text(facts[key])
            for key in _FACTS
            if facts.get(key) not in (None, "", {})
        },
        "remarks": list(run.remarks.get(subject.identity, ())),
        "drawing": run.drawings.get(subject.identity),
    }


def _fact_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _entry(entry: Standing, decimals: int | None) -> list[Any]:
    ends = (_short(entry.low), _short(entry.high))
    ranks = (entry.rank, entry.tied, entry.best, entry.worst)
    quantile = "" if entry.quantile is None else _percent_text(entry.quantile)
    texts = entry_texts(entry, decimals)
    return [
        _json_number(entry.value), *ends, *ranks, quantile, entry.n, entry.over, entry.status,
        entry.reason, *texts,
    ]  # fmt: skip


def entry_texts(entry: Standing, decimals: int | None) -> tuple[str, str, str, str]:
    """Format a value, its error, its interval and its range over places or seeds."""
    if entry.status != "ok" or not math.isfinite(entry.value):
        return "", "", "", ""
    spread = range_text([entry.least, entry.greatest])
    if entry.error > 0:
        value, _, error = plus_minus(entry.value, entry.error).partition(" ± ")
        interval = interval_text(entry.low, entry.high, entry.error)
        if ")" in error:  # a common exponent
            return f"{value} ± {error}", "", interval, spread
        return value, f"± {error}", interval, spread
    return number(entry.value, decimals), "exact" if entry.over == "exact" else "", "", spread


def _short(value: float) -> float | str | None:
    return float(f"{value:.6g}") if math.isfinite(value) else _json_number(value)


def _cell(
    cell: TableCell,
    subject: TableSubject,
    measure: str,
    runs: Mapping[str, NamedRun],
    lists: _PlaceLists | None,
    traces: dict[str, int],
    colours: ColourScale | None,
) -> dict[str, Any]:
    packed: dict[str, Any] = {"s": cell.status, "n": cell.n}
    if cell.reason:
        packed["r"] = cell.reason
    if cell.statistics:
        packed["t"] = {name: _statistic(name, value) for name, value in cell.statistics.items()}
        packed["v"] = plus_minus(cell.value, cell.estimate.error)
        packed |= _statistics_texts(cell)
    run = runs.get(subject.run) or next(iter(runs.values()))
    facts = run.cells.get((*subject.identity, measure), {})
    if facts.get("key"):
        packed["i"] = facts["key"]
    for name, short in (("seconds", "sec"), ("wall_seconds", "pass")):
        if facts.get(name):
            packed[short] = f"{facts[name]:.2g} s"
    if facts.get("peak_memory"):
        packed["mem"] = f"{facts['peak_memory'] / 2**20:,.0f} MiB"
    if facts.get("traceback"):
        packed["tb"] = traces.setdefault(facts["traceback"], len(traces))
    if cell.places and lists is None:
        packed["x"] = len(cell.places)
    elif cell.places and lists is not None:
        packed |= _pack_places(cell, subject, run, lists, colours)
    return packed


def _statistic(name: str, value: float | None) -> float | str | None:
    """Convert a statistic to JSON, an error with four digits."""
    if name == "error" and value is not None and math.isfinite(value):
        return float(f"{value:.4g}")
    return _json_number(value)


def _statistics_texts(cell: TableCell) -> dict[str, Any]:
    """Format the statistics that aren't shown otherwise, and the parts of the value."""
    left_out = numbered(cell.statistics)
    others = [
        f"{name} {number(value)}"
        for name, value in cell.statistics.items()
        if name not in _SHARED_STATISTICS and name not in left_out and ":" not in name
    ]
    parts = {n.partition(":")[2]: v for n, v in cell.statistics.items() if ":" in n}
    total = sum(parts.values())
    texts = [
        [name, _json_number(v), f"{number(v)}, {100 * v / total:.1f} %" if total > 0 else number(v)]
        for name, v in parts.items()
    ]
    packed: dict[str, Any] = {"o": ", ".join(others)} if others else {}
    return {**packed, "parts": texts} if texts else packed


def _pack_places(
    cell: TableCell,
    subject: TableSubject,
    run: NamedRun,
    lists: _PlaceLists,
    colours: ColourScale | None,
    chosen: Collection[str] = (),
) -> dict[str, Any]:
    """Pack the names, values, texts and colours of a cell's places."""
    kinds = run.kinds.get(subject.identity, {})
    names = tuple(place.name for place in cell.places)
    statistics = chosen or dict.fromkeys(name for place in cell.places for name in place.statistics)
    left_out = numbered(statistics)
    columns = [n for n in statistics if n not in left_out and ":" not in n]
    counts = [place.n for place in cell.places]
    estimates = [cell.place_estimate(place) for place in cell.places]
    packed: dict[str, Any] = {
        "p": lists.index(names, tuple(kinds.get(name, "") for name in names)),
        "c": {
            name: [_statistic(name, place.statistics.get(name)) for place in cell.places]
            for name in columns
        },
        "f": [plus_minus(e.value, e.error) if math.isfinite(e.value) else "" for e in estimates],
        "k": counts[0] if len(set(counts)) == 1 else counts,
    }
    known = next((e for e in estimates if e.error > 0), None)
    if known is not None:  # the half width of an interval in standard errors
        packed["h"] = _short((known.interval[1] - known.value) / known.error)
    if colours is not None:
        packed["l"] = "".join(_level(colours.scale, place.value) for place in cell.places)
    if kinds.keys().isdisjoint(names) and not chosen:  # these have a table of all statistics
        packed["fs"] = [
            [number(v) if (v := place.statistics.get(name)) is not None else "" for name in columns]
            for place in cell.places
        ]
    remarks = [
        [index, place.status, place.reason]
        for index, place in enumerate(cell.places)
        if place.status != "ok" or place.reason
    ]
    return {**packed, "m": remarks} if remarks else packed


def _level(scale: Scale, value: float) -> str:
    position = scale.position(value)
    return "x" if math.isnan(position) else str(level_of(position))


def _json_number(value: float | None) -> float | str | None:
    """Convert a number to JSON; represent non-finite ones by their JavaScript names."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def numbered(names: Collection[str]) -> set[str]:
    """Return the statistics with one value per logit: ``logit0``, ``logit1``, and so on.

    Examples
    --------
    >>> sorted(numbered(["value", "logit0", "logit1", "q90"]))
    ['logit0', 'logit1']
    """
    stems = {name[:-1] for name in names if name.endswith("0") and not name[-2:-1].isdigit()}
    return {name for name in names if name[-1:].isdigit() and name.rstrip("0123456789") in stems}


def to_script(content: Mapping[str, Any]) -> str:
    r"""Serialize to JSON that is safe inside a ``<script>`` element.

    Examples
    --------
    >>> to_script({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # U+2028 and U+2029 end a line in old JavaScript; a less-than sign may begin a tag.
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def unpack(content: Mapping[str, Any]) -> pd.DataFrame:
    """Convert the output of `pack` back to the tidy table."""
    rows: list[tuple[Any, ...]] = []
    for subject, cells in zip(content["subjects"], content["cells"], strict=True):
        identity = tuple(subject[key] for key in ("run", "model", "weights", "data", "seed"))
        for measure, cell in zip(content["measures"], cells, strict=True):
            if cell["s"] == "absent" or measure.get("derived"):
                continue
            key = (*identity, measure["name"])
            state = (cell["n"], cell["s"], cell.get("r", ""))
            numbers = cell.get("t") or {"value": "NaN"}
            rows += [(*key, "", name, float(value), *state) for name, value in numbers.items()]
            rows += [(*key, *row) for row in _place_rows(content, cell)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _place_rows(content: Mapping[str, Any], cell: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    if "p" not in cell:
        return []
    rows: list[tuple[Any, ...]] = []
    remarks = {index: (status, reason) for index, status, reason in cell.get("m", ())}
    for index, place in enumerate(content["names"][cell["p"]]):
        n = cell["k"] if isinstance(cell["k"], int) else cell["k"][index]
        state = (n, *remarks.get(index, ("ok", "")))
        numbers = {name: column[index] for name, column in cell["c"].items()}
        numbers = {name: value for name, value in numbers.items() if value is not None}
        for name, value in (numbers or {"value": "NaN"}).items():
            rows.append((place, name, float(value), *state))
    return rows


def read_page(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the tidy table from a page written by nlbench.

    Raises
    ------
    nlbench.RequestError
        If the file isn't a page written by nlbench.
    """
    match = SCORES_SCRIPT.search(read_text(Path(path)))
    if not match:
        raise RequestError(f"{path} contains no scores; expected a page written by nlbench report")
    return unpack(json.loads(match[1]))
