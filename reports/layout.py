"""The plain values that a page is laid out of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

__all__ = ["Cell", "NamedRun", "Table"]


@dataclass(frozen=True)
class NamedRun:
    """A run under a name that no other run of the page has.

    Parameters
    ----------
    name : str
    scores : DataFrame
    manifest : mapping
    drawings : mapping of (model, weights, data, seed) to mapping
        The drawn path of each subject that has one.
    """

    name: str
    scores: pd.DataFrame
    manifest: Mapping[str, Any]
    drawings: Mapping[tuple[str, str, str, int], Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, what it sorts by, and a remark on hovering."""

    text: str
    sort: str = ""
    status: str = "ok"
    remark: str = ""


@dataclass(frozen=True)
class Table:
    """A table ready to be laid out.

    Parameters
    ----------
    head : tuple of Cell
        The remark of a head is its second line.
    rows : tuple of tuple of Cell
    names : int
        How many columns at the left are names; the rest are numbers.
    """

    head: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    names: int = 1
