"""``nlbench show``."""

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import RequestError, nearest, shown
from nlbench.options import Option

__all__ = ["details", "group_of", "show", "source_of"]


def show(
    name: Annotated[
        str,
        typer.Argument(help="Name of a measure, model, dataset or recipe; or a run's folder."),
    ],
    cite: Annotated[
        bool, typer.Option("--cite", help="Only the source, as BibTeX where there is an entry.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A run's manifest as JSON.")] = False,
) -> None:
    """Show what is known of a measure, model, dataset or recipe, or a run's manifest."""
    if _is_run(name):
        from nlbench.store.run_folder import load_run

        manifest = load_run(name).manifest
        as_text = registry.load("reports", "manifest")
        print(json.dumps(dict(manifest), indent=1) if as_json else as_text(manifest))
        return
    try:
        group = group_of(name)
    except RequestError as error:
        if os.path.isdir(name):  # noqa: PTH112 (whatever the name is, this is an answer)
            raise RequestError(f"{name} is a folder without manifest.json, so no run") from error
        raise
    if cite:
        source = source_of(group, name)
        known = source.bibtex or source.citation or source.equation
        if not known:
            raise RequestError(f"{registry.GROUPS[group]} '{name}' names no source")
        print(known)
        return
    print(details(group, name))


def _is_run(name: str) -> bool:
    try:
        return Path(name, "manifest.json").is_file()
    except OSError:  # a name that no file can have
        return False


SHOWN = ("measures", "models", "datasets", "recipes")


def group_of(name: str) -> str:
    """Find which of the groups a name is registered in; a family's member is a model.

    Raises
    ------
    nlbench.RequestError
        If it is registered in none; the message suggests the nearest.

    Examples
    --------
    >>> group_of("affinity"), group_of("vgg8"), group_of("digits"), group_of("adam")
    ('measures', 'models', 'datasets', 'recipes')
    """
    family, slash, _ = name.partition("/")
    for group in ("models", "datasets"):
        if slash and family in registry.families(group):
            return group
    known = {entry: group for group in reversed(SHOWN) for entry in registry.entries(group)}
    if name not in known:
        raise RequestError(
            f"there is no measure, model, dataset or recipe '{shown(name)}'{nearest(name, known)}"
        )
    return known[name]


def source_of(group: str, name: str) -> Source:
    """Where something registered comes from; of a dataset that has to be there."""
    found = _loaded(group, name)
    if group == "models":
        from nlbench.subjects.model import model_info

        return model_info(found).source
    if group == "datasets":
        from nlbench.subjects.load import load_dataset

        return load_dataset(name).source
    source: Source = getattr(found, "source", Source(""))
    return source


def _loaded(group: str, name: str) -> Any:
    if group != "measures":
        return registry.load(group, name)
    from nlbench.plan import load_measure

    return load_measure(name)


def details(group: str, name: str) -> str:
    """Give the lines for something registered.

    Examples
    --------
    >>> print(details("models", "resnet18-w8").partition("source")[0])
    resnet18-w8 (model)
    <BLANKLINE>
    ResNet18 of base width 8 of the linear-regions paper, no batch norm.
    <BLANKLINE>
    trained   no weights ship
    recipe    adam, where train and linearize are given none
    <BLANKLINE>
    """
    found = _loaded(group, name)
    title = f"{name} ({registry.GROUPS[group]})"
    text = inspect.cleandoc(getattr(found, "__doc__", "") or "(no description)")
    if group == "measures":
        title = f"{found.name} (version {found.version}, probe {found.probe})"
    elif group == "recipes":
        # An instance: its own text stands below it in the source.
        text = registry.describe(registry.find(group, name))
    lines = {"measures": _measure, "models": _model, "datasets": _dataset, "recipes": _recipe}
    return "\n".join([title, "", text, "", *lines[group](name, found)])


def _measure(name: str, measure: Any) -> Iterator[str]:
    low, high = measure.bounds
    yield f"bounds    {low:g} to {high:g}"
    yield f"more is   {measure.more_means}"
    yield from _options("option", measure.options, name)
    from nlbench.plan import load_probe

    yield from _options("probe", load_probe(measure.probe).options, measure.probe)
    yield _source(measure.source)


def _model(name: str, build: Any) -> Iterator[str]:
    from nlbench.subjects.model import model_info

    info = model_info(build)
    yield f"trained   {', '.join(info.trained) or 'no weights ship'}"
    yield f"recipe    {info.recipe}, where train and linearize are given none"
    yield _source(info.source)


def _dataset(name: str, build: Any) -> Iterator[str]:
    from nlbench.subjects.data import dataset_info

    yield from _options("option", dataset_info(build).options, name)


def _recipe(name: str, recipe: Any) -> Iterator[str]:
    for entry in fields(recipe):
        if entry.name not in ("name", "source"):
            yield f"setting   {entry.name} = {getattr(recipe, entry.name)}"
    yield _source(recipe.source)


def _options(kind: str, options: Mapping[str, Option], owner: str) -> Iterator[str]:
    for name, option in options.items():
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        yield f"{kind:<9} {owner}.{name} = {option.default}  {option.help}{choices}"


def _source(source: Source) -> str:
    parts = (source.citation, source.equation)
    return f"source    {' '.join(filter(None, parts))}".rstrip()
