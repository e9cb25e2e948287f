"""The pages of ``nlbench similarity`` and ``nlbench remove``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from matplotlib.figure import Figure

from .drawing import PAGE_WIDTH, laid_out, to_svg, use_page_colours
from .environment import Table, check_suffix, render, write_text
from .exports import to_csv
from .fingerprint import LEVELS, Scale
from .panels import draw_curve
from .text import number

if TYPE_CHECKING:
    from nlbench.representations import Similarity


def write_similarity(similarity: Similarity, output: Path) -> Path:
    """Write the matrix in the format given by the file's suffix."""
    check_suffix(output, (".html", ".csv"))
    is_table = output.suffix == ".csv"
    return write_text(output, to_csv(similarity.frame()) if is_table else _page(similarity))


def _page(similarity: Similarity) -> str:
    first, second = similarity.names
    return render(
        "similarity.html.j2",
        names=similarity.names,
        title=first if first == second else f"{first} and {second}",
        n=f"{similarity.n:,}",
        others=similarity.others,
        places=similarity.places,
        values=similarity.values.tolist(),
        errors=similarity.errors.tolist(),
        level=Scale(0.0, 1.0, False, 1).level,
        levels=range(LEVELS),
    )


def removal_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of a removal as text: fractions in percent, costs with their standard errors."""
    names = [name for name in rows[0] if not name.endswith("_se")]
    head = [re.sub(r"left_(\w+)", r"\1 left", name).replace("_", " ") for name in names]
    texts = []
    for row in rows:
        texts.append(tuple(_text(row, name) for name in names))
    return Table(tuple(head), tuple(texts), numbers=True)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value or ("(none)" if name == "removed" else "")
    if name == "accuracy" or name.startswith("left_"):
        return f"{100 * value:.1f} %"
    if isinstance(value, int):
        return f"{value:,}"
    if value != value:
        return "–"
    error = row.get(f"{name}_se")
    return number(value, 4) if error is None else f"{value:.3f} ± {error:.3f}"


def write_removal(
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    file: Path,
    *,
    title: str,
    sentence: str,
    share: str = "",
) -> Path:
    """Write a page with the tables of a removal, by their headings.

    With a `share`, such as ``calls``, the accuracy and the divergence of the first table's rows are
    drawn over its remaining fraction.
    """
    (first, *_) = tables.values()
    known = [name for name in ("accuracy", "kl") if share and name in first[0]]

    def draw(figure: Figure) -> float:
        panels = figure.subplots(1, len(known), squeeze=False)[0]
        for axes, name in zip(panels, known, strict=True):
            factor = 100 if name == "accuracy" else 1
            values = [factor * row[name] for row in first]
            draw_curve(axes, [100 * row[f"left_{share}"] for row in first], values)
            axes.set_xlabel(f"{share} that remain, %")
            axes.set_ylabel({"accuracy": "accuracy, %", "kl": "KL divergence, nats"}[name])
        return 2.4

    svg = to_svg(laid_out(PAGE_WIDTH, "svg", draw), prefix="curve", title=title) if known else ""
    html = render(
        "removal.html.j2",
        title=title,
        sentence=sentence,
        plot=Markup(use_page_colours(svg)),
        tables={heading: removal_table(rows) for heading, rows in tables.items()},
    )
    return write_text(file, html)
