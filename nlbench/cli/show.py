"""``nlbench show``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.store.manifest import manifest_text

from .details import details, group_of, source_of

__all__ = ["show"]


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
        print(json.dumps(dict(manifest), indent=1) if as_json else manifest_text(manifest))
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
