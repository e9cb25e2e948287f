"""The leaderboard of subjects: numbers, ranks, and how sure they are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from .tables import Scores, TableCell, TableSubject

__all__ = [
    "CONFIDENCE",
    "Row",
    "Standing",
    "family_of",
    "leaderboard",
    "leaderboard_frame",
    "rank_intervals",
    "resampled_means",
    "sense_of",
    "sort_measure",
]

CONFIDENCE = 0.95
REPEATS = 1000
_FIELDS = (
    "value", "std", "low", "high", "rank", "tied", "best", "worst", "quantile", "n", "over",
    "status", "reason",
)  # fmt: skip

Measures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Standing:
    """What a leaderboard says in one place: a number, how sure it is, and its rank.

    Parameters
    ----------
    value : float
        NaN where there is none; over several seeds their mean.
    std : float
        Over places, or over seeds; NaN where there is but one.
    low, high : float
        Interval of `value` when places, or seeds, are drawn again; NaN where there is nothing
        to draw from.
    n : int
        Samples behind it.
    over : str
        What was drawn again: ``seeds``, ``sites``, ``paths``, ``places``, or nothing.
    status, reason : str
    error : float
        How far off `value` may be where it is an estimate; else 0.
    rank : int or None
        One more than the number of subjects whose interval, widened by what either may be off,
        lies wholly on the more nonlinear side; None for a measure without direction, and where
        there is no number.
    tied : bool
        Whether another subject has the same rank.
    best, worst : int or None
        Between which ranks the subject moves when all are drawn again.
    quantile : float or None
        Share of the others that are less nonlinear, ties counting half; 1 for the most
        nonlinear.
    """

    value: float
    std: float
    low: float
    high: float
    n: int
    over: str
    status: str
    reason: str
    error: float = 0.0
    rank: int | None = None
    tied: bool = False
    best: int | None = None
    worst: int | None = None
    quantile: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of a leaderboard: a subject, or one network with several seeds.

    Parameters
    ----------
    label : str
    subjects : tuple of TableSubject
        One, or one a seed.
    entries : mapping of str to Standing
        By measure.
    """

    label: str
    subjects: tuple[TableSubject, ...]
    entries: Mapping[str, Standing]

    @property
    def family(self) -> str:
        """Family of the network, from its name."""
        return family_of(self.subjects[0].model)


def family_of(model: str) -> str:
    """Take the family of a network out of its name: the letters that it begins with.

    Examples
    --------
    >>> [family_of(name) for name in ("torchvision/resnet18", "vit_b_16", "redshift-mlp-x6")]
    ['resnet', 'vit', 'redshift']
    """
    name = model.rpartition("/")[2]
    letters = next((i for i, c in enumerate(name) if not c.isalpha()), len(name))
    return name[:letters] or name


def sense_of(about: Mapping[str, Any]) -> int:
    """Say how a measure goes with nonlinearity: 1, -1, or 0 where it has no direction."""
    return {"more nonlinear": 1, "less nonlinear": -1}.get(str(about.get("more_means")), 0)


def sort_measure(measures: Measures, names: Iterable[str]) -> str | None:
    """Name the measure that orders the rows: the first that has a direction."""
    return next((name for name in names if sense_of(measures.get(name, {}))), None)


def leaderboard(
    scores: Scores, measures: Measures, *, together: bool = True, repeats: int = REPEATS
) -> list[Row]:
    """Set subjects side by side, the most nonlinear by the first directed measure on top.

    Parameters
    ----------
    scores : Scores
    measures : mapping of str to mapping
        What is known of each measure: ``more_means`` and ``probe``.
    together : bool
        Whether seeds of one network make one row.
    repeats : int
        How often places or seeds are drawn again.

    Returns
    -------
    list of Row
        Subjects without a number in the measure that orders them come last.
    """
    groups: dict[object, list[TableSubject]] = {}
    for subject in scores.subjects:
        groups.setdefault(subject.group if together else subject.label, []).append(subject)
    members = [tuple(sorted(group, key=lambda subject: subject.seed)) for group in groups.values()]
    labels = _labels(members)
    columns = {
        name: _column(scores, measures.get(name, {}), name, members, labels, repeats)
        for name in scores.measures
    }
    rows = [
        Row(label, group, {name: columns[name][index] for name in columns})
        for index, (label, group) in enumerate(zip(labels, members, strict=True))
    ]
    first = sort_measure(measures, scores.measures)
    if first is None:
        return rows
    sense = sense_of(measures[first])
    return sorted(rows, key=lambda row: _sorting(row.entries[first].value, sense))


def _sorting(value: float, sense: int) -> tuple[bool, float]:
    return (math.isnan(value), 0.0 if math.isnan(value) else -sense * value)


