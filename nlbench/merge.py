"""Put the cells of several runs into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError
from nlbench.manifest import contents, now
from nlbench.records import Record, Run, load_run

__all__ = ["merge_runs"]


def merge_runs(runs: Sequence[str | Path], out: str | Path) -> Run:
    """Put the cells of several runs into one, in a folder of its own.

    A cell that is in several is taken once; a failed one gives way to one that isn't.

    Parameters
    ----------
    runs : sequence of path
        Folders of runs; they are left as they are.
    out : path
        A folder that doesn't exist yet or is empty.

    Returns
    -------
    Run

    Raises
    ------
    nlbench.RequestError
        If a folder isn't a run, or two runs don't go together: another number for the same
        cell, a measure with other options, a subject of other weights or samples.
    """
    loaded = [load_run(path) for path in runs]
    if not loaded:
        raise RequestError("merge: expected at least one run")
    records: dict[str, tuple[Record, Run]] = {}
    for run in loaded:
        for record in run.records:
            other = records.get(record.key)
            if other is None or (record.is_done and not other[0].is_done):
                records[record.key] = record, run
            elif record.is_done and record.reading != other[0].reading:
                raise RequestError(
                    f"{other[1].path} and {run.path} have different readings of "
                    f"{_name(record)}, for the same key"
                )
    _check_alike(records)
    named = {r.identity for r, _ in records.values() if r.is_done}
    kept = [r for r, _ in records.values() if r.is_done or r.identity not in named]
    first = loaded[0].manifest
    manifest: dict[str, Any] = {
        **first,
        "merged": {"from": [str(path) for path in runs], "at": now()},
        "calls": [call for run in loaded for call in run.manifest.get("calls", [])],
        "seconds": round(sum(float(run.manifest.get("seconds", 0)) for run in loaded), 3),
    }
    manifest.pop("unfinished", None)
    manifest.pop("environments", None)
    result = Run({**manifest, **contents(kept)}, kept)
    result.save(out)
    return result


def _check_alike(records: Mapping[str, tuple[Record, Run]]) -> None:
    """Refuse cells that would stand in one column or row and were made in different ways."""
    made: dict[object, tuple[object, Run]] = {}
    for record, run in records.values():
        if not record.is_done:
            continue
        name, probe = record.measure["name"], record.probe
        for what, key, value in (
            (name, name, (record.measure["version"], record.measure["options"])),
            (f"the probe {probe['name']}", f"probe {probe['name']}", probe["options"]),
            (
                f"{record.subject['model']} ({record.subject['weights']})",
                record.identity[:4],
                record.subject.get("key"),
            ),
        ):
            there, whose = made.setdefault(key, (value, run))
            if there != value:
                raise RequestError(
                    f"{whose.path} and {run.path} don't go together: {what} differs in options, "
                    "version, weights, samples or device"
                )


def _name(record: Record) -> str:
    model, weights, data, seed, measure = record.identity
    return f"{measure} of {model} ({weights}) on {data}, seed {seed}"
