"""Citable sources of definitions, and the citation of nlbench."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any


@dataclass(frozen=True)
class Source:
    """Source of a definition.

    Parameters
    ----------
    citation : str
        Authors, title, venue, year.
    equation : str
        Equation or section.
    bibtex : str
        BibTeX entry.
    """

    citation: str
    equation: str = ""
    bibtex: str = ""


def manifest_bibtex(manifest: Mapping[str, Any]) -> str:
    """Return the BibTeX entry of the nlbench that measured a run."""
    # A manifest may be from others: its text must not end the entry.
    facts = (manifest.get("nlbench"), (manifest.get("environment") or {}).get("git"))
    version, commit = (re.sub(r"[^\w.+-]", "", str(fact or "")) for fact in facts)
    return software_bibtex(version, commit)


def software_bibtex(version: str = "", commit: str = "") -> str:
    """Return the BibTeX entry of nlbench, which ``CITATION.cff`` describes.

    Examples
    --------
    >>> print(software_bibtex("0.1.0", "1f2e3d"))
    @software{nlbench,
      title = {nlbench},
      author = {{the nlbench authors}},
      version = {0.1.0},
      license = {MIT},
      note = {commit 1f2e3d}
    }
    """
    # Started in a checkout, Python finds the metadata of its last build first, without this file.
    texts = (found.read_text("licenses/CITATION.cff") for found in distributions(name="nlbench"))
    text = next(filter(None, texts), "")
    # A flat YAML file: a reader of YAML would be another dependency.
    facts = {
        key: value.strip().strip("\"'")
        for key, value in re.findall(r"^(?:\s*- )?([\w-]+):[ \t]*(\S.*)$", text, re.M)
    }
    authors = re.findall(r"^\s+- name:\s*(.+)$", text, re.M)
    fields = {
        "title": facts.get("title", "nlbench"),
        "author": " and ".join(f"{{{name.strip()}}}" for name in authors),
        "version": version or facts.get("version", ""),
        "license": facts.get("license", ""),
        "doi": facts.get("doi", ""),
        "url": facts.get("repository-code") or facts.get("url", ""),
        "year": facts.get("date-released", "")[:4],
        "note": f"commit {commit}" if commit else "",
    }
    lines = (f"  {name} = {{{value}}}" for name, value in fields.items() if value)
    return "@software{nlbench,\n" + ",\n".join(lines) + "\n}"
