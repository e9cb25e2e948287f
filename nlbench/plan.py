"""The cells that a request comes to, and the key of each.

PyTorch is imported only by the plugins that a request names, and by nothing here.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import (
    NlbenchError,
    PluginError,
    RequestError,
    error_text,
    nearest,
    one_line,
    system_text,
)
from nlbench.measure import Measure
from nlbench.measure.contract import as_measure
from nlbench.options import Option, OptionValue, resolve_options
from nlbench.probes import Probe
from nlbench.registry import find_source
from nlbench.request import Request, Settings
from nlbench.serialization.fields import read, written
from nlbench.serialization.files import parse_json, read_text, write_if_changed
from nlbench.serialization.hashing import content_key
from nlbench.subjects.data import dataset_info
from nlbench.subjects.facts import SubjectFacts
from nlbench.subjects.load import FRESH, SubjectSpec, choose_weights
from nlbench.subjects.model import model_info

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PLAN",
    "Cell",
    "Options",
    "Plan",
    "ResolvedSettings",
    "Target",
    "Wanted",
    "checked_measure",
    "keep_plan",
    "kept_plan",
    "load_measure",
    "load_measures",
    "load_probe",
    "make_plan",
    "resolve_settings",
    "what_changed",
]


Options = Mapping[str, OptionValue]


@dataclass(frozen=True)
class ResolvedSettings:
    """The measures of a run with their options, and the options of probes and datasets."""

    measures: tuple[tuple[type[Measure], Options], ...]
    probes: Mapping[str, Options]
    data: Mapping[str, Options] = field(default_factory=dict)

    def by_probe(self) -> dict[str, list[tuple[type[Measure], Options]]]:
        """Group the measures by the pass that feeds them."""
        groups: dict[str, list[tuple[type[Measure], Options]]] = {}
        for entry in self.measures:
            groups.setdefault(entry[0].probe, []).append(entry)
        return groups


def resolve_settings(
    measures: Sequence[type[Measure]],
    settings: Settings,
    datasets: Mapping[str, Mapping[str, Option]] | None = None,
    *,
    inputs: Tensor | None = None,
) -> ResolvedSettings:
    """Sort settings by the measure, probe or dataset they belong to, and check them.

    Parameters
    ----------
    measures : sequence of Measure class
    settings : mapping of str to value
    datasets : mapping of str to options, optional
        By name, what can be set of each.
    inputs : tensor, optional
        That somebody brings along: options of probes that aren't set suit them.

    Raises
    ------
    nlbench.RequestError
        If a setting belongs to none of them or its value doesn't fit.
    """
    by_owner: dict[str, dict[str, OptionValue | str]] = {}
    probes = dict.fromkeys(measure.probe for measure in measures)
    if inputs is not None:
        suited = {name: load_probe(name).defaults(inputs) for name in probes}
        defaults = {f"{name}.{key}": v for name, one in suited.items() for key, v in one.items()}
        settings = {**defaults, **settings}
    declared = {name: load_probe(name).options for name in probes}
    owners = {m.name: m.options for m in measures} | declared
    for name, options in (datasets or {}).items():
        if options and name in owners:
            raise PluginError(f"dataset '{name}' bears the name of a measure or a probe")
        owners.setdefault(name, options)
        # A family's name sets an option of all its members in the run.
        owners.setdefault(name.partition("/")[0], options)
    for key, value in settings.items():
        owner, dot, option = key.rpartition(".")
        if not dot or not owner or not option:
            raise RequestError(
                f"setting '{key}': expected MEASURE.OPTION, PROBE.OPTION or DATASET.OPTION"
            )
        if owner not in owners:
            raise RequestError(
                f"setting '{key}': '{owner}' is no measure, probe or dataset of this run"
                f"{nearest(owner, owners)}"
            )
        by_owner.setdefault(owner, {})[option] = value

    def options_of(name: str, options: Mapping[str, Option]) -> Options:
        family, slash, _ = name.partition("/")
        given = {**(by_owner.get(family, {}) if slash else {}), **by_owner.get(name, {})}
        return resolve_options(options, given, owner=name)

    return ResolvedSettings(
        tuple((m, options_of(m.name, m.options)) for m in measures),
        {name: options_of(name, options) for name, options in declared.items()},
        {name: options_of(name, options) for name, options in (datasets or {}).items()},
    )


def load_measures(names: Iterable[str], warn: Callable[[str], None]) -> list[type[Measure]]:
    """Load registered measures; one found by a glob that can't be loaded is left out."""
    given = list(names)
    loaded: list[type[Measure]] = []
    for name in registry.expand("measures", given):
        try:
            loaded.append(load_measure(name))
        except PluginError as error:
            if name in given:
                raise
            warn(f"{error}; left out")
    if not loaded:
        raise RequestError(f"no measure to run{nearest('', registry.entries('measures'))}")
    return loaded


