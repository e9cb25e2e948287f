"""Units of work, their results, and the messages that transfer both between processes.

A unit contains the cells of one subject, or only those of one probe. Measuring it yields `Record`,
`UnmeasuredCells` and `WorkerEvent` objects, which `to_message` and `from_message` convert to and
from JSON objects.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nlbench.cells import Cell, Plan
from nlbench.progress import Progress
from nlbench.store.record import Record


@dataclass(frozen=True)
class Unit:
    """Cells of one subject, which is loaded once for all of them.

    Parameters
    ----------
    memory : int or None
        Memory limit for a pass, in bytes.
    expected : mapping
        Facts about the subject recorded with its other cells, such as the sample's hash.
    planned_at : str
        Host name of the machine that made the plan; file times are compared only on that machine.
    """

    cells: tuple[Cell, ...]
    device: str
    precision: str = "native"
    memory: int | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    planned_at: str = field(default_factory=platform.node)


@dataclass(frozen=True)
class UnmeasuredCells:
    """Cells that were not measured, and the reason why.

    Parameters
    ----------
    load_failed : bool
        Loading the subject raised an error.
    crashed_early : bool
        The worker crashed, or the time limit was exceeded, before the subject was loaded.
    """

    cells: tuple[Cell, ...]
    reason: str
    traceback: str = ""
    load_failed: bool = False
    crashed_early: bool = False


@dataclass(frozen=True)
class WorkerEvent:
    """A progress report of kind ``step``, or a warning of kind ``warn``."""

    kind: str
    text: str

    def send_to(self, progress: Progress) -> None:
        """Report the event to `progress`."""
        (progress.step if self.kind == "step" else progress.warn)(self.text)


def to_message(result: Record | UnmeasuredCells | WorkerEvent) -> dict[str, Any]:
    """Return a result as a JSON object."""
    if isinstance(result, Record):
        return {"record": result.to_json()}
    if isinstance(result, WorkerEvent):
        return {result.kind: result.text}
    return {**vars(result), "cells": keys_of(result)}


def from_message(
    message: Mapping[str, Any], cells: Mapping[str, Cell]
) -> Record | UnmeasuredCells | WorkerEvent:
    """Convert a message from `to_message`, dropping unmeasured cells that are not in `cells`."""
    if "record" in message:
        return Record.from_json(message["record"], "a worker's record")
    if "cells" in message:
        unmeasured = tuple(cells[key] for key in message["cells"] if key in cells)
        return UnmeasuredCells(**{**message, "cells": unmeasured})
    ((kind, text),) = message.items()
    return WorkerEvent(kind, text)


def keys_of(result: Record | UnmeasuredCells | WorkerEvent) -> list[str]:
    """Return the keys of the cells that a result completes."""
    if isinstance(result, Record):
        return [result.key]
    return [cell.key for cell in result.cells] if isinstance(result, UnmeasuredCells) else []


def units_of(
    cells: Iterable[Cell],
    plan: Plan,
    *,
    memory: int | None,
    expected: Mapping[str, Mapping[str, Any]],
) -> list[Unit]:
    """Group cells by subject."""
    return [
        Unit(
            tuple(group),
            plan.device,
            plan.precision,
            memory,
            expected.get(group[0].subject.key, {}),
        )
        for group in _group(cells, lambda cell: cell.subject.key)
    ]


def split_by_probe(unit: Unit) -> list[Unit]:
    """Split a unit into one for each probe."""
    groups = _group(unit.cells, lambda cell: cell.measure.probe)
    return [replace(unit, cells=tuple(cells)) for cells in groups]


def _group(cells: Iterable[Cell], key: Callable[[Cell], str]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())
