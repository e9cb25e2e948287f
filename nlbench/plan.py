"""Plans: the cells of a request and their keys.

Planning imports PyTorch only if a plugin used by the request does. `nlbench.runner` compares a plan
with the records in a folder.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nlbench import registry
from nlbench.errors import NlbenchError, RequestError, error_text, one_line, system_text
from nlbench.measure import Result, Status
from nlbench.measure.contract import load_measures
from nlbench.options import Options
from nlbench.parsers import unique
from nlbench.probes.probe import load_probe
from nlbench.request import AUTO_DATA, Request
from nlbench.serialization.hashing import content_key
from nlbench.settings import ResolvedSettings, resolve_settings
from nlbench.signals import raise_interruption
from nlbench.store.manifest import now
from nlbench.store.record import (
    Decisions,
    Record,
    RecordedMachine,
    RecordedMeasure,
    RecordedProbe,
    read_decisions,
)
from nlbench.subjects.data import DatasetInfo, dataset_info
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.model import declared_info, default_data
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.weights_choice import WeightsChoice, choose_weights


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
        """Describe a file change since the run was planned. Empty if no file has changed.

        On a machine other than `planned_on`, the dataset's fingerprint is not compared, since a
        copy of the files may have different modification times.
        """
        spec = self.spec
        changed = ""
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
        self, machine: RecordedMachine, reason: str, status: Status = "failed", traceback: str = ""
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
            decisions |= read_decisions(cell)
        for subject in self.subjects:
            decisions["sources", *subject.identity] = (subject.settings_key, dict(subject.sources))
        return decisions


def make_plan(request: Request, device: str, warn: Callable[[str], None]) -> Plan:
    """Expand a request into cells.

    A subject that can't be measured is kept in the plan with the reason, unless there is no other.
    `warn` is called for measures that match a glob but can't be loaded, and for models that are
    freshly initialised because their checkpoint is missing.
    """
    data_of = _data_by_model(request)
    names = dict.fromkeys(itertools.chain.from_iterable(data_of.values()))
    infos = {name: dataset_info(registry.load("datasets", name)) for name in names}
    resolved = resolve_settings(
        load_measures(request.measures, warn),
        request.settings,
        infos,
        {model: declared_info(model) for model in data_of},
    )
    probes = resolved.probes
    for name, options in probes.items():
        load_probe(name).check(request.samples or None, options)
    measures = [
        (RecordedMeasure.of(m, options, request.errors), RecordedProbe(m.probe, probes[m.probe]))
        for m, options in resolved.measures
    ]
    subjects = _plan_subjects(request, device, data_of, infos, resolved, warn)
    providers = {m.name: list(registry.find("measures", m.name).providers) for m, _ in measures}
    cells = tuple(
        _plan_cell(subject, measure, probe, providers[measure.name])
        for subject in subjects
        for measure, probe in measures
    )
    return Plan(cells, device, request.precision)


def _data_by_model(request: Request) -> dict[str, list[str]]:
    """Return the names of the datasets for each model in a request."""
    named = registry.expand("datasets", [name for name in request.data if name != AUTO_DATA])
    models = registry.expand("models", request.models)
    if AUTO_DATA not in request.data:
        return dict.fromkeys(models, named)
    return {model: unique([default_data(model), *named]) for model in models}


def _plan_subjects(
    request: Request,
    device: str,
    data_of: Mapping[str, Sequence[str]],
    infos: Mapping[str, DatasetInfo],
    resolved: ResolvedSettings,
    warn: Callable[[str], None],
) -> Iterable[SubjectPlan]:
    data = resolved.data
    fingerprints = {name: _fingerprint(name, infos[name], data[name]) for name in data}
    plan_weights = cache(_plan_weights)

    @cache
    def providers(group: str, name: str) -> list[str]:
        return list(registry.find(group, name).providers)

    subjects: dict[str, SubjectPlan] = {}
    notes: dict[str, None] = {}
    combinations = (
        (model, *rest)
        for model, names in data_of.items()
        for rest in itertools.product(request.weights, names, request.seeds)
    )
    for model, source, dataset, seed in combinations:
        options = data[dataset]
        sample = request.samples or None, request.split, tuple(sorted(options.items()))
        arguments = tuple(sorted(resolved.models.get(model, {}).items()))
        spec = SubjectSpec(model, source, dataset, seed, *sample, arguments)
        files, problem = fingerprints[dataset]
        # The seed is the same for all, so that each file is hashed only once.
        weights = plan_weights(replace(spec, seed=0))
        if weights.note:
            notes.setdefault(weights.note)
        content: dict[str, Any] = {
            "subject": {**_spec_content(spec), "weights": weights.identity},
            "model": providers("models", model),
            "data": [providers("datasets", dataset), infos[dataset].version],
            "files": files,
            "device": device.partition(":")[0],
            "precision": request.precision,
        }
        key = content_key(content)
        content["subject"]["weights"] = weights.content
        settings_key = content_key({**content, "files": ""})
        versions = {model: weights.model, dataset: files}
        sources = tuple((name, version[:16]) for name, version in versions.items() if version)
        problem = problem or weights.problem
        identity = "" if problem else weights.identity
        subject = SubjectPlan(
            key, spec, weights.label, problem, identity, files, sources, settings_key
        )
        first = subjects.setdefault(key, subject)
        if first.label != subject.label:
            notes.setdefault(
                f"{model}: the weights '{subject.label}' are identical to '{first.label}', so they "
                "are measured only once"
            )
    _check_subjects(list(subjects.values()))
    for note in notes:
        warn(note)
    return subjects.values()


def _spec_content(spec: SubjectSpec) -> dict[str, Any]:
    """Return the fields of a specification, without arguments if none are set."""
    content = {**vars(spec), "options": dict(spec.options), "arguments": dict(spec.arguments)}
    return {name: v for name, v in content.items() if name != "arguments" or v}


def _check_subjects(subjects: Sequence[SubjectPlan]) -> None:
    """Raise if no subject can be measured or if two subjects have the same name."""
    if all(subject.impossible for subject in subjects):
        raise RequestError(subjects[0].impossible)
    named: dict[tuple[object, ...], SubjectPlan] = {}
    for subject in subjects:
        if named.setdefault(subject.identity, subject) is not subject:
            raise RequestError(f"two checkpoints are named '{subject.label}'; rename one of them")


def _fingerprint(name: str, info: DatasetInfo, options: Options) -> tuple[str, str]:
    """Return the fingerprint of a dataset's files, and the reason why it is empty, if any."""
    try:
        return (str(info.fingerprint(**options)) if info.fingerprint else ""), ""
    except NlbenchError as error:
        return "", one_line(error)
    except BaseException as error:
        raise_interruption(error)
        return "", f"dataset '{name}': {error_text(error)}"


def _plan_weights(spec: SubjectSpec) -> WeightsChoice:
    """Choose weights, which are the same for all seeds, and hash them."""
    try:
        choice = choose_weights(spec)
        _ = choice.content
        return choice
    except NlbenchError as error:
        problem = one_line(error)
    except OSError as error:
        problem = f"weights '{spec.weights}': {system_text(error)}"
    # Missing weights with different names count as different subjects.
    return WeightsChoice(spec.weights, None, problem=problem)


def _plan_cell(
    subject: SubjectPlan, measure: RecordedMeasure, probe: RecordedProbe, providers: list[str]
) -> Cell:
    content = {
        "subject": subject.key,
        "measure": [measure.name, measure.version, providers],
        "options": dict(measure.options),
        "probe": [probe.name, dict(probe.options)],
    }
    # Errors don't change the value, so the random numbers are the same with and without.
    stream = content_key(content)
    has_errors = measure.errors != "none"
    key = content_key({**content, "errors": measure.errors}) if has_errors else stream
    return Cell(key, subject, measure, probe, stream)
