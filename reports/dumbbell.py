"""Two networks place by place: a figure with their intervals, and their strips on one scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from matplotlib.figure import Figure

from nlbench.errors import RequestError

from .fingerprint import strip
from .notebook_figure import PAGE_WIDTH, NotebookFigure, laid_out
from .panels import draw_dumbbells
from .population import colour_scale
from .svg import in_page_colours, to_svg
from .text import direction, range_noun, range_text

if TYPE_CHECKING:
    from .compare import Difference

MAX_PLACES = 80


def dumbbell_figure(
    difference: Difference,
    names: tuple[str, str],
    info: Mapping[str, Any],
    width: float = PAGE_WIDTH,
    format: str = "svg",
) -> NotebookFigure:
    """Draw the values of two networks at each place, joined by a bar, and their difference.

    The axis holds all intervals. Of more than 80 places, those that changed most are drawn.

    Raises
    ------
    nlbench.RequestError
        If no place has a value in both networks.
    """
    drawn = [d for d in difference.places if math.isfinite(d.change)]
    if len(drawn) > MAX_PLACES:
        kept = {id(d) for d in sorted(drawn, key=lambda d: -abs(d.change))[:MAX_PLACES]}
        drawn = [d for d in drawn if id(d) in kept]
    if math.isfinite(difference.change):
        drawn.append(difference)
    if not drawn:
        raise RequestError(f"{difference.measure}: no place has a value in both networks")

    def draw(figure: Figure) -> float:
        axes = figure.add_subplot()
        draw_dumbbells(axes, drawn, names)
        words = direction(info.get("more_means", "neither"))
        axes.set_xlabel(f"{difference.measure} ({words})")
        columns = 2 if sum(map(len, names)) < 11 * width else 1
        figure.legend(loc="outside upper left", ncols=columns)
        return 0.8 + 0.19 * len(drawn) + 0.16 * (2 // columns)

    return laid_out(width, format, draw)


def comparison_panel(
    difference: Difference, names: tuple[str, str], info: Mapping[str, Any], index: int
) -> dict[str, Any]:
    """Return the figure as SVG in the page's colours, and the strips of both networks.

    The strips have one scale, with its legend; there are none without places.
    """
    title = f"{difference.measure} of {names[0]} and {names[1]} at each place"
    svg = to_svg(dumbbell_figure(difference, names, info), prefix=f"plot{index}", title=title)
    panel: dict[str, Any] = {"plot": Markup(in_page_colours(svg)), "strips": {}}
    sides = [[d.before for d in difference.places], [d.after for d in difference.places]]
    colours = colour_scale(difference.measure, info, [v for side in sides for v in side])
    if colours is None:
        return panel
    noun = range_noun(info)
    rows = []
    for name, values in zip(names, sides, strict=True):
        title = f"{name}, {noun} {range_text(values)}"
        rows.append({"name": name, "strip": strip(values, colours.scale, title=title)})
    return {**panel, "strips": {"rows": rows, "legend": colours.legend()}}
