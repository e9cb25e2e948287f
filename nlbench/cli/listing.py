"""``nlbench list``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import typer

from nlbench import registry
from nlbench.errors import RequestError

from .common import note, print_table, split_names

__all__ = ["list_"]


class Listing(StrEnum):
    """What ``nlbench list`` lists."""

    measures = "measures"
    models = "models"
    datasets = "datasets"
    studies = "studies"
    recipes = "recipes"
    sites = "sites"
    ops = "ops"


def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Names or globs of models; for sites, whose to list.")
    ] = None,
    data: Annotated[str, typer.Option(help="Dataset that decides the input's shape.")] = "digits",
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
    if what is Listing.sites:
        print_table(_sites(model, data), as_json)
        return
    if what is Listing.ops:
        _list_operations(as_json)
        return
    known = registry.entries(what.value)
    families = registry.families(what.value)
    if traceable:
        print_table(_traceable(_natural(_chosen(model, known)), data), as_json)
        return
    if model is not None:
        rows = [_row(known[name]) for name in _natural(_chosen(model, known))]
    elif everything:
        costly = [n for n, f in families.items() if f.family is not None and f.family.costly]
        members = [name for prefix in costly for name in _members(prefix)]
        rows = [_row(known[name]) for name in _natural([*known, *members])]
    else:
        rows = [_row(known[name]) for name in _natural(known) if known[name].family is None]
        rows += [_family_row(prefix, entry) for prefix, entry in families.items()]
    print_table(rows, as_json)
    conflicts = [e.conflict for e in (*known.values(), *families.values()) if e.conflict]
    for conflict in conflicts:
        note(conflict)
    if conflicts:
        raise typer.Exit(2)


def _list_operations(as_json: bool) -> None:
    from nlbench.probes.ops import load_errors, supported

    print_table(supported(), as_json)
    for error in load_errors():
        note(error)


def _chosen(model: str | None, known: registry.Entries) -> list[str]:
    """Registered models that names and globs with commas mean; all that are listed without."""
    if model is None:
        return list(known)
    return registry.expand("models", split_names([model], "--model"))


def _row(entry: registry.Entry) -> dict[str, Any]:
    description = registry.describe(entry)
    return {"name": entry.name, "description": description, "from": ", ".join(entry.providers)}


def _family_row(prefix: str, entry: registry.Entry) -> dict[str, Any]:
    """One line for a whole family: how many, and how to see them."""
    row = {"name": entry.name, "description": "", "from": ", ".join(entry.providers)}
    if entry.family is None:
        return {**row, "description": "(can't be loaded)"}
    count = "" if entry.family.costly else f"{len(entry.family.names())}: "
    return {
        **row,
        "description": f"{count}{entry.family.description}; list models --model '{prefix}/*'",
    }


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

        from .traceability import traceability

        bar.begin(len(names))
        return traceability(names, load_dataset(data), bar.step)


def _sites(model: str | None, data: str) -> list[dict[str, Any]]:
    if model is None:
        raise RequestError("list sites: name a model with --model")
    from nlbench.probes.sites.sites import list_sites
    from nlbench.subjects.load import (
        SubjectSpec,
        adapted,
        build_model,
        choose_weights,
        load_dataset,
    )
    from nlbench.subjects.model import model_info

    choice = choose_weights(SubjectSpec(model, "auto", data))
    info = model_info(registry.load("models", model))
    dataset = adapted(load_dataset(data), info, choice)
    network = build_model(model, dataset, seed=0)
    example = dataset.sample(2).inputs
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "role": site.role,
            "shape": "×".join(map(str, site.shape)),
            "channels": f"axis {site.channel_axis}" + (" (assumed)" if site.assumed else ""),
        }
        for site in list_sites(network, example)
    ]
