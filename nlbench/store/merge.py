"""Merge several runs into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nlbench.errors import RequestError

from .consistency import changed_keys, decisions_of, difference_text
from .manifest import Manifest, now
from .record import Record
from .run import Run, load_run


def merge_runs(runs: Sequence[str | Path], out: str | Path) -> Run:
    """Merge the cells of several runs into a new or empty folder, leaving the runs unchanged.

    If several runs contain a cell, one record is kept, and finished records take precedence.

    Raises
    ------
    nlbench.RequestError
        If a folder isn't a run, or two runs disagree: different values for the same cell,
        different options for a measure, or different weights or samples for a subject.
    """
    loaded = [load_run(path) for path in runs]
    if not loaded:
        raise RequestError("merge: expected at least one run")
    records: dict[str, Record] = {}
    origins: dict[str, Run] = {}
    for run in loaded:
        for record in run.records:
            other = records.get(record.key)
            if other is None or (record.is_done and not other.is_done):
                records[record.key], origins[record.key] = record, run
            elif record.is_done and record.result != other.result:
                model, weights, data, seed, measure = record.identity
                raise RequestError(
                    f"{origins[record.key].path} and {run.path} have different results for the "
                    f"same key: {measure} of {model} ({weights}) on {data}, seed {seed}"
                )
    finished = [record for record in records.values() if record.is_done]
    _check_consistent(finished, origins)
    identities = {record.identity for record in finished}
    selected = [r for r in records.values() if r.is_done or r.identity not in identities]
    manifests = [Manifest.from_dict(run.manifest) for run in loaded]
    manifest = replace(
        manifests[0],
        merged={"from": [str(path) for path in runs], "at": now()},
        calls=tuple(call for manifest in manifests for call in manifest.calls),
        seconds=round(sum(manifest.seconds for manifest in manifests), 3),
        unfinished=False,
    )
    merged = Run(manifest.of_records(selected), selected)
    merged.save(out)
    return merged


def _check_consistent(records: Sequence[Record], origins: dict[str, Run]) -> None:
    decisions: dict[tuple[object, ...], object] = {}
    first_runs: dict[tuple[object, ...], Run] = {}
    for record in records:
        run, record_decisions = origins[record.key], decisions_of(record)
        for key in changed_keys(record_decisions, decisions):
            raise RequestError(
                f"{first_runs[key].path} and {run.path} can't be merged: "
                f"{difference_text(record, key)}"
            )
        decisions |= record_decisions
        first_runs |= {key: run for key in record_decisions if key not in first_runs}
