"""``nlbench list``."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from nlbench import registry
from nlbench.errors import NlbenchError, RequestError, error_text

from .common import completed, note, print_table, split_names

if TYPE_CHECKING:
    from nlbench.subjects.data import Data

__all__ = ["list_", "traceability"]


class Listing(StrEnum):
    """What ``nlbench list`` lists."""

    measures = "measures"
    probes = "probes"
    models = "models"
    datasets = "datasets"
    recipes = "recipes"
    reports = "reports"
    studies = "studies"
    sites = "sites"
    ops = "ops"
    commands = "commands"


def list_(
    context: typer.Context,
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--models",
            help="Names or globs of models; for sites, whose to list.",
            autocompletion=completed("models"),
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Dataset that decides the input's shape.", autocompletion=completed("datasets")
        ),
    ] = "digits",
    everything: Annotated[
        bool, typer.Option("--all", help="Name every member of a family of models.")
    ] = False,
    traceable: Annotated[
        bool, typer.Option("--traceable", help="Say which models can be traced exactly.")
    ] = False,
) -> None:
    """List what can be named: measures, models, … the sites of a model, or known operations."""
    if what not in (Listing.sites, Listing.models) and model is not None:
        raise RequestError(f"list {what.value}: takes no --model; list sites --model {model} does")
    if what is not Listing.models and (everything or traceable):
        flag = "--all" if everything else "--traceable"
        raise RequestError(f"list {what.value}: takes no {flag}; list models {flag} does")
    others: dict[Listing, Callable[[], list[dict[str, Any]]]] = {
        Listing.sites: lambda: _sites(model, data),
        Listing.ops: _operations,
        Listing.commands: lambda: _commands(context),
    }
    if what in others:
        print_table(others[what](), as_json, has_head=what is Listing.ops)
        return
    known = registry.entries(what.value)
    families = registry.families(what.value)
    chosen = list(known)
    if model is not None:
        chosen = registry.expand("models", split_names([model], "--model"))
    if traceable:
        print_table(_traceable(_natural(chosen), data), as_json)
        return
    if model is not None:
        rows = [_row(registry.find(what.value, name)) for name in _natural(chosen)]
    elif everything:
        costly = [n for n, f in families.items() if f.family is not None and f.family.costly]
        members = [name for prefix in costly for name in _members(prefix)]
        rows = [_row(registry.find(what.value, name)) for name in _natural([*known, *members])]
    else:
        rows = [_row(known[name]) for name in _natural(known) if known[name].family is None]
        rows += [_family_row(prefix, entry) for prefix, entry in families.items()]
    print_table(rows, as_json)
    conflicts = [e.conflict for e in (*known.values(), *families.values()) if e.conflict]
    conflicts += registry.installed()[1]
    for conflict in conflicts:
        note(conflict)
    if conflicts:
        raise typer.Exit(2)


def _row(entry: registry.Entry) -> dict[str, Any]:
    row = {"name": entry.name, "description": registry.describe(entry)}
    if entry.group == "studies":
        study = registry.load("studies", entry.name)
        row["needs"] = study.needs
        row["minutes"] = f"{study.minutes:g}, quick {study.quick_minutes:g}"
    return {**row, "from": ", ".join(entry.providers)}


def _family_row(prefix: str, entry: registry.Entry) -> dict[str, Any]:
    """One line for a whole family: how many, and how to see them."""
    row = {"name": entry.name, "description": "", "from": ", ".join(entry.providers)}
    if entry.family is None:
        return {**row, "description": "(can't be loaded)"}
    members = () if entry.family.costly else entry.family.names()
    count = f"{len(members)}: " if members else ""
    seen = f"; list models --model '{prefix}/*'" if entry.group == "models" else ""
    return {**row, "description": f"{count}{entry.family.description}{seen}"}


def _members(prefix: str) -> list[str]:
    """Members of a costly family; a note in place of them where its library is missing."""
    try:
        return registry.expand("models", [f"{prefix}/*"])
    except RequestError as error:
        note(f"{error}; left out")
        return []


def _natural(names: Iterable[str]) -> list[str]:
    """Sort names with their numbers as numbers, members of families last."""

    def key(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        parts = re.findall(r"\d+|\D+", name)
        digits = [(p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in parts]
        return "/" in name, [(not is_number, n, p) for is_number, n, p in digits]

    return sorted(names, key=key)


def _traceable(names: list[str], data: str) -> list[dict[str, Any]]:
    from nlbench.progress import Bar

    with Bar() as bar:
        bar.say("loading")
        from nlbench.subjects.load import load_dataset

        bar.begin(len(names))
        return traceability(names, load_dataset(data), bar.step)


def _operations() -> list[dict[str, str]]:
    """What is known of each operation, and of plugins whose operations can't be had."""
    from nlbench.introspection.operations import load_errors, supported

    rows = supported()
    for error in load_errors():
        note(error)
    return rows


