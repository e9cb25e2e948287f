"""The leaderboard: the subjects' values, with standard errors, and their ranks, with intervals."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from .tables import Scores, TableCell, TableSubject

CONFIDENCE = 0.95
REPEATS = 1000
MAX_RESAMPLED_VALUES = 2_000_000
"""Maximum number of bootstrap means per measure; above 2,000 rows, the repeats are reduced."""
_FIELDS = (
    "value", "std", "low", "high", "rank", "tied", "best", "worst", "quantile", "n", "over",
    "status", "reason",
)  # fmt: skip

Measures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Standing:
    """One entry in a leaderboard: a value, its interval and its rank.

    Parameters
    ----------
    value : float
        Mean over seeds if there are several; NaN if there is no value.
    std : float
        Standard deviation over places or seeds; NaN if there is only one.
    low, high : float
        Bootstrap interval for `value` over places or seeds; NaN if there is nothing to resample.
    n : int
        Number of samples.
    error_of_mean : float
        Standard error of `value` over the same units as `low` and `high`.
    over : str
        Unit that was resampled: ``seeds``, ``sites``, ``paths``, ``places``, or empty.
    error : float
        Error of an estimated `value`: a bound for measures of lines, otherwise a standard error; 0
        if it is exact.
    rank : int or None
        One more than the number of subjects whose interval, widened by both errors, lies
        entirely on the more nonlinear side; see `_rank_sampled` for standard errors. None if there
        is no value or no direction.
    tied : bool
        True if another subject has the same rank.
    best, worst : int or None
        Interval for the rank.
    quantile : float or None
        Fraction of the other subjects that are less nonlinear (ties count half); 1 for the most
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
    error_of_mean: float = math.nan
    rank: int | None = None
    tied: bool = False
    best: int | None = None
    worst: int | None = None
    quantile: float | None = None


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


def family_of(model: str) -> str:
    """Return the leading letters of a network's name.

    Examples
    --------
    >>> [family_of(name) for name in ("torchvision/resnet18", "vit_b_16", "redshift-mlp-x6")]
    ['resnet', 'vit', 'redshift']
    """
    name = model.rpartition("/")[2]
    letters = next((i for i, c in enumerate(name) if not c.isalpha()), len(name))
    return name[:letters] or name


def sense_of(info: Mapping[str, Any]) -> int:
    """Return 1 if a measure increases with nonlinearity, -1 if it decreases, 0 otherwise."""
    return {"more nonlinear": 1, "less nonlinear": -1}.get(str(info.get("more_means")), 0)


def sort_measure(measures: Measures, names: Iterable[str]) -> str | None:
    """Return the measure by which rows are sorted: the first one with a direction."""
    return next((name for name in names if sense_of(measures.get(name, {}))), None)


def is_training(rows: Sequence[Row]) -> bool:
    """Return True if all rows are checkpoints, from several steps, so that they sort by step."""
    steps = {row.subjects[0].checkpoint for row in rows}
    return None not in steps and len(steps) > 1


def leaderboard(
    scores: Scores, measures: Measures, *, together: bool = True, repeats: int = REPEATS
) -> list[Row]:
    """Rank subjects and sort them: checkpoints by step, others by the first directed measure.

    Parameters
    ----------
    measures : mapping of str to mapping
        Metadata for each measure: ``more_means`` and ``probe``.
    together : bool
        Merge the seeds of a network into one row.
    repeats : int
        Number of bootstrap repeats.

    Returns
    -------
    list of Row
        Most nonlinear first. Subjects without a value for the sorting measure come last.
    """
    members = _members(scores.subjects, together)
    labels = _labels(members)
    columns = {
        name: _column(scores, measures.get(name, {}), name, members, labels, repeats)
        for name in scores.measures
    }
    rows = [
        Row(label, group, {name: columns[name][index] for name in columns})
        for index, (label, group) in enumerate(zip(labels, members, strict=True))
    ]
    if is_training(rows):
        return sorted(rows, key=lambda row: _step_key(row.subjects[0]))
    first = sort_measure(measures, scores.measures)
    if first is None:
        return rows
    sense = sense_of(measures[first])
    return sorted(rows, key=lambda row: _sort_key(row.entries[first].value, sense))


def _sort_key(value: float, sense: int) -> tuple[bool, float]:
    return (math.isnan(value), 0.0 if math.isnan(value) else -sense * value)


def _step_key(subject: TableSubject) -> tuple[Any, ...]:
    return (subject.run, subject.model, subject.data, subject.checkpoint)


