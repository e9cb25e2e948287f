"""From a request to records: look at each subject once, record each cell."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from nlbench.environment import Machine, exact_arithmetic, resolve_device
from nlbench.errors import NlbenchError, RequestError
from nlbench.files import is_unused, make_folder
from nlbench.looking import look, steps_of
from nlbench.manifest import contents, make_manifest, measure_facts, now
from nlbench.measure import Measure, Reading
from nlbench.passes import Means
from nlbench.plan import Bench, Cell, Request, load_measures, make_bench, plan_cells
from nlbench.records import Record, Run, load_run
from nlbench.subject import Subject, load_subject

__all__ = ["Progress", "Silent", "records_of", "run"]


class Progress(Protocol):
    """Told how a run goes on."""

    def begin(self, steps: int) -> None:
        """Get ready for that many steps."""

    def step(self, what: str) -> None:
        """Count one step."""

    def warn(self, message: str) -> None:
        """Say something that the user should know."""


class Silent:
    """Progress that nobody wants to see."""

    def begin(self, steps: int) -> None:
        """Do nothing."""

    def step(self, what: str) -> None:
        """Do nothing."""

    def warn(self, message: str) -> None:
        """Do nothing."""


def run(
    request: Request,
    out: str | Path,
    *,
    progress: Progress | None = None,
    command: str = "",
) -> Run:
    """Measure subjects, one record a cell, in a run's folder.

    Cells that the folder already holds are not measured again, failed ones excepted. Each
    record is on the disk as soon as it exists.

    Parameters
    ----------
    request : Request
    out : path
        The run's folder; it is made, or extended if it is one already.
    progress : Progress, optional
    command : str
        The command line, for the manifest.

    Returns
    -------
    Run
        All that the folder holds.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If the request can't be carried out as a whole. What concerns one cell only is a
        ``failed`` reading.
    """
    progress = progress or Silent()
    began = time.perf_counter()
    bench = make_bench(load_measures(request.measures, progress.warn), request.settings)
    machine = Machine.at(resolve_device(request.device))
    plan = plan_cells(request, bench, machine.device)
    is_new = not os.path.lexists(out)
    result = _open(Path(out), [cell for cells in plan.values() for cell in cells], bench)
    done = {record.key: record for record in result.records}
    todo = [
        [cell for cell in cells if cell.key not in done or not done[cell.key].is_done]
        for cells in plan.values()
    ]
    order = [cell.key for cells in plan.values() for cell in cells]
    manifest = make_manifest(
        asdict(request), machine, command=command, created=result.manifest.get("created")
    )
    progress.begin(sum(_steps(cells, bench, request) for cells in todo))

    call: dict[str, Any] = {"started": now(), "command": command, "request": asdict(request)}
    calls = [*result.manifest.get("calls", []), call]

    def write_tables() -> None:
        places = {key: place for place, key in enumerate(order)}
        result.records = sorted(
            done.values(), key=lambda r: (places.get(r.key, len(order)), r.identity)
        )
        call["seconds"] = round(time.perf_counter() - began, 3)
        result.manifest = {
            **manifest,
            "seconds": round(sum(one["seconds"] for one in calls), 3),
            "calls": calls,
            **contents(result.records),
        }
        result.write_tables()

    write_tables()
    try:
        with exact_arithmetic():
            for cells in filter(None, todo):
                for record in _measure(cells, bench, machine, progress, alone=len(plan) == 1):
                    done[record.key] = record
                    result.write_record(record)
                write_tables()
    except KeyboardInterrupt:
        write_tables()
        raise
    except NlbenchError:
        if is_new and not done:
            _remove(Path(out))
        raise
    write_tables()
    return result


def _remove(folder: Path) -> None:
    """Take back the folder of a run that came to nothing; never one that holds anything else."""
    with contextlib.suppress(OSError):
        for name in ("manifest.json", "scores.csv"):
            (folder / name).unlink(missing_ok=True)
        (folder / "cells").rmdir()
        folder.rmdir()


def _open(folder: Path, cells: Sequence[Cell], bench: Bench) -> Run:
    """Make a run's folder or take up an old one, if what it holds goes with what is asked."""
    result = Run({}, [], folder)
    try:
        if (folder / "manifest.json").is_file():
            result = load_run(folder)
            _check_alike(result, cells, bench)
            _forget_failures(result, cells)
        elif folder.exists() and not is_unused(folder):
            raise RequestError(f"{folder} exists and is not a run; choose another --out")
    except OSError as error:
        raise RequestError(f"can't write to {folder}: {error.strerror or error}") from error
    make_folder(folder / "cells")
    return result


