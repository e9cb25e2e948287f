"""The data embedded in the page: scores, their texts and the metadata of the runs.

All numbers are formatted here; the page's script sorts, filters and draws.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .estimates import change
from .fingerprint import Scale
from .leaderboard import Row, Standing, parse_family
from .population import colour_scale, reference_fraction
from .tables import RELATIVE, NamedRun, Score, Scores, TableSubject, read_measures
from .text import (
    count,
    entry_decimals,
    interval_text,
    number,
    plus_minus,
    range_text,
    settings_text,
)

_FACTS = (
    "weights_hash", "parameters", "preprocessing", "split", "samples", "sample_hash",
    "weights_metadata", "data_options", "mode", "omega",
)  # fmt: skip

MAX_PLACE_VALUES = 100_000
"""Maximum number of values by place on one page, at about 10 bytes each."""
_SHARED_STATISTICS = ("value", "error", "std", "min", "max", "median", "spread")
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


class PageData:
    """The scores of a page as JSON-compatible values.

    Numbered statistics of places (one per logit or segment) and their parts (``site:NAME``) are
    omitted: there are many of them, and the page doesn't show them.

    Attributes
    ----------
    colours : dict of str to Scale or None
        The scale of the strips of each measure.
    """

    def __init__(self, scores: Scores, rows: Sequence[Row], runs: Sequence[NamedRun]) -> None:
        self._scores = scores
        self._rows = rows
        self._runs = {run.name: run for run in runs}
        self._first = runs[0]
        self._with_places = self._choose_subjects()
        self._place_lists: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        self._traces: dict[str, int] = {}
        self.colours = {}
        for name, info in scores.measures.items():
            by_subject = (scores[subject.label, name].place_values for subject in scores.subjects)
            self.colours[name] = colour_scale(name, info, itertools.chain.from_iterable(by_subject))

    def pack(self) -> dict[str, Any]:
        """Return everything that the page shows or exports."""
        scores = self._scores
        positions = {subject.label: index for index, subject in enumerate(scores.subjects)}
        decimals = {}
        for name in scores.measures:
            decimals[name] = entry_decimals([row.entries[name] for row in self._rows])
        rows = []
        for row in self._rows:
            entries = [(name, row.entries[name]) for name in scores.measures]
            rows.append(
                {
                    "label": row.label,
                    "subjects": [positions[subject.label] for subject in row.subjects],
                    "cells": [self._entry(entry, name, decimals[name]) for name, entry in entries],
                    "means": [self._mean(row, entry, name) for name, entry in entries],
                }
            )
        cells = []
        for subject in scores.subjects:
            by_measure = [(name, scores[subject.label, name]) for name in scores.measures]
            cells.append([self._cell(subject, score, name) for name, score in by_measure])
        shown = {name for _, _, score in scores.cells() for name in score.statistics}
        return {
            "measures": [self._measure(name) for name in scores.measures],
            "statistics": {name: text for name, text in _STATISTICS.items() if name in shown},
            "differences": _differences(self._rows, scores.measures),
            "subjects": [self._subject(subject) for subject in scores.subjects],
            "rows": rows,
            "cells": cells,
            "names": [names for names, _ in self._place_lists],
            "kinds": [kinds if any(kinds) else [] for _, kinds in self._place_lists],
            "runs": list(self._runs),
            "settings": [_settings(run.manifest) for run in self._runs.values()],
            "traces": list(self._traces),
        }

    def left_out(self) -> list[str]:
        """Return a list with a sentence on subjects whose places are omitted, if there are any."""
        subjects = {
            subject.label
            for subject, _, score in self._scores.cells()
            if score.places and subject.label not in self._with_places
        }
        if not subjects:
            return []
        return [f"Values by place for {count(len(subjects), 'network')} are only in scores.csv."]

    def kinds(self, subject: TableSubject, score: Score) -> tuple[str, ...]:
        """Return the activation function at each place of a score, empty where there is none."""
        kinds = self._run(subject).kinds(subject.identity)
        return tuple(kinds.get(place.name, "") for place in score.places)

    def has_places(self, row: Row) -> bool:
        """Return True if the places of all subjects of a row are on the page."""
        return all(subject.label in self._with_places for subject in row.subjects)

    def _run(self, subject: TableSubject) -> NamedRun:
        return self._runs.get(subject.run, self._first)

    def _choose_subjects(self) -> set[str]:
        """Return the subjects whose places fit: the first seeds by rank, then the others."""
        order = [row.subjects[0] for row in self._rows]
        order += [subject for row in self._rows for subject in row.subjects[1:]]
        chosen: set[str] = set()
        remaining = MAX_PLACE_VALUES
        for subject in order:
            scores = (self._scores[subject.label, name] for name in self._scores.measures)
            # A place has a text and a colour besides its numbers.
            remaining -= sum(len(p.statistics) + 1 for score in scores for p in score.places)
            if remaining < 0:
                break
            chosen.add(subject.label)
        return chosen

    def _measure(self, name: str) -> dict[str, Any]:
        info = self._scores.measures[name]
        sense = info.sense
        bounds = info.bounds
        places = [p for s in self._scores.subjects for p in self._scores[s.label, name].places]
        axis = Scale.of((end for p in places for end in (p.value, *p.interval)), 1)
        colours = self.colours[name]
        return {
            "name": name,
            "probe": info.probe,
            "noun": info.place_noun,
            "sense": sense,
            "strip": colours and colours.legend(),
            "axis": axis and [axis.low, axis.high, axis.log],
            "description": info.description.strip(),
            "bounds": [None if b is None or math.isinf(b) else b for b in bounds],
            "scale": info.scale,
            "derived": name in RELATIVE,
        }

    def _subject(self, subject: TableSubject) -> dict[str, Any]:
        run = self._run(subject)
        facts = run.subjects.get(subject.identity, {})
        return {
            **asdict(subject),
            "family": parse_family(subject.model),
            "facts": {
                key.replace("_", " "): _fact_text(facts[key])
                for key in _FACTS
                if facts.get(key) not in (None, "", {})
            },
            "remarks": list(run.remarks(subject.identity)),
            "drawing": run.drawings.get(subject.identity),
        }

    def _entry(self, entry: Standing, name: str, decimals: int | None) -> dict[str, Any]:
        texts = entry_texts(entry, decimals)
        fraction = reference_fraction(entry.value, name, self._scores.measures[name])
        return {
            "s": entry.status,
            "r": entry.reason,
            "value": _json_number(entry.value),
            "low": _json_number(entry.low, 6),
            "high": _json_number(entry.high, 6),
            "rank": entry.rank,
            "tied": entry.tied,
            "ranks": entry.ranks,
            "best": entry.best,
            "worst": entry.worst,
            "n": f"{entry.n:,}" if entry.n else "",
            "over": entry.over,
            "reference": _percent_text(fraction),
            **dict(zip(("text", "error", "interval", "range"), texts, strict=True)),
        }

    def _mean(self, row: Row, entry: Standing, name: str) -> dict[str, Any] | None:
        """Pack the means over seeds at each place, if there are several seeds."""
        if len(row.subjects) < 2 or not self.has_places(row):
            return None
        if not entry.places or not entry.places[0].unit.endswith("seeds"):
            return None
        places = self._places(row.subjects[0], entry, name, is_mean=True)
        return {"s": "ok", "seeds": len(row.subjects), **places}

    def _cell(self, subject: TableSubject, score: Score, name: str) -> dict[str, Any]:
        packed: dict[str, Any] = {"s": score.status, "n": score.n}
        packed["count"] = f"{score.n:,}" if score.n else ""
        if score.reason:
            packed["r"] = score.reason
        if score.statistics:
            packed["t"] = {key: _statistic(key, value) for key, value in score.statistics.items()}
            packed["v"] = score.text
            packed |= _statistics_texts(score)
        record = self._run(subject).cells.get((*subject.identity, name))
        if record is not None:
            packed["i"] = record.key
            times = {"sec": record.seconds, "pass": record.costs.get("wall_seconds")}
            packed |= {key: f"{seconds:.2g} s" for key, seconds in times.items() if seconds}
            if memory := record.costs.get("peak_memory"):
                packed["mem"] = f"{memory / 2**20:,.0f} MiB"
            if record.traceback:
                packed["tb"] = self._traces.setdefault(record.traceback, len(self._traces))
        if score.places and subject.label in self._with_places:
            packed |= self._places(subject, score, name)
        return packed

    def _places(
        self, subject: TableSubject, score: Score, measure: str, *, is_mean: bool = False
    ) -> dict[str, Any]:
        """Pack the names, values, texts and colours of a score's places."""
        places = score.places
        kinds = self.kinds(subject, score)
        key = (tuple(place.name for place in places), kinds)
        statistics = dict.fromkeys(name for place in places for name in place.statistics)
        left_out = numbered(statistics)
        columns = [n for n in statistics if n not in left_out and ":" not in n]
        counts = [place.n for place in places]
        values = {}
        for name in columns:
            values[name] = [_statistic(name, place.statistics.get(name)) for place in places]
        packed: dict[str, Any] = {
            "p": self._place_lists.setdefault(key, len(self._place_lists)),
            "c": values,
            "f": [p.text if math.isfinite(p.value) else "" for p in places],
            # Half of the interval, before the bounds cut one of its ends.
            "h": [
                _json_number(max(abs(end - p.value) for end in p.interval), 6)
                if p.error >= 0
                else None
                for p in places
            ],
            "k": counts[0] if len(set(counts)) == 1 else counts,
        }
        colours = self.colours[measure]
        if colours is not None:
            packed["l"] = "".join(colours.level(place.value) for place in places)
        if not any(kinds) and not is_mean:  # these have a table of all statistics
            packed["fs"] = []
            for place in places:
                row = [place.statistics.get(name) for name in columns]
                packed["fs"].append(["" if v is None else number(v) for v in row])
        remarks = [
            [index, place.status, place.reason]
            for index, place in enumerate(places)
            if place.status != "ok" or place.reason
        ]
        return {**packed, "m": remarks} if remarks else packed


