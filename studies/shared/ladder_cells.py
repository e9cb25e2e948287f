"""The cells of the benchmark of measures in one table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from nlbench.reports.tables import MeasureInfo
from nlbench.serialization.fields import to_plain
from nlbench.store.record import Record
from nlbench.studies.framework import Runs

from .ladders import AFFINE_MAPS, LADDERS, MIN_EXPLAINED, TWIN_LADDER, Ladder

NORMALIZED = ("range", "chord")
REFERENCE = "affine-residual"
"""Measure that certifies the order of ladders, and is not ranked on them."""
PARAMETERS = "parameters"
"""Baseline: the number of parameters, recorded with every accuracy."""
ALL_LADDERS: Mapping[str, Ladder] = {
    **LADDERS,
    TWIN_LADDER.name: TWIN_LADDER,
    AFFINE_MAPS.name: AFFINE_MAPS,
}


def _values(record: Record) -> Iterable[tuple[str, float]]:
    """Yield the name and value of a cell's measure, and of each normalised variant."""
    name = record.measure.name
    summary = record.result.summary
    yield name, summary.get("value", math.nan)
    if name == "absdev":
        for kind in NORMALIZED:
            yield f"{name} {kind}", summary.get(f"over_{kind}", math.nan)


def read_cells(runs: Runs, ladders: Mapping[str, Ladder] = ALL_LADDERS) -> pd.DataFrame:
    """Return the cells of all ladders as a table.

    Parts are named after their ladder, optionally followed by a dot and a variant. Rung 0 is the
    least nonlinear. Fitted networks that explain too little of their target are excluded.
    """
    rows = []
    for part, run in runs.items():
        name, _, variant = part.partition(".")
        for record in run.records:
            rung = ladders[name].find_rung(record.subject)
            seed = record.subject.seed
            explained = float((record.subject.weights_metadata or {}).get("explained", "nan"))
            if explained < MIN_EXPLAINED:
                continue
            status = record.result.status
            reason = record.result.reason
            clock = "cpu_seconds" if record.machine.device == "cpu" else "wall_seconds"
            seconds = record.costs.get(clock, math.nan)
            key = (name, variant, rung, seed)
            for measure, value in _values(record):
                is_empty = status == "ok" and math.isnan(value)
                row_status = "undefined" if is_empty else status
                row_reason = "nothing to divide by" if is_empty else reason
                number = value if row_status == "ok" else math.nan
                rows.append((*key, measure, number, row_status, row_reason, seconds))
            if record.measure.name == REFERENCE and record.subject.parameters:
                parameters = float(record.subject.parameters)
                rows.append((*key, PARAMETERS, parameters, "ok", "", math.nan))
    columns = ["ladder", "part", "rung", "seed", "measure", "value", "status", "reason", "seconds"]
    return pd.DataFrame(rows, columns=columns)


def read_descriptions(runs: Runs) -> dict[str, MeasureInfo]:
    """Return the recorded description of each measure. Variants share their measure's."""
    descriptions: dict[str, MeasureInfo] = {}
    for run in runs.values():
        for record in run.records:
            names = (name for name, _ in _values(record))
            descriptions |= dict.fromkeys(names, MeasureInfo.from_dict(to_plain(record.measure)))
    descriptions[PARAMETERS] = MeasureInfo(more_means="more nonlinear")
    return dict(sorted(descriptions.items()))


def read_residuals(cells: pd.DataFrame, ladder: str) -> pd.Series[Any]:
    """Return the affine residuals of the networks on a ladder, by seed and rung."""
    rows = cells[(cells.ladder == ladder) & (cells.measure == REFERENCE)]
    rows = rows[(rows.part == "") & (rows.status == "ok")]
    return rows.set_index(["seed", "rung"]).value
