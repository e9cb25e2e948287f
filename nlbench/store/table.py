"""The tidy table of records, with one number per row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nlbench.errors import one_line
from nlbench.measure import Value
from nlbench.serialization.files import spreadsheet_safe

from .record import Record

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "model",
    "weights",
    "data",
    "seed",
    "measure",
    "place",
    "statistic",
    "value",
    "n",
    "status",
    "reason",
)


def tidy_table(records: Iterable[Record]) -> pd.DataFrame:
    """Build the table of records; see `nlbench.Run.scores`."""
    import pandas as pd

    rows = [row for record in records for row in _rows(record)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(record: Record) -> Iterator[tuple[object, ...]]:
    identity, result = record.identity, record.result
    summary = Value(
        "", result.summary, result.n, result.status, result.reason, result.parts, result.replicates
    )
    for value in (summary, *result.values):
        numbers = value.numbers or {"value": math.nan}
        for statistic, number in numbers.items():
            yield (*identity, value.place, statistic, number, value.n, value.status, value.reason)


def table_text(table: pd.DataFrame) -> str:
    """Return a table as CSV, escaping any text that a spreadsheet would evaluate."""
    texts = [name for name in table.columns if name not in ("seed", "value", "n")]
    safe = table.assign(**{name: table[name].map(_safe_cell) for name in texts})
    text: str = safe.to_csv(index=False)
    return text


def _safe_cell(text: str) -> str:
    return spreadsheet_safe(text if text.isprintable() else one_line(text))
