"""The plain values that a page is laid out of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

__all__ = ["NamedRun", "Table", "TextCell"]

Identity = tuple[str, str, str, int]


@dataclass(frozen=True)
class Picture:
    """A picture as it stands on the page.

    Parameters
    ----------
    source : str
        Its content, as the address of an image that needs no file.
    caption : str
    """

    source: str
    caption: str


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
    kinds : mapping of (model, weights, data, seed) to mapping
        From the sites of each subject to their kinds.
    costs : mapping of (model, weights, data, seed, measure) to mapping
        What each cell cost: ``seconds``, ``peak_memory``, ….
    remarks : mapping of (model, weights, data, seed) to sequence of str
        What whoever reads the numbers has to know.
    planes : tuple of Picture
        Of planes through input space that were drawn for the run.
    """

    name: str
    scores: pd.DataFrame
    manifest: Mapping[str, Any]
    drawings: Mapping[Identity, Mapping[str, Any]] = field(default_factory=dict)
    kinds: Mapping[Identity, Mapping[str, str]] = field(default_factory=dict)
    costs: Mapping[tuple[str, str, str, int, str], Mapping[str, float]] = field(
        default_factory=dict
    )
    remarks: Mapping[Identity, tuple[str, ...]] = field(default_factory=dict)
    planes: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class TextCell:
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
    head : tuple of TextCell
        The remark of a head is its second line.
    rows : tuple of tuple of TextCell
    names : int
        How many columns at the left are names.
    numbers : bool
        Whether the rest are numbers.
    """

    head: tuple[TextCell, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    names: int = 1
    numbers: bool = False
