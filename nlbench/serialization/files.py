"""Writing files so that a reader never sees half of one; reading what anybody may have written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, one_line, system_text

__all__ = [
    "LARGEST_TEXT",
    "check_is_file",
    "is_part",
    "make_folder",
    "parse_json",
    "read_text",
    "remove_parts",
    "spreadsheet_safe",
    "spreadsheet_text",
    "write_atomically",
    "write_if_changed",
]


_PART = re.compile(r"\..+\.\w+\.part")

DEEPEST = 32
"""Levels of nesting in a file of nlbench's; its own have about six."""

LARGEST_TEXT = 2**26
"""Bytes of the largest text that is read: far more than any request, record or plan."""


def check_is_file(path: Path, most: int | None = None) -> None:
    """Refuse what is no regular file: reading a pipe or a device may never end.

    Parameters
    ----------
    path : Path
    most : int, optional
        Bytes that it may have.

    Raises
    ------
    nlbench.RequestError
        If it is absent, no file or too large.
    """
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
    if most is not None and state.st_size > most:
        raise RequestError(
            f"can't read {path}: it has {state.st_size} bytes, expected at most {most}"
        )


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Read a regular file of UTF-8 text.

    Parameters
    ----------
    path : Path
    most : int
        Bytes that it may have.

    Raises
    ------
    nlbench.RequestError
        If it is absent, no file, too large or no text.
    """
    check_is_file(path, most)
    try:
        with path.open("rb") as file:
            # Some files of the system have no end, and no size either.
            data = file.read(most + 1)
        if len(data) > most:
            raise RequestError(f"can't read {path}: expected at most {most} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"can't read {path}: {system_text(error)}") from error


def spreadsheet_safe(text: str) -> str:
    """Give a text that a spreadsheet doesn't run, for a cell of a table.

    One that begins like a formula gets an apostrophe before it, as spreadsheets mark text;
    `spreadsheet_text` takes it away.

    Examples
    --------
    >>> spreadsheet_safe("=1+1"), spreadsheet_safe("vgg8")
    ("'=1+1", 'vgg8')
    """
    return f"'{text}" if text[:1] in _MARKED else text


def spreadsheet_text(cell: str) -> str:
    """Give back what `spreadsheet_safe` was given.

    Examples
    --------
    >>> spreadsheet_text("'=1+1"), spreadsheet_text("vgg8")
    ('=1+1', 'vgg8')
    """
    is_marked = cell[:1] == "'" and cell[1:2] in _MARKED
    return cell[1:] if is_marked else cell


# What a formula may begin with; and the mark itself, so that it can be taken away again.
_MARKED = frozenset("=+-@\t\r\n'")


def parse_json(text: str, origin: str, *, finite: bool = True) -> Any:
    """Read JSON that anybody may have written.

    Parameters
    ----------
    text : str
    origin : str
        Where it is from, for the message.
    finite : bool
        Whether NaN and infinities, which JSON proper has not, are refused.

    Raises
    ------
    nlbench.RequestError
        If it is damaged, nested too deeply, or has a number or a text that nothing can be done
        with.
    """
    parsers: dict[str, Any] = (
        {"parse_constant": _refuse, "parse_float": _within_float64} if finite else {}
    )
    try:
        content = json.loads(text, parse_int=_whole, **parsers)
        if not _is_flat(content, DEEPEST):
            raise ValueError(f"nested in more than {DEEPEST} levels")
        if "\\u" in text:
            # Half of a character that takes two can be escaped, and never written again.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestError(f"{origin} is damaged: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"{origin} is damaged: {one_line(error)}") from error
    return content


def _whole(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _within_float64(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is no number that float64 holds")
    return number


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _is_flat(content: object, levels: int) -> bool:
    if not isinstance(content, dict | list):
        return True
    inner = content.values() if isinstance(content, dict) else content
    return levels > 0 and all(
        _is_flat(value, levels - 1) for value in inner if isinstance(value, dict | list)
    )


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, and make sure that it is on the disk.

    Parameters
    ----------
    path : Path
        Its folder must exist.
    content : bytes or str
        Text is written as UTF-8.

    Raises
    ------
    nlbench.RequestError
        If it can't be written.
    """
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        part = path.parent / f".{path.name[:40]}.{os.urandom(8).hex()}.part"
        # As readable as any other file: the system applies the user's mask.
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


def write_if_changed(path: Path, text: str) -> None:
    """Write a file as `write_atomically` does, unless it says so already: it may be read-only."""
    if not path.is_file() or read_text(path) != text:
        write_atomically(path, text)


def make_folder(path: Path) -> None:
    """Make a folder with its parents, and check that it can be written to.

    Raises
    ------
    nlbench.RequestError
        If it can't be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise RequestError(f"can't write to {path}: {system_text(error)}") from error


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left unfinished in a folder that nobody else writes to."""
    for entry in list(folder.iterdir()):
        if is_part(entry):
            with contextlib.suppress(OSError):
                entry.unlink()


def is_part(path: Path) -> bool:
    """Return True for an unfinished file of `write_atomically`."""
    return _PART.fullmatch(path.name) is not None and path.is_file()


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable; not every system can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(folder: Path):  # type: ignore  # temporary: models/training/train.py
    from nlbench.store.locked_folder import LockedFolder

    with LockedFolder(folder).locked():
        yield
