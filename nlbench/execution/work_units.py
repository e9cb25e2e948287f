"""Units of work: cells of one subject that are measured together, and what is told of them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nlbench.plan import Cell, Plan

__all__ = ["Missed", "Unit", "units_of"]


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

    def only(self, cells: Sequence[Cell]) -> Unit:
        """The same with some of its cells."""
        return replace(self, cells=tuple(cells))

    def on(self, device: str) -> Unit:
        """The same on another device."""
        return replace(self, device=device)

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
