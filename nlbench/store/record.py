"""The record of a cell: one result and everything that determined it.

`nlbench.store.run_folder` reads and writes the files; `nlbench.serialization.files` defines
the version of the file format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from nlbench.citation import Source
from nlbench.errors import RequestError, one_line, strip_controls
from nlbench.measure import Measure, Result
from nlbench.options import OptionValue
from nlbench.probes import ProbeFacts
from nlbench.serialization.fields import SHARED, extra_fields, from_plain, to_plain
from nlbench.serialization.files import (
    add_checksum,
    check_checksum,
    dump_versioned,
    parse_versioned,
)
from nlbench.serialization.versions import changed_files
from nlbench.subjects.facts import SubjectFacts

if TYPE_CHECKING:
    from nlbench.plan import Cell


@dataclass(frozen=True, kw_only=True)
class RecordedMeasure:
    """Declaration and options of a measure."""

    name: str
    description: str | None = None
    probe: str | None = None
    # Bounds with these options; None where unbounded.
    bounds: tuple[float | None, float | None] | None = None
    more_means: str | None = None
    version: str
    options: Mapping[str, OptionValue]
    source: Source | None = None
    # groups or none: kind of replicates; None in records of format 1, which have no replicates.
    errors: str | None = None
    # True if the value doesn't depend on samples or paths; None if unknown.
    exact: bool | None = None
    scale: str | None = None  # how the value depends on units, such as grows with the logits
    rest: Mapping[str, Any] = extra_fields()  # unknown fields in the record's file

    @classmethod
    def of(
        cls, measure: type[Measure], options: Mapping[str, OptionValue], errors: str | None = None
    ) -> RecordedMeasure:
        """Describe a measure and its resolved options."""
        low, high = (x if math.isfinite(x) else None for x in measure.bounds_of(options))
        return cls(
            name=measure.name,
            description=(measure.__doc__ or "").strip().partition("\n")[0],
            probe=measure.probe,
            bounds=(low, high),
            more_means=measure.more_means,
            version=measure.version,
            options=options,
            source=measure.source,
            errors=errors,
            exact=measure.exact_of(options) or None,
            scale=measure.scale_note(options) or None,
        )


@dataclass(frozen=True)
class RecordedProbe:
    """A probe, its options and facts, such as the number of samples or the hash of the paths."""

    name: str
    options: Mapping[str, OptionValue] = field(metadata=SHARED)
    facts: ProbeFacts = extra_fields()  # noqa: RUF009 (a field like the others)


@dataclass(frozen=True)
class RecordedMachine:
    """The model's device and dtype, along with the software versions and hardware.

    ``environment`` is returned by `nlbench.execution.machine.describe_environment`.
    """

    device: str
    dtype: str
    environment: Mapping[str, Any]


MAX_RECORD_BYTES = 2**26
"""Maximum size of a record's file, about a million values."""


@dataclass(frozen=True)
class Record:
    """One finished cell: a result and everything that determined it."""

    key: str  # hash of everything that determines the values; also the name of the record's file
    subject: SubjectFacts
    measure: RecordedMeasure = field(metadata=SHARED)
    probe: RecordedProbe
    machine: RecordedMachine = field(metadata=SHARED)
    result: Result
    seconds: float = 0.0  # time spent in the measure itself, excluding forward passes
    finished: str = ""  # time of completion in UTC
    traceback: str = ""  # traceback if the cell failed
    # Costs shared with other cells: load_seconds for the subject and, for the pass, wall_seconds,
    # cpu_seconds of the process, peak_memory and, on a GPU, peak_device_memory (in bytes).
    costs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A traceback may contain lone surrogates, which can't be encoded.
        object.__setattr__(self, "traceback", strip_controls(self.traceback))

    @property
    def is_done(self) -> bool:
        """True if the result is final: a value or ``undefined``."""
        return self.result.status in ("ok", "undefined")

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """The cell's model, weights, data, seed and measure in the tidy table."""
        return *self.subject.identity, self.measure.name

    def to_json(self) -> str:
        """Return the text of the record's file."""
        return add_checksum(dump_versioned(to_plain(self)))

    @classmethod
    def from_json(cls, text: str, origin: str) -> Record:
        """Parse the text of a record's file."""
        if len(text) > MAX_RECORD_BYTES:
            raise RequestError(f"{origin} has {len(text)} characters, more than {MAX_RECORD_BYTES}")
        content = check_checksum(parse_versioned(text, origin), text, origin)
        try:
            if not is_plain_name(content.get("key")):
                raise ValueError(f"its key {str(content.get('key'))[:80]!r} is not a plain name")
            return from_plain(cls, _upgraded(content), "record")
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            message = one_line(error, 300)
            raise RequestError(f"{origin} is not a record of a cell ({message})") from error


