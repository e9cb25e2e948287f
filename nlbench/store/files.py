"""Writing files so that a reader never sees half of one; reading what anybody may have written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError

__all__ = [
    "is_unused",
    "locked",
    "make_folder",
    "parse_json",
    "read_text",
    "remove_parts",
    "write_atomically",
]


LARGEST = 1 << 28
"""Bytes of the largest file that is read whole."""

DEEPEST = 32
"""Levels of nesting in a file of nlbench's; its own have about six."""

_PART = re.compile(r"\..+\.\w+\.part")


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
        part = path.parent / f".{path.name[:40]}.{secrets.token_hex(8)}.part"
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
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't write {path}: {what}") from error


def read_text(path: Path) -> str:
    """Read a file that anybody may have made.

    Raises
    ------
    nlbench.RequestError
        If it is no regular file, such as a pipe that nobody writes to or a device without an
        end; is too large; or is no UTF-8.
    """
    try:
        # Without it opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                raise RequestError(f"can't read {path}: it is no regular file")
            if state.st_size > LARGEST:
                raise RequestError(f"can't read {path}: it has {state.st_size} bytes")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read().decode("utf-8")
        finally:
            os.close(handle)
    except (OSError, UnicodeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't read {path}: {what}") from error


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
    constants: dict[str, Any] = {"parse_constant": _refuse} if finite else {}
    try:
        content = json.loads(text, parse_int=_whole, **constants)
        if not _is_flat(content, DEEPEST):
            raise ValueError(f"nested in more than {DEEPEST} levels")
        if "\\u" in text:
            # Half of a character that takes two can be escaped, and never written again.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestError(f"{origin} is damaged: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"{origin} is damaged: {' '.join(str(error).split())}") from error
    return content


def _whole(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _is_flat(content: object, levels: int) -> bool:
    if not isinstance(content, dict | list):
        return True
    inner = content.values() if isinstance(content, dict) else content
    return levels > 0 and all(
        _is_flat(value, levels - 1) for value in inner if isinstance(value, dict | list)
    )


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
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't write to {path}: {what}") from error


@contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """Keep other writers out of a run's folder, which has its ``cells`` already.

    Yields
    ------
    int or None
        A handle of ``cells``; None where there are no locks.

    Raises
    ------
    nlbench.RequestError
        If there is another one.
    """
    try:
        import fcntl
    except ImportError:  # no such thing on Windows: records are whole anyway
        yield None
        return
    try:
        handle = os.open(folder / "cells", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise RequestError(
            f"can't write to {folder / 'cells'}: it is no folder, or a link"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(
                f"another nlbench is writing to {folder}; wait for it or choose another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield handle
    finally:
        os.close(handle)


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing, or what is left of a run killed before its manifest."""
    return folder.is_dir() and not any(
        any(not _is_part(cell) for cell in entry.iterdir())
        if entry.name == "cells" and entry.is_dir() and not entry.is_symlink()
        else not _is_part(entry)
        for entry in folder.iterdir()
    )


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left unfinished in a folder that nobody else writes to."""
    for entry in list(folder.iterdir()):
        if _is_part(entry):
            with contextlib.suppress(OSError):
                entry.unlink()


def _is_part(path: Path) -> bool:
    return _PART.fullmatch(path.name) is not None and path.is_file()


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable; not every system can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
