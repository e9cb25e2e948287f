"""The scores of runs, by subject and measure, with their places and replicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlbench.errors import RequestError

from .checkpoints import Checkpoint, parse_checkpoint, split_seed
from .estimates import Estimate, over_seeds
from .relative import RELATIVE, relative_score, with_relative

if TYPE_CHECKING:
    from nlbench.measure import Result, Value
    from nlbench.store.record import Record

Measures = Mapping[str, Mapping[str, Any]]
"""Metadata of each measure, as in a manifest."""


@dataclass(frozen=True)
class Score(Estimate):
    """A measure's value for a network, or at one of its sites, paths or layers.

    Parameters
    ----------
    name : str
        The place; empty for the network.
    statistics : mapping of str to float
        Empty if there is no value.
    status, reason : str
        The status is ``absent`` if nothing is recorded.
    places : tuple of Score
        Of a network: its places in call order.
    """

    name: str = ""
    statistics: Mapping[str, float] = field(default_factory=dict)
    n: int = 0
    status: str = "absent"
    reason: str = "nothing is recorded"
    places: tuple[Score, ...] = ()

    @classmethod
    def of(
        cls,
        part: Value | Result,
        statistics: Mapping[str, float],
        key: str = "",
        unit: str = "",
        **fields: Any,
    ) -> Score:
        """Return the score of a value or result with the given statistics."""
        statistics = statistics if part.status == "ok" else {}
        return cls(
            _finite(statistics.get("value", math.nan)),
            part.replicates,
            key,
            unit,
            statistics.get("numerical_error", 0.0),
            statistics=statistics,
            n=part.n,
            status=part.status,
            reason=part.reason,
            **fields,
        )

    @classmethod
    def of_record(cls, record: Record) -> Score:
        """Return the score in a record."""
        probe = record.probe
        parts = (record.subject.sample_hash, str(probe.facts.get("paths_hash") or ""))
        key = " ".join(part for part in parts if part)
        unit = "exact" if record.measure.exact else "paths" if probe.name == "lines" else "samples"
        places = tuple(cls.of(v, v.numbers, key, unit, name=v.place) for v in record.result.values)
        return cls.of(record.result, record.result.numbers, key, unit, places=places)

    @property
    def place_values(self) -> NDArray[np.float64]:
        """Finite values of the places, in order."""
        values = np.array([place.value for place in self.places], dtype=np.float64)
        return values[np.isfinite(values)]

    @property
    def over(self) -> str:
        """What the standard error is over, ``exact`` without one, empty if it is unknown."""
        is_known = bool(self.replicates) or self.unit == "exact"
        return self.unit if is_known and math.isfinite(self.value) else ""


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def mean_score(scores: Sequence[Score], seeds: Sequence[int], key: str = "") -> Score:
    """Return the mean over seeds, if none failed, for the network and at each place.

    A seed that the measure hasn't been applied to is left out, with a note. If the places of the
    seeds differ, those of the first seed are returned. The replicates leave out one seed each;
    those of places with the same `key` are paired.
    """
    if len(scores) == 1:
        return scores[0]
    pairs = list(zip(scores, seeds, strict=True))
    known = [pair for pair in pairs if math.isfinite(pair[0].value)]
    missing = [pair for pair in pairs if not math.isfinite(pair[0].value)]
    recorded = [score for score in scores if score.status != "absent"] or scores
    shared: dict[str, Any] = {
        "n": max(score.n for score in scores),
        "places": _mean_places(recorded, key),
        "statistics": recorded[0].statistics,
    }
    failed = [pair for pair in missing if pair[0].status == "failed"]
    if failed or not known:
        score, seed = (failed or missing)[0]
        reason = f"seed {seed}: {score.reason}"
        return Score(math.nan, status=score.status, reason=reason, **shared)
    mean = known[0][0]
    if len(known) > 1:
        estimate = over_seeds((score.value for score, _ in known), [seed for _, seed in known])
        error = max(score.numerical_error for score, _ in known)
        unit = f"{len(known)} seeds"
        mean = Score(estimate.value, estimate.replicates, estimate.key, unit, error)
    reasons = dict.fromkeys(s.reason for s in scores if s.status == "ok" and s.reason)
    notes = [f"seed {seed} is {score.status}: {score.reason}" for score, seed in missing]
    return replace(mean, status="ok", reason="; ".join([*reasons, *notes]), **shared)


def _mean_places(scores: Sequence[Score], key: str) -> tuple[Score, ...]:
    """Return the means over seeds at each place, or the places of the first if they differ."""
    places = scores[0].places
    names = [place.name for place in places]
    if len(scores) == 1 or any([p.name for p in score.places] != names for score in scores):
        return places
    means = []
    for first, *others in zip(*(score.places for score in scores), strict=True):
        values = [place.value for place in (first, *others) if math.isfinite(place.value)]
        mean = over_seeds(values, range(len(values))) if values else Estimate(math.nan)
        means.append(
            replace(
                first,
                value=mean.value,
                replicates=mean.replicates,
                key=key,
                unit=f"{len(values)} seeds",
                numerical_error=0.0,
                statistics={"value": mean.value} if values else {},
                status="ok" if values else first.status,
            )
        )
    return tuple(means)


@dataclass(frozen=True)
class TableSubject:
    """Identity of a subject in the table.

    Parameters
    ----------
    label : str
        The model and the fields in which the subject differs from others.
    run : str
        Empty if the table contains only one run.
    """

    label: str
    run: str
    model: str
    weights: str
    data: str
    seed: int

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Key of the network without its seed: run, model, weights, data.

        The names of weights that depend on a seed contain it: ``random-0.5-seed0``.
        """
        return (self.run, self.model, split_seed(self.weights)[0], self.data)

    @property
    def training_seed(self) -> int:
        """The seed in the name of the weights, or else the subject's seed."""
        seed = split_seed(self.weights)[1]
        return self.seed if seed is None else seed

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Training step, parsed from the name of the weights."""
        return parse_checkpoint(self.weights)

    @property
    def weights_text(self) -> str:
        """Name of the weights without the seed; for a checkpoint, its training run and step."""
        if self.checkpoint is None:
            return self.group[2]
        training = self.checkpoint.training
        return ", ".join(p for p in (training, str(self.checkpoint)) if p not in ("", self.model))

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """Key of the subject within its run."""
        return (self.model, self.weights, self.data, self.seed)


class Scores:
    """The scores of one or several runs, their subjects and their measures.

    Parameters
    ----------
    records : mapping of str to sequence of Record
        Records of each run, by the run's name; empty if there is only one.
    measures : iterable of str
        Names in the desired order; other measures in the records follow. The measures in
        `RELATIVE` are followed by their base; see `nlbench.reports.relative`.

    Raises
    ------
    nlbench.RequestError
        If two records are of one cell, or a record contains a place twice.
    """

    def __init__(
        self, records: Mapping[str, Sequence[Record]], measures: Iterable[str] = ()
    ) -> None:
        every = [(run, record) for run, members in records.items() for record in members]
        names = list(dict.fromkeys((run, *record.subject.identity) for run, record in every))
        labels = dict(zip(names, _labels(names), strict=True))
        self.subjects = tuple(TableSubject(label, *name) for name, label in labels.items())
        self._scores: dict[tuple[str, str], Score] = {}
        for run, record in every:
            key = labels[run, *record.subject.identity], record.measure.name
            if key in self._scores:
                raise RequestError(f"two records for {', '.join(key)}; expected one")
            self._scores[key] = score = Score.of_record(record)
            if len({place.name for place in score.places}) < len(score.places):
                raise RequestError(f"the record for {', '.join(key)} contains a place twice")
        shown = dict.fromkeys([*measures, *(record.measure.name for _, record in every)])
        bases = {base: name for name, (base, _) in RELATIVE.items() if self._has_relative(name)}
        ordered: list[str] = []
        for name in shown:
            if name not in RELATIVE:
                ordered += [bases[name], name] if name in bases else [name]
        self.measures = tuple(ordered)

    def _has_relative(self, name: str) -> bool:
        base, statistic = RELATIVE[name]
        numbers = [score.statistics for key, score in self._scores.items() if key[1] == base]
        # If the measure itself was normalised, the two are the same.
        return any(statistic in each and each[statistic] != each["value"] for each in numbers)

    def restrict(
        self,
        *,
        subjects: Iterable[TableSubject] | None = None,
        measures: Iterable[str] | None = None,
    ) -> Scores:
        """Return the scores of some subjects, or of some measures and the subjects with one."""
        part = Scores.__new__(Scores)
        chosen = self.measures if measures is None else tuple(measures)
        if subjects is None:
            subjects = (
                s
                for s in self.subjects
                if any(self[s.label, name].status != "absent" for name in chosen)
            )
        part.__dict__.update(vars(self), measures=chosen, subjects=tuple(subjects))
        return part

    def describe(self, measures: Measures) -> dict[str, Mapping[str, Any]]:
        """Leave out the metadata of derived measures that have no value."""
        return {n: info for n, info in measures.items() if n not in RELATIVE or n in self.measures}

    def __getitem__(self, key: tuple[str, str]) -> Score:
        """Return the score for a subject's label and a measure."""
        if key not in self._scores:
            derived = RELATIVE.get(key[1])
            self._scores[key] = (
                relative_score(self[key[0], derived[0]], derived[1]) if derived else Score(math.nan)
            )
        return self._scores[key]

    def cells(self) -> Iterable[tuple[TableSubject, str, Score]]:
        """Yield each subject with each measure and the score."""
        for subject in self.subjects:
            for name in self.measures:
                yield subject, name, self[subject.label, name]


def _labels(subjects: Sequence[tuple[object, ...]]) -> list[str]:
    """Return a label for each subject: the model and the fields in which they differ.

    Duplicates are numbered.
    """
    columns = list(zip(*subjects, strict=True))
    varying = [i for i, column in enumerate(columns) if i == 1 or len(set(column)) > 1]
    labels: list[str] = []
    taken: Counter[str] = Counter()
    for subject in subjects:
        parts = (f"seed {subject[i]}" if i == 4 else str(subject[i]) for i in varying)
        label = " · ".join(part for part in parts if part)
        taken[label] += 1
        labels.append(f"{label} ({taken[label]})" if taken[label] > 1 else label)
    return labels


def read_run(run: Any) -> tuple[Scores, dict[str, Mapping[str, Any]]]:
    """Return a run's scores and the metadata of its measures."""
    measures = with_relative(run.manifest.get("measures") or {})
    scores = Scores({"": run.records}, measures)
    return scores, scores.describe(measures)
