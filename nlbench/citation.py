"""Where a definition comes from, and how to cite it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """Where a definition comes from.

    Parameters
    ----------
    citation : str
        Authors, title, venue, year.
    equation : str
        Which equation or section.
    bibtex : str
        The entry to paste into a paper.
    """

    citation: str
    equation: str = ""
    bibtex: str = ""
