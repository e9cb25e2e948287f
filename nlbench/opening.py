"""Open a run's folder: for one writer at a time, and only for what goes with what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nlbench.errors import RequestError
from nlbench.files import is_unused, locked, make_folder, remove_parts
from nlbench.plan import Cell, Plan
from nlbench.records import Run, load_run
from nlbench.stamps import PLAN

__all__ = [
    "FILES",
    "check_alike",
    "check_free",
    "forget_failures",
    "open_run",
    "remove_run",
]

FILES = ("manifest.json", "scores.csv", "request.toml", PLAN)
"""What lies in a run's folder beside its cells and pages."""


def check_free(folder: Path) -> bool:
    """Whether a folder holds a run already; else it must be free for one.

    Raises
    ------
    nlbench.RequestError
        If it holds something else.
    """
    try:
        if (folder / "manifest.json").is_file():
            return True
        if folder.exists() and not is_unused(folder):
            raise RequestError(f"{folder} exists and is not a run; choose another --out")
    except OSError as error:
        raise RequestError(f"can't write to {folder}: {error.strerror or error}") from error
    return False


@contextmanager
def open_run(folder: Path, plan: Plan) -> Iterator[Run]:
    """Make a run's folder or take up an old one, and keep other writers out meanwhile.

    Raises
    ------
    nlbench.RequestError
        If it is something else, can't be written, is being written by another process, or
        holds cells that were made in another way.
    """
    if check_free(folder):
        # Refused before anything is touched.
        check_alike(load_run(folder), plan)
    make_folder(folder / "cells")
    with locked(folder):
        for place in (folder, folder / "cells"):
            remove_parts(place)
        # Read again: another process may have finished cells just before.
        result = load_run(folder) if check_free(folder) else Run({}, [], folder)
        check_alike(result, plan)
        yield result


def check_alike(old: Run, plan: Plan) -> None:
    """Refuse to put numbers beside each other that were made in different ways.

    Parameters
    ----------
    old : Run
        What is there.
    plan : Plan
        What is to come.

    Raises
    ------
    nlbench.RequestError
        If they don't go together.

    Notes
    -----
    A board has one column a measure and the manifest one set of options.
    """
    wanted = {cell.key for cell in plan.cells}
    subjects = {cell.identity[:4]: cell.target.key for cell in plan.cells}
    measures = {one.name: (one.version, dict(one.options)) for one in plan.wanted}
    probes = {one.probe: dict(one.settings) for one in plan.wanted}
    for record in old.records:
        if record.key in wanted or not record.is_done:
            continue
        name, probe = record.measure["name"], record.probe["name"]
        # What `evaluate` measured and saved has no key: it answers no request.
        key = record.subject.get("key")
        made = record.measure["version"], dict(record.measure["options"])
        what = ""
        if name in measures and measures[name] != made:
            what = f"{name} with other options or another version"
        elif probe in probes and probes[probe] != dict(record.probe["options"]):
            what = f"{name} through {probe} with other options"
        elif subjects.get(record.identity[:4], key) != key:
            what = (
                f"{name} of another {record.subject['model']} ({record.subject['weights']}): "
                "the weights, samples, split, device or plugin differ"
            )
        if what:
            raise RequestError(f"{old.path} already holds {what}; choose another --out")


def forget_failures(old: Run, cells: Sequence[Cell]) -> None:
    """Remove failed cells that are now asked for in another way."""
    assert old.path is not None
    wanted, named = {cell.key for cell in cells}, {cell.identity for cell in cells}
    for record in list(old.records):
        if not record.is_done and record.key not in wanted and record.identity in named:
            old.records.remove(record)
            (old.path / "cells" / f"{record.key}.json").unlink(missing_ok=True)


def remove_run(folder: Path) -> None:
    """Take back the folder of a run that came to nothing; never one that holds anything else."""
    with contextlib.suppress(OSError):
        # First, since it fails where a worker has written a cell: that one is kept.
        (folder / "cells").rmdir()
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
