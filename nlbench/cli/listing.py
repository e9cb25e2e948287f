"""``nlbench list``."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from nlbench import registry
from nlbench.errors import NlbenchError, RequestError, error_text
from nlbench.parsers import parse_index
from nlbench.question import plain_text
from nlbench.request import AUTO_DATA
from nlbench.source_facts import measure_facts

from .common import name_completer, note, print_table, split_names, subject_options
from .parameters import JsonFlag

if TYPE_CHECKING:
    from nlbench.subjects.data import Data


class Listing(StrEnum):
    """The lists of ``nlbench list``."""

    measures = "measures"
    probes = "probes"
    models = "models"
    datasets = "datasets"
    recipes = "recipes"
    studies = "studies"
    sites = "sites"
    ops = "ops"
    commands = "commands"


def list_(
    context: typer.Context,
    what: Annotated[Listing, typer.Argument(help="The list to print.")],
    as_json: JsonFlag = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--models",
            help="Model names or globs; for sites, a single model.",
            autocompletion=name_completer("models"),
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Dataset that sets the input shape; auto: the model's own, or else digits.",
            autocompletion=name_completer("datasets"),
        ),
    ] = "auto",
    of: Annotated[
        str | None,
        typer.Option(
            "--of",
            help="What counts as a site: activations, blocks, mlp, attention, spans:L or "
            "modules:GLOB.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="OWNER.OPTION=VALUE", help="For sites: an option of model or dataset."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every model of each family.")
    ] = False,
    traceable: Annotated[
        bool, typer.Option("--traceable", help="Show which models can be traced exactly.")
    ] = False,
) -> None:
    """List measures, models, datasets, …, the sites of a model, or supported operations."""
    flags = {
        f"--model {model}": ((Listing.sites, Listing.models), model is not None),
        f"--of {of}": ((Listing.sites,), of is not None),
        "--set …": ((Listing.sites,), bool(setting)),
        "--all": ((Listing.models,), everything),
        "--traceable": ((Listing.models,), traceable),
    }
    for flag, (lists, is_set) in flags.items():
        if is_set and what not in lists:
            option = flag.partition(" ")[0]
            raise RequestError(
                f"list {what.value} has no option {option}; use list {lists[0].value} {flag}"
            )
    unregistered: dict[Listing, Callable[[], list[dict[str, Any]]]] = {
        Listing.sites: lambda: _site_rows(model, data, of or "activations", setting or []),
        Listing.ops: _operation_rows,
        Listing.commands: lambda: _command_rows(context),
    }
    if what in unregistered:
        print_table(unregistered[what](), as_json, show_header=what is Listing.ops)
        return
    entries = registry.entries(what.value)
    families = registry.families(what.value)
    names = list(entries)
    if model is not None:
        names = registry.expand("models", split_names([model], "--model"))
    if traceable:
        print_table(_traceability_rows(_natural_order(names), data), as_json)
        return
    if everything and model is None:
        costly = [n for n, f in families.items() if f.family is not None and f.family.costly]
        names += [name for prefix in costly for name in _members(prefix)]
    if model is not None or everything:
        rows = [_plugin_row(registry.find(what.value, name)) for name in _natural_order(names)]
    else:
        single = [name for name in _natural_order(entries) if entries[name].family is None]
        rows = [_plugin_row(entries[name]) for name in single]
        rows += [_family_row(prefix, entry) for prefix, entry in families.items()]
    if what is Listing.measures and not as_json:
        _print_measures(rows)
    else:
        print_table(rows, as_json, show_header=what is Listing.studies)
    conflicts = [e.conflict for e in (*entries.values(), *families.values()) if e.conflict]
    conflicts += registry.installed()[1]
    for conflict in conflicts:
        note(conflict)
    if conflicts:
        raise typer.Exit(2)


def _plugin_row(entry: registry.Entry) -> dict[str, Any]:
    row = {"name": entry.name, "description": registry.describe(entry)}
    if entry.group == "probes":
        row["description"] = registry.load("probes", entry.name).description
    if entry.group == "studies":
        study = registry.load("studies", entry.name)
        row["needs"] = study.needs
        row["duration"] = f"{study.minutes:g} min, with --quick {study.quick_minutes:g} min"
    if entry.group == "measures":
        facts = measure_facts(entry)
        row |= {name: facts[name] for name in ("larger", "probe", "cost")}
    return {**row, "from": ", ".join(entry.providers)}


def _print_measures(rows: Iterable[Mapping[str, str]]) -> None:
    """Print the questions that measures answer, then each measure, for 80 columns."""
    print("Which measure? Four questions, and one about residual networks:\n")
    for line in plain_text():
        print(line)
    print("\nAll measures (--measures @all):\n")
    arrows = {"more nonlinear": "↑ more nonlinear", "less nonlinear": "↓ more nonlinear"}
    for row in rows:
        direction = arrows.get(row["larger"], "no direction")
        print(f"{row['name']:<20}  {direction:<16}  probe {row['probe']}  {row['from']}")
        cost = f" Cost: {row['cost'][0].lower()}{row['cost'][1:]}." if row["cost"] else ""
        for line in textwrap.wrap(f"{row['description']}{cost}", 78):
            print(f"  {line}")


def _family_row(prefix: str, entry: registry.Entry) -> dict[str, Any]:
    """Return a family's row, with the number of its members and how to list them."""
    row = {"name": entry.name, "description": "", "from": ", ".join(entry.providers)}
    if entry.family is None:
        return {**row, "description": "(can't be loaded)"}
    members = () if entry.family.costly else entry.family.names()
    count = f"{len(members)}: " if members else ""
    has_members = entry.group == "models" and not entry.family.claimed_form
    hint = f"; list models --model '{prefix}/*'" if has_members else ""
    return {**row, "description": f"{count}{entry.family.description}{hint}"}


