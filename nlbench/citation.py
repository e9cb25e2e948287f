"""Sources of definitions, to be cited."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The source of a definition.

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
