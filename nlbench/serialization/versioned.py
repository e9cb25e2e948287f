"""JSON files with a format version and a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError

from .files import parse_json

FORMAT = 2
_CHECKSUM = "checksum"


def dump_versioned(content: Mapping[str, Any], *, finite: bool = True) -> str:
    """Serialize the content of a file; with `finite`, raise for NaN or infinity."""
    versioned = {"format": FORMAT, **content}
    return json.dumps(versioned, indent=1, allow_nan=not finite, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't be recorded")


def parse_versioned(text: str, origin: str, *, finite: bool = True) -> dict[str, Any]:
    """Parse the text of a file and validate its format version."""
    content = parse_json(text, origin, finite=finite)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise RequestError(f"{origin} was not written by nlbench")
    if content["format"] > FORMAT:
        raise RequestError(
            f"{origin} has format {content['format']}, from a newer nlbench; "
            f"this version reads formats up to {FORMAT}"
        )
    return {name: value for name, value in content.items() if name != "format"}


def add_checksum(text: str) -> str:
    """Append a checksum to the text of a JSON object, as its last entry.

    Examples
    --------
    >>> text = add_checksum(dump_versioned({"value": 0.5}))
    >>> sorted(check_checksum(parse_versioned(text, "x.json"), text, "x.json"))
    ['value']
    >>> changed = text.replace("0.5", "0.6")
    >>> check_checksum(parse_versioned(changed, "x.json"), changed, "x.json")
    Traceback (most recent call last):
    nlbench.errors.RequestError: x.json is damaged: its content does not match its checksum
    """
    body = text.removesuffix("\n}\n")
    return f'{body},\n "{_CHECKSUM}": "{_checksum_of(body)}"\n}}\n'


def check_checksum(content: Mapping[str, Any], text: str, origin: str) -> dict[str, Any]:
    """Verify the checksum of a text, if it has one, and return the content without it."""
    body = text.rpartition(f',\n "{_CHECKSUM}": ')[0]
    if content.get(_CHECKSUM, _checksum_of(body)) != _checksum_of(body):
        raise RequestError(f"{origin} is damaged: its content does not match its checksum")
    return {name: value for name, value in content.items() if name != _CHECKSUM}


def _checksum_of(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:32]
