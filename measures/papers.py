"""BibTeX of the papers that define measures, and the papers that define several of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from nlbench.citation import Source


def bibtex(*keys: str) -> str:
    """Return the entries of ``papers.bib`` with these keys.

    Examples
    --------
    >>> bibtex("roy2007effective").partition(",")[0]
    '@inproceedings{roy2007effective'
    """
    return "\n".join(_entries()[key] for key in keys)


@cache
def _entries() -> Mapping[str, str]:
    """Return the entries of the file, keyed by their own keys."""
    text = Path(__file__).with_name("papers.bib").read_text(encoding="utf-8")
    entries = text.strip().split("\n\n")
    return {re.split("[{,]", entry, maxsplit=2)[1]: entry for entry in entries}


def traced_regions(equation: str) -> Source:
    """Cite the paper on linear regions and the one on exact tracing."""
    return Source(
        "M. Gamba, A. Chmielewski-Anders, J. Sullivan, H. Azizpour, M. Björkman, "
        '"Are All Linear Regions Created Equal?", AISTATS 2022; traced exactly after '
        'M. Sotoudeh, A. V. Thakur, "Computing Linear Restrictions of Neural Networks", '
        "NeurIPS 2019",
        equation,
        bibtex("gamba2022regions"),
    )


def affinity_paper(equation: str) -> Source:
    """Cite the affinity score's paper."""
    return Source(
        "Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, M. Heinonen, "
        "V. Kyrki and S. Kaski, From Alexnet to Transformers: Measuring the Non-linearity of "
        "Deep Neural Networks with Affine Optimal Transport, CVPR 2025, pages 25250-25260",
        equation,
        bibtex("Bouniot_2025_CVPR"),
    )
