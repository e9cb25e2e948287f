"""``nlbench list``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from nlbench import registry
from nlbench.errors import RequestError

from .common import note, print_table

__all__ = ["list_"]


class Listing(StrEnum):
    """What ``nlbench list`` lists."""

    measures = "measures"
    models = "models"
    datasets = "datasets"
    studies = "studies"
    recipes = "recipes"
    sites = "sites"


def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    model: Annotated[str | None, typer.Option(help="Whose sites to list.")] = None,
    data: Annotated[str, typer.Option(help="Dataset that decides the input's shape.")] = "digits",
) -> None:
    """List what can be named: measures, models, datasets, … or the sites of a model."""
    if what is not Listing.sites and model is not None:
        raise RequestError(f"list {what.value}: takes no --model; list sites --model {model} does")
    if what is Listing.sites:
        print_table(_sites(model, data), as_json)
        return
    found = registry.entries(what.value)
    rows = [
        {
            "name": entry.name,
            "description": registry.describe(entry),
            "from": ", ".join(entry.providers),
        }
        for entry in found.values()
    ]
    print_table(rows, as_json)
    conflicts = [entry.conflict for entry in found.values() if entry.conflict]
    for conflict in conflicts:
        note(conflict)
    if conflicts:
        raise typer.Exit(2)


def _sites(model: str | None, data: str) -> list[dict[str, Any]]:
    if model is None:
        raise RequestError("list sites: name a model with --model")
    from nlbench.probes.sites import list_sites
    from nlbench.subject import build_model, load_dataset

    dataset = load_dataset(data)
    network = build_model(model, dataset, seed=0)
    example = dataset.sample(2).inputs
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "shape": "×".join(map(str, site.shape)),
            "channels": f"axis {site.channel_axis}" + (" (assumed)" if site.assumed else ""),
        }
        for site in list_sites(network, example)
    ]
