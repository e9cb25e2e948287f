"""Checks that all records in a run were made with the same settings and subjects.

`RunFolder.check` rejects a request that is inconsistent with the records in its folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nlbench.subjects.facts import SubjectFacts

from .record import Record

if TYPE_CHECKING:
    from nlbench.cells import Cell

K = TypeVar("K")

Decisions = Mapping[tuple[object, ...], object]
"""Everything that determines the values in a leaderboard's columns and rows.

Keys are ``("measure", name)``, ``("probe", name)``, ``("subject", *identity)`` and
``("sources", *identity)``.
"""


def changed_keys(recorded: Mapping[K, object], current: Mapping[K, object]) -> list[K]:
    """Return the keys that are in both mappings but have different values.

    Examples
    --------
    >>> changed_keys({"seed": 0, "epochs": 2}, {"seed": 1, "lr": 0.1})
    ['seed']
    """
    return [key for key, value in recorded.items() if key in current and current[key] != value]


def decisions_of(cell: Record | Cell) -> dict[tuple[object, ...], object]:
    """Return the decisions that determine the values of a cell, planned or recorded."""
    measure = cell.measure
    probe = cell.probe
    subject = cell.subject
    decisions: dict[tuple[object, ...], object] = {
        ("measure", measure.name): (
            measure.version,
            dict(measure.options),
            measure.errors or "none",
        ),
        ("probe", probe.name): dict(probe.options),
    }
    # Subjects of `nlbench.evaluate` have no key, since no request specifies them.
    if subject.key:
        decisions["subject", *subject.identity] = subject.key
    return decisions


def changed_sources(record: Record, decisions: Decisions) -> list[str]:
    """Return the names of the model and data whose files alone have changed since a record."""
    subject = record.subject
    current: Any = decisions.get(("sources", *subject.identity))
    if current is None or not subject.sources or subject.settings_key != current[0]:
        return []
    return [name for name, version in current[1].items() if subject.sources.get(name) != version]


def difference_text(record: Record, key: tuple[object, ...]) -> str:
    """Describe a record whose decision for a key differs."""
    measure, subject = record.measure.name, record.subject
    match key[0]:
        case "measure":
            return f"{measure} with other options, another version or other --errors"
        case "probe":
            return f"{measure} through {record.probe.name} with other options"
        case _:
            return (
                f"{measure} for another {subject.model} ({subject.weights}): the weights, samples, "
                "split, device or plugin differ, or its own file has changed"
            )


_CONTENT_FIELDS = ("weights_hash", "sample_hash", "preprocessing")


def recorded_facts(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """Return the facts that all cells of a subject must share, keyed by subject key."""
    facts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        subject = record.subject
        if subject.key and record.is_done:
            content = {name: getattr(subject, name) for name in _CONTENT_FIELDS}
            facts[subject.key] = {name: fact for name, fact in content.items() if fact is not None}
    return facts


def changed_subject(facts: SubjectFacts, recorded: Mapping[str, Any]) -> str:
    """Describe how a loaded subject differs from its recorded facts; empty if they agree.

    Examples
    --------
    >>> facts = SubjectFacts(model="vgg8", weights="init", data="digits", seed=0, sample_hash="a")
    >>> changed_subject(facts, {"sample_hash": "a"})
    ''
    >>> changed_subject(facts, {"sample_hash": "b"}).partition(" differs")[0]
    'vgg8 on digits: the sample hash'
    """
    current = {name: fact for name, fact in vars(facts).items() if fact is not None}
    for name in changed_keys(recorded, current):
        return (
            f"{facts.model} on {facts.data}: the {name.replace('_', ' ')} differs from "
            "that of the run's recorded cells; choose another --out"
        )
    return ""