def _check_alike(old: Run, cells: Sequence[Cell], bench: Bench) -> None:
    """Refuse to put numbers beside each other that were made in different ways.

    A board has one column a measure and the manifest one set of options.
    """
    wanted = {cell.key for cell in cells}
    subjects = {cell.identity[:4]: cell.subject_key for cell in cells}
    measures = {m.name: (m.version, dict(options)) for m, options in bench.measures}
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
        elif probe in bench.probes and dict(bench.probes[probe]) != dict(record.probe["options"]):
            what = f"{name} through {probe} with other options"
        elif subjects.get(record.identity[:4], key) != key:
            what = (
                f"{name} of another {record.subject['model']} ({record.subject['weights']}): "
                "the weights, samples, split, device or plugin differ"
            )
        if what:
            raise RequestError(f"{old.path} already holds {what}; choose another --out")


def _forget_failures(old: Run, cells: Sequence[Cell]) -> None:
    """Remove failed cells that are now asked for in another way."""
    assert old.path is not None
    wanted, named = {cell.key for cell in cells}, {cell.identity for cell in cells}
    for record in list(old.records):
        if not record.is_done and record.key not in wanted and record.identity in named:
            old.records.remove(record)
            (old.path / "cells" / f"{record.key}.json").unlink(missing_ok=True)


def _steps(cells: Sequence[Cell], bench: Bench, request: Request) -> int:
    probes = {cell.measure.probe for cell in cells}
    return sum(steps_of(name, request.samples or 1, bench.probes[name]) for name in probes)


def _measure(
    cells: Sequence[Cell],
    bench: Bench,
    machine: Machine,
    progress: Progress,
    *,
    alone: bool,
) -> Iterator[Record]:
    """Load a subject once and yield the records of its cells.

    A subject that can't be loaded fails its own cells, or the request if it is the only one.
    """
    if not cells:
        return
    spec = cells[0].spec
    keys = {cell.measure: cell.key for cell in cells}
    wanted = replace(bench, measures=tuple((cell.measure, cell.options) for cell in cells))
    try:
        subject = load_subject(spec, machine.device)
        subject.facts["key"] = cells[0].subject_key
    except Exception as error:
        # Whatever a model's or dataset's plugin raises concerns this subject only.
        reason = " ".join(str(error).split())
        if not isinstance(error, NlbenchError):
            reason = f"{spec.model} on {spec.data}: {type(error).__name__}: {reason}"
        if alone:
            raise RequestError(reason) from error
        trace = traceback.format_exc()
        yield from (_unloaded(cell, bench, machine, reason, trace) for cell in cells)
        return
    yield from records_of(subject, wanted, machine, progress, lambda measure: keys[measure])


def _unloaded(cell: Cell, bench: Bench, machine: Machine, reason: str, trace: str) -> Record:
    """Record of a cell whose subject couldn't be loaded."""
    spec, probe = cell.spec, cell.measure.probe
    return Record(
        key=cell.key,
        subject={
            "key": cell.subject_key,
            "model": spec.model,
            "weights": cell.weights.label,
            "data": spec.data,
            "seed": spec.seed,
        },
        measure=measure_facts(cell.measure, cell.options),
        probe={"name": probe, "options": dict(bench.probes[probe])},
        machine=_machine_facts(machine, ""),
        reading=Reading.missing("failed", reason),
        finished=now(),
        traceback=trace,
    )


def records_of(
    subject: Subject,
    bench: Bench,
    machine: Machine,
    progress: Progress,
    key_of: Callable[[type[Measure]], str],
) -> Iterator[Record]:
    """Look at a subject through each probe that the measures need; yield a record a measure."""
    facts = subject.facts
    means = Means(machine.device)
    for probe, entries in bench.by_probe().items():
        settings = bench.probes[probe]
        what = f"{facts['model']}: {', '.join(measure.name for measure, _ in entries)}"
        step = partial(progress.step, what)
        outcomes = look(subject, entries, settings, means=means, step=step)
        for outcome, (measure, options) in zip(outcomes, entries, strict=True):
            yield Record(
                key=key_of(measure),
                subject=facts,
                measure=measure_facts(measure, options),
                probe={"name": probe, "options": dict(settings), **outcome.shown},
                machine=_machine_facts(machine, _dtype(subject.model)),
                reading=outcome.reading,
                seconds=round(outcome.seconds, 6),
                finished=now(),
                traceback=outcome.traceback,
            )


def _machine_facts(machine: Machine, dtype: str) -> dict[str, Any]:
    """What a record says of where it was made."""
    return {
        "device": str(machine.device),
        "dtype": dtype,
        "environment": dict(machine.environment),
    }


def _dtype(model: nn.Module) -> str:
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return str(next(floats, torch.get_default_dtype())).removeprefix("torch.")