def _members(subjects: Iterable[TableSubject], together: bool) -> list[tuple[TableSubject, ...]]:
    """Group subjects by network; split groups in which a seed occurs more than once."""
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
    scores: Scores,
    info: Mapping[str, Any],
    name: str,
    members: Sequence[tuple[TableSubject, ...]],
    labels: Sequence[str],
    repeats: int,
) -> list[Standing]:
    probe = str(info.get("probe", ""))
    plain: list[Standing] = []
    samples: list[NDArray[np.float64]] = []
    for group in members:
        cells = [scores[subject.label, name] for subject in group]
        entry, values = _of_cell(cells[0], probe) if len(group) == 1 else _of_seeds(cells, group)
        plain.append(entry)
        samples.append(values)
    ranked = [i for i, entry in enumerate(plain) if math.isfinite(entry.value)]
    if not ranked:
        return plain
    # Networks share their paths, so the same paths are resampled for all of them.
    shared = probe == "lines" and len({len(samples[i]) for i in ranked}) == 1
    seeds = [name if shared else f"{labels[i]}\0{name}" for i in ranked]
    repeats = min(repeats, max(100, MAX_RESAMPLED_VALUES // len(ranked)))
    means = np.stack(
        [resampled_means(samples[i], repeats, seed) for i, seed in zip(ranked, seeds, strict=True)]
    )
    means = means.clip(*_bounds(info))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=1)
    entries = list(plain)
    for position, i in enumerate(ranked):
        if len(samples[i]) > 1:
            entries[i] = replace(plain[i], low=float(low[position]), high=float(high[position]))
    sense = sense_of(info)
    if not sense:
        return entries
    has_standard_errors = probe != "lines" and any(plain[i].error for i in ranked)
    if has_standard_errors:
        units = [len(s) if len(s) > 1 else e.n for s, e in zip(samples, plain, strict=True)]
        _rank_sampled(entries, ranked, units, sense)
    else:
        _rank(entries, ranked, sense * means, sense)
    return entries


def _bounds(info: Mapping[str, Any]) -> tuple[float, float]:
    low, high = info.get("bounds") or (None, None)
    return -math.inf if low is None else low, math.inf if high is None else high


def _of_cell(cell: TableCell, probe: str) -> tuple[Standing, NDArray[np.float64]]:
    """Return a subject's entry and the values to resample: those by place if it is their mean."""
    places = cell.place_values
    value = cell.value
    std = cell.statistics.get("std", math.nan) if len(places) > 1 else math.nan
    error = _error_of(cell)
    entry = Standing(value, std, math.nan, math.nan, cell.n, "", cell.status, cell.reason, error)
    if not math.isfinite(value):
        return entry, np.empty(0)
    mean = _mean_and_std(places)[0]
    if len(places) > 1 and math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12):
        over = {"sites": "sites", "lines": "paths"}.get(probe, "places")
        return replace(entry, over=over, error_of_mean=standard_error(cell)), places
    return entry, np.array([value])


def _of_seeds(
    cells: Sequence[TableCell], group: Sequence[TableSubject]
) -> tuple[Standing, NDArray[np.float64]]:
    """Return the entry for the mean over seeds and the values of the seeds, if none failed.

    A seed that the measure hasn't been applied to is left out, with a note.
    """
    values = np.array([cell.value for cell in cells])
    values = values[np.isfinite(values)]
    missing = [(c, s) for c, s in zip(cells, group, strict=True) if not math.isfinite(c.value)]
    n = max(cell.n for cell in cells)
    failed = [pair for pair in missing if pair[0].status == "failed"]
    if failed or not len(values):
        cell, subject = (failed or missing)[0]
        reason = f"seed {subject.training_seed}: {cell.reason}"
        nan = math.nan
        return Standing(nan, nan, nan, nan, n, "", cell.status, reason), np.empty(0)
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.status == "ok" and cell.reason)
    notes = [f"seed {s.training_seed} is {c.status}: {c.reason}" for c, s in missing]
    reason = "; ".join([*reasons, *notes])
    over = "seeds" if len(values) > 1 else ""
    mean, std = _mean_and_std(values)
    errors = np.array([_error_of(cell) for cell in cells if math.isfinite(cell.value)])
    error = _mean_and_std(errors)[0]
    entry = Standing(mean, std, math.nan, math.nan, n, over, "ok", reason, error)
    return replace(entry, error_of_mean=std / math.sqrt(len(values))), values


def standard_error(cell: TableCell, statistic: str = "value") -> float:
    """Return a statistic's standard error over places; NaN for fewer than two places."""
    values = [place.statistics.get(statistic, math.nan) for place in cell.places]
    finite = np.array([value for value in values if math.isfinite(value)])
    if len(finite) < 2:
        return math.nan
    return _mean_and_std(finite)[1] / math.sqrt(len(finite))


