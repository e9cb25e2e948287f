"""Dataclasses rendered by the page's templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

Identity = tuple[str, str, str, int]


@dataclass(frozen=True)
class NamedRun:
    """A run under a name that is unique on the page.

    Parameters
    ----------
    drawings : mapping of (model, weights, data, seed) to mapping
        Data for drawing one path, for each subject that has it.
    kinds : mapping of (model, weights, data, seed) to mapping
        Activation function at each site of a subject.
    cells : mapping of (model, weights, data, seed, measure) to mapping
        ``key``, ``traceback``, ``seconds``, ``peak_memory``, … for each cell.
    subjects : mapping of (model, weights, data, seed) to mapping
        Facts about each subject from the manifest.
    remarks : mapping of (model, weights, data, seed) to sequence of str
        The probes' notes on a subject.
    replicates : mapping of Identity to CellReplicates
        See `nlbench.reports.tables`; the run's name is empty.
    planes : tuple of (str, str)
        Data URL and caption for each plane through input space that was drawn for the run.
    """

    name: str
    scores: pd.DataFrame
    manifest: Mapping[str, Any]
    drawings: Mapping[Identity, Mapping[str, Any]] = field(default_factory=dict)
    kinds: Mapping[Identity, Mapping[str, str]] = field(default_factory=dict)
    cells: Mapping[tuple[str, str, str, int, str], Mapping[str, Any]] = field(default_factory=dict)
    subjects: Mapping[Identity, Mapping[str, Any]] = field(default_factory=dict)
    remarks: Mapping[Identity, tuple[str, ...]] = field(default_factory=dict)
    replicates: Mapping[Any, Any] = field(default_factory=dict)
    planes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of strings.

    Parameters
    ----------
    names : int
        Number of leading columns that contain names.
    numbers : bool
        True if the other columns contain numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    numbers: bool = False
