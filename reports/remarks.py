"""What a page says beside the numbers: what was measured, what is missing, what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layout import NamedRun
from .leaderboard import Row, Standing, sort_measure
from .tables import Scores, Series
from .text import count, settings_text

__all__ = [
    "Gap",
    "differences",
    "gaps",
    "gpus_of",
    "summary_sentence",
    "unfinished",
    "what_was_measured",
]

_SHOWN_PLACES = 6


@dataclass(frozen=True)
class Gap:
    """Something that has no number, and why."""

    subject: str
    measure: str
    where: str
    status: str
    reason: str


def what_was_measured(runs: Sequence[NamedRun], scores: Scores, rows: Sequence[Row]) -> str:
    """Say in a few words what was measured, and on what."""
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


def summary_sentence(
    scores: Scores,
    measures: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Row],
    missing: Sequence[Gap],
) -> str:
    """Say which network is the most nonlinear, how sure that is, and what is missing."""
    said = []
    first = sort_measure(measures, scores.measures)
    ranked = [row for row in rows if first and row.entries[first].rank is not None]
    if len(ranked) > 1 and first:
        top, last = ranked[0], ranked[-1]
        said.append(f"Most nonlinear by {first}: {top.label}{_sure(top.entries[first])}.")
        said.append(f"Least: {last.label}{_sure(last.entries[first])}.")
    cells = [scores[subject.label, name] for subject in scores.subjects for name in scores.measures]
    ok = sum(cell.status == "ok" for cell in cells)
    total = ok + sum(not gap.where for gap in missing)
    verb = "has" if total == 1 else "have"
    rest = "" if ok == total else f"; {total - ok} {'says' if total - ok == 1 else 'say'} why not"
    whole = {(gap.subject, gap.measure) for gap in missing if not gap.where}
    partly = len({(gap.subject, gap.measure) for gap in missing if gap.where} - whole)
    some = f"; {partly} {'has' if partly == 1 else 'have'} none at some places" if partly else ""
    said.append(f"{ok} of {count(total, 'cell')} {verb} a value{some}{rest}.")
    return " ".join(said)


def _sure(entry: Standing) -> str:
    if entry.best == entry.worst:
        return f" (rank {entry.best})"
    return f" (rank {entry.best} to {entry.worst})"


def _subjects(run: NamedRun) -> list[Mapping[str, Any]]:
    return list(run.manifest.get("subjects") or [])


def unfinished(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """Name the runs that lack cells they were to have, with the command that goes on."""
    return [
        (run.name, str(run.manifest.get("command") or ""))
        for run in runs
        if run.manifest.get("unfinished")
    ]


def differences(runs: Sequence[NamedRun]) -> list[str]:
    """Say where runs that share a page were made differently, or one on several GPU models."""
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
            said = f"version {about.get('version')}"
            options = settings_text(about.get("options") or {})
            facts.setdefault(name, {})[run.name] = f"{said}, {options}" if options else said
        for name, options in (manifest.get("probes") or {}).items():
            facts.setdefault(f"probe {name}", {})[run.name] = settings_text(options or {})
    return [
        f"{what}: " + "; ".join(f"{text} in {run}" for run, text in said.items())
        for what, said in facts.items()
        if len(set(said.values())) > 1 or what in mixed
    ]


def gpus_of(manifest: Mapping[str, Any]) -> list[str]:
    """Name the models of GPU that a run was measured on: each rounds in its own way."""
    known = [manifest.get("environment") or {}, *(manifest.get("environments") or [])]
    return list(dict.fromkeys(str(one["device_name"]) for one in known if one.get("capability")))


def gaps(runs: Sequence[NamedRun], scores: Scores) -> list[Gap]:
    """List all that has no number: cells first, then places of cells that have one."""
    asked = {run.name: set(run.manifest.get("measures") or {}) for run in runs}
    cells = [
        (subject, name, scores[subject.label, name])
        for subject in scores.subjects
        for name in scores.measures
    ]
    found = [
        Gap(subject.label, name, "", cell.status, cell.reason)
        for subject, name, cell in cells
        if cell.status != "ok"
        and (cell.status != "absent" or not subject.run or name in asked.get(subject.run, ()))
    ]
    for subject, name, cell in cells:
        found += _place_gaps(Series(subject.label, cell.places), name)
    return found


def _place_gaps(one: Series, measure: str) -> list[Gap]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for place in one.places:
        if place.status != "ok":
            grouped.setdefault((place.status, place.reason), []).append(place.name)
    return [Gap(one.label, measure, _enumerated(places), *why) for why, places in grouped.items()]


def _enumerated(places: Sequence[str]) -> str:
    shown = ", ".join(places[:_SHOWN_PLACES])
    more = len(places) - _SHOWN_PLACES
    return f"{shown} and {more} more" if more > 0 else shown
