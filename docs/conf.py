"""Configuration of the documentation site; ``make docs`` builds it."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE)]

project = "nlbench"
copyright = "the nlbench authors, MIT licence"
release = version_of("nlbench")
html_title = f"nlbench {release}"
html_theme = "furo"
html_logo = "static/mark.svg"
html_favicon = "static/mark.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which a page opened from a folder may not
exclude_patterns = ["_build", "tutorials"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "home",
    "leaderboard",
    "mathml",
    "measure_pages",
    "tutorials",
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
    "image_scrapers": ("matplotlib", "tutorials.scrape_figure"),
    "ignore_repr_types": r".*Figure",
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}
