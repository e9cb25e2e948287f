"""The files that Python reads while a network or data are loaded."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

import nlbench


class OpenedFiles:
    """Absolute paths of the files that were opened, for reading or for writing."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._written: set[str] = set()

    def add(self, path: Any, mode: str | None, flags: int) -> None:
        """Record the opening of a file."""
        with contextlib.suppress(TypeError, ValueError, OSError):
            name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (keeps links)
            is_write = bool(set(mode) & set("wax+")) if mode else bool(flags & _WRITE_FLAGS)
            (self._written if is_write else self._read).add(name)

    def merge(self, other: OpenedFiles) -> None:
        """Add the files that were opened earlier, such as those of a cached module."""
        self._read |= other._read
        self._written |= other._written

    def inputs(self, folders: Sequence[Path], named: Iterable[str] = ()) -> set[str]:
        """Return the files that were read, without those of Python, its packages and the system.

        Source files count in `folders`, also if their bytecode is read in their place. Files in
        `named` count as read. Those that were written are no inputs.
        """
        found = set(named) - self._written
        for name in self._read - self._written:
            file = name
            if file.endswith(".pyc"):
                with contextlib.suppress(ValueError):
                    file = source_from_cache(file)
            is_own = any(Path(file).is_relative_to(folder) for folder in folders)
            is_code = file.endswith((".py", ".pyc"))
            is_installed = file.startswith(_installed_folders())
            if (is_own or not is_code) and not is_installed and os.path.isfile(file):  # noqa: PTH113
                found.add(file)
        return found


_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR

_active: list[OpenedFiles] = []


@contextmanager
def opened_files() -> Iterator[OpenedFiles]:
    """Record the files that Python opens inside the block, in any thread of this process.

    Libraries that open files by other means than Python's, and worker processes, are not seen.

    Examples
    --------
    >>> with opened_files() as opened:
    ...     Path(__file__).read_text()[:3]
    '\"\"\"'
    """
    _install_hook()
    opened = OpenedFiles()
    _active.append(opened)
    try:
        yield opened
    finally:
        _active.remove(opened)


@cache
def _install_hook() -> None:
    """Listen to Python's audit events, once in a process."""
    sys.addaudithook(_observe)


def _observe(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _active:
        for opened in _active:
            opened.add(*args)


def add_opened(earlier: OpenedFiles) -> None:
    """Add files that have been opened before to those of the blocks around this call."""
    for opened in _active:
        opened.merge(earlier)


@cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of Python, its packages, nlbench, the system and the user's caches."""
    package = Path(nlbench.__file__).absolute().parent
    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(package)}
    # A prefix such as /usr may hold files of the user, too.
    found = {folder for folder in folders if Path(folder).parent.name}
    found |= {"/proc", "/sys", "/dev", "/etc", "/usr/lib", "/usr/share"}
    found |= {os.path.expanduser("~/.cache"), os.path.expanduser("~/.config")}  # noqa: PTH111
    return tuple(folder + os.sep for folder in found)
