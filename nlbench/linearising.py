"""A grid of linearisations as a run: accuracy, linear units and one measure for each ω and seed.

In the run's folder lie the checkpoints too, under ``checkpoints/``; each can be a subject of
any other measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nlbench.environment import Machine, resolve_device
from nlbench.errors import NotFinite, RequestError
from nlbench.files import is_unused, make_folder
from nlbench.linearised import Recorder
from nlbench.linearising_grid import Grid, Item, LinearisingRequest
from nlbench.manifest import contents, make_manifest, now
from nlbench.options import OptionValue
from nlbench.plan import load_measures, make_bench
from nlbench.records import Run, load_run
from nlbench.runner import Progress, Silent
from nlbench.training import Trained, recipe_of, run_training, starting_point

__all__ = ["LinearisingRequest", "linearise"]


def linearise(
    request: LinearisingRequest,
    out: str | Path,
    *,
    settings: Mapping[str, OptionValue | str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Run:
    """Linearise a network for each ω and seed, and measure what comes of it.

    What the folder already holds is not done again; an interrupted training goes on.

    Parameters
    ----------
    request : LinearisingRequest
    out : path
        The run's folder; it is made, or extended if it is one already.
    settings : mapping of str to value, optional
        Options of the request's measure.
    progress : Progress, optional
    command : str
        The command line, for the manifest.

    Returns
    -------
    Run
        Measures ``accuracy``, ``linear_units`` and the request's; each subject's facts have
        ``mode``, ``omega``, ``accuracy`` and ``linear_share``.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out, or the folder holds something else.
    """
    grid = Grid(request, Path(out))
    work = _Work(grid, dict(settings or {}), progress or Silent(), command)
    try:
        for item in grid:
            work.do(item)
    finally:
        work.write()
    return work.run


class _Work:
    """A run that grows by one network after the other."""

    def __init__(
        self,
        grid: Grid,
        settings: dict[str, OptionValue | str],
        progress: Progress,
        command: str,
    ) -> None:
        self.grid = grid
        self.progress = progress
        self.command = command
        self.machine = Machine.at(resolve_device(grid.request.device))
        measures = load_measures([grid.request.measure], progress.warn)
        # Settings that don't fit are told before the first training, not after it.
        make_bench(measures, settings)
        self.recorder = Recorder(grid, measures[0], settings, self.machine)
        if not (grid.folder / "manifest.json").is_file():
            self._check_network()
        self.run = self._open()
        self.calls = [*self.run.manifest.get("calls", [])]
        self.calls.append({"started": now(), "command": command, "request": asdict(grid.request)})
        self.done = {record.key: record for record in self.run.records}
        progress.begin(sum(grid.epochs(item) for item in grid if not self._is_done(item)))
        self.write()

    def do(self, item: Item) -> None:
        """Train one network and record what it is, if that isn't done."""
        if self._is_done(item):
            return
        try:
            records = self.recorder.records(item, self._train(item))
        except NotFinite as error:
            records = self.recorder.failures(item, str(error))
        for record in records:
            self.done[record.key] = record
            self.run.write_record(record)
        self.write()

    def write(self) -> None:
        """Write manifest and table of what is there."""
        self.run.records = list(self.done.values())
        self.run.manifest = {
            **make_manifest(
                asdict(self.grid.request),
                self.machine,
                command=self.command,
                created=self.run.manifest.get("created"),
            ),
            "calls": self.calls,
            **contents(self.run.records),
        }
        self.run.write_tables()

    def _check_network(self) -> None:
        """Tell before the first training whether the recipe can be followed."""
        training = self.grid.training(Item("linearised", self.grid.request.omegas[0], 0))
        check = getattr(recipe_of(training), "check", None)
        if check is None:
            return
        dataset, build = starting_point(replace(training, weights="init"))
        if remark := check(build(), dataset):
            self.progress.warn(f"{training.model}: {remark}")

    def _open(self) -> Run:
        folder, request = self.grid.folder, self.grid.request
        is_run = (folder / "manifest.json").is_file()
        run = load_run(folder) if is_run else Run({}, [], folder)
        if not is_run and folder.exists() and not is_unused(folder):
            raise RequestError(f"{folder} exists and is not a run; choose another --out")
        keys = {
            (self.grid.label(item), measure): key
            for item in self.grid
            for measure, key in self.recorder.keys(item).items()
        }
        for record in run.records:
            subject, measure = record.subject, str(record.measure["name"])
            if "mode" not in subject:
                raise RequestError(f"{folder} is a run of another kind; choose another --out")
            key = keys.get((str(subject["weights"]), measure), record.key)
            same = (subject["model"], subject["data"]) == (request.model, request.data)
            if not same or key != record.key:
                raise RequestError(
                    f"{folder} already holds {subject['weights']} of {subject['model']}, made in "
                    f"another way{self._what_differs(run)}; choose another --out"
                )
        make_folder(folder / "cells")
        make_folder(folder / "checkpoints")
        return run

    def _what_differs(self, run: Run) -> str:
        """What the last call in the same mode asked for otherwise, in words."""
        asked = json.loads(json.dumps(self.grid.request.deciding, default=str))
        calls = [call["request"] for call in run.manifest.get("calls", [])]
        before = next((old for old in reversed(calls) if old["mode"] == asked["mode"]), asked)
        changed = [
            f"{name} was {before.get(name)} and is {value}"
            for name, value in asked.items()
            if before.get(name) != value
        ]
        return f" ({', '.join(changed)})" if changed else ""

    def _is_done(self, item: Item) -> bool:
        found = [self.done.get(key) for key in self.recorder.keys(item).values()]
        return all(record is not None and record.is_done for record in found) and (
            self.grid.own_file(item) is None or self.grid.file(item).is_file()
        )

    def _train(self, item: Item) -> Trained | None:
        file = self.grid.own_file(item)
        if file is None:
            return None
        share = None
        if item.kind == "random":
            pattern = replace(item, kind="linearised")
            found = self.done[self.recorder.linear_units(pattern)]
            if not found.is_done:
                raise NotFinite(
                    f"there is no network that it could be a control of: {found.reading.reason}"
                )
            share = found.reading.summary["value"]
        label = self.grid.label(item)

        def step(epoch: Any) -> None:
            self.progress.step(f"{label}: test accuracy {epoch.test_accuracy:.1%}")

        return run_training(
            self.grid.training(item, share), file, resume=True, progress=step, command=self.command
        )
