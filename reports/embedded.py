"""The data embedded in the page: the packed tidy table and the metadata of the runs."""

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

from .fingerprint import Scale
from .layout import NamedRun
from .leaderboard import Measures, Row, family_of, sense_of
from .population import reference_share
from .tables import Scores, TableCell, TableSubject
from .text import column_decimals, count, interval_decimals, settings_text

COLUMNS = (
    "run", "model", "weights", "data", "seed", "measure", "place", "statistic", "value", "n",
    "status", "reason",
)  # fmt: skip

SCORES_SCRIPT = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_FACTS = (
    "weights_hash", "parameters", "preprocessing", "split", "samples", "sample_hash",
    "weights_metadata", "data_options", "mode", "omega",
)  # fmt: skip

MAX_PLACE_VALUES = 120_000
"""Maximum number of values by place on one page, at about 20 bytes each."""


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
    return {
        "measures": [
            _measure(name, measures.get(name, {}), [row.entries[name] for row in rows], scores)
            for name in scores.measures
        ],
        "subjects": [
            _subject(subject, by_name.get(subject.run, runs[0])) for subject in scores.subjects
        ],
        "rows": [
            {
                "label": row.label,
                "subjects": [positions[subject.label] for subject in row.subjects],
                "cells": [_entry(row.entries[name]) for name in scores.measures],
                "reference": [
                    _json_number(reference_share(row, scores, name, measures.get(name, {})))
                    for name in scores.measures
                ],
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
        remaining -= sum(len(place.statistics) for cell in cells for place in cell.places)
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
    name: str, info: Mapping[str, Any], entries: Sequence[Any], scores: Scores
) -> dict[str, Any]:
    sense = sense_of(info)
    places = [v for s in scores.subjects for v in scores[s.label, name].place_values]
    strip = Scale.of(places, sense, clip=True)
    mark = Scale.of([entry.value for entry in entries], sense)

    bounds = [None if b is None or math.isinf(b) else b for b in info.get("bounds") or (None,) * 2]
    return {
        "name": name,
        "probe": str(info.get("probe", "")),
        "sense": sense,
        "mark": mark and asdict(mark),
        "strip": strip and asdict(strip),
        "description": str(info.get("description", "")).strip(),
        "bounds": bounds,
        "decimals": interval_decimals(entries),
        "all": column_decimals(entry.value for entry in entries),
    }


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
        "facts": {key: facts[key] for key in _FACTS if facts.get(key) not in (None, "", {})},
        "remarks": list(run.remarks.get(subject.identity, ())),
        "drawing": run.drawings.get(subject.identity),
    }


def _entry(entry: Any) -> list[Any]:
    numbers = (entry.value, entry.std, entry.low, entry.high)
    ranks = (entry.rank, entry.tied, entry.best, entry.worst, entry.quantile)
    return [*map(_json_number, numbers), *ranks, entry.n, entry.over, entry.status, entry.reason]


def _cell(
    cell: TableCell,
    subject: TableSubject,
    measure: str,
    runs: Mapping[str, NamedRun],
    lists: _PlaceLists | None,
    traces: dict[str, int],
) -> dict[str, Any]:
    packed: dict[str, Any] = {"s": cell.status, "n": cell.n}
    if cell.reason:
        packed["r"] = cell.reason
    if cell.statistics:
        packed["t"] = {name: _json_number(value) for name, value in cell.statistics.items()}
    run = runs.get(subject.run) or next(iter(runs.values()))
    facts = run.cells.get((*subject.identity, measure), {})
    for name, short in (("key", "i"), ("seconds", "sec"), ("peak_memory", "mem")):
        if facts.get(name):
            packed[short] = facts[name] if name == "key" else float(f"{facts[name]:.3g}")
    if facts.get("traceback"):
        packed["tb"] = traces.setdefault(facts["traceback"], len(traces))
    if cell.places and lists is None:
        packed["x"] = len(cell.places)
    elif cell.places and lists is not None:
        kinds = run.kinds.get(subject.identity, {})
        names = tuple(place.name for place in cell.places)
        packed["p"] = lists.index(names, tuple(kinds.get(name, "") for name in names))
        statistics = dict.fromkeys(name for place in cell.places for name in place.statistics)
        left_out = numbered(statistics)
        packed["c"] = {
            name: [_json_number(place.statistics.get(name)) for place in cell.places]
            for name in statistics
            if name not in left_out and ":" not in name
        }
        counts = [place.n for place in cell.places]
        packed["k"] = counts[0] if len(set(counts)) == 1 else counts
        remarks = [
            [index, place.status, place.reason]
            for index, place in enumerate(cell.places)
            if place.status != "ok" or place.reason
        ]
        if remarks:
            packed["m"] = remarks
    return packed


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
            if cell["s"] == "absent":
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
