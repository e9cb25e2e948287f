"""Loading and validation of registered measures and probes.

`nlbench.registry` defines the groups of entry points and finds names in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nlbench import registry
from nlbench.errors import PluginError, RequestError, nearest
from nlbench.measure import Measure
from nlbench.measure.contract import as_measure
from nlbench.probes import Probe


def load_measures(names: Iterable[str], warn: Callable[[str], None]) -> list[type[Measure]]:
    """Load registered measures; skip those matched by a glob that can't be loaded."""
    patterns = list(names)
    loaded: list[type[Measure]] = []
    for name in registry.expand("measures", patterns):
        try:
            loaded.append(load_measure(name))
        except PluginError as error:
            if name in patterns:
                raise
            warn(f"{error}; skipped")
    if not loaded:
        raise RequestError(f"no measure to run{nearest('', registry.entries('measures'))}")
    return loaded


def load_measure(name: str) -> type[Measure]:
    """Load a registered measure."""
    return checked_measure(registry.load("measures", name), name)


def checked_measure(measure: object, name: str | None = None) -> type[Measure]:
    """Convert an object to a measure whose probe is registered; see `as_measure`."""
    checked = as_measure(measure, name)
    probes = registry.entries("probes")
    if checked.name in probes:
        raise PluginError(f"measure '{checked.name}' has the name of a probe; choose another")
    if checked.probe not in probes:
        raise PluginError(
            f"measure '{checked.name}' requires the probe '{checked.probe}'"
            f"{nearest(checked.probe, probes)}"
        )
    return checked


def load_probe(name: str) -> Probe:
    """Load a registered probe."""
    probe = registry.load("probes", name)
    if not isinstance(probe, Probe):
        raise PluginError(f"probe '{name}' is {probe!r}, expected an nlbench.probes.Probe")
    if probe.name != name:
        raise PluginError(
            f"probe '{name}' has the name '{probe.name}'; an entry point and its probe must have "
            "the same name"
        )
    return probe
