"""The scores of runs, by subject and measure, with their places and replicates.

Absolute deviation grows with the logits. Divided by the range of the logits it doesn't, so networks
and checkpoints are compared by ``absdev.relative``: the statistic ``over_range`` of absdev.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlbench.errors import RequestError
from nlbench.measure import Result, Value
from nlbench.measure.replicates import group_index
from nlbench.parsers import unique
from nlbench.store.record import Record

from .checkpoints import Checkpoint, parse_checkpoint, split_seed
from .estimates import Estimate, over_seeds
from .text import functional_calls


@dataclass(frozen=True)
class MeasureInfo:
    """Metadata of a measure.

    Parameters
    ----------
    noun : str
        Noun for the places of a measure of sites.
    base : str
        Measure that this one is derived from; empty if it was measured itself.
    relative : str
        Measure in `RELATIVE` that is derived from this one; empty if there is none.

    Examples
    --------
    >>> info = MeasureInfo(probe="lines", more_means="less nonlinear")
    >>> info.place_noun, info.range_noun, info.sense
    ('path', 'paths', -1)
    """

    probe: str = ""
    description: str = ""
    bounds: tuple[float | None, float | None] = (None, None)
    more_means: str = "neither"
    version: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: str = ""
    citation: str = ""
    equation: str = ""
    bibtex: str = ""
    noun: str = "activation"
    base: str = ""
    relative: str = ""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MeasureInfo:
        """Read an entry of a manifest, in which fields may be missing."""
        values = {**(content.get("source") or {}), **content}
        names = [entry.name for entry in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def sense(self) -> int:
        """1 if the measure increases with nonlinearity, -1 if it decreases, 0 otherwise."""
        return {"more nonlinear": 1, "less nonlinear": -1}.get(self.more_means, 0)

    @property
    def place_noun(self) -> str:
        """Noun for the measure's places, such as path or block."""
        return {"lines": "path", "sites": self.noun}.get(self.probe, "place")

    @property
    def range_noun(self) -> str:
        """Noun for the range over the measure's places."""
        noun = self.place_noun
        return "layers" if noun in ("activation", "place") else f"{noun}s"


Measures = Mapping[str, MeasureInfo]
RELATIVE = {"absdev.relative": ("absdev", "over_range")}
"""Base measure and statistic of each derived measure."""

RELATIVE_BOUNDS = (0.0, 1.0)


def relative_score(score: Score, statistic: str) -> Score:
    """Return a score in which a statistic of paths is the value.

    Its replicates are means over paths without one group each, as those of the value.
    """
    places = tuple(_select_statistic(place, statistic) for place in score.places)
    relative = replace(_select_statistic(score, statistic), places=places)
    if relative.status != "ok":
        return relative
    values = [place.value for place in places]
    finite = [value for value in values if math.isfinite(value)]
    ends = {"min": min(finite), "max": max(finite)} if finite else {}
    return replace(
        relative,
        statistics={**relative.statistics, **ends},
        replicates=_leave_groups_out(values) if score.replicates else (),
    )


def _select_statistic(score: Score, statistic: str) -> Score:
    """Return a score without places whose value is a statistic, without replicates."""
    number = score.statistics.get(statistic, math.nan)
    bare = replace(score, statistics={}, replicates=(), numerical_error=0.0, bounds=RELATIVE_BOUNDS)
    if score.status == "ok" and math.isfinite(number):
        return replace(bare, value=number, statistics={"value": number})
    status = score.status if score.status != "ok" else "undefined"
    reason = score.reason or f"without the statistic {statistic}"
    return replace(bare, value=math.nan, status=status, reason=reason)


