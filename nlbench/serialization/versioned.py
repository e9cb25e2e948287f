"""JSON files with a format version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError

from .files import parse_json

__all__ = ["FORMAT", "dump_versioned", "parse_versioned"]

FORMAT = 1


def dump_versioned(content: Mapping[str, Any], *, finite: bool = True) -> str:
    """Serialize the content of a file; with `finite`, NaN and infinities are refused."""
    versioned = {"format": FORMAT, **content}
    return json.dumps(versioned, indent=1, allow_nan=not finite, default=_plain) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't be recorded")


def parse_versioned(text: str, origin: str, *, finite: bool = True) -> dict[str, Any]:
    """Parse the text of a file, after validating its format version."""
    content = parse_json(text, origin, finite=finite)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise RequestError(f"{origin} was not written by nlbench")
    if content["format"] > FORMAT:
        raise RequestError(
            f"{origin} has format {content['format']}, from a newer nlbench; "
            f"this one reads up to {FORMAT}"
        )
    return {name: value for name, value in content.items() if name != "format"}