def _settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Format the options of each measure and its probe."""
    probes = manifest.get("probes") or {}
    texts = {}
    for name, info in read_measures(manifest).items():
        probe = info.probe
        shared = settings_text(probes.get(probe) or {})
        parts = (
            f"version {info.version}",
            settings_text(info.options),
            shared and f"probe {probe}: {shared}",
        )
        texts[name] = "; ".join(part for part in parts if part)
    return texts


def _percent_text(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if math.isfinite(fraction) else ""


def _differences(rows: Sequence[Row], measures: Collection[str]) -> list[list[list[str]]]:
    """Format the differences of all rows from the first ones: by base, row and measure.

    The number of bases is limited, since there is a text for each pair of rows.
    """
    bases = min(len(rows), 4_000 // max(1, len(rows) * len(measures)))
    texts = []
    for base in rows[:bases]:
        by_row = []
        for row in rows:
            by_row.append([_difference_text(base, row, name) for name in measures])
        texts.append(by_row)
    return texts


def _difference_text(base: Row, row: Row, measure: str) -> str:
    first = base.entries[measure]
    second = row.entries[measure]
    is_known = math.isfinite(first.value) and math.isfinite(second.value)
    return change(first, second).text if is_known and base is not row else ""


def _fact_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def entry_texts(entry: Standing, decimals: int | None) -> tuple[str, str, str, str]:
    """Format a value, its error, its interval and its range over places or seeds."""
    if entry.status != "ok" or not math.isfinite(entry.value):
        return "", "", "", ""
    spread = range_text([entry.least, entry.greatest], entry.error)
    if entry.error > 0:
        value, _, error = plus_minus(entry.value, entry.error).partition(" ± ")
        interval = interval_text(entry.low, entry.high, entry.error)
        if ")" in error:  # a common exponent
            return f"{value} ± {error}", "", interval, spread
        return value, f"± {error}", interval, spread
    return number(entry.value, decimals), "exact" if entry.over == "exact" else "", "", spread


def _json_number(value: float | None, digits: int = 17) -> float | str | None:
    """Convert a number to JSON. Represent non-finite ones by their JavaScript names."""
    if value is None or math.isfinite(value):
        return value if value is None or digits == 17 else float(f"{value:.{digits}g}")
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _statistic(name: str, value: float | None) -> float | str | None:
    """Convert a statistic to JSON, an error with four digits."""
    return _json_number(value, 4 if name == "error" else 17)


def _statistics_texts(score: Score) -> dict[str, Any]:
    """Format the statistics that aren't shown otherwise, and the parts of the value."""
    left_out = numbered(score.statistics)
    others = [
        f"{name} {number(value)}"
        for name, value in score.statistics.items()
        if name not in _SHARED_STATISTICS and name not in left_out and ":" not in name
    ]
    parts = {n.partition(":")[2]: v for n, v in score.statistics.items() if ":" in n}
    total = sum(parts.values())
    texts = [
        [name, _json_number(v), f"{number(v)}, {100 * v / total:.1f} %" if total > 0 else number(v)]
        for name, v in parts.items()
    ]
    packed: dict[str, Any] = {"o": ", ".join(others)} if others else {}
    return {**packed, "parts": texts} if texts else packed


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
    """Serialize a page's data to JSON, compressed, which the page unpacks."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    packed = gzip.compress(text.encode("utf-8", "replace"), mtime=0)
    return base64.b64encode(packed).decode("ascii")
