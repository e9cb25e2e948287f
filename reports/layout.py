"""The runs of a page, and tables of its templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .text import functional_calls

if TYPE_CHECKING:
    from nlbench.store.record import Record

Identity = tuple[str, str, str, int]
"""Model, weights, data and seed of a subject."""


@dataclass(frozen=True)
class NamedRun:
    """A run under a name that is unique on the page.

    Parameters
    ----------
    planes : tuple of (str, str)
        Data URL and caption for each plane through input space that was drawn for the run.
    """

    name: str
    manifest: Mapping[str, Any]
    records: tuple[Record, ...] = ()
    planes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def subjects(self) -> dict[Identity, Mapping[str, Any]]:
        """Facts about each subject from the manifest."""
        keys = ("model", "weights", "data", "seed")
        known = [s for s in self.manifest.get("subjects") or [] if set(keys) <= s.keys()]
        return {(*(str(s[key]) for key in keys[:3]), int(s["seed"])): s for s in known}  # type: ignore[misc]

    @cached_property
    def cells(self) -> dict[tuple[str, str, str, int, str], Record]:
        """The record of each subject and measure."""
        return {record.identity: record for record in self.records}

    @cached_property
    def _members(self) -> dict[Identity, list[Record]]:
        members: dict[Identity, list[Record]] = {}
        for record in self.records:
            members.setdefault(record.subject.identity, []).append(record)
        return members

    @cached_property
    def drawings(self) -> dict[Identity, Mapping[str, Any]]:
        """The recorded path of each subject that has one, shared by the measures of lines."""
        return {
            subject: drawing
            for subject, records in self._members.items()
            for record in reversed(records)
            if (drawing := record.probe.facts.get("drawing"))
        }

    def kinds(self, subject: Identity) -> dict[str, str]:
        """Return the activation function at each site of a subject."""
        kinds: dict[str, str] = {}
        for record in self._members.get(subject, ()):
            kinds.update(record.probe.facts.get("kinds", {}))
        return kinds

    def remarks(self, subject: Identity) -> list[str]:
        """Return the probes' notes on a subject."""
        notes = (note for record in self._members.get(subject, ()) for note in _notes(record))
        return list(dict.fromkeys(notes))


def _notes(record: Record) -> Iterator[str]:
    facts = record.probe.facts
    for site, remark in facts.get("remarks", {}).items():
        yield f"{site}: {remark}"
    if where := facts.get("where"):
        yield functional_calls(where)
    if facts.get("unseen"):
        yield f"activations inside {', '.join(facts['unseen'])} were not observed"


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
