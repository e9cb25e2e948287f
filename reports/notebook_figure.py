"""Matplotlib figures that notebooks display, and their style."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

STYLE = {
    "svg.hashsalt": "nlbench",  # ids depend on the content alone
    "svg.fonttype": "none",  # text remains searchable and accessible, in the page's font
    "text.parse_math": False,  # names of models may have dollar signs
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
"""Settings of all figures."""


class NotebookFigure(Figure):
    """A figure that a notebook displays without pyplot.

    Notebooks know how to display figures only once pyplot is imported.

    Examples
    --------
    >>> NotebookFigure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