def reading_problem(record: Record) -> str:
    """Return why a record can't be read back from its file. Empty if it can.

    Results and facts come from plugins, and a single bad file would make the run unreadable.
    """
    try:
        Record.from_json(record.to_json(), "the record")
    except (RequestError, TypeError, ValueError, RecursionError) as error:
        return str(error)
    return ""


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Rename the statistic ``error`` of paths in records of format 1, which had no replicates.

    It is the error of the method, not that due to the choice of samples.
    """
    result = content.get("result")
    if not isinstance(result, dict) or "replicates" in result:
        return content
    probe = content.get("probe")
    values = result.get("values")
    if not isinstance(probe, dict) or probe.get("name") != "lines" or not isinstance(values, list):
        return content
    tables = [result.get("summary")]
    tables += [value.get("statistics") for value in values if isinstance(value, dict)]
    for table in tables:
        if isinstance(table, dict) and "error" in table:
            table["numerical_error"] = table.pop("error")
    return content


def is_plain_name(name: object) -> bool:
    """Return True if a name is safe as a file name, without separators or dots.

    Examples
    --------
    >>> is_plain_name("3f2a"), is_plain_name("../3f2a"), is_plain_name("a/b"), is_plain_name("")
    (True, False, False, False)
    """
    form = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
    return isinstance(name, str) and re.fullmatch(form, name) is not None


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


def read_decisions(cell: Record | Cell) -> dict[tuple[object, ...], object]:
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


def changed_sources(records: Iterable[Record], decisions: Decisions) -> dict[str, list[str]]:
    """Return the model, the data and the files that alone have changed, by the records' keys."""
    # Records of a subject share its facts, so that its files are compared once.
    by_subject: dict[int, list[str]] = {}
    changed = {}
    for record in records:
        subject = record.subject
        if id(subject) not in by_subject:
            by_subject[id(subject)] = _changed_subject_sources(subject, decisions)
        changed[record.key] = by_subject[id(subject)]
    return changed


def _changed_subject_sources(subject: SubjectFacts, decisions: Decisions) -> list[str]:
    current: Any = decisions.get(("sources", *subject.identity))
    if current is None or not subject.sources or subject.settings_key != current[0]:
        return []
    names = [name for name, version in current[1].items() if subject.sources.get(name) != version]
    return names + changed_files(subject.files or {})


def difference_text(record: Record, key: tuple[object, ...]) -> str:
    """Describe a record whose decision for a key differs."""
    measure = record.measure.name
    subject = record.subject
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


def recorded_facts(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """Return the facts that all cells of a subject must share, keyed by subject key."""
    facts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        subject = record.subject
        if subject.key and record.is_done:
            facts[subject.key] = {
                name: fact
                for name in ("weights_hash", "sample_hash", "preprocessing")
                if (fact := getattr(subject, name)) is not None
            }
    return facts


def changed_subject(facts: SubjectFacts, recorded: Mapping[str, Any]) -> str:
    """Describe how a loaded subject differs from its recorded facts. Empty if they agree.

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
