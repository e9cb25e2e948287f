"""What a run is asked for, and the cells that it comes to."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch

from nlbench import registry
from nlbench.errors import PluginError, RequestError, nearest
from nlbench.measure import Measure, MoreMeans, Source
from nlbench.options import Option, OptionValue, resolve_options
from nlbench.passes.lines import check_samples
from nlbench.probes import PROBES
from nlbench.subject import SubjectSpec, WeightsChoice, choose_weights

__all__ = [
    "Bench",
    "Cell",
    "Request",
    "Settings",
    "checked_measure",
    "content_key",
    "load_measures",
    "make_bench",
    "plan_cells",
]

Settings = Mapping[str, OptionValue | str]


@dataclass(frozen=True)
class Request:
    """What a run is asked for.

    Parameters
    ----------
    measures, models : tuple of str
        Registered names or globs.
    data : tuple of str
        Registered names or globs.
    weights : str
        ``auto``, ``trained``, ``init`` or a checkpoint's path.
    seeds : tuple of int
    samples : int
        How many samples of the split; 0: all.
    split : {"test", "train"}
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
    settings : mapping of str to value
        Options of measures and probes: ``affinity.shrinkage`` to ``none``.
    """

    measures: tuple[str, ...]
    models: tuple[str, ...]
    data: tuple[str, ...]
    weights: str = "auto"
    seeds: tuple[int, ...] = (0,)
    samples: int = 512
    split: str = "test"
    device: str = "auto"
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The measures of a run with their options, and the options of their probes."""

    measures: tuple[tuple[type[Measure], Mapping[str, OptionValue]], ...]
    probes: Mapping[str, Mapping[str, OptionValue]]

    def by_probe(self) -> dict[str, list[tuple[type[Measure], Mapping[str, OptionValue]]]]:
        """Group the measures by the pass that feeds them."""
        groups: dict[str, list[tuple[type[Measure], Mapping[str, OptionValue]]]] = {}
        for entry in self.measures:
            groups.setdefault(entry[0].probe, []).append(entry)
        return groups


def make_bench(measures: Sequence[type[Measure]], settings: Settings) -> Bench:
    """Sort settings by the measure or probe they belong to, and check them."""
    by_owner: dict[str, dict[str, OptionValue | str]] = {}
    owners = {measure.name for measure in measures} | {measure.probe for measure in measures}
    for key, value in settings.items():
        owner, dot, option = key.partition(".")
        if not dot:
            raise RequestError(f"setting '{key}': expected MEASURE.OPTION or PROBE.OPTION")
        if owner not in owners:
            raise RequestError(
                f"setting '{key}': '{owner}' is no measure or probe of this run"
                f"{nearest(owner, owners)}"
            )
        by_owner.setdefault(owner, {})[option] = value
    return Bench(
        tuple(
            (m, resolve_options(m.options, by_owner.get(m.name, {}), owner=m.name))
            for m in measures
        ),
        {
            name: resolve_options(PROBES[name].options, by_owner.get(name, {}), owner=name)
            for name in dict.fromkeys(measure.probe for measure in measures)
        },
    )


def load_measures(names: Iterable[str], warn: Callable[[str], None]) -> list[type[Measure]]:
    """Load registered measures; one found by a glob that can't be loaded is left out."""
    given = list(names)
    loaded: list[type[Measure]] = []
    for name in registry.expand("measures", given):
        try:
            loaded.append(checked_measure(registry.load("measures", name), name))
        except PluginError as error:
            if name in given:
                raise
            warn(f"{error}; left out")
    if not loaded:
        raise RequestError(f"no measure to run{nearest('', registry.entries('measures'))}")
    return loaded


