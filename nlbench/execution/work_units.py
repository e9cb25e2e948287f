"""Units of work, their results, and the messages that transfer both between processes.

A unit contains the cells of one subject, or only those of one probe. Measuring it yields records
and events, which `to_message` and `from_message` convert to and from JSON objects.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nlbench.plan import Cell, Plan
from nlbench.store.record import Record, RecordedMachine


@dataclass(frozen=True)
class Unit:
    """Cells of one subject, which is loaded once for all of them."""

    cells: tuple[Cell, ...]
    device: str
    precision: str = "native"
    memory: int | None = None  # memory limit for a pass, in bytes
    # Facts about the subject recorded with its other cells, such as the sample's hash.
    expected: Mapping[str, Any] = field(default_factory=dict)
    # Recorded for cells that can't be measured.
    machine: RecordedMachine = RecordedMachine("", "", {})  # noqa: RUF009 (it is frozen)
    # Host name of the machine that made the plan; file times are compared only on that machine.
    planned_at: str = field(default_factory=platform.node)

    def missing_records(self, reason: str, traceback: str = "") -> Iterator[Record]:
        """Yield a failed record for each cell."""
        for cell in self.cells:
            yield cell.missing_record(self.machine, reason, traceback=traceback)


Event = Mapping[str, str]
"""A JSON object with one entry, the name of a method of `ProgressMonitor` and its argument.

The method is called by the process that started the run.
"""


def to_message(result: Record | Event) -> Mapping[str, str]:
    """Return a record or an event as a JSON object."""
    return {"record": result.to_json()} if isinstance(result, Record) else result


def from_message(message: Mapping[str, str]) -> Record | Event:
    """Convert a message from `to_message`."""
    if "record" in message:
        return Record.from_json(message["record"], "a worker's record")
    return message


def group_by_subject(
    cells: Iterable[Cell],
    plan: Plan,
    machine: RecordedMachine,
    *,
    memory: int | None,
    expected: Mapping[str, Mapping[str, Any]],
) -> list[Unit]:
    """Group cells by subject."""
    units = []
    for group in group_cells(cells, lambda cell: cell.subject.key):
        facts = expected.get(group[0].subject.key, {})
        units.append(Unit(tuple(group), plan.device, plan.precision, memory, facts, machine))
    return units


def split_by_probe(unit: Unit) -> list[Unit]:
    """Split a unit into one for each probe."""
    groups = group_cells(unit.cells, lambda cell: cell.probe.name)
    return [replace(unit, cells=tuple(cells)) for cells in groups]


def group_cells(cells: Iterable[Cell], key: Callable[[Cell], str]) -> list[list[Cell]]:
    """Group cells by a key, in order."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())
