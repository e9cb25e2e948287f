"""What the figures of studies share: their size, their colours, and distributions over paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nlbench.reports.figures import ecdf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

__all__ = ["COLOURS", "draw_shares", "page_figure"]


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777", "#E69F00", "#56B4E9")
"""Of Okabe and Ito, "Color Universal Design", 2008, with grey among them."""


def page_figure(
    height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """Begin a figure as wide as the page.

    Parameters
    ----------
    height : float
        In inches.
    rows, columns : int
        Of panels.
    **options
        Of matplotlib's ``subplots``.

    Returns
    -------
    tuple
        The figure, and its panel or an array of its panels.

    Examples
    --------
    >>> figure, (left, right) = page_figure(2.9, columns=2)
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Names beside the axes are set in the page's font, which may be wider.
    figure = Figure(figsize=(7.2, height), layout=ConstrainedLayoutEngine(w_pad=0.12))
    return figure, figure.subplots(rows, columns, **options)


def draw_shares(axes: Axes, values: ArrayLike, **style: Any) -> None:
    """Draw the share of values that are at most so large."""
    x, share = ecdf(values)
    axes.step([x[0], *x], [0.0, *share], where="post", **style)
    axes.set_ylim(0, 1.02)
