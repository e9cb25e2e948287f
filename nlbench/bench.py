"""The measures of a run, and the settings that belong to them, their probes and the datasets.

Measures are plugins: what they declare is checked before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from nlbench import registry
from nlbench.errors import PluginError, RequestError, nearest
from nlbench.measure import Measure, MoreMeans, Source
from nlbench.options import Option, OptionValue, resolve_options
from nlbench.probes import PROBES
from nlbench.request import Settings

__all__ = ["Bench", "Options", "checked_measure", "load_measures", "make_bench"]

Options = Mapping[str, OptionValue]


@dataclass(frozen=True)
class Bench:
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


def make_bench(
    measures: Sequence[type[Measure]],
    settings: Settings,
    datasets: Mapping[str, Mapping[str, Option]] | None = None,
) -> Bench:
    """Sort settings by the measure, probe or dataset they belong to, and check them.

    Raises
    ------
    nlbench.RequestError
        If a setting belongs to none of them or its value doesn't fit.
    """
    by_owner: dict[str, dict[str, OptionValue | str]] = {}
    declared = {name: PROBES[name].options for name in dict.fromkeys(m.probe for m in measures)}
    owners = {m.name: m.options for m in measures} | declared
    for name, options in (datasets or {}).items():
        if options and name in owners:
            raise PluginError(f"dataset '{name}' bears the name of a measure or a probe")
        owners.setdefault(name, options)
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

    def resolved(name: str, options: Mapping[str, Option]) -> Options:
        return resolve_options(options, by_owner.get(name, {}), owner=name)

    return Bench(
        tuple((m, resolved(m.name, m.options)) for m in measures),
        {name: resolved(name, options) for name, options in declared.items()},
        {name: resolved(name, options) for name, options in (datasets or {}).items()},
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
