"""Changes between the first and the last checkpoint of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compare import difference_of
from .layout import Table
from .leaderboard import CONFIDENCE, Row, is_training, mean_interval, sense_of
from .tables import Scores, TableCell
from .text import column_decimals, count, number, place_noun, place_text

Measures = Mapping[str, Mapping[str, Any]]

_MAX_PLACES = 3


@dataclass(frozen=True)
class Change:
    """Change in a measure from the first step to the last, as a mean over seeds.

    Parameters
    ----------
    place : str
        Empty for the whole network.
    low, high : float
        Interval for the difference, paired by seed (or by place for one seed); NaN if undefined.
    over : str
        Number of pairs with its unit, such as ``3 seeds``.
    """

    measure: str
    place: str
    before: float
    after: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def values(self) -> str:
        """The formatted values before and after."""
        decimals = self._decimals
        return f"{number(self.before, decimals)} → {number(self.after, decimals)}"

    @property
    def interval(self) -> str:
        """The formatted interval for the difference; empty if undefined."""
        if not math.isfinite(self.low):
            return ""
        ends = (self._format_signed(self.low), self._format_signed(self.high))
        return f"{ends[0]} to {ends[1]}"

    @property
    def difference(self) -> str:
        """The formatted difference, with its sign."""
        return self._format_signed(self.after - self.before)

    @property
    def _decimals(self) -> int | None:
        decimals = column_decimals([self.before, self.after])
        return decimals and max(0, decimals - 1)

    def _format_signed(self, value: float) -> str:
        return ("+" if value > 0 else "") + number(value, self._decimals).replace("-", "−")


@dataclass(frozen=True)
class TrainingRun:
    """Checkpoints of one training run, ordered by step.

    Parameters
    ----------
    label : str
        Consists of those of run, model, training run and data that vary on the page.
    """

    label: str
    rows: tuple[Row, ...]

    def changes(self, scores: Scores, measures: Measures) -> dict[str, list[Change]]:
        """Compare the last step with the first for each measure.

        Returns
        -------
        dict of str to list of Change
            Keyed by measure. The whole network comes first, then the places that changed, in order
            of decreasing change. Paths are omitted, since they are not places in a network.
        """
        changes = {}
        for name in scores.measures:
            pairs = self._pairs(scores, name)
            if not pairs:
                continue
            changes[name] = [_network_change(name, pairs, measures)]
            if measures.get(name, {}).get("probe") != "lines" and len(pairs[0][0].places) > 1:
                changes[name] += sorted(
                    _place_changes(name, pairs), key=lambda c: -abs(c.after - c.before)
                )
        return changes

    def packed(
        self, positions: Mapping[str, int], changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Any]:
        """Return the data for the curves on the page, without the rows that the page omits."""
        rows = [row for row in self.rows if row.label in positions]
        checkpoint = self.rows[0].subjects[0].checkpoint
        return {
            "label": self.label,
            "unit": checkpoint.unit if checkpoint else "",
            "rows": [positions[row.label] for row in rows],
            "steps": [_step(row) for row in rows],
            "top": {name: entries[1].place for name, entries in changes.items() if entries[1:]},
        }

    def _pairs(self, scores: Scores, measure: str) -> list[tuple[TableCell, TableCell]]:
        """Return the cells for the first and the last step, paired by seed."""
        first, last = (
            {s.training_seed: scores[s.label, measure] for s in row.subjects}
            for row in (self.rows[0], self.rows[-1])
        )
        pairs = [(first[seed], last[seed]) for seed in first if seed in last]
        return [(a, b) for a, b in pairs if math.isfinite(a.value) and math.isfinite(b.value)]


def training_runs(rows: Sequence[Row]) -> list[TrainingRun]:
    """Group checkpoints by training run, keeping runs with several steps."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        subject = row.subjects[0]
        if subject.checkpoint:
            key = (subject.run, subject.model, subject.checkpoint.training, subject.data)
            groups.setdefault((*key, subject.checkpoint.unit), []).append(row)
    groups = {key: group for key, group in groups.items() if is_training(group)}
    varying = [len(set(column)) > 1 for column in zip(*groups, strict=True)]
    return [
        TrainingRun(
            " · ".join(part for part, varies in zip(key, varying, strict=True) if varies and part),
            tuple(sorted(group, key=_step)),
        )
        for key, group in groups.items()
    ]


