"""The manifest of a run as readable tables: all that decided a number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layout import NamedRun, Table, TextCell
from .text import settings_text

__all__ = ["ManifestView", "flat", "manifest_view"]

_HASH_SHOWN = 12


@dataclass(frozen=True)
class ManifestView:
    """A run's manifest, ready to be laid out.

    Parameters
    ----------
    name : str
        The run's name.
    facts : tuple of pair of str
        When, how long, on what, by which command.
    subjects, data, measures, probes : Table
    environment : tuple of pair of str
    request : str
        What was asked for, as JSON.
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
    """Put a run's manifest into tables; what it lacks stays blank."""
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
    return Table(tuple(TextCell(text) for text in head), tuple(rows))


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
    """Give the values of tables in tables, each by one name with dots.

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