def checked_measure(measure: object, name: str) -> type[Measure]:
    """Give back what a name stands for if it is a measure of that name.

    Raises
    ------
    nlbench.PluginError
        If it is something else.
    """
    if not (isinstance(measure, type) and issubclass(measure, Measure)):
        raise PluginError(f"measure '{name}' is no nlbench.Measure but {measure!r}")
    if measure.name != name:
        raise PluginError(
            f"measure '{name}' calls itself '{measure.name}'; an entry point and its measure "
            "must bear the same name"
        )
    if name in PROBES:
        raise PluginError(f"measure '{name}' bears the name of a probe; choose another")
    probe = getattr(measure, "probe", "")
    if probe not in PROBES:
        raise PluginError(f"measure '{name}' wants probe '{probe}'{nearest(probe, PROBES)}")
    for attribute, (is_right, expected) in _DECLARED.items():
        given = getattr(measure, attribute)
        if not is_right(given):
            raise PluginError(f"measure '{name}': {attribute} is {given!r}, expected {expected}")
    return measure


def _are_bounds(given: object) -> bool:
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    low, high = given
    return all(isinstance(n, int | float) for n in given) and bool(low <= high)


def _are_options(given: object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(o, Option) for o in given.values())


_DECLARED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bounds": (_are_bounds, "two numbers, the smaller first"),
    "more_means": (
        lambda given: given in get_args(MoreMeans),
        "one of " + ", ".join(f"'{word}'" for word in get_args(MoreMeans)),
    ),
    "version": (lambda given: isinstance(given, str), "a text"),
    "options": (_are_options, "a mapping of names to nlbench.Option"),
    "source": (lambda given: isinstance(given, Source), "an nlbench.Source or a text"),
}


def content_key(content: Mapping[str, Any]) -> str:
    """Hash of everything that decides a cell's numbers."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Cell:
    """One subject and one measure: what is recorded, cached and may fail on its own."""

    key: str
    subject_key: str
    spec: SubjectSpec
    weights: WeightsChoice
    measure: type[Measure]
    options: Mapping[str, OptionValue]

    @property
    def identity(self) -> tuple[str, str, str, int, str]:
        """What names the cell in the tidy table."""
        spec = self.spec
        return spec.model, self.weights.label, spec.data, spec.seed, self.measure.name


def _subject_specs(request: Request) -> Iterator[SubjectSpec]:
    if request.split not in ("test", "train"):
        raise RequestError(f"unknown split '{request.split}'; expected test or train")
    if request.samples < 0:
        raise RequestError(f"samples: {request.samples} is out of bounds, expected 0 (all) or more")
    models = registry.expand("models", request.models)
    data = registry.expand("datasets", request.data)
    for model, dataset, seed in itertools.product(models, data, request.seeds):
        yield SubjectSpec(
            model, request.weights, dataset, seed, request.samples or None, request.split
        )


def plan_cells(
    request: Request, bench: Bench, device: torch.device
) -> dict[SubjectSpec, list[Cell]]:
    """Expand a request to cells, subject by subject.

    Raises
    ------
    nlbench.RequestError
        If a name, a number or a file in it can't be used.
    """
    plan: dict[SubjectSpec, list[Cell]] = {}
    if "lines" in bench.probes and request.samples:
        check_samples(bench.probes["lines"], request.samples)
    for spec in _subject_specs(request):
        weights = choose_weights(spec)
        subject = content_key(
            {
                "subject": {**asdict(spec), "weights": weights.identity},
                "model": _provider("models", spec.model),
                "data": _provider("datasets", spec.data),
                "device": device.type,
            }
        )
        plan[spec] = [
            Cell(_cell_key(subject, m, o, bench), subject, spec, weights, m, o)
            for m, o in bench.measures
        ]
    return plan


def _cell_key(
    subject: str, measure: type[Measure], options: Mapping[str, OptionValue], bench: Bench
) -> str:
    return content_key(
        {
            "subject": subject,
            "measure": [measure.name, measure.version, _provider("measures", measure.name)],
            "options": dict(options),
            "probe": [measure.probe, dict(bench.probes[measure.probe])],
        }
    )


def _provider(group: str, name: str) -> tuple[str, ...]:
    return registry.entries(group)[name].providers
