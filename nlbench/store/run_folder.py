"""Keep a run's folder while cells come in: records at once, manifest and table now and then."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.files import is_unused, locked, make_folder, remove_parts
from nlbench.plan import PLAN, Cell, Plan, Target, keep_plan
from nlbench.request import Request, write_request
from nlbench.subjects.data import dataset_info
from nlbench.subjects.load import choose_weights

from .manifest import contents, make_manifest, now
from .record import Record, Run, load_run

if TYPE_CHECKING:
    from nlbench.execution.numerics import Machine

__all__ = [
    "FILES",
    "Book",
    "check_alike",
    "check_free",
    "check_unchanged",
    "difference",
    "expected_facts",
    "forget_failures",
    "merge_runs",
    "open_run",
    "remove_run",
]


TABLES_SECONDS = 30.0
"""How often the table is written while cells come in; the records are what counts."""


class Book:
    """The run's folder while cells come in.

    Parameters
    ----------
    run : Run
        What the folder holds.
    request : Request
    plan : Plan
    machine : Machine
    command : str
        The command line.
    began : float
        When, by `time.perf_counter`.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        plan: Plan,
        machine: Machine,
        command: str,
        began: float,
    ) -> None:
        self.run, self.request, self.plan, self.machine = run, request, plan, machine
        self.done = {record.key: record for record in run.records}
        self._began, self._written, self._cost = began, time.perf_counter(), 0.0
        self._call: dict[str, Any] = {
            "started": now(),
            "command": command,
            "request": asdict(request),
        }
        self._calls = [*run.manifest.get("calls", []), self._call]
        self._command = command

    def open(self) -> None:
        """Write what is known before a cell is measured; the manifest comes first."""
        assert self.run.path is not None
        self._arrange(unfinished=True)
        self.run.write_manifest()
        keep_plan(self.run.path, self.request, self.plan)
        write_request(self.run.path / "request.toml", self.request)

    def add(self, record: Record) -> None:
        """Write a record, and the table where it has fallen behind."""
        self.done[record.key] = record
        self.run.write_record(record)
        # A table takes as long as the run has cells: never more than a tenth of the time.
        if time.perf_counter() - self._written > max(TABLES_SECONDS, 10 * self._cost):
            self.write()

    def write(self, *, unfinished: bool = True) -> None:
        """Write the manifest and the table."""
        begin = time.perf_counter()
        self._arrange(unfinished=unfinished)
        self.run.write_tables()
        self._written = time.perf_counter()
        self._cost = self._written - begin

    def close(self) -> None:
        """Write them for the last time."""
        self.write(unfinished=False)

    def _arrange(self, *, unfinished: bool) -> None:
        places = {cell.key: place for place, cell in enumerate(self.plan.cells)}
        self.run.records[:] = sorted(
            self.done.values(), key=lambda r: (places.get(r.key, len(places)), r.identity)
        )
        self._call["seconds"] = round(time.perf_counter() - self._began, 3)
        old = self.run.manifest
        manifest = make_manifest(
            asdict(self.request), self.machine, command=self._command, created=old.get("created")
        )
        self.run.manifest = {
            **manifest,
            **({"unfinished": True} if unfinished else {}),
            **({"merged": old["merged"]} if "merged" in old else {}),
            "seconds": round(sum(call.get("seconds", 0.0) for call in self._calls), 3),
            "calls": self._calls,
            **contents(self.run.records),
        }


FILES = ("manifest.json", "scores.csv", "request.toml", PLAN)
"""What lies in a run's folder beside its cells and pages."""


def check_free(folder: Path) -> bool:
    """Whether a folder holds a run already; else it must be free for one.

    Raises
    ------
    nlbench.RequestError
        If it holds something else.
    """
    try:
        if (folder / "manifest.json").is_file():
            return True
        if folder.exists() and not is_unused(folder):
            raise RequestError(f"{folder} exists and is not a run; choose another --out")
    except OSError as error:
        raise RequestError(f"can't write to {folder}: {error.strerror or error}") from error
    return False


@contextmanager
def open_run(folder: Path, plan: Plan) -> Iterator[Run]:
    """Make a run's folder or take up an old one, and keep other writers out meanwhile.

    Raises
    ------
    nlbench.RequestError
        If it is something else, can't be written, is being written by another process, or
        holds cells that were made in another way.
    """
    if check_free(folder):
        # Refused before anything is touched.
        check_alike(load_run(folder), plan)
    make_folder(folder / "cells")
    with locked(folder):
        for place in (folder, folder / "cells"):
            remove_parts(place)
        # Read again: another process may have finished cells just before.
        result = load_run(folder) if check_free(folder) else Run({}, [], folder)
        check_alike(result, plan)
        yield result


