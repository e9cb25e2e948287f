"""Report page for a single network: a strip of activations and one card per measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup, escape

from .fingerprint import Scale, level_of
from .leaderboard import Row, Standing, sense_of, standard_error
from .population import Population, population_of
from .tables import Scores, TableCell
from .text import count, number, place_noun, plus_minus, short_decimals

_WIDTH, _HEIGHT, _MARGIN = 300.0, 46.0, 12.0
_FIRST_DARK_LEVEL = 6
_MAX_DRAWN_PLACES = 60


@dataclass(frozen=True)
class Card:
    """Card showing one measure of a network."""

    name: str
    description: str
    text: str
    axis: Markup
    notes: tuple[str, ...]


def strip_fields(cell: TableCell, sense: int) -> list[dict[str, Any]]:
    """Return the cells of a measure's strip, one per activation, in call order."""
    scale = Scale.of((place.value for place in cell.places), sense)
    decimals = short_decimals(cell.place_values)
    fields = []
    for place in cell.places:
        level = -1
        if scale is not None and math.isfinite(place.value):
            level = level_of(scale.position(place.value))
        fields.append(
            {
                "label": ".".join(place.name.split(".")[-2:]),
                "text": number(place.value, decimals) if level >= 0 else place.status,
                "level": "qx" if level < 0 else f"q{level}",
                "dark": level >= _FIRST_DARK_LEVEL,
                "remark": place.reason or f"{place.name}: {number(place.value)}",
            }
        )
    return fields


def cards(row: Row, scores: Scores, measures: Mapping[str, Mapping[str, Any]]) -> list[Card]:
    """Return a card for each measure of a network."""
    network_cards = []
    for name in scores.measures:
        info = measures.get(name, {})
        entry, cells = row.entries[name], [scores[s.label, name] for s in row.subjects]
        description = str(info.get("description", "")).strip()
        if entry.status != "ok":
            network_cards.append(Card(name, description, entry.status, Markup(), (entry.reason,)))
            continue
        network_cards.append(_card(name, description, entry, cells, info))
    return network_cards


def _card(
    name: str,
    description: str,
    entry: Standing,
    cells: Sequence[TableCell],
    info: Mapping[str, Any],
) -> Card:
    error = entry.error_of_mean
    places, value = cells[0].places, entry.value
    statistic = "value"
    notes = []
    shares = [cell.statistics["over_range"] for cell in cells if "over_range" in cell.statistics]
    if name == "absdev" and shares:
        # The area depends on the units of inputs and logits; its ratio to the range does not.
        notes.append(f"Raw value: {plus_minus(value, error)}, in units of logits times inputs.")
        statistic, value = "over_range", fmean(shares)
        several = len(shares) > 1
        error = (
            stdev(shares) / math.sqrt(len(shares))
            if several
            else standard_error(cells[0], statistic)
        )
        name = "absdev, relative to its range"
    if math.isfinite(error):
        by_seed = entry.over == "seeds"
        units = count(len(cells), "seed") if by_seed else count(len(places), place_noun(info))
        notes.append(f"± is the standard error over {units}.")
    population = population_of(name.partition(",")[0], info)
    if population is not None:
        notes.append(population.sentence(value) + ".")
    if entry.error:
        relative = entry.error / abs(entry.value) if entry.value else math.inf
        notes.append(f"Estimated, with a relative error of at most {100 * relative:.2g} %.")
    elif entry.reason:
        notes.append(f"{entry.reason[0].upper()}{entry.reason[1:]}.")
    values = [place.statistics.get(statistic, math.nan) for place in places if entry.over]
    axis = _axis(name, value, error, values, population, sense_of(info))
    return Card(name, description, plus_minus(value, error), axis, tuple(notes))


def _axis(
    name: str,
    value: float,
    error: float,
    places: Sequence[float],
    population: Population | None,
    sense: int,
) -> Markup:
    """Plot the value and its standard error alongside the places and the reference networks."""
    others = [] if population is None else list(population.values)
    affine = math.nan if population is None else population.affine
    shown = [v for v in places if math.isfinite(v)]
    shown = shown if len(shown) <= _MAX_DRAWN_PLACES else []
    half = error if math.isfinite(error) else 0.0
    finite = [v for v in (value - half, value + half, affine, *others, *shown) if math.isfinite(v)]
    low, high = min(finite), max(finite)
    if not sense or not high > low:
        return Markup()
    log = low > 0 and high > 50 * low
    ends = (math.log(low), math.log(high)) if log else (low, high)

    def x(v: float) -> float:
        position = ((math.log(max(v, 1e-300)) if log else v) - ends[0]) / (ends[1] - ends[0])
        position = min(1.0, max(0.0, position if sense > 0 else 1 - position))
        return _MARGIN + position * (_WIDTH - 2 * _MARGIN)

    y = 20.0
    parts = [f'<line class="rule" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y}" y2="{y}"/>']
    parts += [f'<circle class="other" cx="{x(v):.1f}" cy="{y}" r="3"/>' for v in others]
    parts += [f'<path class="place" d="M{x(v):.1f} {y - 5}v10"/>' for v in shown]
    if half:
        parts.append(
            f'<line class="error" x1="{x(value - half):.1f}" x2="{x(value + half):.1f}"'
            f' y1="{y}" y2="{y}"/>'
        )
    parts.append(f'<circle class="own" cx="{x(value):.1f}" cy="{y}" r="5"/>')
    least, most = (low, high) if sense > 0 else (high, low)
    begin = f"{number(least)} affine" if least == affine else number(least)
    parts.append(f'<text x="0" y="{_HEIGHT - 4}">{escape(begin)}</text>')
    parts.append(
        f'<text x="{_WIDTH:g}" y="{_HEIGHT - 4}" text-anchor="end">more nonlinear'
        f" {number(most)}</text>"
    )
    title = f"{name}: {number(value)}"
    if others:
        title += f" among {len(others)} reference networks"
    return Markup(
        f'<svg class="dots" role="img" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def cite_sentence(row: Row, measures: Mapping[str, Mapping[str, Any]], facts: Sequence[str]) -> str:
    """Return a citable sentence with a network's values that ends with `facts` about the run."""
    texts, units = [], set()
    for name, entry in row.entries.items():
        if entry.status == "ok" and sense_of(measures.get(name, {})):
            texts.append(f"{name} {plus_minus(entry.value, entry.error_of_mean)}")
            units.add(entry.over)
    units.discard("")
    legend = f"± is the standard error over {' or '.join(sorted(units))}" if units else ""
    parts = "; ".join(part for part in (legend, *facts) if part)
    data = row.subjects[0].data
    on = "" if data == "given" else f" on {data}"  # "given": passed to `nlbench.evaluate`
    return f"{row.label}{on}: {', '.join(texts)} ({parts})."
