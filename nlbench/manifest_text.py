"""The manifest as lines that a person reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["manifest_text"]


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
