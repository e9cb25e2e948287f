"""Parsers for user input: numbers, sizes, names, seeds, paths and settings.

`nlbench.options` validates the parsed values, `nlbench.settings` assigns settings to their owners.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from nlbench.errors import RequestError, shorten

Item = TypeVar("Item")

MAX_INTEGER = 2**63 - 1
MAX_SEEDS = 100_000
MAX_TRAINING_SEED = 2**32 - 1
"""Largest seed that NumPy's legacy generator accepts."""

MAX_COUNT = 10_000_000
"""Maximum number of epochs, steps or samples in a batch."""

MAX_LEARNING_RATE = 1e30
"""Far beyond divergence, but within float32, also after multiplication by `MAX_WEIGHT`."""

MAX_WEIGHT = 1e6
"""Maximum weight of a term in a loss, or of a learning rate relative to another."""

SEEDS_TEXT = "non-negative integers"
SIZE_TEXT = "a size such as 4GB"


def unique(items: Iterable[Item]) -> list[Item]:
    """Return the distinct items in order.

    Examples
    --------
    >>> unique("abca")
    ['a', 'b', 'c']
    """
    return list(dict.fromkeys(items))


def parse_integer(text: str) -> int:
    """Parse an integer, which may be written ``1e3`` or ``8.0``. Raise ValueError for other text.

    Examples
    --------
    >>> parse_integer("64"), parse_integer("1e3")
    (64, 1000)
    """
    text = text.strip()
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal():
        # Python limits the number of digits that it parses; 40 digits exceed every bound.
        return int(text[:40])
    number = parse_number(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


def parse_index(text: str) -> int | None:
    """Parse a non-negative integer of the digits 0 to 9, or return None for any other text.

    `int` also accepts the digits of other scripts and underscores, and refuses thousands of digits.

    Examples
    --------
    >>> parse_index("12"), parse_index("-1"), parse_index("²"), parse_index("9" * 5000)
    (12, None, None, None)
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(MAX_INTEGER)):
        return None
    return number if (number := int(text)) <= MAX_INTEGER else None


def parse_number(text: str) -> float:
    """Parse a number other than NaN. Raise ValueError for other text."""
    number = float(text)
    # Python also accepts underscores and the digits of other scripts.
    if math.isnan(number) or not text.isascii() or "_" in text:
        raise ValueError(text)
    return number


def parse_size(text: str | int, label: str = "--memory") -> int:
    """Parse a number of bytes.

    Examples
    --------
    >>> parse_size("4GB"), parse_size("1.5 MiB"), parse_size("100")
    (4000000000, 1572864, 100)
    """
    if isinstance(text, int):
        size: float = min(text, 10**16)
    else:
        match = re.fullmatch(r"([0-9.]{1,40})\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
        try:
            if match is None:
                raise ValueError
            number, unit, binary = match.groups()
            size = float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
        except ValueError:
            raise RequestError(f"{label}: expected {SIZE_TEXT}, got '{shorten(text)}'") from None
    if not (1 <= size < 1e15 and math.isfinite(size)):
        raise RequestError(f"{label}: {shorten(text)} is out of bounds, expected 1 byte to 1000 TB")
    return int(size)


def parse_names(text: str) -> list[str]:
    """Split comma-separated names."""
    return [part for part in map(str.strip, text.split(",")) if part]


def parse_seeds(texts: Sequence[str], label: str = "--seeds") -> tuple[int, ...]:
    """Parse comma-separated seeds and ranges of seeds, which include both ends.

    Examples
    --------
    >>> parse_seeds(["0-3,7", "7"])
    (0, 1, 2, 3, 7)
    """
    seeds: dict[int, None] = {}
    for part in (part for text in texts for part in parse_names(text)):
        first, dash, last = part.partition("-")
        if not dash:
            first, dash, last = part.partition("..")
        ends = [_parse_seed(end, part, label) for end in ((first, last) if dash else (first,))]
        if ends[-1] < ends[0]:
            raise RequestError(f"{label}: '{shorten(part)}' runs backwards")
        # However long the range is, one seed more than the limit is enough to raise the error.
        seeds |= dict.fromkeys(range(ends[0], min(ends[-1], ends[0] + MAX_SEEDS) + 1))
        limited_seeds(seeds, label)
    if not seeds:
        raise RequestError(f"{label}: expected {SEEDS_TEXT}, got ''")
    return tuple(seeds)


def _parse_seed(text: str, part: str, label: str) -> int:
    seed = parse_index(text.strip())
    if seed is None:
        raise RequestError(f"{label}: expected {SEEDS_TEXT}, got '{shorten(part)}'")
    return seed


def limited_seeds(seeds: Iterable[int], label: str) -> tuple[int, ...]:
    """Return the distinct seeds in order. Raise if there are too many."""
    distinct = tuple(unique(seeds))
    if len(distinct) > MAX_SEEDS:
        raise RequestError(f"{label}: too many, expected at most {MAX_SEEDS}")
    return distinct


_CHECKPOINTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def parse_paths(text: str, label: str) -> list[str]:
    """Split comma-separated paths, unless the whole text is a file's path, and expand globs.

    If a glob matches checkpoints, other files that it matches, such as ``epochs.csv``, are ignored.
    ``#KEY`` after a path or a glob names an entry of the files.
    """
    if _exists(text):
        return [text]
    paths: list[str] = []
    for part in parse_names(text):
        if not any(letter in part for letter in "*?[") or _exists(part):
            paths.append(part)
            continue
        pattern, hash_mark, key = part.rpartition("#")
        if not hash_mark:
            pattern = part
        files = sorted(match for match in _glob(Path(pattern)) if match.is_file())
        weights = [file for file in files if file.suffix in _CHECKPOINTS]
        matches = [str(file) + (f"#{key}" if hash_mark else "") for file in weights or files]
        if not matches:
            raise RequestError(f"{label}: no file matches '{shorten(part)}'")
        paths += matches
    return paths


def _glob(path: Path) -> list[Path]:
    try:
        root = Path(path.anchor)
        return list(root.glob(str(path.relative_to(root))))
    except (ValueError, OSError, NotImplementedError, RecursionError):
        return []


def _exists(text: str) -> bool:
    return os.path.exists(text)  # noqa: PTH110 (returns False for an invalid name)


def parse_settings(texts: Iterable[str], label: str) -> dict[str, str]:
    """Parse settings of the form ``OWNER.OPTION=VALUE``."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise RequestError(f"{label}: expected OWNER.OPTION=VALUE, got '{shorten(text)}'")
        settings[key.strip()] = value.strip()
    return settings
