"""Write files atomically, and read untrusted ones safely."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, one_line, system_text

MAX_JSON_DEPTH = 32
"""Maximum nesting depth of a JSON file; nlbench's own files have about six levels."""

MAX_TEXT_BYTES = 2**30
"""Maximum size of a text file; the manifest of a million subjects is smaller."""


def check_is_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise unless a path is a regular file: reading a pipe or a device may never end."""
    try:
        state = path.stat()
    except FileNotFoundError as error:
        raise RequestError(f"can't read {path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise RequestError(f"can't read {path}: {system_text(error)}") from error
    if stat.S_ISDIR(state.st_mode):
        raise RequestError(f"can't read {path}: it is a directory, expected a file")
    if not stat.S_ISREG(state.st_mode):
        raise RequestError(f"can't read {path}: it is not a regular file")
    if max_bytes is not None and state.st_size > max_bytes:
        raise RequestError(
            f"can't read {path}: it has {state.st_size} bytes, expected at most {max_bytes}"
        )


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a regular file of UTF-8 text."""
    check_is_file(path, max_bytes)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, max_bytes) + 1)
            if len(data) > size:  # Some system files report a size of 0 and never end.
                data += file.read(max_bytes + 1 - len(data))
        if len(data) > max_bytes:
            raise RequestError(f"can't read {path}: expected at most {max_bytes} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"can't read {path}: {system_text(error)}") from error


def spreadsheet_safe(text: str) -> str:
    """Escape the text of a cell so that no spreadsheet evaluates it as a formula.

    Text that begins like a formula gets a leading apostrophe; `spreadsheet_text` removes it.

    Examples
    --------
    >>> spreadsheet_safe("=1+1"), spreadsheet_safe("vgg8")
    ("'=1+1", 'vgg8')
    """
    return f"'{text}" if text[:1] in _FORMULA_STARTS else text


def spreadsheet_text(cell: str) -> str:
    """Undo `spreadsheet_safe`.

    Examples
    --------
    >>> spreadsheet_text("'=1+1"), spreadsheet_text("vgg8")
    ('=1+1', 'vgg8')
    """
    is_escaped = cell[:1] == "'" and cell[1:2] in _FORMULA_STARTS
    return cell[1:] if is_escaped else cell


# The apostrophe itself is escaped too, so that the escape can be undone.
_FORMULA_STARTS = frozenset("=+-@\t\r\n'")


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV that is safe to open in a spreadsheet. None and NaN are empty.

    Examples
    --------
    >>> csv_text(["model", "value"], [("=1+1", 0.5), ("vgg8", None)]).splitlines()
    ['model,value', "'=1+1,0.5", 'vgg8,']
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(spreadsheet_safe, columns))
    writer.writerows(map(_csv_cell, row) for row in rows)
    return stream.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        return spreadsheet_safe(value)
    return "" if value is None or value != value else value


def parse_json(text: str, origin: str, *, finite: bool = True) -> Any:
    """Parse untrusted JSON, from the file `origin` in messages.

    Raise RequestError if it is damaged, nested too deeply, has too many values for its size, or
    contains a number or string that can't be stored, or NaN or an infinity, if it must be `finite`.
    """
    parsers: dict[str, Any] = (
        {"parse_constant": _reject_constant, "parse_float": _parse_float} if finite else {}
    )
    try:
        _check_structure(text)
        content = json.loads(text, parse_int=_parse_int, **parsers)
        if "\\u" in text:
            # JSON can represent lone surrogates, but UTF-8 can't encode them.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestError(f"{origin} is damaged: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"{origin} is damaged: {one_line(error)}") from error
    return content


def _parse_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a whole number with {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is out of the range of float64")
    return number


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _check_structure(text: str) -> None:
    """Raise if text is nested too deeply, or has more values than a file of its size needs.

    An empty list takes 20 times as much memory as its text.
    """
    brackets = text.count("[") + text.count("{")
    for number, characters in ((brackets, 16), (text.count(","), 6)):
        if number > _FREE_VALUES + len(text) // characters:
            raise ValueError(f"{number} values in {len(text)} characters")
    # Text with few brackets isn't nested deeply, so most records don't need the search.
    if brackets > MAX_JSON_DEPTH and _measure_depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")


_FREE_VALUES = 10_000
"""Number of values that a file may have, however short."""

_STRING = re.compile(r'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^][{}]+")


def _measure_depth(text: str) -> int:
    """Return the nesting depth of JSON, without parsing it.

    Examples
    --------
    >>> _measure_depth('[{"a": "[[["}, []]')
    2
    """
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text))
    return max(
        itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0
    )


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file in an existing folder completely or not at all, and flush it to the disk."""
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        part = path.parent / f".{path.name[:40]}.{os.urandom(8).hex()}.part"
        # Unlike a file from tempfile, it has the default permissions.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        _sync_folder(path.parent)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"can't write {path}: {system_text(error)}") from error


def make_folder(path: Path) -> None:
    """Create a folder with its parents, and check that it is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise RequestError(f"can't write to {path}: {system_text(error)}") from error


def remove_parts(folder: Path) -> None:
    """Remove unfinished files from killed processes. No other process may be writing."""
    for entry in list(folder.iterdir()):
        if is_part(entry):
            with contextlib.suppress(OSError):
                entry.unlink()


def is_part(path: Path) -> bool:
    """Return True for an unfinished file from `write_atomically`."""
    return re.fullmatch(r"\..+\.\w+\.part", path.name) is not None and path.is_file()


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, on systems that can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


FORMAT = 2
_CHECKSUM = "checksum"


def dump_versioned(content: Mapping[str, Any], *, finite: bool = True) -> str:
    """Serialize the content of a file. With `finite`, raise for NaN or infinity."""
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
    return f'{body},\n "{_CHECKSUM}": "{_compute_checksum(body)}"\n}}\n'


def check_checksum(content: Mapping[str, Any], text: str, origin: str) -> dict[str, Any]:
    """Verify the checksum of a text, if it has one, and return the content without it."""
    body = text.rpartition(f',\n "{_CHECKSUM}": ')[0]
    if content.get(_CHECKSUM, _compute_checksum(body)) != _compute_checksum(body):
        raise RequestError(f"{origin} is damaged: its content does not match its checksum")
    return {name: value for name, value in content.items() if name != _CHECKSUM}


def _compute_checksum(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:32]