def _mean_and_std(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and standard deviation, or NaN if there are too few values."""
    scale = _scale_of(values)
    mean = float((values / scale).mean()) if len(values) else math.nan
    std = float((values / scale).std(ddof=1)) if len(values) > 1 else math.nan
    return scale * mean, scale * std


def _scale_of(values: NDArray[np.float64]) -> float:
    """Return a power of two by which to divide values so that no sum or square overflows."""
    largest = float(np.abs(values).max(initial=0.0))
    return 1.0 if largest < 1e150 else 2.0 ** (math.frexp(largest)[1] - 1)


def _error_of(cell: TableCell) -> float:
    """Return the statistic ``error`` of an estimate, or 0 for an exact value."""
    error = cell.statistics.get("error", 0.0)
    return error if math.isfinite(error) else 0.0


def mean_interval(values: ArrayLike, seed: str) -> tuple[float, float]:
    """Return the bootstrap interval for a mean; NaN for fewer than two values."""
    if len(np.asarray(values)) < 2:
        return math.nan, math.nan
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled_means(values, REPEATS, seed), [tail, 100 - tail])
    return float(low), float(high)


def resampled_means(values: ArrayLike, repeats: int, seed: str) -> NDArray[np.float64]:
    """Compute bootstrap means, widened to the scale of Student's t-distribution.

    Plain bootstrap intervals are too narrow for small samples: by a factor of 9 for two values, 2
    for four and 1.1 for twenty (T. C. Hesterberg, What Teachers Should Know About the Bootstrap,
    The American Statistician, 2015, section 4.2).

    Parameters
    ----------
    values : array of shape (n,)
        At least one value.
    seed : str
        Arrays with the same length and seed are resampled with the same indices.

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
    scale = _scale_of(numbers)
    numbers = numbers / scale
    middle = numbers.mean()
    means: NDArray[np.float64] = middle + _widening(len(numbers)) * (
        numbers[drawn].mean(axis=1) - middle
    )
    with np.errstate(over="ignore"):  # an interval may exceed the largest float
        return scale * means


def _widening(n: int) -> float:
    """Return the ratio of the widths of the Student and bootstrap intervals for `n` values."""
    from scipy.special import ndtri

    return student_half_width(n) / float(ndtri((1 + CONFIDENCE) / 2)) * math.sqrt(n / (n - 1))


def student_half_width(n: int) -> float:
    """Return half the width of the interval for a mean of `n` values, in standard errors.

    Examples
    --------
    >>> round(student_half_width(2), 3)
    12.706
    """
    # scipy.stats also has this quantile, but takes half a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))


def rank_intervals(
    scores: ArrayLike, confidence: float = CONFIDENCE, errors: ArrayLike = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute the interval for each subject's rank over bootstrap repeats.

    Parameters
    ----------
    scores : array of shape (subjects, repeats)
        The largest score has rank 1; equal scores share their ranks.
    confidence : float
        Fraction of the repeats that the interval covers.
    errors : array of shape (subjects,)
        Error bounds for the scores; scores that agree within their bounds count as equal.

    Returns
    -------
    best, worst : integer arrays of shape (subjects,)
        Ranks, counted from 1.

    Examples
    --------
    >>> best, worst = rank_intervals([[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]])
    >>> best.tolist(), worst.tolist()
    ([1, 2, 2], [1, 3, 3])
    """
    numbers = np.asarray(scores, dtype=np.float64)
    tail = (1 - confidence) / 2
    bounds = np.broadcast_to(np.asarray(errors, dtype=np.float64), len(numbers))
    first, last = np.empty_like(numbers), np.empty_like(numbers)
    for repeat, column in enumerate(numbers.T):
        first[:, repeat] = 1 + _count_above(column - bounds, column + bounds)
        last[:, repeat] = len(column) - _count_above(-column - bounds, -column + bounds)
    best = np.quantile(first, tail, axis=1, method="inverted_cdf")
    worst = np.quantile(last, 1 - tail, axis=1, method="inverted_cdf")
    return best.astype(np.int64), worst.astype(np.int64)


def _count_above(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.int64]:
    """Count the intervals that lie entirely above each interval."""
    return len(lower) - np.searchsorted(np.sort(lower), upper, side="right")


def _rank(
    entries: list[Standing], ranked: Sequence[int], means: NDArray[np.float64], sense: int
) -> None:
    """Set the ranks of entries in place; `means` increase with nonlinearity."""
    group = [entries[i] for i in ranked]
    values = np.array([sense * entry.value for entry in group])
    ends = np.array([[sense * e.low, sense * e.high] if e.over else [sense * e.value] * 2
                     for e in group])  # fmt: skip
    errors = np.array([entry.error for entry in group])
    lower, upper = ends.min(axis=1) - errors, ends.max(axis=1) + errors
    ranks = 1 + _count_above(lower, upper)
    best, worst = rank_intervals(means, errors=errors)
    _set_ranks(entries, ranked, values, ranks, best, worst)


def _rank_sampled(
    entries: list[Standing], ranked: Sequence[int], units: Sequence[int], sense: int
) -> None:
    """Set the ranks of entries in place whose values have standard errors.

    A rank's interval excludes the subjects whose intervals do not overlap the subject's own. Half
    the width of an interval is the standard error, combined with that over places or seeds, times
    the quantile of Student's distribution for 95 %. If there are more than two subjects, the level
    rises with the number of pairs (Bonferroni), so that 5 % of the orders of equal values contain
    an error, however many subjects there are.
    """
    group = [entries[i] for i in ranked]
    values = np.array([sense * entry.value for entry in group])
    half_widths = np.array(
        [_half_width(entry, units[i], len(group)) for i, entry in zip(ranked, group, strict=True)]
    )
    lower, upper = values - half_widths, values + half_widths
    best = 1 + _count_above(lower, upper)
    worst = len(group) - _count_above(-upper, -lower)
    _set_ranks(entries, ranked, values, best, best, worst)


def _half_width(entry: Standing, units: int, subjects: int) -> float:
    """Return half the width of a value's interval for comparisons between subjects."""
    from scipy.special import stdtrit

    error = math.hypot(entry.error, entry.error_of_mean if entry.over else 0.0)
    if error == 0 or units < 2:
        return error
    pairs = max(1, subjects * (subjects - 1) // 2)
    tail = (1 - CONFIDENCE) / 2
    # Two equal intervals of half width q / sqrt(2) are apart as often as the difference exceeds q.
    simultaneous = -float(stdtrit(units - 1, tail / pairs)) / math.sqrt(2)
    return error * max(student_half_width(units), simultaneous)


def _set_ranks(
    entries: list[Standing],
    ranked: Sequence[int],
    values: NDArray[np.float64],
    ranks: NDArray[np.int64],
    best: NDArray[np.int64],
    worst: NDArray[np.int64],
) -> None:
    shared = Counter(ranks.tolist())
    quantiles = (
        (pd.Series(values).rank().to_numpy() - 1) / (len(values) - 1)
        if len(values) > 1
        else np.full(1, math.nan)
    )
    for position, i in enumerate(ranked):
        entries[i] = replace(
            entries[i],
            rank=int(ranks[position]),
            tied=shared[int(ranks[position])] > 1,
            best=int(best[position]),
            worst=int(worst[position]),
            quantile=None if len(values) == 1 else float(quantiles[position]),
        )


def leaderboard_frame(
    rows: Sequence[Row], measures: Sequence[str], *, full: bool = True
) -> pd.DataFrame:
    """Convert a leaderboard to a DataFrame.

    Parameters
    ----------
    full : bool
        Include all fields of `Standing` and all keys of a row, not just values, intervals and
        ranks.

    Returns
    -------
    DataFrame
        One row per subject, indexed by ``run, model, weights, data, seeds, subject`` (if `full`) or
        ``subject``; columns ``(measure, field)``.
    """
    fields = _FIELDS if full else tuple(f for f in _FIELDS if f in ("value", "low", "high", "rank"))
    keys = ["run", "model", "weights", "data", "seeds", "subject"]
    seeds = [", ".join(str(s.training_seed) for s in row.subjects) for row in rows]
    index: pd.Index | None = pd.Index([row.label for row in rows], name="subject")
    if full:
        names = [
            (*row.subjects[0].group, text, row.label) for row, text in zip(rows, seeds, strict=True)
        ]
        index = pd.MultiIndex.from_tuples(names, names=keys) if rows else None
    cells = [
        [getattr(row.entries[name], field) for name in measures for field in fields] for row in rows
    ]
    columns = pd.MultiIndex.from_product([measures, fields], names=["measure", "field"])
    frame = pd.DataFrame(cells, index=index, columns=columns, dtype=object)
    for name, field in columns:
        if field in ("value", "std", "low", "high", "rank", "best", "worst", "quantile", "n"):
            frame[name, field] = pd.to_numeric(frame[name, field])
    return frame
