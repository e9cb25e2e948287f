"""The layout and locking of a run's folder.

It contains ``manifest.json``, one ``cells/KEY.json`` per cell and ``scores.csv`` (the tidy table).
The runner adds ``request.toml``, and `nlbench report` adds a page. A folder may be untrusted: its
content is validated and never used as a file name.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, one_line, system_text
from nlbench.measure import Value
from nlbench.parsers import unique
from nlbench.serialization.files import csv_text, is_part, make_folder, read_text
from nlbench.signals import uninterrupted
from nlbench.subjects.facts import SubjectFacts

from .locked_folder import LockedFolder
from .manifest import Manifest, RunCall, now
from .record import (
    MAX_RECORD_BYTES,
    Decisions,
    Record,
    changed_keys,
    changed_sources,
    difference_text,
    is_plain_name,
    read_decisions,
)

if TYPE_CHECKING:
    import pandas as pd


_CHECKPOINTS = "checkpoints"

SUPERSEDED = "superseded"
"""Folder of the records that were made with earlier versions of files."""


class RunFolder(LockedFolder):
    """A run's folder, which need not exist yet.

    Examples
    --------
    >>> RunFolder("runs/first").record_file("3f2a").as_posix()
    'runs/first/cells/3f2a.json'
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "cells")
        self.cells, self.table_file = self.path / "cells", self.path / "scores.csv"
        self.manifest = Manifest()
        self.records: dict[str, Record] = {}
        self._write_seconds = 0.0

    def record_file(self, key: str) -> Path:
        """Return the path of a cell's record."""
        if not is_plain_name(key):
            raise RequestError(f"{self.path}: the cell key {key[:80]!r} is not a plain name")
        return self.cells / f"{key}.json"

    def holds_a_run(self) -> bool:
        """Return True for a run and False for an unused folder. Raise for anything else."""
        if self._is_free():
            return False
        if self.manifest_file.is_file():
            return True
        raise RequestError(f"{self.path} exists and is not a run; choose another --out")

    def read(self) -> tuple[Manifest, list[Record]]:
        """Read the manifest and all records, in the manifest's order."""
        if not self.manifest_file.exists():
            raise RequestError(f"{self.path} is not a run: it has no manifest.json")
        manifest = self._read_manifest()
        if manifest.saving:
            raise RequestError(
                f"{self.path} is not a run: saving one there was interrupted; save it again or "
                "delete the folder"
            )
        subjects: dict[str | None, SubjectFacts] = {}
        with _garbage_collection_paused():
            records = [_share_subject(self._read_record(f), subjects) for f in self._record_files()]
        order = {key: index for index, key in enumerate(manifest.order)}
        records.sort(key=lambda record: (order.get(record.key, len(order)), record.identity))
        return manifest, records

    def _read_manifest(self) -> Manifest:
        return Manifest.from_dict(self.read_manifest(), str(self.manifest_file))

    def _record_files(self) -> list[Path]:
        try:
            with os.scandir(self.cells) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            raise RequestError(f"can't read {self.cells}: {system_text(error)}") from error
        return [self.cells / name for name in names if name.endswith(".json")]

    def _read_record(self, file: Path) -> Record:
        record = Record.from_json(read_text(file, MAX_RECORD_BYTES), str(file))
        if record.key != file.stem:
            raise RequestError(f"{file} is not a record of a cell (its key is '{record.key}')")
        return record

    def find_record(self, key: str) -> Record | None:
        """Read a cell's record, or return None if there is none."""
        file = self.record_file(key)
        return self._read_record(file) if file.is_file() else None

    @contextmanager
    def open(self, decisions: Decisions | None = None) -> Iterator[None]:
        """Create the folder or read its run, and lock it against other writers.

        `decisions` are the decisions of the cells to add; see `nlbench.store.record`.
        """
        self.holds_a_run()
        with self.locked():
            # Another process may have finished cells before this one acquired the lock.
            manifest, records = self.read() if self.holds_a_run() else (Manifest(), [])
            self.check(records, decisions or {})
            self.remove_parts()
            self.manifest, self.records = manifest, {record.key: record for record in records}
            yield

    def set_aside(self, decisions: Decisions) -> str:
        """Move the records of earlier versions of files, and describe what was moved, if any."""
        changed = changed_sources(self.records.values(), decisions)
        outdated = {key: names for key, names in changed.items() if names}
        if not outdated:
            return ""
        names = unique(itertools.chain.from_iterable(outdated.values()))
        cells = "1 cell" if len(outdated) == 1 else f"{len(outdated)} cells"
        note = (
            f"{', '.join(names)} changed after {cells} had been recorded; what is requested is "
            f"measured again, and the earlier records are in {SUPERSEDED}/"
        )
        make_folder(self.path / SUPERSEDED)
        with uninterrupted():
            for key in outdated:
                del self.records[key]
                file = self.record_file(key)
                file.replace(self.path / SUPERSEDED / file.name)
            superseded = (*self.manifest.superseded, f"{now()} {note}")
            self.manifest = replace(self.manifest, superseded=superseded)
        return note

    def check(self, records: Iterable[Record], decisions: Decisions) -> None:
        """Raise if the decisions of a finished record differ from those of the cells to add.

        Records of earlier versions of files don't count.
        """
        records = list(records)
        changed = changed_sources(records, decisions)
        for record in records:
            if not record.is_done or changed[record.key]:
                continue
            for key in changed_keys(read_decisions(record), decisions):
                raise RequestError(
                    f"{self.path} already contains {difference_text(record, key)}; "
                    "choose another --out"
                )

    def forget_failures(self, keys: Collection[str], identities: Collection[object]) -> None:
        """Remove failed and skipped cells that are now requested under another key."""
        for record in list(self.records.values()):
            if not record.is_done and record.key not in keys and record.identity in identities:
                del self.records[record.key]
                self.record_file(record.key).unlink(missing_ok=True)

    def begin(self, manifest: Manifest, order: Iterable[str]) -> None:
        """Write the manifest, including earlier calls, before any cell is measured.

        `order` contains the cell keys in the order of the table.
        """
        self._positions = {key: position for position, key in enumerate(order)}
        self._start = self._written = time.perf_counter()
        self._call = RunCall(started=now(), command=manifest.command, request=manifest.request)
        self._earlier = self.manifest
        self.manifest = replace(
            manifest,
            created=self._earlier.created or manifest.created,
            merged=self._earlier.merged,
            superseded=self._earlier.superseded,
            rest=self._earlier.rest,
        )
        self._arrange(unfinished=True)
        self.write_manifest(self.manifest)

    def add(self, record: Record) -> None:
        """Write a record, and the table if it is due."""
        # An interruption between the two steps would lose the cell.
        with uninterrupted():
            self.write(self.record_file(record.key), record.to_json())
            self.records[record.key] = record
        # Writing takes longer as the run grows, and is limited to a tenth of the total time.
        # Minimum time between updates of the table while cells are being added.
        if time.perf_counter() - self._written > max(30.0, 10 * self._write_seconds):
            self.write_table()

    def write_table(self, *, unfinished: bool = True) -> None:
        """Write the tidy table and the manifest."""
        start = time.perf_counter()
        with uninterrupted():
            self._arrange(unfinished=unfinished)
            self.write(self.table_file, table_text(self.records.values()))
            self.write_manifest(self.manifest)
        self._written = time.perf_counter()
        self._write_seconds = self._written - start

    def _arrange(self, *, unfinished: bool) -> None:
        positions = self._positions
        last = len(self._positions)
        arranged = sorted(
            self.records.values(), key=lambda r: (positions.get(r.key, last), r.identity)
        )
        self.records = {record.key: record for record in arranged}
        seconds = round(time.perf_counter() - self._start, 3)
        self.manifest = replace(
            self.manifest,
            unfinished=unfinished,
            seconds=round(self._earlier.seconds + seconds, 3),
            calls=(*self._earlier.calls, replace(self._call, seconds=seconds)),
        ).describe_records(arranged)

    def save(self, manifest: Manifest, records: Collection[Record], *, is_own: bool) -> None:
        """Write a whole run.

        `is_own` is True if it is already in this folder. See `nlbench.Run.save`.
        """
        self._check_free(is_own)
        with self.locked():
            # Another process may have saved its run before this one acquired the lock.
            self._check_free(is_own)
            if not is_own or self._is_half_saved():
                self.write_manifest(Manifest(saving=True))
                for file in self._record_files():
                    file.unlink()
            for record in records:
                self.write(self.record_file(record.key), record.to_json())
            self.write(self.table_file, table_text(records))
            self.write_manifest(manifest)

    def _check_free(self, is_own: bool) -> None:
        if not (is_own or self._is_free() or self._is_half_saved()):
            raise RequestError(
                f"{self.path} contains something else, such as an earlier run; "
                "choose another folder or delete it"
            )

    def _is_free(self) -> bool:
        """Return True if the folder is absent, or has only checkpoints and parts of files."""
        try:
            return not os.path.lexists(self.path) or (
                self.path.is_dir() and all(map(_is_remnant, self.path.iterdir()))
            )
        except (OSError, ValueError) as error:
            raise RequestError(f"can't write to {self.path}: {system_text(error)}") from error

    def _is_half_saved(self) -> bool:
        """Return True if the folder contains only a run that was interrupted while being saved."""
        try:
            return self.manifest_file.is_file() and self._read_manifest().saving
        except RequestError:
            return False

    def remove(self) -> None:
        """Remove the folder of a run without cells. Keep it if it contains anything else."""
        with contextlib.suppress(OSError):
            # Called first, since it fails if there is a cell.
            self.cells.rmdir()
            for name in ("manifest.json", "scores.csv", "request.toml"):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def _is_remnant(entry: Path) -> bool:
    if entry.name == "cells" and entry.is_dir() and not entry.is_symlink():
        return all(map(is_part, entry.iterdir()))
    return is_part(entry) or (entry.name == _CHECKPOINTS and entry.is_dir())


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the search for reference cycles: records have none, and it takes 20% of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _share_subject(record: Record, subjects: dict[str | None, SubjectFacts]) -> Record:
    """Replace a record's subject by an equal one from an earlier record, to save memory."""
    subject = subjects.setdefault(record.subject.key, record.subject)
    return replace(record, subject=subject) if subject == record.subject else record


COLUMNS = (
    "model",
    "weights",
    "data",
    "seed",
    "measure",
    "place",
    "statistic",
    "value",
    "n",
    "status",
    "reason",
)


def tidy_table(records: Iterable[Record]) -> pd.DataFrame:
    """Build the table of records. See `nlbench.Run.scores`."""
    import pandas as pd

    rows = [row for record in records for row in _rows(record)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(record: Record) -> Iterator[tuple[object, ...]]:
    identity = record.identity
    result = record.result
    summary = Value(
        "", result.summary, result.n, result.status, result.reason, result.parts, result.replicates
    )
    for value in (summary, *result.values):
        numbers = value.numbers or {"value": math.nan}
        for statistic, number in numbers.items():
            yield (*identity, value.place, statistic, number, value.n, value.status, value.reason)


def table_text(records: Iterable[Record]) -> str:
    """Return the table of records as CSV, escaping any text that a spreadsheet would evaluate.

    pandas isn't used, since its import takes a twentieth of a short run.
    """
    rows = []
    for row in itertools.chain.from_iterable(map(_rows, records)):
        rows.append([one_line(v) if isinstance(v, str) and not v.isprintable() else v for v in row])
    return csv_text(COLUMNS, rows)