def _labels(members: Sequence[tuple[TableSubject, ...]]) -> list[str]:
    """Label of each row: of a subject, or what all its seeds share."""
    found = []
    for group in members:
        label = group[0].label
        if len(group) > 1:
            seed = group[0].seed
            label = label.removesuffix(f"seed {seed}").removesuffix(" · ")
            label = label.removesuffix(f"-seed{seed}")
        found.append(label)
    counts = {label: found.count(label) for label in found}
    return [
        label if counts[label] == 1 else group[0].label
        for label, group in zip(found, members, strict=True)
    ]


def _column(
    scores: Scores,
    about: Mapping[str, Any],
    name: str,
    members: Sequence[tuple[TableSubject, ...]],
    labels: Sequence[str],
    repeats: int,
) -> list[Standing]:
    probe = str(about.get("probe", ""))
    plain: list[Standing] = []
    samples: list[NDArray[np.float64]] = []
    for group in members:
        cells = [scores[subject.label, name] for subject in group]
        entry, drawn = _of_cell(cells[0], probe) if len(group) == 1 else _of_seeds(cells, group)
        plain.append(entry)
        samples.append(drawn)
    kept = [i for i, entry in enumerate(plain) if math.isfinite(entry.value)]
    if not kept:
        return plain
    shared = probe == "lines" and len({len(samples[i]) for i in kept}) == 1
    seeds = [name if shared else f"{labels[i]}\0{name}" for i in kept]
    means = np.stack(
        [resampled_means(samples[i], repeats, seed) for i, seed in zip(kept, seeds, strict=True)]
    )
    means = means.clip(*_bounds(about))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=1)
    entries = list(plain)
    for place, i in enumerate(kept):
        drawn_again = len(samples[i]) > 1
        entries[i] = replace(
            plain[i],
            low=float(low[place]) if drawn_again else math.nan,
            high=float(high[place]) if drawn_again else math.nan,
        )
    sense = sense_of(about)
    if sense:
        _rank(entries, kept, sense * means, sense)
    return entries


def _bounds(about: Mapping[str, Any]) -> tuple[float, float]:
    low, high = about.get("bounds") or (None, None)
    return -math.inf if low is None else low, math.inf if high is None else high


def _of_cell(cell: TableCell, probe: str) -> tuple[Standing, NDArray[np.float64]]:
    """Standing of one subject, and what to draw from: its places, if its number is their mean."""
    places = cell.place_values
    value = cell.value
    std = cell.statistics.get("std", math.nan) if len(places) > 1 else math.nan
    error = _error_of(cell)
    entry = Standing(value, std, math.nan, math.nan, cell.n, "", cell.status, cell.reason, error)
    if not math.isfinite(value):
        return entry, np.empty(0)
    if len(places) > 1 and math.isclose(float(places.mean()), value, rel_tol=1e-9, abs_tol=1e-12):
        over = {"sites": "sites", "lines": "paths"}.get(probe, "places")
        return replace(entry, over=over), places
    return entry, np.array([value])


def _of_seeds(
    cells: Sequence[TableCell], group: Sequence[TableSubject]
) -> tuple[Standing, NDArray[np.float64]]:
    """Standing of several seeds: their mean; one that failed leaves none."""
    values = np.array([cell.value for cell in cells])
    found = values[np.isfinite(values)]
    missing = [(c, s) for c, s in zip(cells, group, strict=True) if not math.isfinite(c.value)]
    n = max(cell.n for cell in cells)
    failed = [pair for pair in missing if pair[0].status in ("failed", "absent")]
    if failed or not len(found):
        cell, subject = (failed or missing)[0]
        reason = f"seed {subject.seed}: {cell.reason}"
        nan = math.nan
        return Standing(nan, nan, nan, nan, n, "", cell.status, reason), np.empty(0)
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.status == "ok" and cell.reason)
    said = [f"seed {s.seed} is {c.status}: {c.reason}" for c, s in missing]
    std = float(found.std(ddof=1)) if len(found) > 1 else math.nan
    reason = "; ".join([*reasons, *said])
    over = "seeds" if len(found) > 1 else ""
    mean = float(found.mean())
    error = float(np.mean([_error_of(cell) for cell in cells if math.isfinite(cell.value)]))
    return Standing(mean, std, math.nan, math.nan, n, over, "ok", reason, error), found


def _error_of(cell: TableCell) -> float:
    """How far off a number may be by its own account: the statistic ``error`` of estimates."""
    error = cell.statistics.get("error", 0.0)
    return error if math.isfinite(error) else 0.0


