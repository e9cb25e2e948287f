"""Units of work: cells of one subject that are measured together, and what is told of them.

What comes of a unit is a `Record`, a `Missed` or something `Told`; between processes it goes as a
message, which `message_of` makes and `result_of` reads.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nlbench.plan import Cell, Plan
from nlbench.progress import Progress
from nlbench.store.record import Record

__all__ = ["Missed", "Told", "Unit", "keys_of", "message_of", "result_of", "units_of"]


@dataclass(frozen=True)
class Unit:
    """Cells of one subject, which share its loading, and how they are measured.

    Parameters
    ----------
    cells : tuple of Cell
    device, precision : str
    memory : int or None
        Bytes that a pass may use.
    expected : mapping
        Facts of the subject as recorded with its other cells, such as the sample's hash.
    planned_at : str
        The machine that made the plan: elsewhere a dataset's copy has other times.
    """

    cells: tuple[Cell, ...]
    device: str
    precision: str = "native"
    memory: int | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    planned_at: str = field(default_factory=platform.node)

    def to_dict(self) -> dict[str, Any]:
        """Plain content; `from_dict` reads it."""
        plan = Plan(self.cells, self.device, self.precision)
        rest = {"memory": self.memory, "expected": dict(self.expected)}
        return {**plan.to_dict(), **rest, "planned_at": self.planned_at}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Unit:
        """Make a unit of what `to_dict` gave."""
        plan = Plan.from_dict(content)
        rest = (content[name] for name in ("memory", "expected", "planned_at"))
        return cls(plan.cells, plan.device, plan.precision, *rest)


@dataclass(frozen=True)
class Missed:
    """Cells that were not measured, and why.

    Parameters
    ----------
    cells : tuple of Cell
    reason : str
    traceback : str
    loading : bool
        Whether it is the subject that couldn't be loaded.
    """

    cells: tuple[Cell, ...]
    reason: str
    traceback: str = ""
    loading: bool = False


@dataclass(frozen=True)
class Told:
    """What a worker tells beside its results: a ``step``, or something to ``warn`` of."""

    kind: str
    text: str

    def to(self, progress: Progress) -> None:
        """Pass it on."""
        (progress.step if self.kind == "step" else progress.warn)(self.text)


def message_of(result: Record | Missed | Told) -> dict[str, Any]:
    """Give a result as JSON has it."""
    if isinstance(result, Record):
        return {"record": result.to_json()}
    if isinstance(result, Told):
        return {result.kind: result.text}
    return {**vars(result), "cells": keys_of(result)}


def result_of(message: Mapping[str, Any], cells: Mapping[str, Cell]) -> Record | Missed | Told:
    """Read what `message_of` gave.

    Parameters
    ----------
    message : mapping
    cells : mapping of str to Cell
        By key; what is said to be missed of others is left out.
    """
    if "record" in message:
        return Record.from_json(message["record"], "what a worker measured")
    if "cells" in message:
        gone = tuple(cells[key] for key in message["cells"] if key in cells)
        return Missed(**{**message, "cells": gone})
    ((kind, text),) = message.items()
    return Told(kind, text)


def keys_of(result: Record | Missed | Told) -> list[str]:
    """Keys of the cells that a result answers."""
    if isinstance(result, Record):
        return [result.key]
    return [cell.key for cell in result.cells] if isinstance(result, Missed) else []


def units_of(
    cells: Iterable[Cell],
    plan: Plan,
    *,
    memory: int | None,
    expected: Mapping[str, Mapping[str, Any]],
    workers: int = 1,
) -> list[Unit]:
    """Group cells by subject; by subject and probe where there are workers to spare.

    Parameters
    ----------
    cells : iterable of Cell
        In the plan's order.
    plan : Plan
    memory : int or None
    expected : mapping of subject key to facts
    workers : int
    """
    parts = _grouped(cells, lambda cell: cell.target.key)
    if len(parts) < workers:
        parts = [part for group in parts for part in _grouped(group, lambda c: c.wanted.probe)]
    return [
        Unit(
            tuple(part),
            plan.device,
            plan.precision,
            memory,
            expected.get(part[0].target.key, {}),
        )
        for part in parts
    ]


def _grouped(cells: Iterable[Cell], key: Callable[[Cell], str]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())
