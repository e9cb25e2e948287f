"""A page with the heat map of a similarity matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError
from nlbench.serialization.files import make_folder, write_atomically

from .environment import environment
from .exports import to_csv
from .text import plus_minus

if TYPE_CHECKING:
    from nlbench.representations import Similarity

LEVELS = 10
"""Number of colours, from 0 to 1."""


@dataclass(frozen=True)
class PairCell:
    """A coloured cell: its level, from 0 to 9, or ``x`` without a value, and its description."""

    level: str
    title: str


def write_similarity(similarity: Similarity, output: Path) -> Path:
    """Write the matrix in the format given by the file's suffix.

    Raises
    ------
    nlbench.RequestError
        If the suffix isn't ``.html`` or ``.csv``.
    """
    if output.suffix == ".csv":
        text = to_csv(similarity.frame())
    elif output.suffix == ".html":
        text = _page(similarity)
    else:
        raise RequestError(f"{output}: expected a file name ending in .html, .csv")
    make_folder(output.parent)
    write_atomically(output, text.encode("utf-8", errors="replace"))
    return output


def _page(similarity: Similarity) -> str:
    first, second = similarity.names
    return (
        environment()
        .get_template("similarity.html.j2")
        .render(
            names=similarity.names,
            title=first if first == second else f"{first} and {second}",
            n=f"{similarity.n:,}",
            others=similarity.others,
            rows=list(zip(similarity.places, _cells(similarity), strict=True)),
            levels=range(LEVELS),
        )
    )


def _cells(similarity: Similarity) -> Iterator[list[PairCell]]:
    for i, place in enumerate(similarity.places):
        row = []
        for j, other in enumerate(similarity.others):
            value = float(similarity.values[i, j])
            if math.isnan(value):
                row.append(PairCell("x", f"{place} × {other}: undefined, a constant output"))
                continue
            level = min(LEVELS - 1, max(0, math.floor(value * LEVELS)))
            text = plus_minus(value, float(similarity.errors[i, j]))
            row.append(PairCell(str(level), f"{place} × {other}: {text}"))
        yield row
