"""The cells that a request comes to, and the key of each.

PyTorch is imported only by the plugins that a request names, and by nothing here.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nlbench import registry
from nlbench.bench import Bench, Options, checked_measure, load_measures, make_bench
from nlbench.data import dataset_info
from nlbench.errors import NlbenchError, RequestError, nearest
from nlbench.request import PRECISIONS, Request, Settings
from nlbench.subject import SubjectSpec, choose_weights

__all__ = [
    "Bench",
    "Cell",
    "Plan",
    "Request",
    "Settings",
    "Target",
    "Wanted",
    "checked_measure",
    "content_key",
    "load_measures",
    "make_bench",
    "make_plan",
]


def content_key(content: Mapping[str, Any]) -> str:
    """Hash of everything that decides a cell's numbers.

    Examples
    --------
    >>> content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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

    def to_dict(self) -> dict[str, Any]:
        """Plain content, without repetition; `of` reads it."""
        targets, wanted = self.targets, self.wanted
        rows = {target.key: number for number, target in enumerate(targets)}
        columns = {one.name: number for number, one in enumerate(wanted)}
        return {
            "device": self.device,
            "precision": self.precision,
            "targets": [asdict(target) for target in targets],
            "measures": [asdict(one) for one in wanted],
            "cells": [[c.key, rows[c.target.key], columns[c.wanted.name]] for c in self.cells],
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Plan:
        """Make a plan of what `to_dict` gave."""
        targets = [Target(**{**t, "spec": _spec_of(t["spec"])}) for t in content["targets"]]
        wanted = [Wanted(**one) for one in content["measures"]]
        cells = tuple(Cell(key, targets[i], wanted[j]) for key, i, j in content["cells"])
        return cls(cells, content["device"], content["precision"])


def _spec_of(content: Mapping[str, Any]) -> SubjectSpec:
    options = tuple((name, value) for name, value in content["options"])
    return SubjectSpec(**{**content, "options": options})


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
    _check(request)
    names = registry.expand("datasets", request.data)
    infos = {name: dataset_info(registry.load("datasets", name)) for name in names}
    bench = make_bench(
        load_measures(request.measures, warn),
        request.settings,
        {name: info.options for name, info in infos.items()},
    )
    if "lines" in bench.probes and request.samples:
        # Imported by name since this module is to be had without PyTorch.
        lines = importlib.import_module("nlbench.passes.lines")
        lines.check_samples(bench.probes["lines"], request.samples)
    wanted = [
        Wanted(m.name, m.version, options, m.probe, bench.probes[m.probe])
        for m, options in bench.measures
    ]
    prints = {name: _fingerprint(name, infos[name].fingerprint, bench.data[name]) for name in names}
    providers = _Providers()
    targets: dict[str, Target] = {}
    remarks: dict[str, None] = {}
    for spec in _specs(request, bench):
        facts = {
            "model": providers.of("models", spec.model),
            "data": [providers.of("datasets", spec.data), infos[spec.data].version],
            "files": prints[spec.data].found,
            "device": device.partition(":")[0],
            "precision": request.precision,
        }
        target = _target(spec, facts, prints[spec.data].problem, remarks)
        targets.setdefault(target.key, target)
    _check_targets(list(targets.values()))
    for remark in remarks:
        warn(remark)
    origins = {one.name: providers.of("measures", one.name) for one in wanted}
    return Plan(
        tuple(
            Cell(_cell_key(target, one, origins[one.name]), target, one)
            for target in targets.values()
            for one in wanted
        ),
        device,
        request.precision,
    )


def _check(request: Request) -> None:
    if request.split not in ("test", "train"):
        raise RequestError(f"unknown split '{request.split}'; expected test or train")
    if not 0 <= request.samples < 2**63:
        raise RequestError(f"samples: {request.samples} is out of bounds, expected 0 (all) or more")
    if request.precision not in PRECISIONS:
        raise RequestError(
            f"unknown precision '{request.precision}'{nearest(request.precision, PRECISIONS)}"
        )
    for seed in request.seeds:
        if not 0 <= seed < 2**63:
            raise RequestError(f"seeds: {seed} is out of bounds, expected 0 or more")


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


def _specs(request: Request, bench: Bench) -> Iterator[SubjectSpec]:
    models = registry.expand("models", request.models)
    for model, weights, (data, options), seed in itertools.product(
        models, request.weights, bench.data.items(), request.seeds
    ):
        yield SubjectSpec(
            model,
            weights,
            data,
            seed,
            request.samples or None,
            request.split,
            tuple(sorted(options.items())),
        )


@dataclass(frozen=True)
class _Print:
    found: str
    problem: str = ""


def _fingerprint(name: str, of: Callable[..., str] | None, options: Options) -> _Print:
    """What a dataset's files are now, or why it has none."""
    try:
        return _Print(str(of(**options)) if of else "")
    except NlbenchError as error:
        return _Print("", " ".join(str(error).split()))
    except (Exception, SystemExit) as error:
        return _Print("", f"dataset '{name}': {type(error).__name__}: {error}")


def _target(
    spec: SubjectSpec, facts: Mapping[str, Any], problem: str, remarks: dict[str, None]
) -> Target:
    label, identity = spec.weights, "absent"
    try:
        choice = choose_weights(spec)
        label, identity = choice.label, choice.identity
        if choice.remark:
            remarks.setdefault(choice.remark)
    except NlbenchError as error:
        problem = problem or " ".join(str(error).split())
    except OSError as error:
        problem = problem or f"weights '{spec.weights}': {error.strerror or error}"
    subject = {**asdict(spec), "weights": identity, "options": dict(spec.options)}
    key = content_key({"subject": subject, **facts})
    return Target(key, spec, label, problem, "" if problem else identity, facts["files"])


def _cell_key(target: Target, wanted: Wanted, providers: list[str]) -> str:
    return content_key(
        {
            "subject": target.key,
            "measure": [wanted.name, wanted.version, providers],
            "options": dict(wanted.options),
            "probe": [wanted.probe, dict(wanted.settings)],
        }
    )


class _Providers:
    """Who provides each registered name: distribution and version.

    Listing a group reads the metadata of all that is installed; once a plan is enough.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Mapping[str, registry.Entry]] = {}

    def of(self, group: str, name: str) -> list[str]:
        if group not in self._groups:
            self._groups[group] = registry.entries(group)
        return list(self._groups[group][name].providers)
