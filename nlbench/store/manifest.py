"""The manifest of a run: its requests, machine and versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, TypedDict, TypeVar

from nlbench.errors import RequestError, one_line
from nlbench.options import OptionValue
from nlbench.parsers import unique
from nlbench.serialization.fields import extra_fields, from_plain, to_plain
from nlbench.subjects.facts import SubjectFacts

from .record import Record, RecordedMachine, RecordedMeasure

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunCall:
    """A call that added cells to a run."""

    started: str | None = None
    command: str
    request: Mapping[str, Any] | None = None
    seconds: float | None = None
    rest: Mapping[str, Any] = extra_fields()


Merged = TypedDict("Merged", {"from": Sequence[str], "at": str}, total=False)
"""The runs that were merged, and the time of the merge."""


@dataclass(frozen=True)
class Manifest(Mapping[str, Any]):
    """Everything that determined a run's values, and the status of its cells.

    As a mapping, it has the content of its file, in which unset fields may be missing.

    Examples
    --------
    >>> manifest = Manifest(command="nlbench run", unfinished=True)
    >>> manifest["unfinished"], manifest["cells"], "merged" in manifest
    (True, {}, False)
    >>> Manifest.from_dict(dict(manifest), "here") == manifest
    True
    """

    nlbench: str = ""
    created: str = ""
    # command, request: command line and request for the last call
    command: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    # See `nlbench.execution.machine.describe_environment`.
    environment: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0  # total time of all calls
    unfinished: bool = False  # True if the run was interrupted or is in progress
    # True while `nlbench.Run.save` writes the folder; the other fields are then absent.
    saving: bool = False
    # The runs that were merged, and the time of the merge.
    merged: Merged = field(default_factory=Merged)
    superseded: tuple[str, ...] = ()  # what was measured again because a file had changed
    calls: tuple[RunCall, ...] = ()  # every call that added cells to the run
    order: tuple[str, ...] = ()  # record keys in the order of the table
    dtype: str = ""
    subjects: tuple[SubjectFacts, ...] = ()
    measures: Mapping[str, RecordedMeasure] = field(default_factory=dict)
    probes: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    # The environments of all cells, if they differ.
    environments: tuple[Mapping[str, Any], ...] = ()
    cells: Mapping[str, int] = field(default_factory=dict)  # number of cells for each status
    rest: Mapping[str, Any] = extra_fields()  # unknown fields in the manifest's file

    def _written_fields(self) -> Mapping[str, Any]:
        """Return the fields to write to the file."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)[:-1]}
        present = {name: value for name, value in values.items() if value or name in _REQUIRED}
        return {**({"saving": True} if self.saving else present), **self.rest}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "the manifest") -> Manifest:
        """Validate the content of a manifest's file."""
        if isinstance(content, Manifest):
            return content
        present = {name: value for name, value in content.items() if value is not None}
        try:
            return from_plain(cls, present, "manifest")
        except ValueError as error:
            raise RequestError(
                f"{origin} is not a run's manifest ({one_line(error, 300)})"
            ) from error

    def describe_records(self, records: Sequence[Record]) -> Manifest:
        """Return a copy with the records' subjects, measures, probes, environments and counts."""
        environments = _distinct(record.machine.environment for record in records)
        statuses = [record.result.status for record in records]
        return replace(
            self,
            order=tuple(record.key for record in records),
            dtype=", ".join(unique(r.machine.dtype for r in records if r.machine.dtype)),
            subjects=_distinct(record.subject for record in records),
            measures={r.measure.name: r.measure for r in records},
            probes={r.probe.name: r.probe.options for r in records},
            environments=environments if len(environments) > 1 else (),
            cells={status: statuses.count(status) for status in unique(statuses)},
        )

    def __getitem__(self, name: str) -> Any:
        return to_plain(self._written_fields()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._written_fields())

    def __len__(self) -> int:
        return len(self._written_fields())


_REQUIRED = ("command", "seconds", "order", "dtype", "subjects", "measures", "probes", "cells")


def make_manifest(
    request: Mapping[str, Any],
    machine: RecordedMachine,
    *,
    command: str = "",
    created: str | None = None,
) -> Manifest:
    """Create a manifest without records. See `Manifest.describe_records`."""
    return Manifest(
        nlbench=machine.environment["packages"]["nlbench"] or "",
        created=created or now(),
        command=command,
        request=dict(request),
        environment=dict(machine.environment),
        device=machine.device,
    )


def _distinct(facts: Iterable[T]) -> tuple[T, ...]:
    """Drop duplicates, keeping the last of equal facts in the position of the first."""
    # Records of a run share most of these objects.
    objects = {id(fact): fact for fact in facts}
    distinct = {json.dumps(to_plain(o), sort_keys=True, default=str): o for o in objects.values()}
    return tuple(distinct.values())


def now() -> str:
    """Return the current time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
