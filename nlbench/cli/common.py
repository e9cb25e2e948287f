"""What the commands share: reading names and settings, printing tables, interruptions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from nlbench import registry
from nlbench.errors import RequestError

__all__ = ["Interrupted", "note", "print_table", "split_names", "split_seeds", "split_settings"]


def split_names(texts: list[str], option: str, group: str | None = None) -> tuple[str, ...]:
    """Read names with commas; those of a group must be registered."""
    parts = (part.strip() for text in texts for part in text.split(","))
    names = tuple(dict.fromkeys(part for part in parts if part))
    if not names:
        raise RequestError(f"{option}: expected at least one name, got '{','.join(texts)}'")
    if group:
        registry.expand(group, names)
    return names


def split_seeds(texts: list[str]) -> tuple[int, ...]:
    """Read seeds, with commas."""
    return tuple(_seed(text) for text in split_names(texts, "--seeds"))


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**63:
        raise RequestError(f"--seeds: expected whole numbers of 0 or more, got '{text}'")
    return int(text)


def split_settings(given: Iterable[str]) -> dict[str, str]:
    """Read ``OWNER.OPTION=VALUE``."""
    settings: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise RequestError(f"--set: expected OWNER.OPTION=VALUE, got '{text}'")
        settings[key.strip()] = value.strip()
    return settings


def print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows of equal keys as columns, or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("(none)")
        return
    widths = {key: max(len(str(row[key])) for row in rows) for key in rows[0]}
    for row in rows:
        print("  ".join(str(value).ljust(widths[key]) for key, value in row.items()).rstrip())


class Interrupted(Exception):
    """The user stopped a run that can be taken up again; its arguments are lines to print."""


def note(message: str) -> None:
    """Say one line on standard error."""
    print(f"nlbench: {' '.join(message.split())}", file=sys.stderr)
