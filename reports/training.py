"""Changes between the first and the last checkpoint of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .compare import Difference, compare_scores, mark_significant
from .environment import Table
from .leaderboard import Row, compared_measures, is_training
from .tables import Score, Scores, mean_score
from .text import place_text


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

    def changes(self, scores: Scores) -> dict[str, Difference]:
        """Compare the last step with the first for each measure, paired by seed or by sample.

        The measures are those with a value at both steps.
        """
        found = []
        for name, info in scores.measures.items():
            pairs = self._pairs(scores, name)
            if pairs:
                difference = _difference(name, pairs)
                has_paths = info.probe == "lines"
                found.append(replace(difference, places=()) if has_paths else difference)
        return {d.measure: d for d in mark_significant(found)}

    def packed(
        self, positions: Mapping[str, int], changes: Mapping[str, Difference]
    ) -> dict[str, Any]:
        """Return the data for the curves on the page, without the rows that the page omits."""
        rows = [row for row in self.rows if row.label in positions]
        checkpoint = self.rows[0].subjects[0].checkpoint
        return {
            "label": self.label,
            "unit": checkpoint.unit if checkpoint else "",
            "rows": [positions[row.label] for row in rows],
            "steps": [_step(row) for row in rows],
            "top": {name: top.place for name, d in changes.items() if (top := d.most_changed)},
        }

    def _pairs(self, scores: Scores, measure: str) -> list[tuple[Score, Score]]:
        """Return the cells for the first and the last step, paired by seed."""
        first = {s.training_seed: scores[s.label, measure] for s in self.rows[0].subjects}
        last = {s.training_seed: scores[s.label, measure] for s in self.rows[-1].subjects}
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
    runs = []
    for names, group in groups.items():
        parts = [part for part, varies in zip(names, varying, strict=True) if varies and part]
        runs.append(TrainingRun(" · ".join(parts), tuple(sorted(group, key=_step))))
    return runs


def _step(row: Row) -> int:
    checkpoint = row.subjects[0].checkpoint
    return checkpoint.step if checkpoint else 0


def _difference(measure: str, pairs: Sequence[tuple[Score, Score]]) -> Difference:
    """Compare two steps, by their means over seeds."""
    seeds = range(len(pairs))
    first, last = (mean_score(side, seeds) for side in zip(*pairs, strict=True))
    return compare_scores("", measure, first, last)


def _by_change(difference: Difference) -> list[Difference]:
    """Return the places whose value differs, largest change first, clear changes before others."""
    places = [d for d in difference.places if math.isfinite(d.change) and d.change]
    return sorted(places, key=lambda d: (not d.is_significant, -abs(d.change)))


def change_table(changes: Mapping[str, Difference]) -> Table:
    """Tabulate the changes in the whole network and in the places that changed most."""
    head = ("measure", "place", "from", "to", "difference", "changed")
    rows = []
    for measure, difference in changes.items():
        for d in (difference, *_by_change(difference)[:3]):
            name = "" if d.place else measure
            texts = (d.first.text, d.second.text, d.estimate.text, d.verdict)
            rows.append((name, d.place or "whole network", *texts))
    return Table(head, tuple(rows), 2, True)


def training_findings(training: TrainingRun, scores: Scores) -> Iterator[str]:
    """Describe which place changed most, and which measures changed beyond their errors."""
    changes = training.changes(scores)
    first, last = (row.subjects[0].checkpoint for row in (training.rows[0], training.rows[-1]))
    prefix = f"In {training.label}: by" if training.label else "By"
    compared = [name for name in compared_measures(scores.measures) if name in changes]
    for name in compared:
        clear = [d for d in _by_change(changes[name]) if d.is_significant]
        if clear:
            known = sum(math.isfinite(d.error) for d in changes[name].places)
            noun = scores.measures[name].range_noun
            named = [f"{place_text(d.place)} ({d.estimate.text})" for d in clear[:2]]
            steps = f"between {first} and {last}"
            text = f"{len(clear)} of {known} {noun} changed"
            if top := changes[name].most_changed:
                most = f"{place_text(top.place)} changed most ({top.estimate.text})"
                yield f"{prefix} {name}, {most} {steps}; {text}."
            else:
                yield f"{prefix} {name}, {text} {steps}; largest: {', '.join(named)}."
            break
    clear_texts = []
    unclear = []
    for name in compared:
        d = changes[name]
        if d.is_significant:
            clear_texts.append(f"{name} ({d.ends}, {d.estimate.text})")
        elif math.isfinite(d.error):
            unclear.append(f"{name} ({d.ends})")
    texts = [f"The whole network changed in {', '.join(clear_texts)}."] if clear_texts else []
    texts += [f"No clear overall change in {', '.join(unclear)}."] if unclear else []
    if texts:
        yield " ".join(texts)
