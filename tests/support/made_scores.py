"""Records and scores with the numbers of a tidy table."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from made_records import make_record

from nlbench.measure import Result, Value
from nlbench.reports.tables import MeasureInfo, Scores
from nlbench.store.record import Record
from nlbench.store.run_folder import COLUMNS


class Replicates(NamedTuple):
    """Replicates of a cell: of its summary, of its places, the key of its samples, and its unit."""

    summary: tuple[float, ...] = ()
    places: Mapping[str, tuple[float, ...]] = {}
    key: str = ""
    unit: str = "samples"


def records_of(
    table: pd.DataFrame,
    measures: Mapping[str, Mapping[str, Any]] | Sequence[str] = (),
    replicates: Mapping[tuple[Any, ...], Replicates] | None = None,
) -> list[Record]:
    """Records with the numbers of a tidy table."""
    cells: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in table.itertuples(index=False):
        key = (row.model, row.weights, row.data, int(row.seed), row.measure)
        cells.setdefault(key, {}).setdefault(row.place, []).append(row)
    records = []
    for (*subject, name), places in cells.items():
        known = (replicates or {}).get((*subject, name), Replicates())
        info = dict(measures[name]) if isinstance(measures, Mapping) and name in measures else {}
        values = []
        for place, rows in places.items():
            main = next((row for row in rows if row.statistic == "value"), rows[0])
            numbers = {row.statistic: row.value for row in rows if row.status == "ok"}
            repeated = known.places.get(place, ()) if place else known.summary
            value = Value(place, numbers, main.n, main.status, main.reason, {}, repeated)
            values.append(value)
        whole = next((v for v in values if not v.place), Value.missing("", "absent", "none"))
        records.append(
            make_record(
                key="-".join(map(str, (*subject, name))),
                subject=dict(
                    zip(("model", "weights", "data", "seed"), subject, strict=True),
                    sample_hash=known.key,
                ),
                measure={
                    "name": name,
                    "version": str(info.get("version", "1")),
                    "options": {},
                    "exact": known.unit == "exact" or None,
                },
                probe={"name": str(info.get("probe", "sites")), "options": {}},
                result=Result(
                    whole.statistics,
                    tuple(v for v in values if v.place),
                    whole.n,
                    whole.status,
                    whole.reason,
                    replicates=whole.replicates,
                ),
            )
        )
    return records


def scores_of(
    table: pd.DataFrame,
    measures: Mapping[str, Mapping[str, Any]] | Sequence[str] = (),
    replicates: Mapping[tuple[Any, ...], Replicates] | None = None,
) -> Scores:
    """The scores of a tidy table."""
    known = measures if isinstance(measures, Mapping) else {name: {} for name in measures}
    infos = {name: MeasureInfo.from_dict(content) for name, content in known.items()}
    return Scores({"": records_of(table, measures, replicates)}, infos)


def page_script(html: str) -> str:
    """The embedded data of a page, compressed."""
    match = re.search(r'<script type="text/plain" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return match[1]


def page_content(html: str) -> dict[str, Any]:
    """The data of a page."""
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(page_script(html))))
    return content


def page_table(html: str) -> pd.DataFrame:
    """The tidy table in the data of a page."""
    content = page_content(html)
    rows: list[tuple[Any, ...]] = []
    for subject, cells in zip(content["subjects"], content["cells"], strict=True):
        identity = tuple(subject[key] for key in ("run", "model", "weights", "data", "seed"))
        for measure, cell in zip(content["measures"], cells, strict=True):
            if cell["s"] == "absent" or measure.get("derived"):
                continue
            key = (*identity, measure["name"])
            parts = [("", cell.get("t", {}), cell["n"], cell["s"], cell.get("r", ""))]
            remarks = {index: state for index, *state in cell.get("m", ())}
            for index, place in enumerate(content["names"][cell["p"]] if "p" in cell else ()):
                numbers = {name: column[index] for name, column in cell["c"].items()}
                n = cell["k"] if isinstance(cell["k"], int) else cell["k"][index]
                parts.append((place, numbers, n, *remarks.get(index, ("ok", ""))))
            for place, numbers, *state in parts:
                known = {name: value for name, value in numbers.items() if value is not None}
                for name, value in (known or {"value": "NaN"}).items():
                    rows.append((*key, place, name, float(value), *state))
    return pd.DataFrame(rows, columns=["run", *COLUMNS])
