"""Bundled results of the benchmark of measures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from nlbench.serialization.files import write_atomically

from .ladder_tables import ORDER_COLUMNS, PRECISION_COLUMNS, clear_unseen_costs

FILE = Path(__file__).with_name("benchmark_results.json")
SIGNIFICANT_DIGITS = 4
_TABLES = {
    "orders": ("order-kendall-s-tau-by-ladder.csv", ORDER_COLUMNS),
    "precision": ("precision-and-cost.csv", PRECISION_COLUMNS),
}


def shipped_results(measured: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the bundled orders for measures that were not run, and all bundled precisions.

    The tables are those of `order_table` and `precision_table`.
    """
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    orders, precision = (
        pd.DataFrame(stored.get(name, []), columns=columns)
        for name, (_, columns) in _TABLES.items()
    )
    precision = clear_unseen_costs(precision, orders)
    return orders[~orders.measure.isin(list(measured))], precision


def save_results(study: Path, file: Path) -> None:
    """Save the tables in a full study's folder as the bundled results."""
    stored = {}
    for name, (table, columns) in _TABLES.items():
        rows = pd.read_csv(study / table)[columns]
        floats = rows.select_dtypes("float").map(lambda x: float(f"{x:.{SIGNIFICANT_DIGITS}g}"))
        stored[name] = json.loads(rows.assign(**floats).to_json(orient="values"))
    parts = []
    for name, rows in stored.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    write_atomically(file, "{" + ",\n".join(parts) + "}\n")
