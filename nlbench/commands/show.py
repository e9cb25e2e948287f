"""``nlbench show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry
from nlbench.manifest_text import manifest_text

__all__ = ["show"]


def show(
    name: Annotated[str, typer.Argument(help="A measure's name, or a run's folder.")],
    cite: Annotated[bool, typer.Option("--cite", help="Only the BibTeX entry.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A run's manifest as JSON.")] = False,
) -> None:
    """Show a measure's definition, bounds, options and source, or a run's manifest."""
    if Path(name, "manifest.json").is_file():
        from nlbench.records import load_run

        manifest = load_run(name).manifest
        print(json.dumps(manifest, indent=1) if as_json else manifest_text(manifest))
        return
    import inspect

    measure = registry.load("measures", name)
    if cite:
        print(measure.source.bibtex or measure.source.citation)
        return
    low, high = measure.bounds
    print(f"{measure.name} (version {measure.version}, probe {measure.probe})\n")
    print(inspect.cleandoc(measure.__doc__ or "(no description)"))
    print(f"\nbounds    {low:g} to {high:g}\nmore is   {measure.more_means}")
    for option, detail in measure.options.items():
        choices = f" ({', '.join(detail.choices)})" if detail.choices else ""
        print(f"option    {measure.name}.{option} = {detail.default}  {detail.help}{choices}")
    from nlbench.probes import PROBES

    for option, detail in PROBES[measure.probe].options.items():
        choices = f" ({', '.join(detail.choices)})" if detail.choices else ""
        print(f"probe     {measure.probe}.{option} = {detail.default}  {detail.help}{choices}")
    print(f"source    {measure.source.citation} {measure.source.equation}".rstrip())