def _members(prefix: str) -> list[str]:
    """Return the members of a costly family. Print a message if its library is missing."""
    try:
        return registry.expand("models", [f"{prefix}/*"])
    except RequestError as error:
        note(f"{error}; skipped")
        return []


def _natural_order(names: Iterable[str]) -> list[str]:
    """Sort names in natural order (2 before 10), with members of families last."""

    def key(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        parts = [(parse_index(part), part) for part in re.findall(r"\d+|\D+", name)]
        return "/" in name, [(number is None, number or 0, part) for number, part in parts]

    return sorted(names, key=key)


def _traceability_rows(names: list[str], data: str) -> list[dict[str, Any]]:
    from nlbench.progress import create_progress

    with create_progress("auto") as bar:
        bar.show_status("loading")
        from nlbench.subjects.load import load_dataset
        from nlbench.subjects.model import default_data

        bar.begin(len(names))
        datasets: dict[str, list[str]] = {}
        for name in names:
            datasets.setdefault(default_data(name) if data == AUTO_DATA else data, []).append(name)
        return [
            row
            for dataset, models in datasets.items()
            for row in traceability(models, load_dataset(dataset), bar.step)
        ]


def _operation_rows() -> list[dict[str, str]]:
    """Return a row per operation. Print errors from plugins that register operations."""
    from nlbench.introspection.operations import load_errors
    from nlbench.introspection.operations.listing import supported

    rows = supported()
    for error in load_errors():
        note(error)
    return rows


def _command_rows(context: typer.Context) -> list[dict[str, str]]:
    group = context.find_root().command
    commands = group.commands if isinstance(group, TyperGroup) else {}
    return [
        {"name": name, "description": (command.help or "").partition("\n")[0]}
        for name, command in commands.items()
    ]


def _site_rows(model: str | None, data: str, of: str, settings: list[str]) -> list[dict[str, Any]]:
    if model is None:
        raise RequestError("list sites: specify a model with --model")
    from nlbench.probes.sites.sites_observation import list_sites
    from nlbench.subjects.load import bind_arguments, model_source
    from nlbench.subjects.model import default_data
    from nlbench.subjects.spec import SubjectSpec

    dataset = default_data(model) if data == AUTO_DATA else data
    arguments, options = subject_options(settings, model, dataset)
    spec = SubjectSpec(model, "auto", dataset, options=options, arguments=arguments)
    source = model_source(spec)
    network = source.fresh()
    inputs = bind_arguments(source.dataset, network).sample(2, split=spec.split).inputs
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "role": site.role,
            "shape": "×".join(map(str, site.shape)),
            "channels": f"axis {site.channel_axis}" + (" (assumed)" if site.assumed else ""),
            "where": site.problem or site.where,
        }
        for site in list_sites(network, inputs, of=of)
    ]


def traceability(
    names: Iterable[str], dataset: "Data", step: Callable[[str], None] = lambda name: None
) -> list[dict[str, Any]]:
    """Determine whether each model can be traced exactly and, if not, why not.

    Each model is built for the dataset's input shape or, if it rejects that, for its builder's
    default input shape. If possible, it is built on PyTorch's ``meta`` device, so that large
    models take no longer than small ones. If a model can't be built or run, its row contains the
    error. `step` is called with each name before the model is built.
    """
    rows = []
    for name in names:
        step(name)
        try:
            shape, reason = _untraceable_reason(name, dataset)
            answer = "no" if reason else "yes"
        except (Exception, SystemExit) as error:
            # A model may raise any exception, which must not abort the listing.
            shape = ()
            answer = "unknown"
            reason = error_text(error)
        size = "×".join(map(str, shape))
        rows.append({"name": name, "traceable": answer, "input": size, "reason": reason})
    return rows


def _untraceable_reason(name: str, dataset: "Data") -> tuple[tuple[int, ...], str]:
    import torch

    from nlbench.probes.lines import untraceable_reason

    first_error: NlbenchError | None = None
    for shape in _input_shapes(name, dataset):
        # A placeholder for a dataset with that input shape.
        stand_in = SimpleNamespace(
            name=dataset.name,
            shape=shape,
            classes=dataset.classes,
            sample=lambda count, shape=shape: SimpleNamespace(inputs=torch.zeros(count, *shape)),
        )
        try:
            model = _build_without_weights(name, stand_in)
        except NlbenchError as error:
            first_error = first_error or error
            continue
        return shape, untraceable_reason(model, torch.zeros(1, *shape))
    assert first_error is not None
    raise first_error


def _build_without_weights(name: str, dataset: Any) -> Any:
    import torch

    from nlbench.subjects.load import build_model

    try:
        with torch.device("meta"):
            return build_model(name, dataset, seed=0)
    except NlbenchError:
        raise
    except Exception:
        # Some builders compute with the weights, which have no values on the meta device.
        return build_model(name, dataset, seed=0)


def _input_shapes(name: str, dataset: "Data") -> Iterator[tuple[int, ...]]:
    """Yield the dataset's input shape, then the builder's default shape."""
    yield tuple(dataset.shape)
    try:
        parameters = inspect.signature(registry.load("models", name)).parameters
    except (TypeError, ValueError):
        return
    missing = SimpleNamespace(default=None)
    shape = parameters.get("input_shape", missing).default
    side = parameters.get("image_size", missing).default
    channels = parameters.get("in_channels", missing).default
    if isinstance(shape, tuple):
        yield shape
    elif isinstance(side, int) and isinstance(channels, int):
        yield (channels, side, side)
