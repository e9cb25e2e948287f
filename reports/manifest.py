"""Formatting of a run's manifest as lines of text, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nlbench.errors import one_line

from .text import settings_text


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings: yield each value with its dotted name.

    Examples
    --------
    >>> list(flatten({"torch": {"version": "2.8"}, "cores": 2}))
    [('torch.version', '2.8'), ('cores', 2)]
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def iter_settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a run's version, device and options."""
    for key in ("nlbench", "device", "dtype"):
        yield key, manifest.get(key, "")
    for name, options in (manifest.get("probes") or {}).items():
        yield from flatten(options or {}, f"probe {name}.")
    for name, measure in (manifest.get("measures") or {}).items():
        yield f"{name}.version", measure.get("version", "")
        yield from flatten(measure.get("options") or {}, f"{name}.")


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Format a run's manifest, one entry per line.

    Examples
    --------
    >>> print(manifest_text({"created": "2026-01-01", "cells": {"ok": 2, "failed": 1}}))
    created      2026-01-01
    cells        2 ok, 1 failed
    """
    lines = manifest_lines(manifest)
    return "\n".join(f"{one_line(name):<12} {one_line(text, 10_000)}" for name, text in lines)


def manifest_lines(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text for each manifest entry."""
    for name in ("created", "command", "seconds", "nlbench", "device", "dtype"):
        if manifest.get(name) not in (None, ""):
            yield name, str(manifest[name])
    if "cells" in manifest:
        counts = ", ".join(f"{n} {status}" for status, n in manifest["cells"].items())
        yield "cells", counts or "none"
    if manifest.get("unfinished"):
        yield "unfinished", "interrupted or still running"
    if "merged" in manifest:
        yield "merged", ", ".join(map(str, manifest["merged"].get("from", [])))
    for change in manifest.get("superseded", ()):
        yield "superseded", change
    for key, value in manifest.get("request", {}).items():
        if value not in ({}, [], "", None):
            yield "request", f"{key} {_value_text(value)}"
    yield from _environment_lines(manifest.get("environment", {}))
    for other in manifest.get("environments", [])[1:]:
        yield "environment", ", ".join(text for _, text in _environment_lines(other))
    for name, measure in (manifest.get("measures") or {}).items():
        options = settings_text(measure.get("options") or {})
        yield "measure", f"{name} {measure.get('version', '')} {options}".rstrip()
    for name, options in manifest.get("probes", {}).items():
        yield "probe", f"{name} {settings_text(options or {})}".rstrip()
    for subject in manifest.get("subjects", []):
        yield "subject", _subject_line(subject)
    for call in manifest.get("calls", []):
        yield "call", f"{call.get('started', '')} {call.get('seconds', 0)} s {call['command']}"


def _environment_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            text = ", ".join(
                f"{name} {_value_text(entry)}" for name, entry in value.items() if entry is not None
            )
            if text:
                yield key, text
        elif value is not None:
            yield key, _value_text(value)


def _value_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    return str(value)


def _subject_line(subject: Mapping[str, Any]) -> str:
    model, weights, data, seed = (
        subject.get(key, "") for key in ("model", "weights", "data", "seed")
    )
    title = f"{model} ({weights}) on {data}"
    facts = [f"seed {seed}"]
    for key, value in subject.items():
        if key in ("model", "weights", "data", "seed", "key") or value in (None, {}, ""):
            continue
        text = _value_text(value)
        facts.append(f"{key} {text[:12] if key.endswith('_hash') else text}")
    return f"{title}: {', '.join(facts)}"
