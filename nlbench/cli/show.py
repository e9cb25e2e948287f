"""``nlbench show``."""

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Option


def show(
    name: Annotated[
        str, typer.Argument(help="Name of a measure, model, dataset or recipe, or a run folder.")
    ],
    cite: Annotated[
        bool, typer.Option("--cite", help="Print only the source, as BibTeX if possible.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a run's manifest as JSON.")
    ] = False,
) -> None:
    """Show a measure, model, dataset or recipe, or a run's manifest."""
    # The functions of os.path return False for an invalid name instead of raising.
    if os.path.isfile(f"{name}/manifest.json"):  # noqa: PTH113
        from nlbench.lazy import load_reports
        from nlbench.store.run import load_run

        manifest = load_run(name).manifest
        as_text = load_reports().manifest_text
        print(json.dumps(dict(manifest), indent=1) if as_json else as_text(manifest))
        return
    try:
        group = find_group(name)
    except RequestError as error:
        if os.path.isdir(name):  # noqa: PTH112
            raise RequestError(f"{name} is not a run: it has no manifest.json") from error
        raise
    if cite:
        source = load_source(group, name)
        text = source.bibtex or source.citation or source.equation
        if not text:
            raise RequestError(f"{registry.GROUPS[group]} '{name}' has no source")
        print(text)
        return
    print(details(group, name))


GROUPS = ("measures", "models", "datasets", "recipes")


def find_group(name: str) -> str:
    """Return the group in which a name is registered.

    Examples
    --------
    >>> find_group("affinity"), find_group("vgg8"), find_group("digits"), find_group("adam")
    ('measures', 'models', 'datasets', 'recipes')
    """
    family, slash, _ = name.partition("/")
    for group in ("models", "datasets"):
        if slash and family in registry.families(group):
            return group
    groups = {entry: group for group in reversed(GROUPS) for entry in registry.entries(group)}
    if name not in groups:
        raise RequestError(
            f"there is no measure, model, dataset or recipe '{shorten(name)}'"
            f"{nearest(name, groups)}"
        )
    return groups[name]


def load_source(group: str, name: str) -> Source:
    """Return the source of a registered object. A dataset is opened to read its source."""
    plugin = _load_plugin(group, name)
    if group == "models":
        from nlbench.subjects.model import model_info

        return model_info(plugin).source
    if group == "datasets":
        from nlbench.subjects.load import load_dataset

        return load_dataset(name).source
    return getattr(plugin, "source", Source(""))


def _load_plugin(group: str, name: str) -> Any:
    if group != "measures":
        return registry.load(group, name)
    from nlbench.measure.contract import load_measure

    return load_measure(name)


def details(group: str, name: str) -> str:
    """Return a multi-line description of a registered object.

    Examples
    --------
    >>> print(details("models", "resnet18-w8").partition("source")[0])
    resnet18-w8 (model)
    <BLANKLINE>
    ResNet18 of base width 8 from the linear-regions paper, no batch norm.
    <BLANKLINE>
    trained   none included
    recipe    adam (default of nlbench train and linearize)
    <BLANKLINE>
    """
    plugin = _load_plugin(group, name)
    title = f"{name} ({registry.GROUPS[group]})"
    if group == "measures":
        title = f"{plugin.name} (version {plugin.version}, probe {plugin.probe})"
    # Instances and built functions have none; the description is the string below the definition.
    doc = "" if group == "recipes" else getattr(plugin, "__doc__", "")
    doc = doc or registry.describe(registry.find(group, name))
    text = inspect.cleandoc(doc or "(no description)")
    lines = {"measures": _measure, "models": _model, "datasets": _dataset, "recipes": _recipe}
    text = re.sub(r":math:`([^`]*)`", r"\1", text.replace(".. math::\n\n", ""))
    return "\n".join([title, "", text, "", *lines[group](name, plugin)])


def _measure(name: str, measure: Any) -> Iterator[str]:
    low, high = measure.bounds
    yield f"bounds    {low:g} to {high:g}"
    yield f"higher    {measure.more_means}"
    yield from _option_lines("option", measure.options, name)
    from nlbench.probes.probe import load_probe

    yield from _option_lines("probe", load_probe(measure.probe).options, measure.probe)
    yield _source_line(measure.source)


def _model(name: str, build: Any) -> Iterator[str]:
    from nlbench.subjects.model import ANY_DATA, model_info

    info = model_info(build)
    trained = ["any data" if data == ANY_DATA else data for data in info.trained]
    yield f"trained   {', '.join(trained) or 'none included'}"
    if info.data:
        yield f"data      {info.data} (default of nlbench run)"
    yield f"recipe    {info.recipe} (default of nlbench train and linearize)"
    yield _source_line(info.source)


def _dataset(name: str, build: Any) -> Iterator[str]:
    from nlbench.subjects.data import dataset_info

    yield from _option_lines("option", dataset_info(build).options, name)


def _recipe(name: str, recipe: Any) -> Iterator[str]:
    for entry in fields(recipe):
        if entry.name not in ("name", "source"):
            yield f"setting   {entry.name} = {getattr(recipe, entry.name)}"
    yield _source_line(recipe.source)


def _option_lines(kind: str, options: Mapping[str, Option], owner: str) -> Iterator[str]:
    for name, option in options.items():
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        yield f"{kind:<9} {owner}.{name} = {option.default}  {option.help}{choices}"


def _source_line(source: Source) -> str:
    parts = (source.citation, source.equation)
    return f"source    {', '.join(filter(None, parts))}".rstrip()
