"""A run: its records and their tidy table, in memory or in a folder.

`RunFolder` is the one that knows where a record lies, and who may write there:
``manifest.json``, one ``cells/KEY.json`` a cell, ``scores.csv`` (the tidy table); beside them
``request.toml`` and ``plan.json`` of whoever measures, and pages. A folder may come from
anybody: what is in it is read as data, checked, and never taken for the name of a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import RequestError, one_line, system_text
from nlbench.measure import Result, Value
from nlbench.serialization.files import (
    is_unused,
    locked,
    make_folder,
    read_text,
    remove_parts,
    spreadsheet_safe,
    write_atomically,
)
from nlbench.signals import uninterrupted

from .manifest import Manifest, RunCall, now
from .record import FORMAT, Record, is_plain_name, parse_content, plain

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["COLUMNS", "Run", "RunFolder", "decided_by", "load_run", "merge_runs"]


TABLES_SECONDS = 30.0
"""How often the table is written while cells come in; the records are what counts."""

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


@dataclass
class Run:
    """Records of cells and what they share.

    Parameters
    ----------
    manifest : Manifest, or mapping with what one has
        What was asked for, on which machine, when, with which versions.
    records : list of Record
    path : Path, optional
        The run's folder.

    Examples
    --------
    >>> import torch, nlbench
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> run = nlbench.evaluate(model, torch.randn(64, 4), measures=["r2"])
    >>> list(run.scores.columns[:6])
    ['model', 'weights', 'data', 'seed', 'measure', 'place']
    >>> 0 < run["r2"].summary["value"] < 1
    True
    """

    manifest: Mapping[str, Any]
    records: list[Record] = field(default_factory=list)
    path: Path | None = None

    def __post_init__(self) -> None:
        self.manifest = Manifest.from_dict(self.manifest)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name if self.path else "run"

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The tidy table: one number a row.

        Columns ``model, weights, data, seed, measure, place, statistic, value, n, status,
        reason``. ``place`` is empty for the summary, else the site, path or layer. What has
        no value is one row with an empty value, its status and its reason.
        """
        import pandas as pd

        rows = [row for record in self.records for row in _rows(record)]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def __getitem__(self, measure: str) -> Result:
        """Result of a measure, where the run has one subject."""
        found = [r.result for r in self.records if r.measure.name == measure]
        if len(found) != 1:
            have = sorted({r.measure.name for r in self.records})
            raise KeyError(f"{len(found)} results of '{measure}' here; measures: {have}")
        return found[0]

    def __repr__(self) -> str:
        """Say what the run has in one line."""
        models = list(dict.fromkeys(r.subject.model for r in self.records))
        measures = list(dict.fromkeys(r.measure.name for r in self.records))
        statuses = [record.result.status for record in self.records]
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
        where = f" in {self.path}" if self.path else ""
        what = f"{_few(models)} by {_few(measures)}" if self.records else "no cells"
        return f"<Run{where}: {what}{f': {counts}' if counts else ''}>"

    @property
    def failed(self) -> list[Record]:
        """Cells that failed."""
        return [record for record in self.records if record.result.status == "failed"]

    def save(self, path: str | Path) -> Path:
        """Write the run to a folder of its own: manifest, records and table.

        One that is cut short can be saved to the same folder once more; until then nothing
        takes what is there for a run.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        nlbench.RequestError
            If the folder holds something else, or can't be written.
        """
        folder = Path(path)
        RunFolder(folder).save(self, own=folder == self.path)
        self.path = folder
        return folder

    def table(self) -> str:
        """Text of the tidy table's file."""
        self.__dict__.pop("scores", None)
        scores = self.scores
        texts = [name for name in scores.columns if name not in ("seed", "value", "n")]
        safe = scores.assign(**{name: scores[name].map(_cell) for name in texts})
        text: str = safe.to_csv(index=False)
        return text

    def report(self, output: str | Path) -> Path:
        """Write the page that the command line writes as ``report.html``; give its path."""
        page: Path = registry.load("reports", "html")([self], Path(output))
        return page

    def leaderboard(
        self, measures: Sequence[str] | None = None, *, seeds: str = "together"
    ) -> pd.DataFrame:
        """Set the subjects side by side, with ranks and how sure they are.

        Parameters
        ----------
        measures : sequence of str, optional
            Which; by default all. The first that has a direction orders the rows.
        seeds : {"together", "apart"}
            Whether the seeds of a network make one row.

        Returns
        -------
        DataFrame
            One row a subject; columns ``(measure, field)`` with the fields ``value, std, low,
            high, rank, tied, best, worst, quantile, n, over, status, reason``.
        """
        frame: pd.DataFrame = _report("leaderboard", self, measures, seeds=seeds)
        return frame

    def agreement(self) -> pd.DataFrame:
        """Correlate the measures, pair by pair: over networks, and over sites within them."""
        frame: pd.DataFrame = _report("agreement", self)
        return frame

    def signature(self, subject: str | None = None, measure: str | None = None) -> Any:
        """Give the `nlbench.Signature` of a subject, named by its label, by a measure."""
        return _report("signature", self, subject, measure)

    def fingerprint(self, measure: str | None = None) -> Any:
        """Draw each network as a strip over its depth, coloured by score: a matplotlib figure."""
        return _report("fingerprint", self, measure)

    def plot(self, measure: str) -> Any:
        """Draw what a measure says of each place, a series a subject: a matplotlib figure."""
        return _report("plot", self, measure)

    def to_latex(self, *, ranks: bool = True) -> str:
        """Write the leaderboard as a LaTeX table with booktabs' rules."""
        return str(_report("latex", self, ranks=ranks))

    def to_markdown(self, *, ranks: bool = True) -> str:
        """Write the leaderboard as a Markdown table."""
        return str(_report("markdown", self, ranks=ranks))

    def to_parquet(self, path: str | Path) -> Path:
        """Write the tidy table as Parquet, which needs the package pyarrow; give its path."""
        return Path(_report("parquet", self, path))

    def _repr_html_(self) -> str:
        return str(_report("notebook", self))


