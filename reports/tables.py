"""The tidy table of scores, indexed by subject, measure and place, with replicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nlbench.errors import RequestError

from .checkpoints import Checkpoint, parse_checkpoint, split_seed
from .estimates import Estimate, over_seeds
from .relative import RELATIVE, relative_cell, with_relative

if TYPE_CHECKING:
    from nlbench.measure import Result
    from nlbench.store.record import Record

_SUBJECT = ("run", "model", "weights", "data", "seed")
Identity = tuple[str, str, str, str, int, str]
"""Run, model, weights, data, seed and measure of a cell."""


@dataclass(frozen=True, slots=True)
class Place:
    """Values of a measure at one site, path or layer of one subject.

    Parameters
    ----------
    statistics : mapping of str to float
        Empty if there is no value.
    replicates : tuple of float
        The value without each group of samples; empty if its error is unknown.
    """

    name: str
    statistics: Mapping[str, float]
    n: int
    status: str
    reason: str
    replicates: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The statistic ``value``; NaN if there is none."""
        return _value(self.statistics, self.status)

    @property
    def numerical_error(self) -> float:
        """Bound for the error of the method, or 0 if there is none."""
        return self.statistics.get("numerical_error", 0.0)


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


@dataclass(frozen=True, slots=True)
class TableCell:
    """Values of one measure for one subject.

    Parameters
    ----------
    statistics : mapping of str to float
        Statistics for the subject as a whole; ``value`` is the summary.
    status, reason : str
        The status is ``absent`` if nothing is recorded.
    replicates : tuple of float
        The summary without each group of samples; empty if its error is unknown.
    key : str
        Identifies the samples and their groups.
    unit : str
        What the groups consist of: ``samples``, ``paths`` or ``seeds``; ``exact`` if the value
        doesn't depend on samples.
    """

    statistics: Mapping[str, float]
    n: int
    status: str
    reason: str
    places: tuple[Place, ...] = ()
    replicates: tuple[float, ...] = ()
    key: str = ""
    unit: str = ""

    @property
    def value(self) -> float:
        """The statistic ``value``; NaN if there is none."""
        return _value(self.statistics, self.status)

    @property
    def place_values(self) -> NDArray[np.float64]:
        """Finite values of the places, in order."""
        values = np.array([place.value for place in self.places], dtype=np.float64)
        return values[np.isfinite(values)]

    @property
    def estimate(self) -> Estimate:
        """The summary with its replicates."""
        return self._estimate(self.value, self.replicates, self.statistics)

    def place_estimate(self, place: Place) -> Estimate:
        """Return the value at one of the cell's places with its replicates."""
        return self._estimate(place.value, place.replicates, place.statistics)

    def _estimate(
        self, value: float, replicates: tuple[float, ...], statistics: Mapping[str, float]
    ) -> Estimate:
        unit = self.unit if replicates or self.unit == "exact" else ""
        numerical_error = statistics.get("numerical_error", 0.0)
        return Estimate(value, replicates, self.key, unit, numerical_error)


def mean_cell(cells: Sequence[TableCell]) -> TableCell:
    """Return the first seed's cell, with the mean over seeds at each place if they all share it.

    Seeds without a recorded cell are left out. The replicates of a mean leave out one seed each.
    """
    cells = [cell for cell in cells if cell.status != "absent"] or cells
    first = cells[0]
    names = [place.name for place in first.places]
    if len(cells) == 1 or any([p.name for p in cell.places] != names for cell in cells):
        return first
    places = []
    for group in zip(*(cell.places for cell in cells), strict=True):
        values = [place.value for place in group if math.isfinite(place.value)]
        mean = over_seeds(values, range(len(values))) if values else Estimate(math.nan)
        statistics = {"value": mean.value} if values else {}
        if math.isfinite(mean.error):
            statistics["error"] = mean.error
        places.append(
            replace(
                group[0],
                statistics=statistics,
                status="ok" if values else group[0].status,
                replicates=mean.replicates,
            )
        )
    return replace(first, places=tuple(places), unit="seeds", key="")


