"""``nlbench cite``."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nlbench import registry
from nlbench.citation import manifest_bibtex
from nlbench.errors import NlbenchError, strip_controls
from nlbench.parsers import unique

from .show import load_source


def cite(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders; without any, nlbench alone.", metavar="[RUN...]"),
    ] = None,
) -> None:
    """Print BibTeX of nlbench and of the measures, models, data and recipes used in runs."""
    from nlbench.store.run import load_run

    manifests = [load_run(path).manifest for path in runs or ()]
    entries = dict.fromkeys(map(manifest_bibtex, manifests or [{}]))
    for manifest in manifests:
        for bibtex, citation in _sources(manifest):
            if bibtex.strip():
                entries.update(dict.fromkeys(re.split(r"\n\s*\n(?=@)", bibtex.strip())))
            elif citation.strip():
                entries[f"% {' '.join(citation.split())}"] = None
    print(strip_controls("\n\n".join(entries)))


def _sources(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the BibTeX entry and citation of each recorded measure and registered plugin."""
    for about in (manifest.get("measures") or {}).values():
        source = about.get("source") or {}
        yield str(source.get("bibtex") or ""), str(source.get("citation") or "")
    subjects = manifest.get("subjects") or []
    for group, key in (("models", "model"), ("datasets", "data"), ("recipes", "recipe")):
        names = (s.get(key) or (s.get("weights_metadata") or {}).get(key) for s in subjects)
        for name in unique(str(name) for name in names if name):
            # A manifest may be from others, and its paths must not be opened.
            if not registry.is_listed(group, name):
                continue
            try:
                source = load_source(group, name)
            except NlbenchError:  # Not registered on this machine, or its data is missing.
                continue
            yield source.bibtex, source.citation
