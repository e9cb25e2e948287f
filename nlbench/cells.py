"""Cells: the subjects and measures of a plan, and the plan itself."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from nlbench import registry
from nlbench.measure import Result, Status
from nlbench.store.manifest import now
from nlbench.store.record import (
    Decisions,
    Record,
    RecordedMachine,
    RecordedMeasure,
    RecordedProbe,
    decisions_of,
)
from nlbench.subjects.data import dataset_info
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights_choice import choose_weights


@dataclass(frozen=True)
class SubjectPlan:
    """A subject to measure."""

    key: str  # hash of everything that determines the observations
    spec: SubjectSpec
    label: str  # name of the subject's weights in the table
    impossible: str = ""  # reason why the subject can't be measured; empty if it can
    weights: str = ""  # identity of the weights, see `WeightsChoice.identity`; empty if unknown
    files: str = ""  # fingerprint of the dataset's files; empty if it has no files
    # Versions of the files of the model and of the data, by the name of the model or dataset.
    sources: tuple[tuple[str, str], ...] = ()
    # Hash of everything that determines the observations, except these versions.
    settings_key: str = ""

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """The subject's model, weights, data and seed in the tidy table."""
        return self.spec.model, self.label, self.spec.data, self.spec.seed

    def changed_files(self, planned_on: str) -> str:
        """Describe a file change since the run was planned; empty if no file has changed.

        On a machine other than `planned_on`, the dataset's fingerprint is not compared, since a
        copy of the files may have different modification times.
        """
        spec, changed = self.spec, ""
        if self.weights and choose_weights(spec).identity != self.weights:
            changed = f"{spec.model} with weights {self.label}: the file has"
        fingerprint = dataset_info(registry.load("datasets", spec.data)).fingerprint
        if fingerprint is not None and planned_on == platform.node():
            is_same = str(fingerprint(**dict(spec.options))) == self.files
            changed = changed if is_same else f"{spec.data}: its files have"
        return f"{changed} changed since the run was planned; start it again" if changed else ""


@dataclass(frozen=True)
class Cell:
    """One subject and one measure: the unit that is recorded, and that may fail.

    Its measure and probe are recorded as planned.
    """

    key: str
    subject: SubjectPlan
    measure: RecordedMeasure
    probe: RecordedProbe
    stream: str = ""  # name of the measure's random stream, the same with and without errors

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """The cell's model, weights, data, seed and measure in the tidy table."""
        return (*self.subject.identity, self.measure.name)

    def missing_record(
        self,
        machine: RecordedMachine,
        reason: str,
        status: Status = "failed",
        traceback: str = "",
    ) -> Record:
        """Return the record of a cell that was not measured."""
        spec = self.subject.spec
        return Record(
            key=self.key,
            subject=SubjectFacts(
                model=spec.model,
                weights=self.subject.label,
                data=spec.data,
                seed=spec.seed,
                key=self.subject.key,
            ),
            measure=self.measure,
            probe=self.probe,
            machine=machine,
            result=Result.missing(status, reason),
            finished=now(),
            traceback=traceback,
        )


@dataclass(frozen=True)
class Plan:
    """All cells of a request, grouped by subject."""

    cells: tuple[Cell, ...]
    device: str
    precision: str = "native"

    @property
    def subjects(self) -> list[SubjectPlan]:
        """The subjects, in order."""
        return list({cell.subject.key: cell.subject for cell in self.cells}.values())

    @property
    def decisions(self) -> Decisions:
        """The settings and keys that determine the results of the cells."""
        decisions: dict[tuple[object, ...], object] = {}
        for cell in self.cells:
            decisions |= decisions_of(cell)
        for subject in self.subjects:
            decisions["sources", *subject.identity] = (subject.settings_key, dict(subject.sources))
        return decisions
