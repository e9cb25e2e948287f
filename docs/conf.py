"""Configuration of the documentation site; ``make docs`` builds it."""

import shutil
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "nlbench"
copyright = "the nlbench developers"
release = version_of("nlbench")
html_title = f"nlbench {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
exclude_patterns = ["_build", "tutorials"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "measure_pages",
]
default_role = "code"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_links_external_new_tab = False

autosummary_generate = True
autodoc_typehints = "none"  # docstrings have shapes, which annotations lack
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_custom_sections = ["Definition", "Units", "Undefined", "Cost", "Limits", "Published code"]

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "filename_pattern": r".*\.py",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib",),
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}

RUNS = Path(__file__).parent / "tutorials" / "runs"


def remove_runs(app):
    """Remove what the tutorials of an earlier build wrote."""
    shutil.rmtree(RUNS, ignore_errors=True)


def copy_pages(app, error):
    """Copy the pages that the tutorials wrote into the site."""
    pages = Path(app.outdir, "pages")
    pages.mkdir(parents=True, exist_ok=True)
    for page in RUNS.glob("*.html"):
        shutil.copy(page, pages)


def setup(app):
    """Connect the two, before the gallery runs its scripts."""
    app.connect("builder-inited", remove_runs, priority=1)
    app.connect("build-finished", copy_pages)
