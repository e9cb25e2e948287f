"""A folder with a manifest, writable by one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, system_text
from nlbench.parsers import unique
from nlbench.serialization.files import (
    dump_versioned,
    make_folder,
    parse_versioned,
    read_text,
    remove_parts,
    write_atomically,
)


class LockedFolder:
    """A folder with a manifest, writable by one process at a time.

    It need not exist. The lock is held on the folder itself, or on its subfolder `locked`.

    Examples
    --------
    >>> import tempfile
    >>> folder = LockedFolder(Path(tempfile.mkdtemp()) / "training")
    >>> with folder.locked():
    ...     folder.write_manifest({"epochs": 3})
    >>> folder.read_manifest()
    {'epochs': 3}
    """

    def __init__(self, path: str | Path, locked: str = "") -> None:
        self.path = Path(path)
        self.manifest_file = self.path / "manifest.json"
        self._locked_folder = self.path / locked
        self._handle: int | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if it doesn't exist, and lock it against other writers."""
        make_folder(self._locked_folder)
        self._handle = _open_locked(self._locked_folder, self.path)
        try:
            yield
        finally:
            if self._handle is not None:
                os.close(self._handle)
            self._handle = None

    def remove_parts(self) -> None:
        """Remove partial files left by killed processes. The folder must be locked."""
        for folder in unique((self.path, self._locked_folder)):
            remove_parts(folder)

    def read_manifest(self) -> dict[str, Any]:
        """Read the manifest."""
        file = self.manifest_file
        return parse_versioned(read_text(file), str(file), finite=False)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Write the manifest atomically."""
        self.write(self.manifest_file, dump_versioned(content, finite=False))

    def write(self, file: Path, text: str) -> None:
        """Write a file atomically. Raise if the locked folder has been replaced."""
        folder = self._locked_folder
        if self._handle is not None:
            try:
                is_same = os.path.samestat(folder.stat(), os.fstat(self._handle))
            except OSError as error:
                raise RequestError(f"can't write to {folder}: {system_text(error)}") from error
            if not is_same:
                raise RequestError(f"can't write to {folder}: the folder was replaced")
        write_atomically(file, text)


def _open_locked(folder: Path, path: Path) -> int | None:
    """Open and lock a folder, and return its file descriptor.

    Return None on systems without locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; atomic writes still protect single files.
        return None
    # If the subfolder is a symbolic link, it could point outside the folder.
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if folder == path else os.O_NOFOLLOW)
    try:
        handle = os.open(folder, flags)
    except OSError as error:
        raise RequestError(f"can't write to {folder}: it is a link or not a folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise RequestError(
            f"another nlbench is writing to {path}; wait for it or choose another folder"
        ) from error
    except OSError:
        pass  # a file system without locks
    return handle
