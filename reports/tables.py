"""The tidy table of scores, read the ways that boards, figures and pages need it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from nlbench.errors import RequestError

__all__ = ["Place", "Series", "labelled", "per_place", "subject_columns"]

_SUBJECT = ("run", "model", "weights", "data", "seed")
_REQUIRED = (*_SUBJECT[1:], "measure", "place", "statistic", "value", "n", "status", "reason")


@dataclass(frozen=True)
class Place:
    """What a measure says of one site, path or layer of one subject.

    Parameters
    ----------
    name : str
    statistics : mapping of str to float
        Empty where there is no value.
    n : int
    status : str
    reason : str
    """

    name: str
    statistics: Mapping[str, float]
    n: int
    status: str
    reason: str

    @property
    def value(self) -> float:
        """The number itself; NaN where there is none."""
        found = self.statistics.get("value", math.nan) if self.status == "ok" else math.nan
        return found if math.isfinite(found) else math.nan


@dataclass(frozen=True)
class Series:
    """What a measure says of the places of one subject, in order of call.

    Parameters
    ----------
    label : str
        The subject, named by what tells it from the others.
    places : tuple of Place
    """

    label: str
    places: tuple[Place, ...]

    @property
    def has_value(self) -> bool:
        """Whether any place has a number."""
        return any(math.isfinite(place.value) for place in self.places)


def subject_columns(scores: pd.DataFrame) -> list[str]:
    """Name the columns that tell subjects apart: ``run`` only where there is one."""
    return [name for name in _SUBJECT if name in scores.columns]


def labelled(scores: pd.DataFrame) -> pd.DataFrame:
    """Check a tidy table of scores, fill its blanks and add the column ``subject``.

    A subject is named by its model and by whatever else differs between the
    subjects of the table. A table that has the column already is given back as is.

    Parameters
    ----------
    scores : DataFrame
        One number a row, with the columns ``model, weights, data, seed, measure, place,
        statistic, value, n, status, reason`` and perhaps ``run``.

    Raises
    ------
    nlbench.RequestError
        If a column is missing or a number is there twice.

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
    absent = [name for name in _REQUIRED if name not in scores.columns]
    if absent and len(scores):
        raise RequestError(f"the table of scores lacks the columns {', '.join(absent)}")
    table = scores.reindex(columns=[*scores.columns, *absent]).reset_index(drop=True)
    keys = subject_columns(table)
    for name in (*keys, "measure", "place", "statistic", "status", "reason"):
        table[name] = pd.Series([_plain(v) for v in table[name]], index=table.index, dtype=object)
    _check_unique(table, keys)
    varying = [name for name in keys if name == "model" or len(set(table[name])) > 1]
    labels = _labels(list(_rows(table, keys)), [keys.index(name) for name in varying])
    table["subject"] = pd.Series(labels, index=table.index, dtype=object)
    return table


def _rows(table: pd.DataFrame, columns: list[str]) -> zip[tuple[object, ...]]:
    return zip(*(table[name] for name in columns), strict=True)


def _plain(value: object) -> str | int:
    """Text, a whole number, or nothing: what a subject's columns hold after any round trip."""
    if isinstance(value, float) and not value.is_integer():
        return "" if math.isnan(value) else str(value)
    if isinstance(value, (bool, str)):
        return str(value)
    return "" if value is None or value is pd.NA else int(value)  # type: ignore[call-overload]


def _labels(subjects: Sequence[tuple[object, ...]], varying: Sequence[int]) -> list[str]:
    """One label a row; subjects whose names run together are numbered."""
    labels: dict[tuple[object, ...], str] = {}
    for subject in dict.fromkeys(subjects):
        seed = len(subject) - 1
        parts = (f"seed {subject[i]}" if i == seed else str(subject[i]) for i in varying)
        label = " · ".join(part for part in parts if part)
        taken = sum(other == label for other in labels.values())
        labels[subject] = f"{label} ({taken + 1})" if taken else label
    return [labels[subject] for subject in subjects]


def _check_unique(table: pd.DataFrame, keys: list[str]) -> None:
    columns = [*keys, "measure", "place", "statistic"]
    twice = table[table.duplicated(columns)]
    if len(twice):
        found = ", ".join(str(part) for part in next(_rows(twice, columns)) if part != "")
        raise RequestError(f"the table of scores has two values for {found}; expected one")


def per_place(scores: pd.DataFrame, measure: str) -> list[Series]:
    """Collect what a measure says of each place, one series a subject.

    Parameters
    ----------
    scores : DataFrame
        As `labelled` takes it.
    measure : str

    Returns
    -------
    list of Series
        Subjects and places in the order of the table. Subjects without places are
        left out.
    """
    table = labelled(scores)
    rows = table[(table["measure"] == measure) & (table["place"] != "")]
    return [
        Series(str(label), _places(group)) for label, group in rows.groupby("subject", sort=False)
    ]


def _places(rows: pd.DataFrame) -> tuple[Place, ...]:
    columns = ["place", "statistic", "value", "n", "status", "reason"]
    statistics: dict[str, dict[str, float]] = {}
    about: dict[str, tuple[int, str, str]] = {}
    for place, statistic, value, n, status, reason in rows[columns].itertuples(index=False):
        found = statistics.setdefault(place, {})
        if status == "ok":
            found[statistic] = float(value)
        if place not in about or statistic == "value":
            about[place] = (0 if pd.isna(n) else int(n), status, reason)
    return tuple(Place(name, found, *about[name]) for name, found in statistics.items())
