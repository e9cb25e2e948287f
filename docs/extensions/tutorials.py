"""What the tutorials show: figures of runs, and the pages that they write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst

from nlbench.reports.drawing import NotebookFigure

RUNS = Path(__file__).parents[1] / "tutorials" / "runs"


def scrape_figure(block: object, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save a figure that a block ends with; those of runs are not pyplot's."""
    figure = block_vars["example_globals"].get("___")
    # A block without a last expression still has that of an earlier one.
    if not isinstance(figure, NotebookFigure) or figure.get_gid() == "saved":
        return ""
    figure.set_gid("saved")
    path = next(block_vars["image_path_iterator"])
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return str(figure_rst([path], gallery_conf["src_dir"]))


def copy_pages(app: Sphinx, error: Exception | None) -> None:
    """Copy the pages that the tutorials wrote into the site."""
    pages = Path(app.outdir, "pages")
    pages.mkdir(parents=True, exist_ok=True)
    for page in RUNS.glob("*.html"):
        shutil.copy(page, pages)


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy the pages when the site is written."""
    app.connect("build-finished", copy_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
