"""The manifest: what was asked for, on which machine, with which versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from nlbench.errors import RequestError, one_line
from nlbench.options import OptionValue
from nlbench.serialization.fields import others, read, written
from nlbench.subjects.facts import SubjectFacts

from .record import Record, RecordedMeasure

if TYPE_CHECKING:
    from nlbench.execution.numerics import Machine

__all__ = ["Manifest", "RunCall", "make_manifest", "now"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunCall:
    """One call that added to a run."""

    started: str | None = None
    command: str
    request: Mapping[str, Any] | None = None
    seconds: float | None = None
    rest: Mapping[str, Any] = others()


Merged = TypedDict("Merged", {"from": Sequence[str], "at": str}, total=False)
"""Which runs a run was merged of, and when."""


@dataclass(frozen=True)
class Manifest(Mapping[str, Any]):
    """What decided a run's numbers, and what came of its cells.

    As a mapping it has what its file has; a field that is rarely set is there only where it is.

    Parameters
    ----------
    nlbench : str
        Version that made it.
    created : str
        When, in UTC.
    command : str
        The last command line.
    request : mapping
        What it asked for.
    environment : mapping
        See `nlbench.execution.numerics.describe_environment`.
    device, dtype : str
        Of the models.
    seconds : float
        That all calls have taken.
    calls : tuple of RunCall
        Every call that added to the run.
    unfinished : bool
        Whether it was interrupted, or is being written.
    saving : bool
        Whether the folder is being written whole; nothing else is known then.
    merged : mapping
        ``from`` which runs, and when.
    order : tuple of str
        Keys of the records.
    subjects : tuple of SubjectFacts
        What the records tell of theirs.
    measures : mapping of str to RecordedMeasure
    probes : mapping of str to mapping
        Options of probes.
    environments : tuple of mapping
        All that cells were measured in, where there are several.
    cells : mapping of str to int
        Number of cells by status.
    rest : mapping
        What somebody else keeps here.

    Examples
    --------
    >>> manifest = Manifest(command="nlbench run", unfinished=True)
    >>> manifest["unfinished"], manifest["cells"], "merged" in manifest
    (True, {}, False)
    >>> Manifest.from_dict(manifest.to_dict(), "here") == manifest
    True
    """

    nlbench: str = ""
    created: str = ""
    command: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0
    unfinished: bool = False
    saving: bool = False
    merged: Merged = field(default_factory=Merged)
    calls: tuple[RunCall, ...] = ()
    order: tuple[str, ...] = ()
    dtype: str = ""
    subjects: tuple[SubjectFacts, ...] = ()
    measures: Mapping[str, RecordedMeasure] = field(default_factory=dict)
    probes: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    environments: tuple[Mapping[str, Any], ...] = ()
    cells: Mapping[str, int] = field(default_factory=dict)
    rest: Mapping[str, Any] = others()

    def to_dict(self) -> dict[str, Any]:
        """Content of the manifest's file; `from_dict` reads it."""
        return {name: written(value) for name, value in self._said().items()}

    def _said(self) -> Mapping[str, Any]:
        """What its file has, as objects."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)[:-1]}
        said = {name: value for name, value in given.items() if value or name in _ALWAYS}
        return {**({"saving": True} if self.saving else said), **self.rest}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "the manifest") -> Manifest:
        """Make a manifest of what `to_dict` gave, or of what claims to be that.

        Raises
        ------
        nlbench.RequestError
            If a field is of another type.
        """
        if isinstance(content, Manifest):
            return content
        given = {name: value for name, value in content.items() if value is not None}
        try:
            return read(cls, given, "manifest")
        except ValueError as error:
            raise RequestError(
                f"{origin} is no manifest of a run ({one_line(error, 300)})"
            ) from error

    def of_records(self, records: Sequence[Record]) -> Manifest:
        """Add what records tell: subjects, measures, probes, counts by status.

        ``environments`` lists all that cells were measured in, where a run was extended
        elsewhere or with other versions.
        """
        environments = _distinct(record.machine.environment for record in records)
        statuses = [record.result.status for record in records]
        return replace(
            self,
            order=tuple(record.key for record in records),
            dtype=", ".join(dict.fromkeys(r.machine.dtype for r in records)),
            subjects=_distinct(record.subject for record in records),
            measures={r.measure.name: r.measure for r in records},
            probes={r.probe.name: r.probe.options for r in records},
            environments=environments if len(environments) > 1 else (),
            cells={status: statuses.count(status) for status in dict.fromkeys(statuses)},
        )

    def __getitem__(self, name: str) -> Any:
        return written(self._said()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._said())

    def __len__(self) -> int:
        return len(self._said())


_ALWAYS = ("command", "seconds", "order", "dtype", "subjects", "measures", "probes", "cells")


def make_manifest(
    request: Mapping[str, Any],
    machine: Machine,
    *,
    command: str = "",
    created: str | None = None,
) -> Manifest:
    """What is known before a cell is measured; `Manifest.of_records` adds what the records tell."""
    return Manifest(
        nlbench=machine.environment["packages"]["nlbench"] or "",
        created=created or now(),
        command=command,
        request=dict(request),
        environment=dict(machine.environment),
        device=str(machine.device),
    )


def _distinct(facts: Iterable[T]) -> tuple[T, ...]:
    """Those that differ, in the order of their first appearance; of equal ones the last."""
    found = {json.dumps(written(one), sort_keys=True, default=str): one for one in facts}
    return tuple(found.values())


def now() -> str:
    """Time of day, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