def _value(statistics: Mapping[str, float], status: str) -> float:
    value = statistics.get("value", math.nan) if status == "ok" else math.nan
    return value if math.isfinite(value) else math.nan


@dataclass(frozen=True)
class CellReplicates:
    """Replicates of a cell's summary and of its places, see `TableCell`."""

    summary: tuple[float, ...] = ()
    places: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    key: str = ""
    unit: str = ""

    @classmethod
    def of(cls, record: Record) -> CellReplicates:
        """Return the replicates in a record."""
        result = record.result
        probe = record.probe
        paths = str(probe.facts.get("paths_hash") or "")
        hashes = [part for part in (record.subject.sample_hash, paths) if part]
        unit = "exact" if record.measure.exact else "paths" if probe.name == "lines" else "samples"
        places = {value.place: value.replicates for value in result.values if value.replicates}
        return cls(result.replicates, places, " ".join(hashes), unit)


def replicates_by_cell(records: Iterable[Record], run: str = "") -> dict[Identity, CellReplicates]:
    """Collect the replicates of a run's records."""
    return {(run, *record.identity): CellReplicates.of(record) for record in records}


_ABSENT = TableCell({}, 0, "absent", "nothing is recorded")


class Scores:
    """Index of a tidy table: its subjects, its measures and their cells.

    Parameters
    ----------
    table : DataFrame
        A table that `labelled` accepts.
    measures : iterable of str
        Names in the desired order; other measures in the table follow.
    replicates : mapping of Identity to CellReplicates
        By default, all errors are unknown.

    The measures in `RELATIVE` are followed by their base; see `nlbench.reports.relative`.

    Examples
    --------
    >>> table = pd.DataFrame({"model": "a", "weights": "init", "data": "digits", "seed": 0,
    ...     "measure": "affinity", "place": ["", "relu"], "statistic": "value",
    ...     "value": [0.9, 0.9], "n": 64, "status": "ok", "reason": ""})
    >>> scores = Scores(table)
    >>> scores["a", "affinity"].value, len(scores["a", "affinity"].places)
    (0.9, 1)
    """

    def __init__(
        self,
        table: pd.DataFrame,
        measures: Iterable[str] = (),
        replicates: Mapping[Identity, CellReplicates] | None = None,
    ) -> None:
        table = labelled(table)
        runs = table["run"] if "run" in table.columns else [""] * len(table)
        self._cells: dict[tuple[str, str], _CellBuilder] = {}
        subjects: dict[str, TableSubject] = {}
        names = dict.fromkeys(measures)
        columns = ["subject", "measure", "place", "statistic", "value", "n", "status", "reason"]
        identities = ["model", "weights", "data", "seed"]
        rows = zip(
            *(table[name] for name in columns), runs, *(table[i] for i in identities), strict=True
        )
        for label, measure, place, statistic, value, n, status, reason, run, *identity in rows:
            if label not in subjects:
                model, weights, data, seed = identity
                subjects[label] = TableSubject(
                    label, str(run), str(model), str(weights), str(data), int(seed)
                )
            names.setdefault(measure)
            cell = self._cells.get((label, measure))
            if cell is None:
                cell = self._cells[label, measure] = _CellBuilder()
            cell.add(place, statistic, value, n, status, reason)
        for (label, name), cell in self._cells.items():
            subject = subjects[label]
            known = (replicates or {}).get((subject.run, *subject.identity, name))
            cell.replicates = known or cell.replicates
        self.subjects = tuple(subjects.values())
        self._done: dict[tuple[str, str], TableCell] = {}
        self.measures = self._with_relative(names)

    @classmethod
    def of_records(cls, records: Sequence[Record], measures: Iterable[str] = ()) -> Scores:
        """Index records directly, which takes a third of the time and memory of a tidy table."""
        scores = cls.__new__(cls)
        names = list(dict.fromkeys(record.subject.identity for record in records))
        varying = [i for i, column in enumerate(zip(*names, strict=True))
                   if i == 0 or len(set(column)) > 1]  # fmt: skip
        labels = dict(zip(names, _labels(names, varying), strict=True))
        scores.subjects = tuple(TableSubject(label, "", *name) for name, label in labels.items())
        scores._cells = {}
        scores._done = {}
        for record in records:
            key = labels[record.subject.identity], record.measure.name
            if key in scores._done:
                raise RequestError(f"two records for {', '.join(key)}; expected one")
            scores._done[key] = cell = _table_cell(record.result, CellReplicates.of(record))
            if len({place.name for place in cell.places}) < len(cell.places):
                raise RequestError(f"the record for {', '.join(key)} contains a place twice")
        shown = dict.fromkeys([*measures, *(record.measure.name for record in records)])
        scores.measures = scores._with_relative(shown)
        return scores

    def _with_relative(self, names: Iterable[str]) -> tuple[str, ...]:
        """Insert relative measures before those that they are computed from."""
        bases = {base: name for name, (base, _) in RELATIVE.items()}
        shown: list[str] = []
        for name in names:
            if name in RELATIVE:
                continue
            if name in bases and self._has_relative(bases[name]):
                shown.append(bases[name])
            shown.append(name)
        return tuple(shown)

    def _has_relative(self, name: str) -> bool:
        base, statistic = RELATIVE[name]
        numbers: Iterable[Mapping[str, float]] = (
            *(cell.statistics.get("", {}) for key, cell in self._cells.items() if key[1] == base),
            *(cell.statistics for key, cell in self._done.items() if key[1] == base),
        )
        # If the measure itself was normalised, the two are the same.
        return any(statistic in each and each[statistic] != each["value"] for each in numbers)

    def subset(self, subjects: Iterable[TableSubject]) -> Scores:
        """Return the scores of some subjects, in the given order."""
        part = Scores.__new__(Scores)
        part.__dict__.update(vars(self), subjects=tuple(subjects))
        return part

    def describe(self, measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Leave out the metadata of derived measures that have no value."""
        return {n: info for n, info in measures.items() if n not in RELATIVE or n in self.measures}

    def of_measures(self, names: Iterable[str]) -> Scores:
        """Return the scores of some measures, in order, with the subjects that have one."""
        part = Scores.__new__(Scores)
        chosen = tuple(names)
        subjects = tuple(
            s
            for s in self.subjects
            if any(self[s.label, name].status != "absent" for name in chosen)
        )
        part.__dict__.update(vars(self), measures=chosen, subjects=subjects)
        return part

    def __getitem__(self, key: tuple[str, str]) -> TableCell:
        """Return the cell for a subject's label and a measure."""
        if key not in self._done and key[1] in RELATIVE and key not in self._cells:
            base, statistic = RELATIVE[key[1]]
            self._done[key] = relative_cell(self[key[0], base], statistic)
        if key not in self._done:
            self._done[key] = self._cells.pop(key).build() if key in self._cells else _ABSENT
        return self._done[key]


def _table_cell(result: Result, replicates: CellReplicates = CellReplicates()) -> TableCell:
    places = tuple(
        Place(v.place, v.numbers if v.status == "ok" else {}, v.n, v.status, v.reason, v.replicates)
        for v in result.values
    )
    numbers = result.numbers if result.status == "ok" else {}
    return TableCell(
        numbers,
        result.n,
        result.status,
        result.reason,
        places,
        result.replicates,
        replicates.key,
        replicates.unit,
    )


class _CellBuilder:
    """Builder for a cell from its rows in the table."""

    __slots__ = ("replicates", "states", "statistics")

    def __init__(self) -> None:
        self.replicates = CellReplicates()
        self.statistics: dict[str, dict[str, float]] = {}
        self.states: dict[str, tuple[int, str, str]] = {}

    def add(
        self, place: str, statistic: str, value: float, n: float, status: str, reason: str
    ) -> None:
        statistics = self.statistics.setdefault(place, {})
        if status == "ok":
            statistics[statistic] = float(value)
        if place not in self.states or statistic == "value":
            self.states[place] = (int(n), status, reason)

    def build(self) -> TableCell:
        known = self.replicates
        places = tuple(
            Place(name, statistics, *self.states[name], known.places.get(name, ()))
            for name, statistics in self.statistics.items()
            if name != ""
        )
        if "" not in self.statistics:
            return replace(_ABSENT, places=places)
        return TableCell(
            self.statistics[""], *self.states[""], places, known.summary, known.key, known.unit
        )


def labelled(scores: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``subject`` to a tidy table of scores.

    A subject's label consists of its model and the fields in which the table's subjects differ. A
    table that already has the column is returned unchanged.

    Parameters
    ----------
    scores : DataFrame
        `nlbench.Run.scores`; with a column ``run`` if there are several runs.

    Raises
    ------
    nlbench.RequestError
        If a value occurs twice.

    Examples
    --------
    >>> scores = pd.DataFrame({"model": ["vgg8"] * 2, "weights": ["init", "trained"],
    ...     "data": "digits", "seed": 0, "measure": "affinity", "place": "",
    ...     "statistic": "value", "value": [0.9, 0.8], "n": 64, "status": "ok", "reason": ""})
    >>> labelled(scores)["subject"].tolist()
    ['vgg8 · init', 'vgg8 · trained']
    """
    if "subject" in scores.columns:
        return scores
    table = scores.reset_index(drop=True)
    keys = [name for name in _SUBJECT if name in table.columns]
    for name in (*keys, "measure", "place", "statistic", "status", "reason"):
        # If equal values share an object, the table is smaller and several times faster to read.
        codes, values = pd.factorize(table[name])
        table[name] = pd.Series(values.to_numpy(dtype=object)[codes], dtype=object)
    _check_unique(table, keys)
    varying = [name for name in keys if name == "model" or len(set(table[name])) > 1]
    distinct = list(dict.fromkeys(_rows(table, keys)))
    labels = dict(zip(distinct, _labels(distinct, [keys.index(n) for n in varying]), strict=True))
    table["subject"] = pd.Series(
        [labels[s] for s in _rows(table, keys)], index=table.index, dtype=object
    )
    return table


def _rows(table: pd.DataFrame, columns: list[str]) -> zip[tuple[object, ...]]:
    return zip(*(table[name] for name in columns), strict=True)


def _labels(subjects: Sequence[tuple[object, ...]], varying: Sequence[int]) -> list[str]:
    """Return one label per subject; duplicates are numbered."""
    labels: list[str] = []
    taken: Counter[str] = Counter()
    for subject in subjects:
        seed = len(subject) - 1
        parts = (f"seed {subject[i]}" if i == seed else str(subject[i]) for i in varying)
        label = " · ".join(part for part in parts if part)
        taken[label] += 1
        labels.append(f"{label} ({taken[label]})" if taken[label] > 1 else label)
    return labels


def _check_unique(table: pd.DataFrame, keys: list[str]) -> None:
    columns = [*keys, "measure", "place", "statistic"]
    twice = table[table.duplicated(columns)]
    if len(twice):
        key = ", ".join(str(part) for part in next(_rows(twice, columns)) if part != "")
        raise RequestError(f"the table of scores has two values for {key}; expected one")


def read_run(run: Any) -> tuple[Scores, dict[str, Mapping[str, Any]]]:
    """Return a run's scores with replicates, and the metadata of its measures."""
    measures = with_relative(run.manifest.get("measures") or {})
    if run.records:
        scores = Scores.of_records(run.records, measures)
    else:
        scores = Scores(run.scores, measures)
    return scores, scores.describe(measures)
