"""Matplotlib figures for papers, notebooks and pages: their style, layout and SVG."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import matplotlib.style
from markupsafe import escape
from matplotlib.figure import Figure

from nlbench.errors import one_line

POINTS = 8.0
"""Size of all text, at which it stands in a paper without scaling."""
STYLE = {
    "svg.hashsalt": "nlbench",  # ids depend only on the content
    "svg.fonttype": "none",  # text remains searchable and accessible and uses the page's font
    "pdf.fonttype": 42,  # TrueType, which publishers require
    "text.parse_math": False,  # model names may contain dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.labelsize": POINTS,
    "axes.titlesize": POINTS,
    "axes.axisbelow": True,
    "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS,
    "legend.fontsize": POINTS,
    "legend.frameon": False,
    "font.family": ["DejaVu Sans"],
    "font.size": POINTS,
    "hatch.linewidth": 0.6,
}
"""Settings for all figures."""
PAGE_WIDTH = 7.2  # inches
_DATES = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


class NotebookFigure(Figure):
    """A figure that notebooks can display without pyplot, and that is saved in its own style.

    Other figures can only be displayed once pyplot has been imported.

    Attributes
    ----------
    format : str
        Format of a file without a suffix: ``png``, ``pdf`` or ``svg``.

    Examples
    --------
    >>> NotebookFigure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    format: str = "png"

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure. The same figure gives the same bytes."""
        suffix = PurePath(fname).suffix if isinstance(fname, str | os.PathLike) else ""
        kind = options.setdefault("format", suffix.lstrip(".").lower() or self.format)
        options.setdefault("metadata", _DATES.get(kind))
        logging.getLogger("fontTools.subset").setLevel(logging.WARNING)  # reports each table
        options.setdefault("dpi", 300)
        with matplotlib.style.context(["default", STYLE]):
            super().savefig(fname, **options)

    def to_bytes(self) -> bytes:
        """Return the content of the file in the figure's format."""
        buffer = io.BytesIO()
        self.savefig(buffer)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
        return buffer.getvalue()


def laid_out(width: float, format: str, draw: Callable[[Figure], float]) -> NotebookFigure:
    """Return a figure of a width in inches, drawn by a function that returns its height."""
    with matplotlib.style.context(["default", STYLE]):
        figure = NotebookFigure(figsize=(width, 2.0), layout="constrained")
        figure.format = format
        figure.set_size_inches(width, draw(figure))
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.execute(figure)  # while the style is in effect
        figure.set_layout_engine(None)  # saving would draw it twice
    return figure


_NOT_DRAWN = re.compile(r"<!--.*?-->|<(metadata|style)\b.*?</\1>|\bxlink:(?=href)", re.DOTALL)
_TAG = re.compile("<[^>]+>")
_ID = re.compile(r'( id="|href="#|url\(#)')

# CSS variable for each colour in figures; page.css defines its light and dark values.
_VARIABLES = {
    "#000000": "ink",
    "#ffffff": "paper",
    "#444444": "quiet",
    "#777777": "quiet",
    "#7f7f7f": "quiet",
    "#808080": "quiet",
    "#999999": "quiet",
    "#bfbfbf": "none",
    "#cccccc": "none",
    "#dddddd": "rule",
    "#e4e4e4": "rule",
    "#e6e6e6": "rule",
    "#eeeeee": "track",
    "#0072b2": "c0",
    "#d55e00": "c1",
    "#009e73": "c2",
    "#cc79a7": "c3",
    "#e69f00": "c5",
    "#56b4e9": "c6",
    "#1f77b4": "c0",
    "#ff7f0e": "c1",
    "#2ca02c": "c2",
    "#7b3294": "kind3",
}


def use_page_colours(svg: str) -> str:
    """Replace colours of an SVG file with the page's CSS variables, for light and dark themes.

    Colours that encode values are unchanged.

    Examples
    --------
    >>> use_page_colours('<path style="fill: #ffffff; stroke: #123456"/>')
    '<path style="fill: var(--paper, #ffffff); stroke: #123456"/>'
    """

    def variable(match: re.Match[str]) -> str:
        attribute, colour = match.groups()
        name = _VARIABLES.get(colour)
        return f"{attribute}: var(--{name}, {colour})" if name else match.group()

    # Black text and markers have no explicit colour.
    caps = "stroke-linecap: butt"
    svg = svg.replace(caps, f"{caps}; fill: var(--ink, #000000)", 1)
    return re.sub(r"\b(fill|stroke): (#[0-9a-f]{6})\b", variable, svg)


def to_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Convert a figure to an SVG element, deterministically, with a title for screen readers.

    `prefix` precedes every id, and is unique on the page: letters, digits and hyphens. The rules of
    matplotlib's style sheet are moved to the element, so that they don't affect the page.

    Examples
    --------
    >>> to_svg(Figure(figsize=(1, 1)), prefix="f1", title="Nothing").count('id="f1-figure_1"')
    1
    """
    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = _NOT_DRAWN.sub("", buffer.getvalue().decode("utf-8"))
    text = _TAG.sub(lambda tag: _ID.sub(rf"\1{prefix}-", tag[0]), text)
    head, _, content = text[text.index("<svg") :].partition(">")
    size = " ".join(re.findall(r'(?:width|height|viewBox)="[^"]*"', head))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
        f' aria-labelledby="{prefix}-title"'
        f' style="stroke-linejoin: round; stroke-linecap: butt"><title id="{prefix}-title">'
        f"{escape(one_line(title))}</title>{content.strip()}"
    )
