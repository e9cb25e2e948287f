"""A run's manifest as tables for the page and as lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlbench.errors import one_line

from .layout import NamedRun, Table, TextCell
from .text import settings_text

_HASH_SHOWN = 12
_MAX_ROWS = 200


@dataclass(frozen=True)
class ManifestView:
    """A run's manifest as tables.

    Parameters
    ----------
    name : str
        Name of the run.
    facts : tuple of pair of str
        Date, duration, command, version, device and dtype.
    subjects, data, measures, probes : Table
    environment : tuple of pair of str
    request : str
        The request as JSON.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    subjects: Table
    data: Table
    measures: Table
    probes: Table
    environment: tuple[tuple[str, str], ...]
    request: str


def manifest_view(run: NamedRun) -> ManifestView:
    """Convert a run's manifest to tables; missing entries stay blank."""
    manifest: Mapping[str, Any] = run.manifest
    subjects: Sequence[Mapping[str, Any]] = manifest.get("subjects") or []
    measures = (manifest.get("measures") or {}).items()
    probes = (manifest.get("probes") or {}).items()
    return ManifestView(
        name=run.name,
        facts=tuple(_facts(manifest)),
        subjects=_table(
            ("model", "weights", "weights hash", "data", "seed", "parameters"),
            (_subject_row(subject) for subject in subjects),
        ),
        data=_table(
            ("data", "split", "samples", "sample hash", "preprocessing"),
            dict.fromkeys(_data_row(subject) for subject in subjects),
        ),
        measures=_table(
            ("measure", "version", "options"),
            (
                (
                    TextCell(name),
                    _plain(about.get("version")),
                    TextCell(_settings(about.get("options"))),
                )
                for name, about in measures
            ),
        ),
        probes=_table(
            ("probe", "options"),
            ((TextCell(name), TextCell(_settings(options))) for name, options in probes),
        ),
        environment=tuple((n, _words(v)) for n, v in flat(manifest.get("environment") or {})),
        request=json.dumps(
            manifest.get("request") or {}, indent=2, ensure_ascii=False, default=str
        ),
    )


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    seconds = manifest.get("seconds")
    facts = {
        "created": manifest.get("created"),
        "wall time": None if seconds is None else f"{float(seconds):,.1f} s",
        "command": manifest.get("command"),
        "nlbench": manifest.get("nlbench"),
        "device": manifest.get("device"),
        "dtype": manifest.get("dtype"),
    }
    for name, value in facts.items():
        if value not in (None, ""):
            yield name, _words(value)


def _words(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _table(head: Iterable[str], rows: Iterable[tuple[TextCell, ...]]) -> Table:
    heads, cells = tuple(TextCell(text) for text in head), tuple(rows)
    if len(cells) > _MAX_ROWS:
        more = TextCell(f"and {len(cells) - _MAX_ROWS:,} more in manifest.json")
        cells = (*cells[:_MAX_ROWS], (more, *[TextCell("")] * (len(heads) - 1)))
    return Table(heads, cells)


def _subject_row(subject: Mapping[str, Any]) -> tuple[TextCell, ...]:
    parameters = subject.get("parameters")
    return (
        _plain(subject.get("model")),
        _plain(subject.get("weights")),
        _hash(subject.get("weights_hash")),
        _plain(subject.get("data")),
        _plain(subject.get("seed")),
        TextCell("" if parameters is None else f"{int(parameters):,}"),
    )


def _data_row(subject: Mapping[str, Any]) -> tuple[TextCell, ...]:
    samples = subject.get("samples")
    return (
        _plain(subject.get("data")),
        _plain(subject.get("split")),
        TextCell("" if samples is None else f"{int(samples):,}"),
        _hash(subject.get("sample_hash")),
        _plain(subject.get("preprocessing")),
    )


def _plain(value: Any) -> TextCell:
    return TextCell("" if value is None else str(value))


def _hash(value: Any) -> TextCell:
    text = "" if value is None else str(value)
    short = text[:_HASH_SHOWN] + ("…" if len(text) > _HASH_SHOWN else "")
    return TextCell(short, remark=text, status="hash")


def _settings(options: Mapping[str, Any] | None) -> str:
    return settings_text(options or {}) or "none"


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings: yield each value under its dotted name.

    Examples
    --------
    >>> list(flat({"torch": {"version": "2.8"}, "cores": 2}))
    [('torch.version', '2.8'), ('cores', 2)]
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings_of(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the version, device and options of a run by name."""
    for key in ("nlbench", "device", "dtype"):
        yield key, manifest.get(key, "")
    for name, options in (manifest.get("probes") or {}).items():
        yield from flat(options or {}, f"probe {name}.")
    for name, about in (manifest.get("measures") or {}).items():
        yield f"{name}.version", about.get("version", "")
        yield from flat(about.get("options") or {}, f"{name}.")


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Format a run's manifest, one entry per line.

    Parameters
    ----------
    manifest : mapping
        `nlbench.Run.manifest`.

    Examples
    --------
    >>> print(manifest_text({"created": "2026-01-01", "cells": {"ok": 2, "failed": 1}}))
    created      2026-01-01
    cells        2 ok, 1 failed
    """
    return "\n".join(f"{one_line(n):<12} {one_line(t, 10_000)}" for n, t in _lines(manifest))


def _lines(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("created", "command", "seconds", "device", "dtype"):
        if manifest.get(name) not in (None, ""):
            yield name, str(manifest[name])
    if "cells" in manifest:
        counts = ", ".join(f"{n} {status}" for status, n in manifest["cells"].items())
        yield "cells", counts or "none"
    if manifest.get("unfinished"):
        yield "unfinished", "interrupted, or still running"
    if "merged" in manifest:
        yield "merged", ", ".join(map(str, manifest["merged"].get("from", [])))
    yield from _pairs("request", manifest.get("request", {}))
    yield from _environment_lines(manifest.get("environment", {}))
    for other in manifest.get("environments", [])[1:]:
        yield "also", ", ".join(text for _, text in _environment_lines(other))
    for name, measure in manifest.get("measures", {}).items():
        yield "measure", f"{name} {measure.get('version', '')} {_settings_of(measure)}".rstrip()
    for name, options in manifest.get("probes", {}).items():
        yield "probe", f"{name} {_settings_of({'options': options})}".rstrip()
    for subject in manifest.get("subjects", []):
        yield "subject", _subject_line(subject)
    for call in manifest.get("calls", []):
        yield "call", f"{call.get('started', '')} {call.get('seconds', 0)} s {call['command']}"


def _pairs(title: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if value not in ({}, [], "", None):
            yield title, f"{key} {_in_words(value)}"


def _environment_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            text = ", ".join(
                f"{name} {_in_words(entry)}" for name, entry in value.items() if entry is not None
            )
            if text:
                yield key, text
        elif value is not None:
            yield key, _in_words(value)


def _in_words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    return str(value)


def _settings_of(measure: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in measure.get("options", {}).items())


def _subject_line(subject: Mapping[str, Any]) -> str:
    title = f"{subject['model']} ({subject['weights']}) on {subject['data']}"
    facts = [f"seed {subject['seed']}"]
    for key, value in subject.items():
        if key in ("model", "weights", "data", "seed", "key") or value in (None, {}, ""):
            continue
        text = _in_words(value)
        facts.append(f"{key} {text[:12] if key.endswith('_hash') else text}")
    return f"{title}: {', '.join(facts)}"
