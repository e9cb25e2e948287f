"""Findings of a run, as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nlbench.errors import one_line

from .agreement import Correlation
from .estimates import all_exceed, change
from .leaderboard import Row, compared_measures, is_training, sort_measure
from .population import find_population
from .remarks import Gap, group_remarks
from .tables import MeasureInfo, Measures, Score, Scores
from .text import count, place_text, range_text
from .training import training_findings, training_runs

_MAX_NAMED = 3
_STANDOUT_GAP = 2.0  # as a multiple of the mean gap between the other places


def standout_places(cell: Score, sense: int) -> tuple[list[str], list[str]]:
    """Split the places of a cell into those that stand out as the most nonlinear and the others.

    Up to three of the most nonlinear places stand out if the gap between them and the next one
    exceeds twice the mean gap between the remaining places.

    Examples
    --------
    >>> values = {"a": 0.9, "b": 0.5, "c": 0.93, "d": 0.95}
    >>> places = tuple(Score(value, name=name) for name, value in values.items())
    >>> standout_places(Score(0.8, places=places), -1)
    (['b'], ['a', 'c', 'd'])
    """
    finite = [(place.name, place.value) for place in cell.places if math.isfinite(place.value)]
    ordered = sorted(finite, key=lambda pair: -sense * pair[1])
    best = 0
    size = 0.0
    for k in range(1, min(_MAX_NAMED, len(ordered) - 2) + 1):
        mean_gap = abs(ordered[-1][1] - ordered[k][1]) / (len(ordered) - k - 1)
        gap = abs(ordered[k][1] - ordered[k - 1][1])
        if gap > _STANDOUT_GAP * mean_gap and gap > size:
            best = k
            size = gap
    names = [name for name, _ in ordered]
    return names[:best], [name for name, _ in finite if name not in names[:best]]


def are_clearly_first(cell: Score, names: Sequence[str], sense: int) -> bool:
    """Return True if places are more nonlinear than all others by more than the error."""
    first = [place for place in cell.places if place.name in names]
    others = [p for p in cell.places if p.name not in names and math.isfinite(p.value)]
    return all_exceed(
        [change(other.scaled(sense), place.scaled(sense)) for place in first for other in others]
    )


def network_findings(row: Row, measures: Measures) -> list[str]:
    """Describe one network: the places that stand out and its rank among reference networks."""
    sentences = []
    compared = compared_measures(measures)
    for measure in compared:
        cell = row.entries[measure]
        if measures[measure].probe == "sites" and len(cell.place_values) > 2:
            sentences.append(_places_sentence(measure, cell, measures[measure]))
            break
    fractions = {}
    for measure in compared:
        info = measures[measure]
        population = find_population(measure, info)
        entry = row.entries[measure]
        if population is None or not math.isfinite(entry.value):
            continue
        fractions[measure] = population.fraction_below(entry.value)
        place = population.sentence(entry.value)
        sentences.append(f"By {measure} ({entry.text}), it is {place[0].lower()}{place[1:]}.")
    return sentences + _disagreement(fractions, measures)


_VIEWS = {
    "sites": "at each activation",
    "lines": "at the whole function along paths",
    "function": "at the whole function",
    "graph": "at the connections between units",
}
DISAGREE = "disagree: "
"""Part of a sentence on measures that disagree."""


def _disagreement(fractions: Mapping[str, float], measures: Measures) -> list[str]:
    """Explain why measures place a network differently among the reference networks."""
    if not fractions:
        return []
    low, high = (pick(fractions, key=fractions.__getitem__) for pick in (min, max))
    if fractions[high] - fractions[low] < 0.4:
        return []
    views = [_VIEWS.get(str(measures[name].probe), "") for name in (high, low)]
    start = f"{'The two' if len(fractions) == 2 else f'{high} and {low}'} {DISAGREE}"
    if views[0] == views[1] or not all(views):
        return [f"{start}they measure different things, on different reference networks."]
    return [
        f"{start}{high} looks {views[0]}, {low} {views[1]}, and their reference networks differ."
    ]


def _places_sentence(measure: str, cell: Score, info: MeasureInfo) -> str:
    """Describe the most nonlinear places, as far as the errors tell them apart."""
    places = {place.name: place for place in cell.places}
    sense = info.sense
    noun = info.place_noun

    def named(name: str) -> str:
        return f"{place_text(name)} ({places[name].text})"

    finite = [place for place in cell.places if math.isfinite(place.value)]
    ordered = sorted(finite, key=lambda place: -sense * place.value)
    standout, others = standout_places(cell, sense)
    if standout and are_clearly_first(cell, standout, sense):
        parts = (", ".join(map(named, standout[:-1])), named(standout[-1]))
        names = " and ".join(part for part in parts if part)
        verb = "stands" if len(standout) == 1 else "stand"
        rest = range_text(places[name].value for name in others)
        return (
            f"By {measure}, {names} {verb} out as the most nonlinear; the other "
            f"{count(len(others), noun)} lie in {rest}."
        )
    if are_clearly_first(cell, [ordered[0].name], sense):
        least = are_clearly_first(cell, [ordered[-1].name], -sense)
        end = f" and {named(ordered[-1].name)} the least" if least else ""
        return (
            f"By {measure}, {named(ordered[0].name)} is the most nonlinear of "
            f"{count(len(finite), noun)}{end}."
        )
    text = f"By {measure}, {count(len(finite), noun)} lie in {range_text(p.value for p in finite)}"
    if all(math.isfinite(place.error) for place in ordered[:2]):
        text += "; the errors do not tell which is the most nonlinear"
    return f"{text}."


def findings(
    rows: Sequence[Row],
    scores: Scores,
    missing: Sequence[Gap],
    spearman: Mapping[tuple[str, str], Correlation],
) -> list[str]:
    """Describe a run: extremes, disagreement between measures, and missing values."""
    sentences = []
    measures = scores.measures
    if len(rows) == 1:
        sentences += network_findings(rows[0], measures)
    for training in training_runs(rows)[:_MAX_NAMED]:
        sentences += training_findings(training, scores)
    first = sort_measure(measures)
    ranked = [row for row in rows if first and row.entries[first].rank is not None]
    if len(ranked) > 1 and first and not is_training(rows):
        sentences.append(_extremes(ranked, first))
        top = ranked[0]
        cell = top.entries[first]
        if measures[first].probe == "sites" and len(cell.place_values) > 2:
            sentence = _places_sentence(first, cell, measures[first])
            sentences.append(f"In {top.label}: {sentence[0].lower()}{sentence[1:]}")
    against = [pair for pair, c in spearman.items() if math.isfinite(c.high) and c.high < 0]
    for a, b in against[:_MAX_NAMED]:
        rho = spearman[a, b].text.replace("-", "−")
        sentences.append(f"{a} and {b} rank the networks in opposite order (ρ {rho}).")
    sentences += _missing_sentences(missing)
    return sentences


def _extremes(ranked: Sequence[Row], measure: str) -> str:
    """Name the most and the least nonlinear networks, as far as the errors tell them apart."""
    top = ranked[0]
    last = ranked[-1]
    entries = [row.entries[measure] for row in ranked]
    known = [math.isfinite(entry.error) for entry in entries]
    if not all(known):
        errors = "some errors are" if any(known) else "their errors are"
        return f"By {measure}, networks range from {_value_text(top, measure)} to " + (
            f"{_value_text(last, measure)}; {errors} unknown."
        )
    first = sum(entry.best == 1 for entry in entries)
    if first == len(entries):
        values = range_text(entry.value for entry in entries)
        return f"By {measure}, the networks ({values}) do not differ beyond their errors."
    text = f"By {measure}, {_value_text(top, measure)} is the most nonlinear"
    if first > 1:
        text = f"By {measure}, {first} networks are the most nonlinear within the error, led by "
        text += _value_text(top, measure)
    if entries[-1].best == len(entries):
        text += f"{',' if first > 1 else ''} and {_value_text(last, measure)} the least"
    return f"{text}."


def _value_text(row: Row, measure: str) -> str:
    return f"{row.label} ({row.entries[measure].text})"


def _missing_sentences(missing: Sequence[Gap]) -> list[str]:
    remarks = group_remarks(
        (gap.status, gap.reason.partition(";")[0], gap.subject, gap.measure)
        for gap in missing
        if not gap.where
    )
    sentences = []
    for remark in remarks[:_MAX_NAMED]:
        reason = one_line(remark.text, 120).rstrip(".")
        verb = "are" if "," in remark.measures else "is"
        sentences.append(
            f"{remark.measures} {verb} {remark.status} for {remark.networks}: {reason}."
        )
    if len(remarks) > _MAX_NAMED:
        more = count(len(remarks) - _MAX_NAMED, "other reason")
        sentences.append(f"There are {more} for missing values, listed at the end.")
    return sentences