def load_measure(name: str) -> type[Measure]:
    """Load a registered measure.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If there is none of that name, or what is registered can't be used here.
    """
    return checked_measure(registry.load("measures", name), name)


def checked_measure(measure: object, name: str | None = None) -> type[Measure]:
    """Give the measure that something stands for, if it can be used here; see `as_measure`.

    Raises
    ------
    nlbench.PluginError
        If it is something else.
    """
    checked = as_measure(measure, name)
    probes = registry.entries("probes")
    if checked.name in probes:
        raise PluginError(f"measure '{checked.name}' bears the name of a probe; choose another")
    if checked.probe not in probes:
        raise PluginError(
            f"measure '{checked.name}' wants probe '{checked.probe}'"
            f"{nearest(checked.probe, probes)}"
        )
    return checked


def load_probe(name: str) -> Probe:
    """Load a registered probe.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If there is none of that name, or what is registered is none.
    """
    probe = registry.load("probes", name)
    if not isinstance(probe, Probe):
        raise PluginError(f"probe '{name}' is no nlbench.probes.Probe but {probe!r}")
    if probe.name != name:
        raise PluginError(
            f"probe '{name}' calls itself '{probe.name}'; an entry point and its probe must bear "
            "the same name"
        )
    return probe


@dataclass(frozen=True)
class Target:
    """A subject that is to be measured.

    Parameters
    ----------
    key : str
        Hash of everything that decides what the measures will see.
    spec : SubjectSpec
    label : str
        What its weights are called in the table.
    impossible : str
        Why it can't be measured; else empty.
    weights : str
        Hash of their file, or ``init``; empty if unknown.
    files : str
        Fingerprint of the dataset's files; empty where it has none.
    """

    key: str
    spec: SubjectSpec
    label: str
    impossible: str = ""
    weights: str = ""
    files: str = ""


@dataclass(frozen=True)
class Wanted:
    """A measure with its options and those of its probe, by name."""

    name: str
    version: str
    options: Options
    probe: str
    settings: Options


@dataclass(frozen=True)
class Cell:
    """One subject and one measure: what is recorded, cached and may fail on its own."""

    key: str
    target: Target
    wanted: Wanted

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """What names the cell in the tidy table."""
        spec = self.target.spec
        return spec.model, self.target.label, spec.data, spec.seed, self.wanted.name


