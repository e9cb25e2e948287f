"""Findings of a run, as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nlbench.errors import one_line

from .agreement import Correlation
from .leaderboard import Measures, Row, is_training, sense_of, sort_measure
from .population import comparable_value, population_of
from .remarks import Gap, group_remarks
from .tables import Scores, TableCell, mean_cell
from .text import count, number, place_noun, place_text, short_decimals
from .training import training_findings, training_runs

_MAX_NAMED = 3
_MAX_REASON = 120
_STANDOUT_GAP = 2.0  # as a multiple of the mean gap between the other places


def standout_places(cell: TableCell, sense: int) -> tuple[list[str], list[str]]:
    """Split the places of a cell into those that stand out as the most nonlinear and the others.

    Up to three of the most nonlinear places stand out if the gap between them and the next one
    exceeds twice the mean gap between the remaining places.

    Examples
    --------
    >>> from .tables import Place
    >>> places = tuple(Place(n, {"value": v}, 8, "ok", "") for n, v in
    ...     [("a", 0.9), ("b", 0.5), ("c", 0.93), ("d", 0.95)])
    >>> standout_places(TableCell({"value": 0.8}, 8, "ok", "", places), -1)
    (['b'], ['a', 'c', 'd'])
    """
    finite = [(place.name, place.value) for place in cell.places if math.isfinite(place.value)]
    ordered = sorted(finite, key=lambda pair: -sense * pair[1])
    best, size = 0, 0.0
    for k in range(1, min(_MAX_NAMED, len(ordered) - 2) + 1):
        mean_gap = abs(ordered[-1][1] - ordered[k][1]) / (len(ordered) - k - 1)
        gap = abs(ordered[k][1] - ordered[k - 1][1])
        if gap > _STANDOUT_GAP * mean_gap and gap > size:
            best, size = k, gap
    names = [name for name, _ in ordered]
    return names[:best], [name for name, _ in finite if name not in names[:best]]


def network_findings(row: Row, scores: Scores, measures: Measures) -> list[str]:
    """Describe one network: the places that stand out and its rank among reference networks."""
    sentences = []
    for measure in scores.measures:
        info = measures.get(measure, {})
        cell = mean_cell([scores[subject.label, measure] for subject in row.subjects])
        sense = sense_of(info)
        if info.get("probe") == "sites" and sense and len(cell.place_values) > 2:
            sentences.append(_places_sentence(measure, cell, info))
            break
    for measure in scores.measures:
        info = measures.get(measure, {})
        population = population_of(measure, info)
        value = comparable_value(row, scores, measure)
        if population is None or not math.isfinite(value):
            continue
        name = "absdev relative to its range" if measure == "absdev" else measure
        place = population.sentence(value)
        sentences.append(f"By {name} ({number(value)}), it is {place[0].lower()}{place[1:]}.")
    return sentences


def _places_sentence(measure: str, cell: TableCell, info: Mapping[str, Any]) -> str:
    values = {place.name: place.value for place in cell.places}
    sense, noun = sense_of(info), place_noun(info)
    standout, others = standout_places(cell, sense)
    rest = [values[name] for name in others]
    decimals = short_decimals(rest)

    def named(name: str) -> str:
        return f"{place_text(name)} ({number(values[name], decimals)})"

    if not standout:
        ordered = sorted(others, key=lambda name: -sense * values[name])
        return (
            f"By {measure}, {named(ordered[0])} is the most nonlinear of "
            f"{count(len(others), noun)} and {named(ordered[-1])} the least."
        )
    parts = (", ".join(map(named, standout[:-1])), named(standout[-1]))
    names = " and ".join(part for part in parts if part)
    verb = "stands" if len(standout) == 1 else "stand"
    return (
        f"By {measure}, {names} {verb} out as the most nonlinear; the other "
        f"{count(len(rest), noun)} lie between {number(min(rest), decimals)} and "
        f"{number(max(rest), decimals)}."
    )


def findings(
    rows: Sequence[Row],
    scores: Scores,
    measures: Measures,
    missing: Sequence[Gap],
    spearman: Mapping[tuple[str, str], Correlation],
) -> list[str]:
    """Describe a run: extremes, disagreement between measures, and missing values."""
    sentences = []
    if len(rows) == 1:
        sentences += network_findings(rows[0], scores, measures)
    for training in training_runs(rows)[:_MAX_NAMED]:
        sentences += training_findings(training, scores, measures)
    first = sort_measure(measures, scores.measures)
    ranked = [row for row in rows if first and row.entries[first].rank is not None]
    if len(ranked) > 1 and first and not is_training(rows):
        sentences.append(_extremes(ranked, first, sense_of(measures[first])))
        top = ranked[0]
        cell = mean_cell([scores[subject.label, first] for subject in top.subjects])
        if measures[first].get("probe") == "sites" and len(cell.place_values) > 2:
            sentence = _places_sentence(first, cell, measures[first])
            sentences.append(f"In {top.label}: {sentence[0].lower()}{sentence[1:]}")
    against = [pair for pair, c in spearman.items() if math.isfinite(c.high) and c.high < 0]
    for a, b in against[:_MAX_NAMED]:
        rho = spearman[a, b].text
        sentences.append(f"{a} and {b} rank the networks in opposite order (ρ {rho}).")
    sentences += _missing_sentences(missing)
    return sentences


def _extremes(ranked: Sequence[Row], measure: str, sense: int) -> str:
    top, last = ranked[0], ranked[-1]
    text = f"By {measure}, {_value_text(top, measure)} is the most nonlinear"
    text += f" and {_value_text(last, measure)} the least"
    near, far = (row.entries[measure] for row in (top, last))
    ends = (near.low, far.high) if sense > 0 else (far.low, near.high)
    if all(map(math.isfinite, ends)) and ends[0] <= ends[1]:
        return f"{text}; their intervals overlap."
    beyond = sum(entry.rank == 1 for entry in (row.entries[measure] for row in ranked))
    return f"{text}." if beyond < 2 else f"{text}; {beyond - 1} more may be equally nonlinear."


def _value_text(row: Row, measure: str) -> str:
    return f"{row.label} ({number(row.entries[measure].value, 3)})"


def _missing_sentences(missing: Sequence[Gap]) -> list[str]:
    remarks = group_remarks(
        (gap.status, gap.reason.partition(";")[0], gap.subject, gap.measure)
        for gap in missing
        if not gap.where
    )
    sentences = []
    for remark in remarks[:_MAX_NAMED]:
        reason = one_line(remark.text, _MAX_REASON).rstrip(".")
        verb = "are" if "," in remark.measures else "is"
        sentences.append(
            f"{remark.measures} {verb} {remark.status} for {remark.networks}: {reason}."
        )
    if len(remarks) > _MAX_NAMED:
        more = count(len(remarks) - _MAX_NAMED, "other reason")
        sentences.append(f"There are {more} for missing values, listed at the end.")
    return sentences
