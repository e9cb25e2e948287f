"""Where a dataset's files lie, and what to say when they don't."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nlbench.errors import RequestError
from nlbench.options import Option

__all__ = [
    "DOWNLOAD",
    "FOLDER",
    "download_if_missing",
    "find_folder",
    "read_bytes",
    "stamp",
    "wanted_folder",
]


FOLDER = Option("", "where the files are; by default below the folder that NLBENCH_DATA names")
DOWNLOAD = Option(False, "fetch the files into the folder if they are missing")


def wanted_folder(name: str, folder: str) -> Path:
    """Folder that a dataset is looked for in.

    Parameters
    ----------
    name : str
        The dataset's.
    folder : str
        The option; empty: ``$NLBENCH_DATA/NAME``.

    Raises
    ------
    nlbench.RequestError
        If neither says where.

    Examples
    --------
    >>> wanted_folder("mnist", "somewhere").name
    'somewhere'
    """
    if folder:
        return Path(os.path.expanduser(folder))  # noqa: PTH111 - Path's fails for unknown users
    root = os.environ.get("NLBENCH_DATA", "")
    if not root:
        raise RequestError(
            f"{name}: no folder is given; say where its files are with --set {name}.folder=PATH, "
            f"or set NLBENCH_DATA to a folder and put them into its subfolder {name}"
        )
    return Path(os.path.expanduser(root), name)  # noqa: PTH111


def find_folder(
    name: str, folder: str, below: Sequence[str], needed: Iterable[str], expected: str
) -> Path:
    """Find the folder that holds the files needed.

    Parameters
    ----------
    name, folder : str
        See `wanted_folder`.
    below : sequence of str
        Where else to look: paths relative to it, and to the folder NLBENCH_DATA.
    needed : iterable of str
        Names of files or folders, of which one must be there.
    expected : str
        What to put there, for the message.

    Raises
    ------
    nlbench.RequestError
        If it isn't there; the message says what to put where.
    """
    wanted = wanted_folder(name, folder)
    roots = [wanted] if folder else [wanted, wanted.parent]
    tried = [wanted, *(root / part for root in roots for part in below)]
    names = list(needed)
    for place in tried:
        if any((place / each).exists() for each in names):
            return place
    raise RequestError(f"{name}: its files are not in {wanted}; put {expected} there")


def download_if_missing(name: str, folder: str, kind: str, find: Callable[[], Path]) -> Path:
    """Find a dataset's files; where they are missing, let torchvision fetch them first.

    Parameters
    ----------
    name, folder : str
        See `wanted_folder`.
    kind : str
        The class of `torchvision.datasets` that fetches them.
    find : callable
        Gives the folder that holds them, or raises `nlbench.RequestError`.

    Raises
    ------
    nlbench.RequestError
        If they can't be fetched, or are still not there.
    """
    wanted = wanted_folder(name, folder)
    try:
        return find()
    except RequestError:
        _download(name, wanted, kind)
    return find()


def _download(name: str, folder: Path, kind: str) -> None:
    from torchvision import datasets

    try:
        getattr(datasets, kind)(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{name}: can't download to {folder}: {reason}") from error


def stamp(files: Iterable[Path]) -> str:
    """Sizes and times of files: changes when they do, without reading them.

    Examples
    --------
    >>> stamp([])
    ''
    """
    parts = []
    for file in files:
        if file.is_file():
            status = file.stat()
            parts.append(f"{file.name}:{status.st_size}:{status.st_mtime_ns}")
    return " ".join(parts)


def read_bytes(name: str, file: Path) -> bytes:
    """Read a file of a dataset.

    Raises
    ------
    nlbench.RequestError
        If it can't be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"{name}: can't read {file}: {error.strerror or error}") from error
