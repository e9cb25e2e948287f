"""The manifest: what was asked for, on which machine, with which versions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nlbench.measure import Measure
from nlbench.options import OptionValue

from .record import Record

if TYPE_CHECKING:
    from nlbench.execution.numerics import Machine

__all__ = ["contents", "make_manifest", "manifest_text", "measure_facts", "now"]


def measure_facts(measure: type[Measure], options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """What a record says of a measure."""
    return {
        "name": measure.name,
        "description": (measure.__doc__ or "").strip().partition("\n")[0],
        "probe": measure.probe,
        "bounds": [bound if math.isfinite(bound) else None for bound in measure.bounds_of(options)],
        "more_means": measure.more_means,
        "version": measure.version,
        "options": dict(options),
        "source": asdict(measure.source),
    }


def make_manifest(
    request: Mapping[str, Any],
    machine: Machine,
    *,
    command: str = "",
    created: str | None = None,
) -> dict[str, Any]:
    """What is known before a cell is measured; `contents` adds what the records tell."""
    return {
        "nlbench": machine.environment["packages"]["nlbench"],
        "created": created or now(),
        "command": command,
        "request": dict(request),
        "environment": dict(machine.environment),
        "device": str(machine.device),
        "seconds": 0.0,
    }


def contents(records: Sequence[Record]) -> dict[str, Any]:
    """What the manifest says of the records: subjects, measures, probes, counts by status.

    ``environments`` lists all that cells were measured in, where a run was extended elsewhere
    or with other versions.
    """
    subjects = _distinct(record.subject for record in records)
    environments = _distinct(record.machine["environment"] for record in records)
    statuses = [record.result.status for record in records]
    return {
        "order": [record.key for record in records],
        "dtype": ", ".join(dict.fromkeys(str(r.machine["dtype"]) for r in records)),
        "subjects": subjects,
        "measures": {r.measure["name"]: dict(r.measure) for r in records},
        "probes": {r.probe["name"]: dict(r.probe["options"]) for r in records},
        **({"environments": environments} if len(environments) > 1 else {}),
        "cells": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
    }


def _distinct(facts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those that differ, in the order of their first appearance."""
    return list({json.dumps(dict(f), sort_keys=True): dict(f) for f in facts}.values())


def now() -> str:
    """Time of day, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Say what decided a run's numbers, line by line.

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
    return "\n".join(f"{name:<12} {text}" for name, text in _lines(manifest))


def _lines(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("created", "command", "seconds", "device", "dtype"):
        if manifest.get(name) not in (None, ""):
            yield name, str(manifest[name])
    if "cells" in manifest:
        counts = ", ".join(f"{n} {status}" for status, n in manifest["cells"].items())
        yield "cells", counts or "none"
    if manifest.get("unfinished"):
        yield "unfinished", "it was interrupted, or is being written"
    if "merged" in manifest:
        yield "merged", ", ".join(manifest["merged"]["from"])
    yield from _pairs("request", manifest.get("request", {}))
    yield from _environment(manifest.get("environment", {}))
    for other in manifest.get("environments", [])[1:]:
        yield "also", ", ".join(text for _, text in _environment(other))
    for name, measure in manifest.get("measures", {}).items():
        yield "measure", f"{name} {measure.get('version', '')} {_options(measure)}".rstrip()
    for name, options in manifest.get("probes", {}).items():
        yield "probe", f"{name} {_options({'options': options})}".rstrip()
    for subject in manifest.get("subjects", []):
        yield "subject", _subject(subject)
    for call in manifest.get("calls", []):
        yield "call", f"{call.get('started', '')} {call.get('seconds', 0)} s {call['command']}"


def _pairs(title: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if value not in ({}, [], "", None):
            yield title, f"{key} {_plain(value)}"


def _environment(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            pairs = (f"{name} {_plain(one)}" for name, one in value.items() if one is not None)
            text = ", ".join(pairs)
            if text:
                yield key, text
        elif value is not None:
            yield key, _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return str(value)


def _options(measure: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in measure.get("options", {}).items())


def _subject(subject: Mapping[str, Any]) -> str:
    title = f"{subject['model']} ({subject['weights']}) on {subject['data']}"
    facts = [f"seed {subject['seed']}"]
    for key, value in subject.items():
        if key in ("model", "weights", "data", "seed", "key") or value in (None, {}, ""):
            continue
        text = _plain(value)
        facts.append(f"{key} {text[:12] if key.endswith('_hash') else text}")
    return f"{title}: {', '.join(facts)}"
