"""What a page says beside the numbers: what was measured, what is missing, what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .board import missing_cells
from .layout import NamedRun
from .tables import Series, per_place
from .text import count, settings_text

__all__ = ["Gap", "differences", "gaps", "summary_sentence", "unfinished"]

_SHOWN_PLACES = 6


@dataclass(frozen=True)
class Gap:
    """Something that has no number, and why."""

    subject: str
    measure: str
    where: str
    status: str
    reason: str


def summary_sentence(runs: Sequence[NamedRun], frame: pd.DataFrame, missing: Sequence[Gap]) -> str:
    """Say in one sentence what was measured."""
    names = list(frame.columns.unique("measure"))
    samples = sorted(
        {int(s["samples"]) for run in runs for s in _subjects(run) if s.get("samples") is not None}
    )
    sentence = f"{count(len(frame), 'subject')} and {count(len(names), 'measure')}"
    if samples:
        least = "" if len(samples) == 1 else f"{samples[0]:,} to "
        sentence += f", on {least}{count(samples[-1], 'sample')} each"
    ok = sum(int((frame[name, "status"] == "ok").sum()) for name in names)
    cells = ok + sum(not gap.where for gap in missing)
    return f"{sentence}: {ok} of {count(cells, 'cell')} {'has' if cells == 1 else 'have'} a value."


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
    """Say where runs that share a page were made differently."""
    facts: dict[str, dict[str, str]] = {}
    for run in runs:
        manifest = run.manifest
        for key in ("nlbench", "device", "dtype"):
            facts.setdefault(key, {})[run.name] = str(manifest.get(key, "unknown"))
        for name, about in (manifest.get("measures") or {}).items():
            said = f"version {about.get('version')}"
            options = settings_text(about.get("options") or {})
            facts.setdefault(name, {})[run.name] = f"{said}, {options}" if options else said
        for name, options in (manifest.get("probes") or {}).items():
            facts.setdefault(f"probe {name}", {})[run.name] = settings_text(options or {})
    return [
        f"{what}: " + "; ".join(f"{text} in {run}" for run, text in said.items())
        for what, said in facts.items()
        if len(set(said.values())) > 1
    ]


def gaps(runs: Sequence[NamedRun], scores: pd.DataFrame, frame: pd.DataFrame) -> list[Gap]:
    """List all that has no number: cells first, then places of cells that have one."""
    asked = {run.name: set(run.manifest.get("measures") or {}) for run in runs}
    found = [
        Gap(cell.subject, cell.measure, "", cell.status, cell.reason)
        for cell in missing_cells(frame)
        if cell.status != "absent" or not cell.run or cell.measure in asked.get(cell.run, ())
    ]
    for name in frame.columns.unique("measure"):
        for one in per_place(scores, name):
            found += _place_gaps(one, name)
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
