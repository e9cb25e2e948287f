"""Versions of files: what changes if the content of a file may have changed.

Small files are identified by their content, larger ones by size and times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from .hashing import content_key, file_hash

MAX_HASHED_BYTES = 2**26
"""Total size in bytes up to which the content of files is hashed, about a tenth of a second."""

MAX_LISTED_FILES = 32
"""Number of files in a folder above which the folder is recorded in their place."""


def files_version(files: Sequence[Path]) -> str:
    """Return a hash of the names and contents of files, and of dead links.

    If they are large, their times stand for their contents: that of the last change of the
    content, and that of any change, which programs can't set.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "x.txt")
    >>> _ = file.write_text("a")
    >>> first = files_version([file])
    >>> _ = file.write_text("b")
    >>> files_version([file]) == first
    False
    """
    states = {file: file.stat() if file.exists() else file.lstat() for file in files}
    is_small = sum(state.st_size for state in states.values()) <= MAX_HASHED_BYTES
    versions: dict[str, object] = {}
    for file, state in states.items():
        times = state.st_size, state.st_mtime_ns, state.st_ctime_ns
        is_hashed = is_small and file.is_file()
        versions[str(file)] = _content_hash(str(file), times) if is_hashed else times
    return content_key(versions)


@lru_cache(maxsize=4096)
def _content_hash(file: str, times: tuple[int, int, int]) -> str:
    """Return the hash of a file, which is read once for each state."""
    del times
    return file_hash(file)


def describe_files(files: Iterable[str]) -> dict[str, str]:
    """Return the versions of files by their paths from the current folder.

    A folder with many of the files stands for all files directly in it.
    """
    by_folder: dict[str, list[str]] = {}
    for file in sorted(files):
        by_folder.setdefault(os.path.dirname(file), []).append(file)  # noqa: PTH120
    paths: list[str] = []
    for folder, members in by_folder.items():
        paths += [os.path.join(folder, "")] if len(members) > MAX_LISTED_FILES else members  # noqa: PTH118
    relative = (os.path.relpath(path) + (os.sep if path.endswith(os.sep) else "") for path in paths)
    return {path: _version(path) for path in relative}


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """Return the paths whose versions differ from those that `describe_files` returned."""
    return [path for path, version in recorded.items() if _version(path) != version]


def _version(path: str) -> str:
    """Return the version of a file or of the files in a folder, and "" if there is none."""
    try:
        if path.endswith(os.sep):
            files = sorted(file for file in Path(path).iterdir() if file.is_file())
        else:
            files = [Path(path)]
        return files_version(files)[:16]
    except OSError:
        return ""
