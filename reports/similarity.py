"""A page with the heat map of a similarity matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError
from nlbench.serialization.files import make_folder, write_atomically

from .environment import environment
from .exports import to_csv
from .fingerprint import LEVELS, Scale, level_name
from .text import plus_minus

if TYPE_CHECKING:
    from nlbench.representations import Similarity


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


def _cells(similarity: Similarity) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of cells: the colour's level, ``x`` without a value, and a description."""
    scale = Scale(0.0, 1.0, False, 1)
    for place, values, errors in zip(
        similarity.places, similarity.values.tolist(), similarity.errors.tolist(), strict=True
    ):
        row = []
        for other, value, error in zip(similarity.others, values, errors, strict=True):
            known = not math.isnan(value)
            text = plus_minus(value, error) if known else "undefined, a constant output"
            title = f"{place} × {other}: {text}"
            row.append({"level": level_name(scale, value), "title": title})
        yield row