def _commands(context: typer.Context) -> list[dict[str, str]]:
    """The commands, with what each does in one line."""
    group = context.find_root().command
    found = {} if not isinstance(group, TyperGroup) else group.commands
    return [
        {"name": name, "description": (command.help or "").partition("\n")[0]}
        for name, command in found.items()
    ]


def _sites(model: str | None, data: str) -> list[dict[str, Any]]:
    if model is None:
        raise RequestError("list sites: name a model with --model")
    from nlbench.probes.sites.probe import list_sites
    from nlbench.subjects.load import SubjectSpec, model_source

    source = model_source(SubjectSpec(model, "auto", data))
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "role": site.role,
            "shape": "×".join(map(str, site.shape)),
            "channels": f"axis {site.channel_axis}" + (" (assumed)" if site.assumed else ""),
        }
        for site in list_sites(source.fresh(), source.example(2))
    ]


def traceability(
    names: Iterable[str], dataset: "Data", step: Callable[[str], None] = lambda name: None
) -> list[dict[str, Any]]:
    """Say of each model whether it can be traced, and what prevents it.

    A model is built for the dataset's inputs, or where it refuses them for those that its
    own builder states as default. It gets no weights where PyTorch's ``meta`` device will
    do, so that large ones cost as little as small ones. One that can't be built or looked
    at is listed with the reason.

    Parameters
    ----------
    names : iterable of str
        Registered models.
    dataset : Data
    step : callable
        Told each name before its model is built.

    Returns
    -------
    list of dict
        ``name``; ``traceable``: yes, no or unknown; ``input``, its shape; ``reason``.
    """
    rows = []
    for name in names:
        step(name)
        try:
            shape, reason = _look(name, dataset)
            answer = "no" if reason else "yes"
        except (Exception, SystemExit) as error:
            # A model may fail in any way; the list goes on with the next.
            shape, answer, reason = (), "unknown", error_text(error)
        size = "×".join(map(str, shape))
        rows.append({"name": name, "traceable": answer, "input": size, "reason": reason})
    return rows


def _look(name: str, dataset: "Data") -> tuple[tuple[int, ...], str]:
    import torch

    from nlbench.probes.lines.recording.program import traceable

    refused: NlbenchError | None = None
    for shape in _shapes(name, dataset):
        # As much of a dataset as building a model for it needs.
        target = SimpleNamespace(
            name=dataset.name,
            shape=shape,
            classes=dataset.classes,
            sample=lambda count, shape=shape: SimpleNamespace(inputs=torch.zeros(count, *shape)),
        )
        try:
            model = _built(name, target)
        except NlbenchError as error:
            refused = refused or error
            continue
        return shape, traceable(model, torch.zeros(1, *shape))
    assert refused is not None
    raise refused


def _built(name: str, target: Any) -> Any:
    import torch

    from nlbench.subjects.load import build_model

    try:
        with torch.device("meta"):
            return build_model(name, target, seed=0)
    except NlbenchError:
        raise
    except Exception:
        # Some builders compute with their weights, which the meta device doesn't have.
        return build_model(name, target, seed=0)


def _shapes(name: str, dataset: "Data") -> Iterator[tuple[int, ...]]:
    """The dataset's shape, then the one that the builder's defaults state."""
    yield tuple(dataset.shape)
    try:
        parameters = inspect.signature(registry.load("models", name)).parameters
    except (TypeError, ValueError):
        return
    none = SimpleNamespace(default=None)
    shape = parameters.get("input_shape", none).default
    side = parameters.get("image_size", none).default
    channels = parameters.get("in_channels", none).default
    if isinstance(shape, tuple):
        yield shape
    elif isinstance(side, int) and isinstance(channels, int):
        yield (channels, side, side)
