"""Assign the settings of a run (``--set``) to its measures, probes and datasets.

`nlbench.options` declares and validates single options; `nlbench.parsers` parses text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nlbench.errors import PluginError, RequestError, nearest
from nlbench.measure import Measure
from nlbench.options import Option, Options, OptionValue, Settings, resolve_options
from nlbench.parsers import unique
from nlbench.probes.probe import load_probe
from nlbench.subjects.data import DatasetInfo, settings_owners
from nlbench.subjects.model import MODEL_OWNER, OUTPUT, ModelInfo, resolve_arguments

if TYPE_CHECKING:
    from nlbench.probes.probe import Probe


@dataclass(frozen=True)
class ResolvedSettings:
    """The measures of a run with their options, and the options of probes and datasets."""

    measures: tuple[tuple[type[Measure], Options], ...]
    probes: Mapping[str, Options]
    data: Mapping[str, Options] = field(default_factory=dict)
    models: Mapping[str, Options] = field(default_factory=dict)


def resolve_settings(
    measures: Sequence[type[Measure]],
    settings: Settings,
    datasets: Mapping[str, DatasetInfo] | None = None,
    models: Mapping[str, ModelInfo] | None = None,
) -> ResolvedSettings:
    """Assign settings to the measures, probes and datasets of a run and validate them.

    Datasets and models have declarations, with options or keyword arguments, by name. Raise
    RequestError if a setting applies to nothing.
    """
    probe_names = unique(m.probe for m in measures)
    probes = {name: load_probe(name) for name in probe_names}
    settings = _copy_followed_settings(settings, probes)
    owners = {m.name: m.options for m in measures}
    owners |= {name: probe.options for name, probe in probes.items()}
    datasets = datasets or {}
    for name, info in datasets.items():
        if info.options and name in owners:
            raise PluginError(f"dataset '{name}' has the name of a measure or a probe")
        for owner in settings_owners(name, info):
            # A setting of a family applies to all its members in the run.
            owners.setdefault(owner, info.options)
    arguments = {n: m for n, m in (models or {}).items() if m.options is None or m.options}
    owners |= {name: {} for name in arguments}
    # Every model has an output to choose.
    if arguments or (models and f"{MODEL_OWNER}.{OUTPUT}" in settings):
        owners.setdefault(MODEL_OWNER, {})
    by_owner = _split_settings(settings, owners)
    for_all = by_owner.get(MODEL_OWNER, {})
    output = {OUTPUT: for_all[OUTPUT]} if OUTPUT in for_all else {}

    def collect_options(
        name: str, options: Mapping[str, Option], groups: Sequence[str] = ()
    ) -> Options:
        set_options: dict[str, OptionValue | str] = {}
        for owner in (*groups, name):
            set_options |= by_owner.get(owner, {})
        return resolve_options(options, set_options, owner=name)

    by_model = {}
    for name, model in (models or {}).items():
        if name in arguments or output:
            common = for_all if name in arguments else output
            by_model[name] = resolve_arguments(name, model, {**common, **by_owner.get(name, {})})
    return ResolvedSettings(
        tuple((m, collect_options(m.name, m.options)) for m in measures),
        {name: collect_options(name, probe.options) for name, probe in probes.items()},
        {
            n: collect_options(n, info.options, settings_owners(n, info))
            for n, info in datasets.items()
        },
        by_model,
    )


def _copy_followed_settings(settings: Settings, probes: Mapping[str, Probe]) -> Settings:
    """Set the options that follow another probe's options, unless they are set explicitly."""
    followed = {
        f"{name}.{option}": key
        for name, probe in probes.items()
        for option, key in probe.follows.items()
        if key in settings
    }
    explicit = {k: v for k, v in settings.items() if k.partition(".")[0] in probes}
    others = {k: v for k, v in settings.items() if k not in explicit and k not in followed.values()}
    return {**{option: settings[key] for option, key in followed.items()}, **explicit, **others}


def _split_settings(
    settings: Settings, owners: Mapping[str, object]
) -> dict[str, dict[str, OptionValue | str]]:
    """Group settings with keys ``OWNER.OPTION`` by owner."""
    by_owner: dict[str, dict[str, OptionValue | str]] = {}
    for key, value in settings.items():
        owner, dot, option = key.rpartition(".")
        if not dot or not owner or not option:
            raise RequestError(
                f"setting '{key}': expected MEASURE.OPTION, PROBE.OPTION or DATASET.OPTION, or "
                "model.ARGUMENT for your own network"
            )
        if owner == MODEL_OWNER and owner not in owners:
            raise RequestError(
                f"setting '{key}': the networks of this run take no arguments, only "
                f"{MODEL_OWNER}.{OUTPUT}"
            )
        if owner not in owners:
            raise RequestError(
                f"setting '{key}': '{owner}' is not a measure, probe or dataset of this run"
                f"{nearest(owner, owners)}"
            )
        by_owner.setdefault(owner, {})[option] = value
    return by_owner
