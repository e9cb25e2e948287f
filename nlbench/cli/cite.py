"""``nlbench cite``."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nlbench.errors import NlbenchError, without_controls

from .show import source_of

__all__ = ["cite"]


def cite(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")],
) -> None:
    """Print BibTeX of the measures, models, data and recipes that runs used."""
    from nlbench.store.run_folder import load_run

    found: dict[str, None] = {}
    for path in runs:
        for bibtex, citation in _sources(load_run(path).manifest):
            if bibtex.strip():
                found.update(dict.fromkeys(re.split(r"\n\s*\n(?=@)", bibtex.strip())))
            elif citation.strip():
                found[f"% {' '.join(citation.split())}"] = None
    print(
        without_controls("\n\n".join(found))
        if found
        else "% nothing that these runs used names a source"
    )


def _sources(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """BibTeX and citation of the measures as recorded, and of what is registered here."""
    for about in (manifest.get("measures") or {}).values():
        source = about.get("source") or {}
        yield str(source.get("bibtex") or ""), str(source.get("citation") or "")
    subjects = manifest.get("subjects") or []
    for group, key in (("models", "model"), ("datasets", "data"), ("recipes", "recipe")):
        named = (s.get(key) or (s.get("weights_metadata") or {}).get(key) for s in subjects)
        for name in dict.fromkeys(str(name) for name in named if name):
            try:
                source = source_of(group, name)
            except NlbenchError:  # somebody's own model, or data that aren't here
                continue
            yield source.bibtex, source.citation
