"""The strip of the home page, and screenshots of pages, from the runs behind the leaderboard."""

from __future__ import annotations

from html import escape
from pathlib import Path

import screenshots
from leaderboard import leaderboard_run
from sphinx.application import Sphinx

from nlbench.reports.figures import FigureData
from nlbench.reports.panels import RAMP
from nlbench.reports.population import colour_scale
from nlbench.reports.views import strip_fields

NETWORK = "vgg8 · trained · digits"


def write_strip(app: Sphinx) -> None:
    """Write the strip of a network.

    Each field leads to the network on the leaderboard.
    """
    source = FigureData.of(leaderboard_run(), NETWORK)
    ((label, cell),) = source.cells("affinity")
    fields = strip_fields(
        cell, colour_scale("affinity", source.scores.measures["affinity"], cell.place_values)
    )
    items = []
    for field in fields:
        level = int(field["level"][1:])
        colour = "#fff" if field["dark"] else "#17191e"
        items.append(
            f'<li><a href="pages/leaderboard.html#subject={escape(label)}"'
            f' style="background:{RAMP[level]};color:{colour}" title="{escape(field["remark"])}">'
            f"{field['text']}</a><span>{escape(field['label'])}</span></li>"
        )
    text = (
        "The affinity of each activation of a small network trained on digits, from input to"
        " output: 1 acts like an affine map, darker is more nonlinear."
    )
    file = Path(app.srcdir, "_build", "strip.html")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'<ol class="home-strip">{"".join(items)}</ol><p>{text}</p>', encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write before Sphinx reads its sources."""
    app.connect("builder-inited", write_strip)
    app.connect("builder-inited", lambda app: screenshots.renew())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
