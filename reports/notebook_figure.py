"""Matplotlib figures for display in notebooks, and their style."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

STYLE = {
    "svg.hashsalt": "nlbench",  # ids depend only on the content
    "svg.fonttype": "none",  # text remains searchable and accessible and uses the page's font
    "text.parse_math": False,  # model names may contain dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
}
"""Settings for all figures."""


class NotebookFigure(Figure):
    """A figure that notebooks can display without pyplot.

    Other figures can only be displayed once pyplot has been imported.

    Examples
    --------
    >>> NotebookFigure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
