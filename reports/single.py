"""Report page for a single network: a strip of activations and one card per measure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .definitions import definition
from .fingerprint import Scale, level_of
from .leaderboard import Row, Standing, sense_of
from .population import ColourScale, Population, population_of
from .tables import Measures, Score
from .text import number, plus_minus, short_decimals, value_text

_WIDTH = 300.0
_MARGIN = 12.0
_FIRST_DARK_LEVEL = 6
_MAX_DRAWN_PLACES = 60


def strip_fields(cell: Score, colours: ColourScale | None) -> list[dict[str, Any]]:
    """Return the cells of a measure's strip, one per activation, in call order."""
    decimals = short_decimals(cell.place_values)
    fields = []
    for place in cell.places:
        level = -1
        if colours is not None and math.isfinite(place.value):
            level = level_of(colours.scale.position(place.value))
        fields.append(
            {
                "label": ".".join(place.name.split(".")[-2:]),
                "text": number(place.value, decimals) if level >= 0 else place.status,
                "level": "qx" if level < 0 else f"q{level}",
                "dark": level >= _FIRST_DARK_LEVEL,
                "remark": place.reason or f"{place.name}: {plus_minus(place.value, place.error)}",
            }
        )
    return fields


def cards(row: Row, measures: Measures) -> list[dict[str, Any]]:
    """Return a card for each measure of a network."""
    shown = []
    for index, (name, entry) in enumerate(row.entries.items()):
        info = measures.get(name, {})
        card = {"name": name, "description": str(info.get("description", "")).strip()}
        if entry.status != "ok":
            shown.append({**card, "text": entry.status, "notes": [entry.reason], "axis": {}})
            continue
        text, _, rest = value_text(entry, info).partition(" · ")
        scale = str(info.get("scale") or "")
        population = population_of(name, info)
        notes = [
            rest,
            scale and f"{scale}, so networks can't be compared by it",
            "" if population is None else population.sentence(entry.value),
            entry.reason,
        ]
        # The places of a mean over seeds are not the seeds' own.
        places = [p.value for p in entry.places] if len(row.subjects) == 1 else []
        shown.append(
            {
                **card,
                "text": text,
                "notes": [f"{note[0].upper()}{note[1:]}." for note in notes if note],
                "axis": _axis(entry, places, population, info),
                "formula": definition(name, info, f"formula{index}"),
            }
        )
    return shown


def _axis(
    entry: Standing,
    places: Sequence[float],
    population: Population | None,
    info: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the positions of the value, its interval, the places and the reference networks.

    The axis holds all of them. It is empty without a direction, or if it would have no extent.
    """
    sense = sense_of(info)
    others = [] if population is None else list(population.values)
    affine = math.nan if population is None else population.affine
    shown = [v for v in places if math.isfinite(v)]
    shown = shown if len(shown) <= _MAX_DRAWN_PLACES else []
    ends = [v for v in (entry.low, entry.high) if math.isfinite(v)]
    finite = [v for v in (entry.value, *ends, affine, *others, *shown) if math.isfinite(v)]
    low, high = min(finite), max(finite)
    if not sense or not high > low:
        return {}
    scale = Scale(low, high, low > 0 and high > 50 * low, sense)
    least, most = (low, high) if sense > 0 else (high, low)

    def x(values: Iterable[float]) -> list[float]:
        return [round(_MARGIN + scale.position(v) * (_WIDTH - 2 * _MARGIN), 1) for v in values]

    return {
        "value": x([entry.value])[0],
        "ends": x(ends) if len(ends) == 2 and ends[0] < ends[1] else [],
        "places": x(shown),
        "others": x(others),
        "begin": f"{number(least)} affine" if least == affine else number(least),
        "end": f"more nonlinear {number(most)}",
        "text": plus_minus(entry.value, entry.error),
    }


def cite_sentence(row: Row, measures: Measures, facts: Sequence[str]) -> str:
    """Return a citable sentence with a network's values that ends with `facts` about the run."""
    texts = []
    units: dict[str, None] = {}
    for name, entry in row.entries.items():
        info = measures.get(name, {})
        if entry.status == "ok" and sense_of(info):
            scale = str(info.get("scale") or "")
            note = f" ({scale})" if scale else ""
            texts.append(f"{name} {plus_minus(entry.value, entry.error)}{note}")
            if entry.error > 0:
                units.setdefault(entry.over)
    legend = f"± standard error over {', '.join(units)}" if units else ""
    parts = "; ".join(part for part in (legend, *facts) if part)
    data = row.subjects[0].data
    on = "" if data == "given" else f" on {data}"  # "given": passed to `nlbench.evaluate`
    return f"{row.label}{on}: {', '.join(texts)} ({parts})."
