"""The record of a cell: one result and everything that decided it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from nlbench.content.files import parse_json
from nlbench.errors import RequestError, without_controls
from nlbench.measure import Result, Status, Value

__all__ = [
    "FORMAT",
    "Record",
    "check_bounds",
    "check_fields",
    "is_plain_name",
    "parse_content",
    "plain",
    "readable",
    "recorded_facts",
]


FORMAT = 1

Kinds = tuple[type, ...]
NUMBER: Kinds = (int, float)
_SUBJECT = {"model": (str,), "weights": (str,), "data": (str,), "seed": (int,)}
_MEASURE = {"name": (str,), "version": (str,), "options": (dict,)}
_PROBE = {"name": (str,), "options": (dict,)}
_MACHINE = {"device": (str,), "dtype": (str,), "environment": (dict,)}
_RESULT = {"summary": (dict,), "values": (list,), "n": (int,), "status": (str,), "reason": (str,)}
_VALUE = {"place": (str,), "statistics": (dict,), "n": (int,), "status": (str,), "reason": (str,)}
_OPTIONAL: Mapping[str, Mapping[str, Kinds]] = {
    "subject": {
        "data_options": (dict,),
        "key": (str,),
        "parameters": (int,),
        "preprocessing": (str,),
        "sample_hash": (str,),
        "samples": (int,),
        "split": (str,),
        "weights_hash": (str,),
        "weights_metadata": (dict,),
    },
    "measure": {
        "bounds": (list,),
        "description": (str,),
        "more_means": (str,),
        "options": (dict,),
        "probe": (str,),
        "source": (dict,),
    },
    "probe": {"kinds": (dict,), "remarks": (dict,), "unseen": (list,)},
    "call": {"request": (dict,), "seconds": NUMBER, "started": (str,)},
    "merged": {"at": (str,), "from": (list,)},
}


@dataclass(frozen=True)
class Record:
    """One finished cell: a result and everything that decided it.

    Parameters
    ----------
    key : str
        Hash of everything that decides the numbers; it names the record's file.
    subject : mapping
        ``model``, ``weights``, ``data``, ``seed`` and what else is known of the subject.
    measure : mapping
        ``name``, ``version``, ``options``, ``bounds``, ``source``, ….
    probe : mapping
        ``name`` and ``options``, and what was looked at (such as the paths' hash).
    machine : mapping
        ``device``, ``dtype`` of the model, and the ``environment``: versions and hardware.
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
    subject: Mapping[str, Any]
    measure: Mapping[str, Any]
    probe: Mapping[str, Any]
    machine: Mapping[str, Any]
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
        subject = self.subject
        return (
            str(subject["model"]),
            str(subject["weights"]),
            str(subject["data"]),
            int(subject["seed"]),
            str(self.measure["name"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Content of the record's file; `from_dict` reads it."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """Text of the record's file."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=plain) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> Record:
        """Read a record's file, which anybody may have written.

        Raises
        ------
        nlbench.RequestError
            If it is damaged, of a newer format, or no record.
        """
        return cls.from_dict(parse_content(text, origin), origin)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str) -> Record:
        """Make a record of what `to_dict` gave, or of what claims to be that.

        Raises
        ------
        nlbench.RequestError
            If it is none.
        """
        try:
            rest = {name: value for name, value in content.items() if name != "format"}
            if "reading" in rest:
                raise ValueError("it has a 'reading', as nlbench wrote before its first release")
            if not is_plain_name(rest.get("key")):
                raise ValueError(f"its key {str(rest.get('key'))[:80]!r} is no plain name")
            check_fields("subject", rest["subject"], _SUBJECT)
            check_fields("measure", rest["measure"], _MEASURE)
            check_bounds(rest["measure"].get("bounds"))
            check_fields("probe", rest["probe"], _PROBE)
            _check_texts(rest["probe"])
            check_fields("machine", rest["machine"], _MACHINE)
            given: dict[str, Any] = {"seconds": 0.0, "finished": "", "traceback": "", "costs": {}}
            given |= rest
            text = dict.fromkeys(("finished", "traceback"), (str,))
            check_fields("record", given, {"seconds": NUMBER, **text, "costs": (dict,)})
            _check_numbers("costs", given["costs"])
            return cls(**{**rest, "result": _result(rest["result"])})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
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
        probe = {name: record.probe[name] for name in _PROBE}
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


def check_fields(what: str, content: object, kinds: Mapping[str, Kinds]) -> None:
    """Refuse content that lacks a field, or has one of another type.

    Raises
    ------
    ValueError
        Naming the field.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{what} is a {type(content).__name__}, expected an object")
    for name, expected in kinds.items():
        if name not in content:
            raise ValueError(f"{what} has no '{name}'")
        _check_kind(f"{what}.{name}", content[name], expected)
    for name, expected in _OPTIONAL.get(what, {}).items():
        if content.get(name) is not None:
            _check_kind(f"{what}.{name}", content[name], expected)


def _check_kind(what: str, value: object, kinds: Kinds) -> None:
    is_right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if not is_right:
        expected = " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds))
        raise ValueError(f"{what} is a {type(value).__name__}, expected {expected}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{what} is out of bounds")


_WORDS = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "a text",
    tuple: "a list",
}


def _check_numbers(what: str, content: Mapping[str, object]) -> None:
    for name, value in content.items():
        _check_kind(f"{what}.{name}", value, NUMBER)


def _check_parts(parts: object) -> None:
    _check_kind("parts", parts, (dict,))
    for name, part in parts.items() if isinstance(parts, dict) else ():
        numbers: Any = dict(enumerate(part)) if isinstance(part, list) else part
        _check_kind(f"parts.{name}", numbers, (dict,))
        _check_numbers(f"parts.{name}", numbers)


def _check_texts(probe: Mapping[str, Any]) -> None:
    """Check what a probe says of places, which are texts by name, and of what it didn't see."""
    for name in ("kinds", "remarks"):
        for place, text in probe.get(name, {}).items():
            _check_kind(f"probe.{name}.{place}", text, (str,))
    for number, text in enumerate(probe.get("unseen", ())):
        _check_kind(f"probe.unseen.{number}", text, (str,))


def check_bounds(bounds: object) -> None:
    """Refuse what aren't two numbers, None where there is no bound.

    Raises
    ------
    ValueError
    """
    if bounds is None:
        return
    is_pair = isinstance(bounds, list) and len(bounds) == 2
    for bound in bounds if isinstance(bounds, list) and is_pair else [()]:
        if bound is not None:
            _check_kind("measure.bounds", bound, NUMBER)


def _result(content: object) -> Result:
    check_fields("result", content, _RESULT)
    assert isinstance(content, dict)
    values = []
    for value in content["values"]:
        check_fields("value", value, _VALUE)
        _check_numbers("statistics", value["statistics"])
        _check_parts(value.get("parts", {}))
        values.append(Value(**value))
    _check_numbers("summary", content["summary"])
    _check_parts(content.get("parts", {}))
    _check_kind("result.notes", content.get("notes", {}), (dict,))
    for entry in (content, *content["values"]):
        if entry["status"] not in get_args(Status):
            raise ValueError(f"unknown status {entry['status'][:40]!r}")
    return Result(**{**content, "values": tuple(values)})


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
        key = record.subject.get("key")
        if key and record.is_done:
            facts[key] = {n: record.subject[n] for n in _DECIDED if n in record.subject}
    return facts
