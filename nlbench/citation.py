"""Citable sources of definitions."""

from __future__ import annotations

from dataclasses import dataclass


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
