"""Sentences and lists around the leaderboard: coverage, missing values, differing settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layout import NamedRun
from .leaderboard import Row
from .tables import Scores, Series
from .text import count, settings_text

__all__ = [
    "Gap",
    "differences",
    "gaps",
    "gpus_of",
    "group_gaps",
    "summary_sentence",
    "unfinished",
    "what_was_measured",
]

_MAX_NAMES_SHOWN = 6


@dataclass(frozen=True)
class Gap:
    """A missing value and its reason."""

    subject: str
    measure: str
    where: str
    status: str
    reason: str


def what_was_measured(runs: Sequence[NamedRun], scores: Scores, rows: Sequence[Row]) -> str:
    """Summarize the numbers of networks, measures, datasets and samples."""
    parts = [count(len(rows), "network"), count(len(scores.measures), "measure")]
    if len(rows) < len(scores.subjects):
        parts[0] += f" ({len(scores.subjects)} with their seeds)"
    data = list(dict.fromkeys(subject.data for subject in scores.subjects))
    if data:
        parts.append(", ".join(data) if len(data) < 4 else count(len(data), "dataset"))
    samples = sorted(
        {int(s["samples"]) for run in runs for s in _subjects(run) if s.get("samples") is not None}
    )
    if samples:
        least = "" if len(samples) == 1 else f"{samples[0]:,} to "
        parts.append(f"{least}{count(samples[-1], 'sample')}")
    return ", ".join(parts)


def summary_sentence(scores: Scores, missing: Sequence[Gap]) -> str:
    """Count the cells with a value and those without."""
    cells = [scores[subject.label, name] for subject in scores.subjects for name in scores.measures]
    ok = sum(cell.status == "ok" for cell in cells)
    total = ok + sum(not gap.where for gap in missing)
    verb = "has" if total == 1 else "have"
    rest = "" if ok == total else f"; {total - ok} {'has' if total - ok == 1 else 'have'} a reason"
    whole = {(gap.subject, gap.measure) for gap in missing if not gap.where}
    partly = len({(gap.subject, gap.measure) for gap in missing if gap.where} - whole)
    some = f"; {partly} {'lacks' if partly == 1 else 'lack'} some places" if partly else ""
    return f"{ok} of {count(total, 'cell')} {verb} a value{some}{rest}."


def _subjects(run: NamedRun) -> list[Mapping[str, Any]]:
    return list(run.manifest.get("subjects") or [])


def unfinished(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """Return the unfinished runs with the command that resumes each."""
    return [
        (run.name, str(run.manifest.get("command") or ""))
        for run in runs
        if run.manifest.get("unfinished")
    ]


def differences(runs: Sequence[NamedRun]) -> list[str]:
    """List the settings, versions and devices in which the runs of a page differ."""
    facts: dict[str, dict[str, str]] = {}
    mixed = {"GPU"} if any(len(gpus_of(run.manifest)) > 1 for run in runs) else set()
    for run in runs:
        manifest = run.manifest
        for key in ("nlbench", "device", "dtype"):
            facts.setdefault(key, {})[run.name] = str(manifest.get(key, "unknown"))
        gpus = gpus_of(manifest)
        if gpus:
            facts.setdefault("GPU", {})[run.name] = " and ".join(gpus)
        for name, about in (manifest.get("measures") or {}).items():
            version = f"version {about.get('version')}"
            options = settings_text(about.get("options") or {})
            facts.setdefault(name, {})[run.name] = f"{version}, {options}" if options else version
        for name, options in (manifest.get("probes") or {}).items():
            facts.setdefault(f"probe {name}", {})[run.name] = settings_text(options or {})
    return [
        f"{name}: " + "; ".join(f"{text} in {run}" for run, text in texts.items())
        for name, texts in facts.items()
        if len(set(texts.values())) > 1 or name in mixed
    ]


def gpus_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the GPU models that a run used; their rounding differs."""
    known = [manifest.get("environment") or {}, *(manifest.get("environments") or [])]
    return list(dict.fromkeys(str(e["device_name"]) for e in known if e.get("capability")))


def gaps(runs: Sequence[NamedRun], scores: Scores) -> list[Gap]:
    """List missing values: of cells first, then of places."""
    requested = {run.name: set(run.manifest.get("measures") or {}) for run in runs}
    cells = [
        (subject, name, scores[subject.label, name])
        for subject in scores.subjects
        for name in scores.measures
    ]
    missing = [
        Gap(subject.label, name, "", cell.status, cell.reason)
        for subject, name, cell in cells
        if cell.status != "ok"
        and (cell.status != "absent" or not subject.run or name in requested.get(subject.run, ()))
    ]
    for subject, name, cell in cells:
        missing += _place_gaps(Series(subject.label, cell.places), name)
    return missing


def group_gaps(missing: Iterable[Gap]) -> list[Gap]:
    """Merge gaps that differ only in their subject: its field then lists the subjects."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for gap in missing:
        key = (gap.measure, gap.where, gap.status, gap.reason)
        grouped.setdefault(key, []).append(gap.subject)
    return [Gap(_enumerated(subjects), *key) for key, subjects in grouped.items()]


def _place_gaps(series: Series, measure: str) -> list[Gap]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for place in series.places:
        if place.status != "ok":
            grouped.setdefault((place.status, place.reason), []).append(place.name)
    return [
        Gap(series.label, measure, _enumerated(places), status, reason)
        for (status, reason), places in grouped.items()
    ]


def _enumerated(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
