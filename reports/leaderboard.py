"""The leaderboard: the subjects' values, with standard errors, and their ranks, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .estimates import LEVEL, clear_orders
from .tables import MeasureInfo, Measures, Score, Scores, TableSubject, mean_score

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = LEVEL
_FIELDS = (
    "value", "error", "low", "high", "least", "greatest", "rank", "tied", "best", "worst",
    "n", "over", "status", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Standing(Score):
    """One entry in a leaderboard: a score, which is the mean over seeds if there are several.

    Parameters
    ----------
    low, high : float
        Confidence interval, within the measure's bounds; NaN if the error is unknown.
    least, greatest : float
        Range over places, or over seeds if there are several; NaN if there is only one.
    rank : int or None
        One more than the number of subjects that are clearly more nonlinear; without errors, than
        the number of subjects with a more nonlinear value. None if there is no value or no
        direction.
    tied : bool
        True if another subject has the same rank.
    best, worst : int or None
        Interval for the rank; None if the error is unknown.
    """

    low: float = math.nan
    high: float = math.nan
    least: float = math.nan
    greatest: float = math.nan
    rank: int | None = None
    tied: bool = False
    best: int | None = None
    worst: int | None = None

    @property
    def ranks(self) -> str:
        """The interval for the rank as text, such as ``1–3``. Empty if it is unknown."""
        if self.best is None or self.worst is None:
            return ""
        return str(self.best) if self.best == self.worst else f"{self.best}–{self.worst}"


@dataclass(frozen=True)
class Row:
    """One row in a leaderboard: a subject, or all seeds of one network.

    Parameters
    ----------
    subjects : tuple of TableSubject
        One per seed.
    entries : mapping of str to Standing
        Keyed by measure.
    """

    label: str
    subjects: tuple[TableSubject, ...]
    entries: Mapping[str, Standing]


def parse_family(model: str) -> str:
    """Return the leading letters of a network's name.

    Examples
    --------
    >>> [parse_family(name) for name in ("torchvision/resnet18", "vit_b_16", "redshift-mlp-x6")]
    ['resnet', 'vit', 'redshift']
    """
    name = model.rpartition("/")[2]
    letters = next((i for i, c in enumerate(name) if not c.isalpha()), len(name))
    return name[:letters] or name


def compared_measures(measures: Measures) -> list[str]:
    """Return the measures by which networks are compared in words.

    These have a direction; of a measure that depends on units, it is the relative one.
    """
    return [name for name, info in measures.items() if info.sense and not info.relative]


def sort_measure(measures: Measures) -> str | None:
    """Return the measure by which rows are sorted: the first by which networks are compared."""
    return next(iter(compared_measures(measures)), None)


def is_training(rows: Sequence[Row]) -> bool:
    """Return True if all rows are checkpoints, from several steps, so that they sort by step."""
    steps = {row.subjects[0].checkpoint for row in rows}
    return None not in steps and len(steps) > 1


def leaderboard(scores: Scores, *, together: bool = True) -> list[Row]:
    """Rank subjects and sort them: checkpoints by step, others by the first directed measure.

    The most nonlinear come first, and those without a value last. If `together`, the seeds of a
    network share a row.
    """
    members = _members(scores.subjects, together)
    labels = _labels(members)
    columns = {name: _column(scores, name, members) for name in scores.measures}
    rows = []
    for index, (label, group) in enumerate(zip(labels, members, strict=True)):
        entries = {name: column[index] for name, column in columns.items()}
        rows.append(Row(label, group, entries))
    if is_training(rows):
        return sorted(rows, key=_step_key)
    first = sort_measure(scores.measures)
    if first is None:
        return rows
    sense = scores.measures[first].sense
    values = [row.entries[first].value for row in rows]
    order = np.argsort(-sense * np.array(values), kind="stable")  # NaN last
    return [rows[index] for index in order]


def _step_key(row: Row) -> tuple[Any, ...]:
    subject = row.subjects[0]
    return (subject.run, subject.model, subject.data, subject.checkpoint)


def _members(subjects: Iterable[TableSubject], together: bool) -> list[tuple[TableSubject, ...]]:
    """Group subjects by network. Groups in which a seed occurs more than once are split."""
    groups: dict[object, list[TableSubject]] = {}
    for subject in subjects:
        groups.setdefault(subject.group if together else subject.label, []).append(subject)
    members: list[tuple[TableSubject, ...]] = []
    for group in groups.values():
        seeds = {subject.training_seed for subject in group}
        if len(seeds) == len(group):
            members.append(tuple(sorted(group, key=lambda subject: subject.training_seed)))
        else:
            members += [(subject,) for subject in group]
    return members


def _labels(members: Sequence[tuple[TableSubject, ...]]) -> list[str]:
    """Return a label for each row, with the step of checkpoints and without merged seeds."""
    labels = []
    for group in members:
        first = group[0]
        parts = first.label.split(" · ")
        if len(group) > 1:
            parts = [part for part in parts if part != f"seed {first.seed}"]
        if len(group) > 1 or first.checkpoint:
            parts = [first.weights_text if part == first.weights else part for part in parts]
        labels.append(" · ".join(parts))
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else group[0].label
        for label, group in zip(labels, members, strict=True)
    ]


def _column(
    scores: Scores, name: str, members: Sequence[tuple[TableSubject, ...]]
) -> list[Standing]:
    info = scores.measures[name]
    entries = []
    for group in members:
        seeds = [scores[subject.label, name] for subject in group]
        entries.append(_standing(seeds, group, info))
    sense = info.sense
    return _ranked(entries, sense) if sense else entries


def _standing(
    seeds: Sequence[Score], subjects: Sequence[TableSubject], info: MeasureInfo
) -> Standing:
    """Return the entry of a network."""
    score = mean_score(seeds, [subject.training_seed for subject in subjects])
    values = score.place_values
    if len(seeds) > 1:
        values = np.array([each.value for each in seeds if math.isfinite(each.value)])
    is_range = len(values) > 1 and (len(seeds) == 1 or score.status == "ok")
    low, high = score.interval
    return Standing(
        **{field.name: getattr(score, field.name) for field in fields(score)},
        low=low,
        high=high,
        least=float(values.min()) if is_range else math.nan,
        greatest=float(values.max()) if is_range else math.nan,
    )


def _ranked(entries: list[Standing], sense: int) -> list[Standing]:
    """Add ranks and their intervals, for which networks are compared in pairs.

    Differences are paired where networks share their samples or seeds. Holm's method over all pairs
    keeps the probability that any of several equal networks are ordered below 5 %.
    """
    ranked = [index for index, entry in enumerate(entries) if math.isfinite(entry.value)]
    if not ranked:
        return entries
    group = [entries[index] for index in ranked]
    values = sense * np.array([entry.value for entry in group])
    orders = sense * clear_orders(group)
    best = 1 + (orders < 0).sum(axis=1)
    worst = len(group) - (orders > 0).sum(axis=1)
    has_error = np.array([math.isfinite(entry.error) for entry in group])
    up_to = np.searchsorted(np.sort(values), values, side="right")
    plain = 1 + (len(group) - up_to)
    ranks = np.where(has_error, best, plain)
    shared = Counter(ranks.tolist())
    result = list(entries)
    for position, index in enumerate(ranked):
        known = bool(has_error[position])
        result[index] = replace(
            entries[index],
            rank=int(ranks[position]),
            tied=shared[int(ranks[position])] > 1,
            best=int(best[position]) if known else None,
            worst=int(worst[position]) if known else None,
        )
    return result


def leaderboard_frame(
    rows: Sequence[Row], measures: Sequence[str], *, full: bool = True
) -> pd.DataFrame:
    """Convert a leaderboard to a DataFrame with columns ``(measure, field)``.

    It has values, errors, intervals and ranks, and is indexed by ``subject``. If `full`, it has all
    fields of `Standing`, and is indexed by ``run, model, weights, data, seeds, subject``.
    """
    import pandas as pd

    chosen = _FIELDS if full else ("value", "error", "low", "high", "rank")
    keys = ["run", "model", "weights", "data", "seeds", "subject"]
    columns = pd.MultiIndex.from_product([measures, chosen], names=["measure", "field"])
    index: pd.Index | None = pd.Index([row.label for row in rows], name="subject")
    names = []
    cells = []
    for row in rows:
        seeds = ", ".join(str(subject.training_seed) for subject in row.subjects)
        names.append((*row.subjects[0].group, seeds, row.label))
        cells.append([getattr(row.entries[name], field) for name, field in columns])
    if full:
        index = pd.MultiIndex.from_tuples(names, names=keys) if rows else None
    frame = pd.DataFrame(cells, index=index, columns=columns, dtype=object)
    for name, field in columns:
        if field not in ("over", "status", "reason", "tied"):
            frame[name, field] = pd.to_numeric(frame[name, field])
    return frame