def check_alike(old: Run, plan: Plan) -> None:
    """Refuse to put numbers beside each other that were made in different ways.

    Parameters
    ----------
    old : Run
        What is there.
    plan : Plan
        What is to come.

    Raises
    ------
    nlbench.RequestError
        If they don't go together.

    Notes
    -----
    A board has one column a measure and the manifest one set of options.
    """
    wanted = {cell.key for cell in plan.cells}
    subjects = {cell.identity[:4]: cell.target.key for cell in plan.cells}
    measures = {one.name: (one.version, dict(one.options)) for one in plan.wanted}
    probes = {one.probe: dict(one.settings) for one in plan.wanted}
    for record in old.records:
        if record.key in wanted or not record.is_done:
            continue
        name, probe = record.measure["name"], record.probe["name"]
        # What `evaluate` measured and saved has no key: it answers no request.
        key = record.subject.get("key")
        made = record.measure["version"], dict(record.measure["options"])
        what = ""
        if name in measures and measures[name] != made:
            what = f"{name} with other options or another version"
        elif probe in probes and probes[probe] != dict(record.probe["options"]):
            what = f"{name} through {probe} with other options"
        elif subjects.get(record.identity[:4], key) != key:
            what = (
                f"{name} of another {record.subject['model']} ({record.subject['weights']}): "
                "the weights, samples, split, device or plugin differ"
            )
        if what:
            raise RequestError(f"{old.path} already holds {what}; choose another --out")


def forget_failures(old: Run, cells: Sequence[Cell]) -> None:
    """Remove failed cells that are now asked for in another way."""
    assert old.path is not None
    wanted, named = {cell.key for cell in cells}, {cell.identity for cell in cells}
    for record in list(old.records):
        if not record.is_done and record.key not in wanted and record.identity in named:
            old.records.remove(record)
            (old.path / "cells" / f"{record.key}.json").unlink(missing_ok=True)


def remove_run(folder: Path) -> None:
    """Take back the folder of a run that came to nothing; never one that holds anything else."""
    with contextlib.suppress(OSError):
        # First, since it fails where a worker has written a cell: that one is kept.
        (folder / "cells").rmdir()
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


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
            elif record.is_done and record.result != other[0].result:
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


_DECIDED = ("weights_hash", "sample_hash", "preprocessing")


def check_unchanged(target: Target, planned_at: str) -> None:
    """Refuse a subject whose weights or data aren't those of the plan, from which its key comes.

    Parameters
    ----------
    target : Target
        Just loaded.
    planned_at : str
        The machine that made the plan. Another one may have copies of the data with other
        times; by their content they are compared with `difference` there.

    Raises
    ------
    nlbench.RequestError
        If the files have changed since.
    """
    spec = target.spec
    changed = ""
    if target.weights and choose_weights(spec).identity != target.weights:
        changed = f"{spec.model} with weights {target.label}: the file has"
    fingerprint = dataset_info(registry.load("datasets", spec.data)).fingerprint
    if fingerprint is not None and planned_at == platform.node():
        found = str(fingerprint(**dict(spec.options)))
        changed = changed if found == target.files else f"{spec.data}: its files have"
    if changed:
        raise RequestError(f"{changed} changed since the run was planned; start it again")


def expected_facts(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """What is recorded of each subject that its other cells must find unchanged.

    Returns
    -------
    dict
        From a subject's key to those of its facts.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        key = record.subject.get("key")
        if key and record.is_done:
            facts[key] = {n: record.subject[n] for n in _DECIDED if n in record.subject}
    return facts


def difference(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Say what is no longer as expected of a subject; else nothing.

    Examples
    --------
    >>> facts = {"model": "vgg8", "data": "digits", "sample_hash": "a"}
    >>> difference(facts, {"sample_hash": "a"})
    ''
    >>> difference(facts, {"sample_hash": "b"}).partition(" is no longer")[0]
    'vgg8 on digits: the sample hash'
    """
    for name, value in expected.items():
        if name in facts and facts[name] != value:
            return (
                f"{facts['model']} on {facts['data']}: the {name.replace('_', ' ')} is no longer "
                "that of the cells which the run already holds; choose another --out"
            )
    return ""
