"""The manifest: what was asked for, on which machine, with which versions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from nlbench.environment import describe_environment
from nlbench.measure import Measure
from nlbench.options import OptionValue
from nlbench.records import Record

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
    device: torch.device,
    *,
    command: str = "",
    created: str | None = None,
) -> dict[str, Any]:
    """What is known before a cell is measured; `contents` adds what the records tell."""
    environment = describe_environment(device)
    return {
        "nlbench": environment["packages"]["nlbench"],
        "created": created or now(),
        "command": command,
        "request": dict(request),
        "environment": environment,
        "device": str(device),
        "seconds": 0.0,
    }


def contents(records: Sequence[Record]) -> dict[str, Any]:
    """What the manifest says of the records: subjects, measures, probes, counts by status."""
    subjects = {json.dumps(dict(r.subject), sort_keys=True): dict(r.subject) for r in records}
    statuses = [record.reading.status for record in records]
    return {
        "order": [record.key for record in records],
        "dtype": ", ".join(dict.fromkeys(str(r.machine["dtype"]) for r in records)),
        "subjects": list(subjects.values()),
        "measures": {r.measure["name"]: dict(r.measure) for r in records},
        "probes": {r.probe["name"]: dict(r.probe["options"]) for r in records},
        "cells": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
    }


def now() -> str:
    """Time of day, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
