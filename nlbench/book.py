"""Keep a run's folder while cells come in: records at once, manifest and table now and then."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nlbench.config import write_request
from nlbench.manifest import contents, make_manifest, now
from nlbench.plan import Plan
from nlbench.records import Record, Run
from nlbench.request import Request
from nlbench.stamps import keep_plan

if TYPE_CHECKING:
    from nlbench.environment import Machine

__all__ = ["Book"]

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