def resampled_means(values: ArrayLike, repeats: int, seed: str) -> NDArray[np.float64]:
    """Draw values again with replacement, as many as there are, and take the mean each time.

    The means lie around that of the values as far apart as Student's distribution has them: the
    plain bootstrap's intervals are too short for few values, by a factor of 9 for two, 2 for four
    and 1.1 for twenty (T. C. Hesterberg, What Teachers Should Know About the Bootstrap, The
    American Statistician, 2015, section 4.2).

    Parameters
    ----------
    values : array of shape (n,)
        At least one.
    repeats : int
    seed : str
        Draws depend on it and on n alone: samples of one length under one seed are drawn
        together, as paths are that several networks share.

    Returns
    -------
    array of shape (repeats,)

    Examples
    --------
    >>> resampled_means([2.0], 3, "a").tolist()
    [2.0, 2.0, 2.0]
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) == 1:
        return np.full(repeats, numbers[0])
    random = np.random.default_rng(zlib.crc32(seed.encode("utf-8", "surrogatepass")))
    drawn = random.integers(0, len(numbers), (repeats, len(numbers)), dtype=np.int32)
    middle = numbers.mean()
    means: NDArray[np.float64] = middle + _widening(len(numbers)) * (
        numbers[drawn].mean(axis=1) - middle
    )
    return means


def _widening(n: int) -> float:
    """How much farther apart means of `n` values are than those that are drawn again."""
    # Of `scipy.stats` these are the quantiles, too, and its import takes half a second.
    from scipy.special import ndtri, stdtrit

    end = (1 + CONFIDENCE) / 2
    return float(stdtrit(n - 1, end) / ndtri(end) * math.sqrt(n / (n - 1)))


def rank_intervals(
    scores: ArrayLike, confidence: float = CONFIDENCE, errors: ArrayLike = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Between which ranks each subject moves.

    Parameters
    ----------
    scores : array of shape (subjects, repeats)
        The more the higher the rank; equal ones share all ranks that they take up.
    confidence : float
        Share of the repeats that the interval covers, as much left out at either end.
    errors : array of shape (subjects,)
        How far off scores may be: two that are within theirs of each other are equal.

    Returns
    -------
    best, worst : arrays of shape (subjects,)
        Whole numbers from 1.

    Examples
    --------
    >>> best, worst = rank_intervals([[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]])
    >>> best.tolist(), worst.tolist()
    ([1, 2, 2], [1, 3, 3])
    """
    numbers = np.asarray(scores, dtype=np.float64)
    tail = (1 - confidence) / 2
    table = pd.DataFrame(-numbers)
    first, last = table.rank(method="min").to_numpy(), table.rank(method="max").to_numpy()
    if np.any(errors):
        off = np.broadcast_to(np.asarray(errors, dtype=np.float64), len(numbers))[:, None]
        least, most = numbers - off, numbers + off
        first = np.stack([1 + (least > one).sum(axis=0) for one in most])
        last = np.stack([len(numbers) - (most < one).sum(axis=0) for one in least])
    best = np.quantile(first, tail, axis=1, method="inverted_cdf")
    worst = np.quantile(last, 1 - tail, axis=1, method="inverted_cdf")
    return best.astype(np.int64), worst.astype(np.int64)


def _rank(
    entries: list[Standing], kept: Sequence[int], means: NDArray[np.float64], sense: int
) -> None:
    """Give entries their ranks; `means` are the more the more nonlinear."""
    found = [entries[i] for i in kept]
    values = np.array([sense * entry.value for entry in found])
    ends = np.array([[sense * e.low, sense * e.high] if e.over else [sense * e.value] * 2
                     for e in found])  # fmt: skip
    errors = np.array([entry.error for entry in found])
    least, most = ends.min(axis=1) - errors, ends.max(axis=1) + errors
    ranks = 1 + (least[None, :] > most[:, None]).sum(axis=1)
    best, worst = rank_intervals(means, errors=errors)
    quantiles = (
        (pd.Series(values).rank().to_numpy() - 1) / (len(values) - 1)
        if len(values) > 1
        else np.full(1, math.nan)
    )
    for place, i in enumerate(kept):
        entries[i] = replace(
            entries[i],
            rank=int(ranks[place]),
            tied=bool((ranks == ranks[place]).sum() > 1),
            best=int(best[place]),
            worst=int(worst[place]),
            quantile=None if len(values) == 1 else float(quantiles[place]),
        )


def leaderboard_frame(rows: Sequence[Row], measures: Sequence[str]) -> pd.DataFrame:
    """Write a leaderboard as a table.

    Returns
    -------
    DataFrame
        One row a subject, its index ``run, model, weights, data, seeds, subject``; columns
        ``(measure, field)`` with the fields of `Standing`.
    """
    index = pd.MultiIndex.from_tuples(
        [
            (*row.subjects[0].group, ", ".join(str(s.seed) for s in row.subjects), row.label)
            for row in rows
        ],
        names=["run", "model", "weights", "data", "seeds", "subject"],
    ) if rows else None  # fmt: skip
    cells = [
        [getattr(row.entries[name], field) for name in measures for field in _FIELDS]
        for row in rows
    ]
    columns = pd.MultiIndex.from_product([measures, _FIELDS], names=["measure", "field"])
    frame = pd.DataFrame(cells, index=index, columns=columns, dtype=object)
    for name in measures:
        for field in ("value", "std", "low", "high", "rank", "best", "worst", "quantile", "n"):
            frame[name, field] = pd.to_numeric(frame[name, field])
    return frame