def _cell(text: str) -> str:
    return spreadsheet_safe(text if text.isprintable() else one_line(text))


def _report(name: str, *given: Any, **options: Any) -> Any:
    """Call a report by its registered name: this module knows none."""
    return registry.load("reports", name)(*given, **options)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rows(record: Record) -> Iterable[tuple[object, ...]]:
    identity, result = record.identity, record.result
    whole = Value("", result.summary, result.n, result.status, result.reason, result.parts)
    for value in (whole, *result.values):
        numbers = value.numbers or {"value": math.nan}
        for statistic, number in numbers.items():
            yield (*identity, value.place, statistic, number, value.n, value.status, value.reason)


def load_run(path: str | Path) -> Run:
    """Read a run's folder.

    Parameters
    ----------
    path : str or Path
        The folder, as ``nlbench run --out`` names it.

    Raises
    ------
    nlbench.RequestError
        If it is not a run's folder or a file in it is damaged.
    """
    folder = Path(path)
    manifest, records = RunFolder(folder).read()
    return Run(manifest, records, folder)


class RunFolder:
    """A run's folder, to be read, made, extended, saved to or taken back.

    Parameters
    ----------
    path : path
        It need not exist.

    Examples
    --------
    >>> RunFolder("runs/first").record_file("3f2a").as_posix()
    'runs/first/cells/3f2a.json'
    """

    FILES = ("manifest.json", "scores.csv", "request.toml", "plan.json")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = Manifest()
        self.records: dict[str, Record] = {}
        self._handle: int | None = None
        self._cost = 0.0

    @property
    def cells(self) -> Path:
        """The folder of the records."""
        return self.path / "cells"

    @property
    def manifest_file(self) -> Path:
        """The file that makes the folder a run's."""
        return self.path / "manifest.json"

    @property
    def table_file(self) -> Path:
        """The tidy table."""
        return self.path / "scores.csv"

    def record_file(self, key: str) -> Path:
        """Where the record of a cell lies.

        Raises
        ------
        nlbench.RequestError
            If the key is no plain name.
        """
        if not is_plain_name(key):
            raise RequestError(f"{self.path}: the key {key[:80]!r} of a cell is no plain name")
        return self.cells / f"{key}.json"

    def holds_a_run(self) -> bool:
        """Whether there is a run already; else the folder must be free for one.

        Raises
        ------
        nlbench.RequestError
            If it holds something else.
        """
        if self._is_free():
            return False
        if self.manifest_file.is_file():
            return True
        raise RequestError(f"{self.path} exists and is not a run; choose another --out")

    def read(self) -> tuple[Manifest, list[Record]]:
        """Read the manifest and all records, in the manifest's order.

        Raises
        ------
        nlbench.RequestError
            If it is not a run's folder, or a file in it is damaged.
        """
        if not self.manifest_file.exists():
            raise RequestError(f"{self.path} is not a run: it has no manifest.json")
        manifest = self._manifest()
        if manifest.saving:
            raise RequestError(
                f"{self.path} is not a run: saving one there was cut short; do it again, or "
                "remove it"
            )
        records = [self._record(file) for file in self._record_files()]
        order = {key: place for place, key in enumerate(manifest.order)}
        records.sort(key=lambda record: (order.get(record.key, len(order)), record.identity))
        return manifest, records

    def _manifest(self) -> Manifest:
        text, origin = read_text(self.manifest_file), str(self.manifest_file)
        return Manifest.from_dict(parse_content(text, origin, finite=False), origin)

    def _record_files(self) -> list[Path]:
        try:
            with os.scandir(self.cells) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            raise RequestError(f"can't read {self.cells}: {system_text(error)}") from error
        return [self.cells / name for name in names if name.endswith(".json")]

    def _record(self, file: Path) -> Record:
        record = Record.from_json(read_text(file), str(file))
        if record.key != file.stem:
            raise RequestError(f"{file} is not a record of a cell (its key is '{record.key}')")
        return record

    def recorded(self, key: str) -> Record | None:
        """Read the record of a cell, if there is one.

        Raises
        ------
        nlbench.RequestError
            If it is damaged.
        """
        file = self.record_file(key)
        return self._record(file) if file.is_file() else None

    @contextmanager
    def open(self, decided: Mapping[tuple[object, ...], object] | None = None) -> Iterator[None]:
        """Make the folder or take up what it holds, and keep other writers out meanwhile.

        Parameters
        ----------
        decided : mapping, optional
            What decides the cells that are to come, as `decided_by` says of those there.

        Raises
        ------
        nlbench.RequestError
            If it is something else, can't be written, is being written by another process, or
            holds cells that were made in another way.
        """
        self.holds_a_run()
        make_folder(self.cells)
        with self._lock():
            # Looked at again: another process may have finished cells just before.
            manifest, records = self.read() if self.holds_a_run() else (Manifest(), [])
            self.check(records, decided or {})
            for folder in (self.path, self.cells):
                remove_parts(folder)
            self.manifest, self.records = manifest, {record.key: record for record in records}
            yield

    def check(
        self, records: Iterable[Record], decided: Mapping[tuple[object, ...], object]
    ) -> None:
        """Refuse to put numbers beside each other that were made in different ways."""
        for record in records:
            for key, (what, made) in decided_by(record).items():
                if record.is_done and key in decided and decided[key] != made:
                    raise RequestError(f"{self.path} already holds {what}; choose another --out")

    def forget_failures(self, keys: Collection[str], identities: Collection[object]) -> None:
        """Remove cells without an answer that are now asked for in another way.

        Parameters
        ----------
        keys, identities : collection
            Of the cells that are asked for.
        """
        for record in list(self.records.values()):
            if not record.is_done and record.key not in keys and record.identity in identities:
                del self.records[record.key]
                self.record_file(record.key).unlink(missing_ok=True)

    def begin(self, manifest: Manifest, order: Iterable[str]) -> None:
        """Write what is known before a cell is measured.

        Parameters
        ----------
        manifest : Manifest
            Of one call; what older ones left is added.
        order : iterable of str
            The cells' keys in the order of the table.
        """
        self._places = {key: place for place, key in enumerate(order)}
        self._began = self._written = time.perf_counter()
        self._call = RunCall(started=now(), command=manifest.command, request=manifest.request)
        self._earlier = self.manifest
        self.manifest = replace(
            manifest,
            created=self._earlier.created or manifest.created,
            merged=self._earlier.merged,
            rest=self._earlier.rest,
        )
        self._arrange(unfinished=True)
        self._write_manifest(self.manifest)

    def add(self, record: Record) -> None:
        """Write a record, and the table where it has fallen behind."""
        # What is measured isn't lost to an interruption in between.
        with uninterrupted():
            self._write_record(record)
            self.records[record.key] = record
        # A table takes as long as the run has cells: never more than a tenth of the time.
        if time.perf_counter() - self._written > max(TABLES_SECONDS, 10 * self._cost):
            self.write()

    def write(self, *, unfinished: bool = True) -> None:
        """Write the manifest and the table."""
        begin = time.perf_counter()
        with uninterrupted():
            self._arrange(unfinished=unfinished)
            self._write(self.table_file, self.run.table())
            self._write_manifest(self.manifest)
        self._written = time.perf_counter()
        self._cost = self._written - begin

    def _arrange(self, *, unfinished: bool) -> None:
        places = self._places
        arranged = sorted(
            self.records.values(), key=lambda r: (places.get(r.key, len(places)), r.identity)
        )
        self.records = {record.key: record for record in arranged}
        seconds = round(time.perf_counter() - self._began, 3)
        self.manifest = replace(
            self.manifest,
            unfinished=unfinished,
            seconds=round(self._earlier.seconds + seconds, 3),
            calls=(*self._earlier.calls, replace(self._call, seconds=seconds)),
        ).of_records(arranged)

    @property
    def run(self) -> Run:
        """What the folder holds, as far as this process knows."""
        return Run(self.manifest, list(self.records.values()), self.path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with locked(self.path) as self._handle:
            try:
                yield
            finally:
                self._handle = None

    def _write_record(self, record: Record) -> None:
        self._write(self.record_file(record.key), record.to_json())

    def _write_manifest(self, manifest: Manifest) -> None:
        content = {"format": FORMAT, **manifest.to_dict()}
        self._write(self.manifest_file, json.dumps(content, indent=1, default=plain) + "\n")

    def _write(self, file: Path, text: str) -> None:
        """Write a file, but not where somebody has put another folder in the opened one's place."""
        if self._handle is not None:
            try:
                is_same = os.path.samestat(self.cells.stat(), os.fstat(self._handle))
            except OSError as error:
                raise RequestError(f"can't write to {self.cells}: {system_text(error)}") from error
            if not is_same:
                raise RequestError(f"can't write to {self.cells}: it is another folder by now")
        write_atomically(file, text)

    def save(self, run: Run, *, own: bool) -> None:
        """Write a whole run; see `Run.save`.

        Parameters
        ----------
        run : Run
        own : bool
            Whether the folder is the run's own already.
        """
        self._check_free(own)
        make_folder(self.cells)
        with self._lock():
            # Once more: another process may have saved its own just before.
            self._check_free(own)
            if not own or self._is_half_saved():
                self._write_manifest(Manifest(saving=True))
                for left in self._record_files():
                    left.unlink()
            for record in run.records:
                self._write_record(record)
            self._write(self.table_file, run.table())
            self._write_manifest(Manifest.from_dict(run.manifest))

    def _check_free(self, own: bool) -> None:
        if not (own or self._is_free() or self._is_half_saved()):
            raise RequestError(f"{self.path} holds something else; choose another folder")

    def _is_free(self) -> bool:
        try:
            return not os.path.lexists(self.path) or is_unused(self.path)
        except (OSError, ValueError) as error:
            raise RequestError(f"can't write to {self.path}: {system_text(error)}") from error

    def _is_half_saved(self) -> bool:
        """Whether it holds nothing but what is left of a run whose saving was cut short."""
        try:
            return self.manifest_file.is_file() and self._manifest().saving
        except RequestError:
            return False

    def remove(self) -> None:
        """Take back the folder of a run that came to nothing; never one with anything else."""
        with contextlib.suppress(OSError):
            # First, since it fails where there is a cell: that one is kept.
            self.cells.rmdir()
            for name in self.FILES:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def decided_by(record: Record) -> dict[tuple[object, ...], tuple[str, object]]:
    """What decided a record's numbers, and has to be the same in all of a run.

    A board has one column a measure and one row a subject, and the manifest one set of options.

    Returns
    -------
    dict
        From the column or row to what is said of another one, and how this one was made.
    """
    measure, probe, subject = record.measure, record.probe, record.subject
    title = f"{subject.model} ({subject.weights})"
    found: dict[tuple[object, ...], tuple[str, object]] = {
        ("measure", measure.name): (
            f"{measure.name} with other options or another version",
            (measure.version, dict(measure.options)),
        ),
        ("probe", probe.name): (
            f"{measure.name} through {probe.name} with other options",
            dict(probe.options),
        ),
    }
    # What `evaluate` measured and saved has no key: it answers no request.
    if subject.key:
        found["subject", *subject.identity] = (
            f"{measure.name} of another {title}: the weights, samples, split, device or plugin "
            "differ",
            subject.key,
        )
    return found


def merge_runs(runs: Sequence[str | Path], out: str | Path) -> Run:
    """Put the cells of several runs into one, in a folder of its own.

    A cell that is in several is taken once; a failed one gives way to one that isn't.

    Parameters
    ----------
    runs : sequence of path
        Folders of runs; they are left as they are.
    out : path
        A folder that doesn't exist yet or is empty.

    Returns
    -------
    Run

    Raises
    ------
    nlbench.RequestError
        If a folder isn't a run, or two runs don't go together: another number for the same
        cell, a measure with other options, a subject of other weights or samples.
    """
    loaded = [load_run(path) for path in runs]
    if not loaded:
        raise RequestError("merge: expected at least one run")
    records: dict[str, Record] = {}
    homes: dict[str, Run] = {}
    for run in loaded:
        for record in run.records:
            other = records.get(record.key)
            if other is None or (record.is_done and not other.is_done):
                records[record.key], homes[record.key] = record, run
            elif record.is_done and record.result != other.result:
                model, weights, data, seed, measure = record.identity
                raise RequestError(
                    f"{homes[record.key].path} and {run.path} have different results of {measure} "
                    f"of {model} ({weights}) on {data}, seed {seed}, for the same key"
                )
    decided: dict[tuple[object, ...], tuple[object, Run]] = {}
    for record in records.values():
        run = homes[record.key]
        for key, (what, made) in decided_by(record).items() if record.is_done else ():
            there, whose = decided.setdefault(key, (made, run))
            if there != made:
                raise RequestError(f"{whose.path} and {run.path} don't go together: {what}")
    named = {record.identity for record in records.values() if record.is_done}
    kept = [r for r in records.values() if r.is_done or r.identity not in named]
    manifests = [Manifest.from_dict(run.manifest) for run in loaded]
    manifest = replace(
        manifests[0],
        merged={"from": [str(path) for path in runs], "at": now()},
        calls=tuple(call for one in manifests for call in one.calls),
        seconds=round(sum(one.seconds for one in manifests), 3),
        unfinished=False,
    )
    result = Run(manifest.of_records(kept), kept)
    result.save(out)
    return result