@dataclass(frozen=True)
class Plan:
    """All cells of a request, subject by subject.

    Parameters
    ----------
    cells : tuple of Cell
    device : str
        A device that is there.
    precision : str
        See `Request`.
    """

    cells: tuple[Cell, ...]
    device: str
    precision: str = "native"

    @property
    def targets(self) -> list[Target]:
        """The subjects, in their order."""
        return list({cell.target.key: cell.target for cell in self.cells}.values())

    @property
    def wanted(self) -> list[Wanted]:
        """The measures, in their order."""
        return list({cell.wanted.name: cell.wanted for cell in self.cells}.values())

    @property
    def decided(self) -> dict[tuple[object, ...], object]:
        """What decides the cells' numbers, as `nlbench.store.run_folder.decided_by` has it."""
        return {
            **{("measure", one.name): (one.version, dict(one.options)) for one in self.wanted},
            **{("probe", one.probe): dict(one.settings) for one in self.wanted},
            **{("subject", *cell.identity[:4]): cell.target.key for cell in self.cells},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain content, without repetition; `from_dict` reads it."""
        targets, wanted = self.targets, self.wanted
        rows = {target.key: number for number, target in enumerate(targets)}
        columns = {one.name: number for number, one in enumerate(wanted)}
        return {
            "device": self.device,
            "precision": self.precision,
            "targets": written(targets),
            "measures": written(wanted),
            "cells": [[c.key, rows[c.target.key], columns[c.wanted.name]] for c in self.cells],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """Make a plan of what `to_dict` gave."""
        targets = [read(Target, target, "target") for target in content["targets"]]
        wanted = [read(Wanted, one, "measure") for one in content["measures"]]
        cells = tuple(Cell(key, targets[i], wanted[j]) for key, i, j in content["cells"])
        return cls(cells, content["device"], content["precision"])


def make_plan(request: Request, device: str, warn: Callable[[str], None]) -> Plan:
    """Expand a request to cells.

    A subject that can't be measured stays in the plan with the reason, unless it is all
    there is.

    Parameters
    ----------
    request : Request
    device : str
        What `Request.device` comes to on this machine.
    warn : callable
        Told of measures that a glob found and that can't be loaded, and of models that are
        freshly initialised because their checkpoint is missing.

    Raises
    ------
    nlbench.RequestError, nlbench.PluginError
        If a name, a number or a file in it can't be used.
    """
    names = registry.expand("datasets", request.data)
    infos = {name: dataset_info(registry.load("datasets", name)) for name in names}
    resolved = resolve_settings(
        load_measures(request.measures, warn),
        request.settings,
        {name: info.options for name, info in infos.items()},
    )
    for name, options in resolved.probes.items():
        load_probe(name).check(request.samples or None, options)
    wanted = [
        Wanted(m.name, m.version, options, m.probe, resolved.probes[m.probe])
        for m, options in resolved.measures
    ]
    prints = {
        name: _fingerprint(name, infos[name].fingerprint, resolved.data[name]) for name in names
    }
    chosen = cache(_chosen)

    @cache
    def providers(group: str, name: str) -> list[str]:
        """Who provides a registered name: distribution and version."""
        return list(registry.find(group, name).providers)

    targets: dict[str, Target] = {}
    remarks: dict[str, None] = {}
    models = registry.expand("models", request.models)
    for model, weights_asked, (data, options), seed in itertools.product(
        models, request.weights, resolved.data.items(), request.seeds
    ):
        which = request.samples or None, request.split, tuple(sorted(options.items()))
        spec = SubjectSpec(model, weights_asked, data, seed, *which)
        files, problem = prints[spec.data]
        facts = {
            "model": providers("models", spec.model),
            "data": [providers("datasets", spec.data), infos[spec.data].version],
            "files": files,
            "device": device.partition(":")[0],
            "precision": request.precision,
        }
        # Chosen once, however many seeds there are.
        weights = chosen(replace(spec, seed=0))
        if weights.remark:
            remarks.setdefault(weights.remark)
        target = _target(spec, facts, problem, weights)
        same = targets.setdefault(target.key, target)
        if same.label != target.label:
            remarks.setdefault(
                f"{spec.model}: the weights '{target.label}' are those of '{same.label}', and are "
                "measured once"
            )
    _check_targets(list(targets.values()))
    for remark in remarks:
        warn(remark)
    return Plan(
        tuple(
            Cell(_cell_key(target, one, providers("measures", one.name)), target, one)
            for target in targets.values()
            for one in wanted
        ),
        device,
        request.precision,
    )


def _check_targets(targets: Sequence[Target]) -> None:
    """Refuse a plan of which nothing is possible, or where two subjects bear one name."""
    if all(target.impossible for target in targets):
        raise RequestError(targets[0].impossible)
    seen: dict[tuple[object, ...], Target] = {}
    for target in targets:
        spec = target.spec
        if seen.setdefault((spec.model, target.label, spec.data, spec.seed), target) is not target:
            raise RequestError(
                f"two of the weights are called '{target.label}'; give one another name"
            )


def _fingerprint(name: str, of: Callable[..., str] | None, options: Options) -> tuple[str, str]:
    """What a dataset's files are now, or why it has none: one of both is empty."""
    try:
        return (str(of(**options)) if of else ""), ""
    except NlbenchError as error:
        return "", one_line(error)
    except (Exception, SystemExit) as error:
        return "", f"dataset '{name}': {error_text(error)}"


@dataclass(frozen=True)
class _Weights:
    """What the weights of a request come to, for all seeds."""

    label: str
    identity: str
    problem: str = ""
    remark: str = ""


def _chosen(spec: SubjectSpec) -> _Weights:
    """Choose the weights of a model on a dataset, or say why there are none."""
    label = spec.weights
    # Each that is missing is missed by itself.
    absent = f"absent: {spec.weights}"
    try:
        choice = choose_weights(spec)
        label = choice.label
        return _Weights(label, choice.identity, "", choice.remark)
    except NlbenchError as error:
        return _Weights(label, absent, one_line(error))
    except OSError as error:
        return _Weights(label, absent, f"weights '{spec.weights}': {system_text(error)}")


def _target(spec: SubjectSpec, facts: Mapping[str, Any], problem: str, weights: _Weights) -> Target:
    subject = {
        **{entry.name: getattr(spec, entry.name) for entry in fields(spec)},
        "weights": weights.identity,
        "options": dict(spec.options),
    }
    key = content_key({"subject": subject, **facts})
    problem = problem or weights.problem
    identity = "" if problem else weights.identity
    return Target(key, spec, weights.label, problem, identity, facts["files"])


def _cell_key(target: Target, wanted: Wanted, providers: list[str]) -> str:
    return content_key(
        {
            "subject": target.key,
            "measure": [wanted.name, wanted.version, providers],
            "options": dict(wanted.options),
            "probe": [wanted.probe, dict(wanted.settings)],
        }
    )


def what_changed(
    target: Target,
    facts: SubjectFacts,
    recorded: Mapping[str, Any],
    planned_at: str | None = None,
) -> str:
    """Say why a subject is no longer the one that was planned or recorded; else nothing.

    Parameters
    ----------
    target : Target
        As planned.
    facts : SubjectFacts
        What was found when it was loaded: its content.
    recorded : mapping
        Those of its facts that other cells of the run have found.
    planned_at : str or None
        The machine that made the plan, if the files from which the key comes are to be looked
        at, as they are to be right after loading. Another machine may have copies of the data
        with other times; there the content alone says.

    Examples
    --------
    >>> spec = SubjectSpec("vgg8", "init", "digits", 0, 64)
    >>> target = Target("a1", spec, "init")
    >>> facts = SubjectFacts(model="vgg8", weights="init", data="digits", seed=0, sample_hash="a")
    >>> what_changed(target, facts, {"sample_hash": "a"})
    ''
    >>> what_changed(target, facts, {"sample_hash": "b"}).partition(" is no")[0]
    'vgg8 on digits: the sample hash'
    """
    spec = target.spec
    if planned_at is not None:
        changed = ""
        if target.weights and choose_weights(spec).identity != target.weights:
            changed = f"{spec.model} with weights {target.label}: the file has"
        fingerprint = dataset_info(registry.load("datasets", spec.data)).fingerprint
        if fingerprint is not None and planned_at == platform.node():
            found = str(fingerprint(**dict(spec.options)))
            changed = changed if found == target.files else f"{spec.data}: its files have"
        if changed:
            return f"{changed} changed since the run was planned; start it again"
    for name, value in recorded.items():
        if getattr(facts, name) not in (None, value):
            return (
                f"{spec.model} on {spec.data}: the {name.replace('_', ' ')} is no longer "
                "that of the cells which the run already holds; choose another --out"
            )
    return ""


PLAN = "plan.json"
FORMAT = 2


def keep_plan(folder: Path, request: Request, plan: Plan) -> None:
    """Write a plan with its stamps into a run's folder."""
    content = {
        "format": FORMAT,
        "request": written(request),
        "here": _here(),
        "plugins": _plugins(request),
        "files": {path: _stamp(path) for path in _files(plan)},
        "prints": _prints(plan, {target.spec.data for target in plan.targets}),
        "plan": plan.to_dict(),
    }
    write_if_changed(folder / PLAN, json.dumps(content) + "\n")


def kept_plan(folder: Path, request: Request) -> Plan | None:
    """Give the plan kept for a request; None if there is none or something has changed."""
    try:
        content = parse_json(read_text(folder / PLAN), PLAN, finite=False)
        if content["format"] != FORMAT or content["request"] != written(request):
            return None
        if content["here"] != _here() or content["plugins"] != _plugins(request):
            return None
        if any(_stamp(path) != stamp for path, stamp in content["files"].items()):
            return None
        plan = Plan.from_dict(content["plan"])
        return plan if content["prints"] == _prints(plan, content["prints"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, NlbenchError):
        # Damaged, of another version, or about plugins that are gone: a new plan is made.
        return None


def _here() -> dict[str, Any]:
    """What decides which device ``auto`` means, and what plugins may look at."""
    return {
        "python": platform.python_version(),
        "torch": registry.version_of("torch"),
        "nlbench": registry.version_of("nlbench"),
        "core": _sources(Path(__file__).parent, "**/*.py"),
        "nvidia": Path("/dev/nvidiactl").exists(),
        "node": platform.node(),
        "variables": {
            name: os.environ.get(name)
            for name in (
                "CUDA_VISIBLE_DEVICES",
                "NLBENCH_DATA",
                "TORCH_HOME",
                "HF_HOME",
                "XDG_CACHE_HOME",
            )
        },
    }


def _plugins(request: Request) -> dict[str, dict[str, Any]]:
    """Who provides each name, and the state of the source files beside it."""
    names = {"measures": request.measures, "models": request.models, "datasets": request.data}
    sources: dict[str, list[list[Any]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for group, patterns in names.items():
        found[group] = {}
        for name in registry.expand(group, patterns):
            entry = registry.find(group, name)
            found[group][name] = [list(entry.providers), [p.value for p in entry.claims]]
            for point in entry.claims:
                for module in (point.module, point.module.partition(".")[0]):
                    if module not in sources:
                        sources[module] = _sources_of(module)
    return {**found, "sources": sources}


def _sources_of(module: str) -> list[list[Any]]:
    """State of the files that a module may use: its package's, or those beside it."""
    spec = find_source(module)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        folders = [Path(place) for place in spec.submodule_search_locations]
        return [row for folder in folders for row in _sources(folder, "**/*.py")]
    if spec.origin is None:
        return []
    # The module's own file may be a compiled one.
    own = [spec.origin, *(_stamp(spec.origin) or [])]
    return [own, *_sources(Path(spec.origin).parent, "*.py")]


def _sources(folder: Path, pattern: str) -> list[list[Any]]:
    return [[str(file), *(_stamp(str(file)) or [])] for file in sorted(folder.glob(pattern))]


def _stamp(path: str) -> list[int] | None:
    try:
        state = Path(path).stat()
    except OSError:
        return None
    # A copy may keep the time of its original; its number and time of change are its own.
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _files(plan: Plan) -> Iterable[str]:
    """Checkpoints that the plan's weights came from, or would come from if they were there."""
    wanted = {(t.spec.model, t.spec.weights, t.spec.data): None for t in plan.targets}
    for model, weights, data in wanted:
        if weights in ("auto", "trained"):
            trained = model_info(registry.load("models", model)).trained
            if data in trained:
                yield str(Path(trained[data]).absolute())
        elif weights not in FRESH:
            yield str(Path(weights).absolute())


def _prints(plan: Plan, names: Container[str]) -> dict[str, Any]:
    """Fingerprints of those of the named datasets that have any; the others aren't imported."""
    options = {t.spec.data: dict(t.spec.options) for t in plan.targets if t.spec.data in names}
    infos = {data: dataset_info(registry.load("datasets", data)) for data in options}
    return {
        data: list(_fingerprint(data, info.fingerprint, options[data]))
        for data, info in infos.items()
        if info.fingerprint is not None
    }