def _step(row: Row) -> int:
    checkpoint = row.subjects[0].checkpoint
    return checkpoint.step if checkpoint else 0


def _network_change(
    measure: str, pairs: Sequence[tuple[TableCell, TableCell]], measures: Measures
) -> Change:
    if len(pairs) > 1:
        return _mean_change(measure, "", [(a.value, b.value) for a, b in pairs])
    [(first, last)] = pairs
    paired = difference_of("", measure, first, last)
    noun = place_noun(measures.get(measure, {}))
    over = count(paired.share.n, noun) if math.isfinite(paired.low) else ""
    return Change(measure, "", first.value, last.value, paired.low, paired.high, over)


def _place_changes(measure: str, pairs: Sequence[tuple[TableCell, TableCell]]) -> Iterator[Change]:
    values = [
        [{place.name: place.value for place in cell.places} for cell in pair] for pair in pairs
    ]
    for name in values[0][0]:
        known = [(a.get(name, math.nan), b.get(name, math.nan)) for a, b in values]
        finite = [pair for pair in known if all(map(math.isfinite, pair))]
        if any(a != b for a, b in finite):
            yield _mean_change(measure, name, finite)


def _mean_change(measure: str, place: str, values: Sequence[tuple[float, float]]) -> Change:
    before, after = np.mean(values, axis=0)
    low, high = mean_interval([b - a for a, b in values], f"{place}\0{measure}")
    over = count(len(values), "seed") if len(values) > 1 else ""
    return Change(measure, place, float(before), float(after), low, high, over)


def change_table(changes: Mapping[str, Sequence[Change]]) -> Table:
    """Tabulate the changes in the whole network and in the places that changed most."""
    head = ("measure", "place", "from", "to", "difference", "95 % interval", "over")
    rows = []
    for measure, entries in changes.items():
        for change in entries[: 1 + _MAX_PLACES]:
            before, after = change.values.split(" → ")
            name = "" if change.place else measure
            rows.append((name, change.place or "whole network", before, after, change.difference,
                         change.interval or "–", change.over))  # fmt: skip
    return Table(head, tuple(rows), 2, True)


def training_findings(training: TrainingRun, scores: Scores, measures: Measures) -> Iterator[str]:
    """Describe which place changed most, and which measures changed beyond their intervals."""
    changes = training.changes(scores, measures)
    first, last = (row.subjects[0].checkpoint for row in (training.rows[0], training.rows[-1]))
    span = f"between {first} and {last}"
    prefix = f"In {training.label}: by" if training.label else "By"
    directed = [name for name in changes if sense_of(measures.get(name, {}))]
    for name in directed:
        places = changes[name][1:]
        if len(places) > 1:
            top = places[0]
            paired = f" ({100 * CONFIDENCE:g} % interval for the difference: {top.interval})"
            text = f"{place_text(top.place)} changed most: {top.values} {span}"
            yield f"{prefix} {name}, {text}{paired if top.interval else ''}."
            break
    whole = [changes[name][0] for name in directed]
    clear = [f"{c.measure} ({c.values})" for c in whole if c.is_clear]
    unclear = [f"{c.measure} ({c.values})" for c in whole if c.low < 0 < c.high]
    texts = [f"The whole network changed clearly in {', '.join(clear)}."] if clear else []
    texts += [f"No clear overall change in {', '.join(unclear)}."] if unclear else []
    if texts:
        yield " ".join(texts)
