"""The record of a cell: one result and everything that decided it.

`nlbench.store.run_folder` writes and reads its files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from nlbench.citation import Source
from nlbench.errors import RequestError, one_line, without_controls
from nlbench.measure import Measure, Result
from nlbench.options import OptionValue
from nlbench.serialization.fields import others, read, written
from nlbench.serialization.files import parse_json
from nlbench.subjects.facts import SubjectFacts

__all__ = [
    "FORMAT",
    "ProbeFacts",
    "Record",
    "RecordedMachine",
    "RecordedMeasure",
    "RecordedProbe",
    "is_plain_name",
    "parse_content",
    "plain",
    "readable",
    "recorded_facts",
]


FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RecordedMeasure:
    """What a record says of a measure.

    Parameters
    ----------
    name, description, probe, more_means, version
        As `nlbench.Measure` declares them.
    bounds : pair of float or None
        Under these options; None where there is no bound.
    options : mapping of str to value
    source : Source
    rest : mapping
        What somebody else says of it.
    """

    name: str
    description: str | None = None
    probe: str | None = None
    bounds: tuple[float | None, float | None] | None = None
    more_means: str | None = None
    version: str
    options: Mapping[str, OptionValue]
    source: Source | None = None
    rest: Mapping[str, Any] = others()

    @classmethod
    def of(cls, measure: type[Measure], options: Mapping[str, OptionValue]) -> RecordedMeasure:
        """Take from a measure what a record says of it."""
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
        )


class ProbeFacts(TypedDict, total=False):
    """What a probe says of what was looked at; beside it whatever it likes."""

    samples: int
    segments: int
    kinds: Mapping[str, str]
    unseen: Sequence[str]
    remark: str
    remarks: Mapping[str, str]
    drawing: Mapping[str, Any]


@dataclass(frozen=True)
class RecordedProbe:
    """What a record says of a probe.

    Parameters
    ----------
    name : str
    options : mapping of str to value
    facts : ProbeFacts
        What was looked at, such as the number of samples, or the paths' hash.
    """

    name: str
    options: Mapping[str, OptionValue]
    facts: ProbeFacts = others()  # noqa: RUF009 (a field, as the others are)


@dataclass(frozen=True)
class RecordedMachine:
    """What a record says of the machine.

    Parameters
    ----------
    device, dtype : str
        Of the model.
    environment : mapping
        Versions and hardware; see `nlbench.execution.numerics.describe_environment`.
    """

    device: str
    dtype: str
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One finished cell: a result and everything that decided it.

    Parameters
    ----------
    key : str
        Hash of everything that decides the numbers; it names the record's file.
    subject : SubjectFacts
    measure : RecordedMeasure
    probe : RecordedProbe
    machine : RecordedMachine
    result : Result
    seconds : float
        The measure's own time, without the probe's pass.
    finished : str
        When, in UTC.
    traceback : str
        Of a failed cell.
    costs : mapping of str to float
        Of the pass that the cell shared with others: ``wall_seconds``; ``peak_memory`` and,
        on a GPU, ``peak_device_memory`` in bytes; ``load_seconds`` of the subject.
    """

    key: str
    subject: SubjectFacts
    measure: RecordedMeasure
    probe: RecordedProbe
    machine: RecordedMachine
    result: Result
    seconds: float = 0.0
    finished: str = ""
    traceback: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # It quotes whatever was raised, where half a character can't even be written.
        object.__setattr__(self, "traceback", without_controls(self.traceback))

    @property
    def is_done(self) -> bool:
        """Whether there is an answer: a number, or that there is nothing to measure."""
        return self.result.status in ("ok", "undefined")

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """What names the cell in the tidy table."""
        return *self.subject.identity, self.measure.name

    def to_json(self) -> str:
        """Text of the record's file; `from_json` reads it."""
        content = {"format": FORMAT, **written(self)}
        return json.dumps(content, indent=1, allow_nan=False, default=plain) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> Record:
        """Read a record's file, which anybody may have written.

        Raises
        ------
        nlbench.RequestError
            If it is damaged, of a newer format, or no record.
        """
        content = parse_content(text, origin)
        try:
            if "reading" in content:
                raise ValueError("it has a 'reading', as nlbench wrote before its first release")
            if not is_plain_name(content.get("key")):
                raise ValueError(f"its key {str(content.get('key'))[:80]!r} is no plain name")
            return read(cls, content, "record")
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            what = one_line(error, 300)
            raise RequestError(f"{origin} is not a record of a cell ({what})") from error


def readable(record: Record) -> Record:
    """Give back a record whose file can be read again; else one that failed, and says why.

    What plugins say of a result, of a subject and of what was looked at may be anything, and
    one file that can't be read would make a run of all the others unreadable.
    """
    try:
        Record.from_json(record.to_json(), "what was measured")
    except (RequestError, TypeError, ValueError, RecursionError) as error:
        reason = f"what it gave can't be recorded: {error}"
        probe = replace(record.probe, facts={})
        return replace(record, probe=probe, result=Result.missing("failed", reason))
    return record


def is_plain_name(name: object) -> bool:
    """Whether something can name a file of a folder, and nothing outside of it.

    Examples
    --------
    >>> is_plain_name("3f2a"), is_plain_name("../3f2a"), is_plain_name("a/b"), is_plain_name("")
    (True, False, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def parse_content(text: str, origin: str, *, finite: bool = True) -> dict[str, Any]:
    """Read a file that states nlbench's format.

    Raises
    ------
    nlbench.RequestError
        If it is damaged, wasn't written by nlbench, or by a newer one.
    """
    content = parse_json(text, origin, finite=finite)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise RequestError(f"{origin} was not written by nlbench")
    if content["format"] > FORMAT:
        raise RequestError(
            f"{origin} has format {content['format']}, from a newer nlbench; "
            f"this one reads up to {FORMAT}"
        )
    return {name: value for name, value in content.items() if name != "format"}


def plain(value: object) -> object:
    """What JSON has for a value that it doesn't know."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't be recorded")


_DECIDED = ("weights_hash", "sample_hash", "preprocessing")


def recorded_facts(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """What is recorded of each subject that its other cells must find unchanged.

    `nlbench.plan.what_changed` compares them.

    Returns
    -------
    dict
        From a subject's key to those of its facts.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        subject = record.subject
        if subject.key and record.is_done:
            found = {name: getattr(subject, name) for name in _DECIDED}
            facts[subject.key] = {name: fact for name, fact in found.items() if fact is not None}
    return facts