def _leave_groups_out(values: list[float]) -> tuple[float, ...]:
    """Return the means of values without one group each, if there are several groups."""
    numbers = np.array(values)
    groups = group_index(np.arange(len(numbers)))
    kept = [numbers[(groups != group) & np.isfinite(numbers)] for group in np.unique(groups)]
    return tuple(float(each.mean()) for each in kept) if all(map(len, kept)) else ()


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
        value = statistics.get("value", math.nan)
        return cls(
            value if math.isfinite(value) else math.nan,
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
    def from_record(cls, record: Record, bounds: tuple[float | None, float | None]) -> Score:
        """Return the score in a record, given the bounds of the measure."""
        probe = record.probe
        parts = (record.subject.sample_hash, str(probe.facts.get("paths_hash") or ""))
        key = " ".join(part for part in parts if part)
        unit = "exact" if record.measure.exact else "paths" if probe.name == "lines" else "samples"
        least, greatest = bounds
        limits = -math.inf if least is None else least, math.inf if greatest is None else greatest
        places = tuple(
            cls.of(v, v.numbers, key, unit, name=v.place, bounds=limits)
            for v in record.result.values
        )
        return cls.of(record.result, record.result.numbers, key, unit, places=places, bounds=limits)

    @property
    def place_values(self) -> NDArray[np.float64]:
        """Finite values of the places, in order."""
        values = np.array([place.value for place in self.places], dtype=np.float64)
        return values[np.isfinite(values)]

    @property
    def over(self) -> str:
        """Unit of the standard error, ``exact`` without one, empty if it is unknown."""
        is_known = bool(self.replicates) or self.unit == "exact"
        return self.unit if is_known and math.isfinite(self.value) else ""


def mean_score(scores: Sequence[Score], seeds: Sequence[int]) -> Score:
    """Return the mean over seeds, if none failed, for the network and at each place.

    A seed that the measure hasn't been applied to is left out, with a note. If the places of the
    seeds differ, those of the first seed are returned. The replicates leave out one seed each.
    """
    if len(scores) == 1:
        return scores[0]
    pairs = list(zip(scores, seeds, strict=True))
    known = [pair for pair in pairs if math.isfinite(pair[0].value)]
    missing = [pair for pair in pairs if not math.isfinite(pair[0].value)]
    recorded = [pair for pair in pairs if pair[0].status != "absent"] or pairs
    shared: dict[str, Any] = {
        "n": max(score.n for score in scores),
        "places": _mean_places(recorded),
        "statistics": recorded[0][0].statistics,
    }
    failed = [pair for pair in missing if pair[0].status == "failed"]
    if failed or not known:
        score, seed = (failed or missing)[0]
        reason = f"seed {seed}: {score.reason}"
        return Score(math.nan, status=score.status, reason=reason, **shared)
    mean = _mean_over_seeds(known)
    reasons = dict.fromkeys(s.reason for s in scores if s.status == "ok" and s.reason)
    notes = [f"seed {seed} is {score.status}: {score.reason}" for score, seed in missing]
    return replace(mean, status="ok", reason="; ".join([*reasons, *notes]), **shared)


def _mean_over_seeds(pairs: Sequence[tuple[Score, int]]) -> Score:
    """Return the mean of scores with a value, each with its seed."""
    first = pairs[0][0]
    if len(pairs) == 1:
        return first
    estimate = over_seeds((score.value for score, _ in pairs), [seed for _, seed in pairs])
    return replace(
        first,
        value=estimate.value,
        replicates=estimate.replicates,
        key=estimate.key,
        unit=f"{len(pairs)} seeds",
        numerical_error=max(score.numerical_error for score, _ in pairs),
        statistics={"value": estimate.value},
    )


def _mean_places(scores: Sequence[tuple[Score, int]]) -> tuple[Score, ...]:
    """Return the means over seeds at each place, or the places of the first if they differ."""
    first = scores[0][0].places
    names = [place.name for place in first]
    if len(scores) == 1 or any([p.name for p in score.places] != names for score, _ in scores):
        return first
    means = []
    for index, place in enumerate(first):
        pairs = [(score.places[index], seed) for score, seed in scores]
        known = [pair for pair in pairs if math.isfinite(pair[0].value)]
        means.append(_mean_over_seeds(known) if known else place)
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
        """Name of the weights without the seed. For a checkpoint, its training run and step."""
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
    measures : mapping of str to MeasureInfo
        Metadata by name, in the desired order; other measures in the records follow.

    Attributes
    ----------
    measures : dict of str to MeasureInfo
        Metadata by name, with the measures in `RELATIVE`, each followed by its base, whose entry
        ``relative`` names it.
    """

    def __init__(
        self, records: Mapping[str, Sequence[Record]], measures: Measures | None = None
    ) -> None:
        every = [(run, record) for run, members in records.items() for record in members]
        names = unique((run, *record.subject.identity) for run, record in every)
        labels = dict(zip(names, _labels(names), strict=True))
        self.subjects = tuple(TableSubject(label, *name) for name, label in labels.items())
        described = measures or {}
        self._scores: dict[tuple[str, str], Score] = {}
        for run, record in every:
            key = labels[run, *record.subject.identity], record.measure.name
            if key in self._scores:
                raise RequestError(f"two records for {', '.join(key)}; expected one")
            bounds = described.get(record.measure.name, MeasureInfo()).bounds
            self._scores[key] = score = Score.from_record(record, bounds)
            if len({place.name for place in score.places}) < len(score.places):
                raise RequestError(f"the record for {', '.join(key)} contains a place twice")
        for name, (base, statistic) in RELATIVE.items():
            known = {label: s for (label, measure), s in self._scores.items() if measure == base}
            numbers = [score.statistics for score in known.values()]
            # If the measure itself was normalised, the two are the same.
            if any(statistic in each and each[statistic] != each["value"] for each in numbers):
                relative = {(k, name): relative_score(s, statistic) for k, s in known.items()}
                self._scores |= relative
        derived = {RELATIVE[name][0]: name for _, name in self._scores if name in RELATIVE}
        self.measures: dict[str, MeasureInfo] = {}
        for name in unique([*described, *(record.measure.name for _, record in every)]):
            info = described.get(name, MeasureInfo())
            if name in dict(RELATIVE.values()) and info.options.get("normalize", "none") == "none":
                info = replace(info, scale=info.scale or "grows with the logits")
            if name in derived:
                self.measures[derived[name]] = replace(
                    info,
                    description=f"{name} divided by the range of the logits on each path.",
                    bounds=RELATIVE_BOUNDS,
                    scale="",
                    base=name,
                )
                info = replace(info, relative=derived[name])
            self.measures[name] = info

    def restrict(
        self,
        *,
        subjects: Iterable[TableSubject] | None = None,
        measures: Iterable[str] | None = None,
    ) -> Scores:
        """Return the scores of some subjects, or of some measures and the subjects with one."""
        part = Scores.__new__(Scores)
        names = self.measures if measures is None else measures
        chosen = {name: self.measures[name] for name in names}
        if subjects is None:
            subjects = (
                s
                for s in self.subjects
                if any(self[s.label, name].status != "absent" for name in chosen)
            )
        part.__dict__.update(vars(self), measures=chosen, subjects=tuple(subjects))
        return part

    def __getitem__(self, key: tuple[str, str]) -> Score:
        """Return the score for a subject's label and a measure."""
        return self._scores.get(key, _ABSENT)

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


_ABSENT = Score(math.nan)


def read_measures(manifest: Mapping[str, Any]) -> dict[str, MeasureInfo]:
    """Return the metadata of a run's measures."""
    measures = manifest.get("measures") or {}
    return {name: MeasureInfo.from_dict(content) for name, content in measures.items()}


def read_run(run: Any) -> Scores:
    """Return a run's scores."""
    return Scores({"": run.records}, read_measures(run.manifest))


Identity = tuple[str, str, str, int]
"""Model, weights, data and seed of a subject."""


@dataclass(frozen=True)
class NamedRun:
    """A run under a name that is unique on the page.

    Parameters
    ----------
    planes : tuple of (str, str)
        Data URL and caption for each plane through input space that was drawn for the run.
    """

    name: str
    manifest: Mapping[str, Any]
    records: tuple[Record, ...] = ()
    planes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def subjects(self) -> dict[Identity, Mapping[str, Any]]:
        """Facts about each subject from the manifest."""
        subjects = {}
        for s in self.manifest.get("subjects") or []:
            if {"model", "weights", "data", "seed"} <= s.keys():
                identity = (str(s["model"]), str(s["weights"]), str(s["data"]), int(s["seed"]))
                subjects[identity] = s
        return subjects

    @cached_property
    def cells(self) -> dict[tuple[str, str, str, int, str], Record]:
        """The record of each subject and measure."""
        return {record.identity: record for record in self.records}

    @cached_property
    def _members(self) -> dict[Identity, list[Record]]:
        members: dict[Identity, list[Record]] = {}
        for record in self.records:
            members.setdefault(record.subject.identity, []).append(record)
        return members

    @cached_property
    def drawings(self) -> dict[Identity, Mapping[str, Any]]:
        """The recorded path of each subject that has one, shared by the measures of lines."""
        drawings: dict[Identity, Mapping[str, Any]] = {}
        for subject, records in self._members.items():
            for record in reversed(records):
                if drawing := record.probe.facts.get("drawing"):
                    _check_drawing(drawing, f"{self.name}: {' '.join(map(str, subject))}")
                    drawings[subject] = drawing
        return drawings

    def kinds(self, subject: Identity) -> dict[str, str]:
        """Return the activation function at each site of a subject."""
        kinds: dict[str, str] = {}
        for record in self._members.get(subject, ()):
            kinds.update(record.probe.facts.get("kinds", {}))
        return kinds

    def remarks(self, subject: Identity) -> list[str]:
        """Return the probes' notes on a subject."""
        notes = (note for record in self._members.get(subject, ()) for note in _notes(record))
        return unique(notes)


def _check_drawing(drawing: Mapping[str, Any], origin: str) -> None:
    """Raise RequestError unless a drawing, which may be from others, has all of its numbers."""
    sites = drawing.get("sites", ())
    rows = drawing.get("breakpoints", ())
    try:
        curves = np.array([[c.split() for c in s] for s in drawing["curves"]], dtype=np.float64)
        counts = np.array([row.split() for row in rows], dtype=np.float64)
    except ValueError:
        curves = counts = np.empty(0)
    parts = (len(drawing["lengths"]), len(drawing["logits"]))
    if not curves.size or curves.shape[:2] != parts or len(counts) != len(sites):
        raise RequestError(f"{origin}: the recorded path is damaged")


def _notes(record: Record) -> Iterator[str]:
    facts = record.probe.facts
    for site, remark in facts.get("remarks", {}).items():
        yield f"{site}: {remark}"
    if where := facts.get("where"):
        yield functional_calls(where)
    if facts.get("unseen"):
        yield f"activations inside {', '.join(facts['unseen'])} were not observed"
