"""The page of ``nlbench remove``: what the network loses with each call that is removed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from nlbench.serialization.files import write_atomically

from .environment import environment
from .layout import Table
from .notebook_figure import PAGE_WIDTH, laid_out
from .panels import draw_curve
from .svg import in_page_colours, to_svg
from .text import number

_LABELS = {
    "accuracy": "accuracy, %",
    "loss": "cross-entropy, nats",
    "kl": "KL divergence, nats",
}


def removal_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the steps of a removal as text: fractions in percent, other numbers rounded."""
    names = [re.sub(r"left_(\w+)", r"\1 left", name) for name in rows[0]]
    texts = [
        (str(row["removed"]) or "(none)", *(_text(name, row[name]) for name in list(row)[1:]))
        for row in rows
    ]
    return Table(tuple(names), tuple(texts), numbers=True)


def _text(name: str, value: float) -> str:
    if name == "accuracy" or name.startswith("left_"):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if name == "positions" else number(value, 4)


def write_removal(
    rows: Sequence[Mapping[str, Any]], file: Path, *, title: str, share: str, sentence: str
) -> Path:
    """Write a page with the curve of a removal and its table.

    Parameters
    ----------
    rows : sequence of mapping
        One per step: ``removed``, ``left_calls``, ``left_units``, ``left_flops``, and
        ``accuracy``, ``loss`` and ``kl`` as far as they are known.
    share : str
        What the curve is drawn over: calls, units, positions or flops.
    """
    known = [name for name in ("accuracy", "kl") if name in rows[0]]

    def draw(figure: Figure) -> float:
        panels = figure.subplots(1, len(known), squeeze=False)[0]
        for axes, name in zip(panels, known, strict=True):
            factor = 100 if name == "accuracy" else 1
            values = [factor * row[name] for row in rows]
            draw_curve(axes, [100 * row[f"left_{share}"] for row in rows], values)
            axes.set_xlabel(f"{share} that remain, %")
            axes.set_ylabel(_LABELS[name])
        return 2.4

    svg = to_svg(laid_out(PAGE_WIDTH, "svg", draw), prefix="curve", title=title)
    html = (
        environment()
        .get_template("removal.html.j2")
        .render(
            title=title,
            sentence=sentence,
            plot=Markup(in_page_colours(svg)),
            table_of_steps=removal_table(rows),
        )
    )
    write_atomically(file, html.encode("utf-8", errors="replace"))
    return file


def write_spans(
    candidates: Sequence[Mapping[str, Any]],
    totals: Sequence[Mapping[str, Any]],
    file: Path,
    *,
    title: str,
    sentence: str,
) -> Path:
    """Write a page with the spans that were judged, and the networks before and after."""
    tables = {"Networks": span_table(totals), "Judged spans": span_table(candidates)}
    html = (
        environment()
        .get_template("removed_spans.html.j2")
        .render(title=title, sentence=sentence, tables=tables)
    )
    write_atomically(file, html.encode("utf-8", errors="replace"))
    return file


def span_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows of spans or networks as text, with each cost next to its standard error."""
    names = [name for name in rows[0] if not name.endswith("_se")]
    texts = [tuple(_span_text(row, name) for name in names) for row in rows]
    return Table(tuple(name.replace("_", " ") for name in names), tuple(texts), numbers=True)


def _span_text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value != value:
        return "–"
    error = row.get(f"{name}_se")
    return number(value, 4) if error is None else f"{value:.3f} ± {error:.3f}"
