"""Notes on the leaderboard: coverage, missing values and differing settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlbench.errors import enumerate_names
from nlbench.parsers import unique

from .environment import Table
from .leaderboard import Row, is_training
from .manifest import iter_settings
from .tables import Measures, NamedRun, Scores
from .text import count

_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w])")


@dataclass(frozen=True)
class Gap:
    """A missing value and its reason."""

    subject: str
    measure: str
    where: str
    status: str
    reason: str


@dataclass(frozen=True)
class Remark:
    """A note on values, or a reason why they are missing, that applies to one or more cells.

    Parameters
    ----------
    text : str
        Numbers that differ between the cells are given as ranges.
    cells : tuple of (str, str)
        Network and measure of each cell.
    """

    status: str
    text: str
    cells: tuple[tuple[str, str], ...]

    @property
    def measures(self) -> str:
        """Names of the measures."""
        return ", ".join(unique(measure for _, measure in self.cells))

    @property
    def networks(self) -> str:
        """Names of the networks if there are at most three, otherwise their number."""
        names = unique(name for name, _ in self.cells)
        return ", ".join(names) if len(names) < 4 else f"{len(names)} networks"


def group_remarks(remarks: Iterable[tuple[str, str, str, str]]) -> list[Remark]:
    """Merge remarks that differ only in numbers: status, text, network and measure of each.

    Examples
    --------
    >>> group_remarks([("ok", "4 of 7 places", "a", "r2"), ("ok", "9 of 17 places", "b", "r2")])
    [Remark(status='ok', text='4–9 of 7–17 places', cells=(('a', 'r2'), ('b', 'r2')))]
    """
    grouped: dict[tuple[str, str], list[tuple[str, tuple[str, str]]]] = {}
    for status, text, network, measure in remarks:
        shape = (status, _NUMBER.sub("0", text))
        grouped.setdefault(shape, []).append((text, (network, measure)))
    merged = []
    for (status, _), group in grouped.items():
        texts, cells = zip(*group, strict=True)
        merged.append(Remark(status, _merge_texts(texts), cells))
    return merged


def _merge_texts(texts: Sequence[str]) -> str:
    """Merge texts that differ only in numbers."""
    ranges = []
    for column in zip(*(_NUMBER.findall(text) for text in texts), strict=True):
        ordered = sorted(set(column), key=lambda text: float(text.replace(",", "")))
        ranges.append("–".join(unique((ordered[0], ordered[-1]))))
    each = iter(ranges)
    return _NUMBER.sub(lambda _: next(each), texts[0])


def collect_remarks(rows: Sequence[Row], measures: Measures) -> list[Remark]:
    """Collect the remarks on a leaderboard's cells and the reasons for missing values."""
    entries = ((row.label, name, row.entries[name]) for row in rows for name in measures)
    nouns = {name: info.range_noun for name, info in measures.items()}
    return group_remarks(
        (entry.status, entry.reason.replace(" places", f" {nouns[name]}"), label, name)
        for label, name, entry in entries
        if entry.reason or entry.status != "ok"
    )


def describe_scope(runs: Sequence[NamedRun], scores: Scores, rows: Sequence[Row]) -> str:
    """Summarize the numbers of networks, measures, datasets and samples."""
    network = "checkpoint" if is_training(rows) else "network"
    parts = [count(len(rows), network), count(len(scores.measures), "measure")]
    if len(rows) < len(scores.subjects):
        parts[0] += f" ({len(scores.subjects)} with their seeds)"
    data = unique(s.data for s in scores.subjects if s.data != "given")
    if data:
        parts.append(", ".join(data) if len(data) < 4 else count(len(data), "dataset"))
    subjects = (s for run in runs for s in run.manifest.get("subjects") or [])
    samples = sorted({int(s["samples"]) for s in subjects if s.get("samples") is not None})
    if samples:
        low = "" if len(samples) == 1 else f"{samples[0]:,} to "
        parts.append(f"{low}{count(samples[-1], 'sample')}")
    return ", ".join(parts)


def differences(runs: Sequence[NamedRun]) -> Table | None:
    """Return a table of the settings, versions and devices in which the runs on a page differ."""
    facts: dict[str, dict[str, list[str]]] = {}
    mixed = {"GPU"} if any(len(list_gpus(run.manifest)) > 1 for run in runs) else set()
    for run in runs:
        settings = dict(iter_settings(run.manifest))
        gpus = list_gpus(run.manifest)
        if gpus:
            settings["GPU"] = " and ".join(gpus)
        for name, value in settings.items():
            facts.setdefault(name, {}).setdefault(str(value), []).append(run.name)
    rows = [
        ("" if place else name, value, enumerate_names(names))
        for name, values in facts.items()
        if len(values) > 1 or name in mixed
        for place, (value, names) in enumerate(values.items())
    ]
    return Table(("setting", "value", "runs"), tuple(rows)) if rows else None


def list_gpus(manifest: Mapping[str, Any]) -> list[str]:
    """Return the GPU models used by a run. Their rounding may differ."""
    known = [manifest.get("environment") or {}, *(manifest.get("environments") or [])]
    return unique(str(e["device_name"]) for e in known if e.get("capability"))


def gaps(runs: Sequence[NamedRun], scores: Scores) -> list[Gap]:
    """List the missing values for cells, then those for places."""
    requested = {run.name: set(run.manifest.get("measures") or {}) for run in runs}
    missing = []
    partial = []
    for subject, name, cell in scores.cells():
        is_expected = not subject.run or name in requested.get(subject.run, ())
        if cell.status != "ok" and (cell.status != "absent" or is_expected):
            missing.append(Gap(subject.label, name, "", cell.status, cell.reason))
        grouped: dict[tuple[str, str], list[str]] = {}
        for place in cell.places:
            if place.status != "ok":
                grouped.setdefault((place.status, place.reason), []).append(place.name)
        for (status, reason), places in grouped.items():
            partial.append(Gap(subject.label, name, enumerate_names(places), status, reason))
    return missing + partial


def gap_table(missing: Iterable[Gap]) -> Table:
    """Tabulate missing values, with one row for all subjects that share a gap."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for gap in missing:
        key = (gap.measure, gap.where or "the whole network", gap.status, gap.reason)
        grouped.setdefault(key, []).append(gap.subject)
    rows = [(key[0], enumerate_names(subjects), *key[1:]) for key, subjects in grouped.items()]
    return Table(("measure", "network", "where", "status", "reason"), tuple(rows))
