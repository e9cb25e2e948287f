"""A run: records of cells in memory or on disk, and the tidy table made of them.

On disk a run is a folder: ``manifest.json``, one ``cells/KEY.json`` a cell,
``scores.csv`` (the tidy table) and ``report.html``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.measure import Result, Value

from .files import is_unused, locked, make_folder, write_atomically

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "FORMAT", "Record", "Run", "load_run"]


FORMAT = 1
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


@dataclass(frozen=True)
class Record:
    """One finished cell: a reading and everything that decided it.

    Parameters
    ----------
    key : str
        Hash of everything that decides the numbers.
    subject : mapping
        ``model``, ``weights``, ``data``, ``seed`` and what else is known of the subject.
    measure : mapping
        ``name``, ``version``, ``options``, ``bounds``, ``source``, ….
    probe : mapping
        ``name`` and ``options``, and what was looked at (such as the paths' hash).
    machine : mapping
        ``device``, ``dtype`` of the model, and the ``environment``: versions and hardware.
    result : Result
    seconds : float
        The measure's own time, without the probe's pass.
    finished : str
        When, in UTC.
    traceback : str
        Of a failed cell.
    costs : mapping of str to float
        Of the pass that the cell shared with others: ``wall_seconds``; ``peak_memory`` and,
        on a GPU, ``peak_device_memory`` in bytes; ``load_seconds`` of the subject.
    """

    key: str
    subject: Mapping[str, Any]
    measure: Mapping[str, Any]
    probe: Mapping[str, Any]
    machine: Mapping[str, Any]
    result: Result
    seconds: float = 0.0
    finished: str = ""
    traceback: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the cell needs no other try."""
        return self.result.status != "failed"

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """What names the cell in the tidy table."""
        subject = self.subject
        return (
            str(subject["model"]),
            str(subject["weights"]),
            str(subject["data"]),
            int(subject["seed"]),
            str(self.measure["name"]),
        )

    def to_json(self) -> str:
        """Text of the record's file."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps(content, indent=1, allow_nan=False, default=_plain) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str) -> Record:
        """Read a record's file.

        Raises
        ------
        nlbench.RequestError
            If it is damaged or of a newer format.
        """
        content = _parse(text, origin)
        try:
            result = content.pop("result")
            values = tuple(Value(**value) for value in result.pop("values"))
            return cls(result=Result(values=values, **result), **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{origin} is not a record of a cell ({error})") from error


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} can't be recorded")


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{origin} is damaged: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise RequestError(f"{origin} was not written by nlbench")
    if content["format"] > FORMAT:
        raise RequestError(
            f"{origin} has format {content['format']}, from a newer nlbench; "
            f"this one reads up to {FORMAT}"
        )
    del content["format"]
    return content


@dataclass
class Run:
    """Records of cells and what they share.

    Parameters
    ----------
    manifest : dict
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

    manifest: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    path: Path | None = None

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
        """Reading of a measure, where the run has one subject."""
        found = [r.result for r in self.records if r.measure["name"] == measure]
        if len(found) != 1:
            have = sorted({str(r.measure["name"]) for r in self.records})
            raise KeyError(f"{len(found)} readings of '{measure}' here; measures: {have}")
        return found[0]

    @property
    def failed(self) -> list[Record]:
        """Cells that failed."""
        return [record for record in self.records if not record.is_done]

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
        self._check_free(folder)
        make_folder(folder / "cells")
        with locked(folder):
            # Once more: another process may have saved its own just before.
            self._check_free(folder)
            if folder != self.path or _is_half(folder):
                begun = {"format": FORMAT, "saving": True}
                write_atomically(folder / "manifest.json", json.dumps(begun) + "\n")
                for left in (folder / "cells").glob("*.json"):
                    left.unlink()
            self.path = folder
            for record in self.records:
                self.write_record(record)
            self.write_tables()
        return self.path

    def _check_free(self, folder: Path) -> None:
        try:
            is_free = folder == self.path or not os.path.lexists(folder) or is_unused(folder)
        except OSError as error:
            raise RequestError(f"can't write to {folder}: {error.strerror or error}") from error
        if not is_free and not _is_half(folder):
            raise RequestError(f"{folder} holds something else; choose another folder")

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

    def write_record(self, record: Record) -> None:
        """Write one cell's file."""
        assert self.path is not None
        write_atomically(self.path / "cells" / f"{record.key}.json", record.to_json())

    def write_tables(self) -> None:
        """Write the manifest and the tidy table."""
        assert self.path is not None
        self.__dict__.pop("scores", None)
        write_atomically(self.path / "scores.csv", self.scores.to_csv(index=False))
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the manifest alone."""
        assert self.path is not None
        manifest = {"format": FORMAT, **self.manifest}
        write_atomically(
            self.path / "manifest.json", json.dumps(manifest, indent=1, default=_plain) + "\n"
        )


def _report(name: str, *given: Any, **options: Any) -> Any:
    """Call a report by its registered name: this module knows none."""
    return registry.load("reports", name)(*given, **options)


def _rows(record: Record) -> Iterable[tuple[object, ...]]:
    identity, result = record.identity, record.result
    whole = Value("", result.summary, result.n, result.status, result.reason)
    for value in (whole, *result.values):
        numbers = value.statistics or {"value": math.nan}
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
    file = folder / "manifest.json"
    if not file.is_file():
        raise RequestError(f"{folder} is not a run: it has no manifest.json")
    manifest = _parse(_read(file), str(file))
    if _is_begun(manifest):
        raise RequestError(
            f"{folder} is not a run: saving one there was cut short; do it again, or remove it"
        )
    records = [
        Record.from_json(_read(cell), str(cell))
        for cell in sorted((folder / "cells").glob("*.json"))
    ]
    order = {key: place for place, key in enumerate(manifest.get("order", []))}
    records.sort(key=lambda record: (order.get(record.key, len(order)), record.identity))
    return Run(manifest, records, folder)


def _is_half(folder: Path) -> bool:
    """Whether a folder holds nothing but what is left of a run whose saving was cut short."""
    file = folder / "manifest.json"
    try:
        return file.is_file() and _is_begun(_parse(_read(file), str(file)))
    except RequestError:
        return False


def _is_begun(manifest: Mapping[str, Any]) -> bool:
    return manifest == {"saving": True}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"can't read {path}: {error}") from error
