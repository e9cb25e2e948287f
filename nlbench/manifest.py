"""The manifest: what was asked for, on which machine, with which versions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nlbench.measure import Measure
from nlbench.options import OptionValue
from nlbench.records import Record

if TYPE_CHECKING:
    from nlbench.environment import Machine

__all__ = ["contents", "make_manifest", "measure_facts", "now"]


def measure_facts(measure: type[Measure], options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """What a record says of a measure."""
    return {
        "name": measure.name,
        "description": (measure.__doc__ or "").strip().partition("\n")[0],
        "probe": measure.probe,
        "bounds": [bound if math.isfinite(bound) else None for bound in measure.bounds],
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
    statuses = [record.reading.status for record in records]
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
