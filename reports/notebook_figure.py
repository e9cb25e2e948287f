"""Matplotlib figures for papers and notebooks, and their style."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

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
        """Save the figure.

        The same figure gives the same bytes.
        """
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
        figure.draw_without_rendering()  # computes the layout while the style is in effect
        figure.set_layout_engine(None)  # saving would draw it twice
    return figure
