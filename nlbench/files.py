"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nlbench.errors import RequestError

__all__ = [
    "LARGEST_TEXT",
    "check_is_file",
    "is_unused",
    "locked",
    "make_folder",
    "read_text",
    "remove_parts",
    "spreadsheet_safe",
    "spreadsheet_text",
    "write_atomically",
]


_PART = re.compile(r"\..+\.\w+\.part")

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
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't read {path}: {what}") from error
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
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't read {path}: {what}") from error


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
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".part"
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files for the owner only; a record is as readable as any other file.
            Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise RequestError(f"can't write {path}: {error.strerror or error}") from error


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
    except OSError as error:
        raise RequestError(f"can't write to {path}: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder; of a run's that has its ``cells`` already.

    Raises
    ------
    nlbench.RequestError
        If there is one.
    """
    try:
        import fcntl
    except ImportError:  # no such thing on Windows: records are whole anyway
        yield
        return
    cells = folder / "cells"
    handle = os.open(cells if cells.is_dir() else folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(
                f"another nlbench is writing to {folder}; wait for it or choose another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing, or what is there before a run's manifest.

    That is what is left of a run that was killed, or checkpoints that it is to measure.
    """
    return folder.is_dir() and not any(
        any(not _is_part(cell) for cell in entry.iterdir())
        if entry.name == "cells" and entry.is_dir()
        else not (_is_part(entry) or (entry.name == "checkpoints" and entry.is_dir()))
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable; not every system can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
