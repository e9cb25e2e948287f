"""Jinja environment for the page templates."""

from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from nlbench.errors import without_controls

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def environment() -> jinja2.Environment:
    """Create the environment, which escapes everything except style sheet, script and figures."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: without_controls(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, file in (("css", "page.css"), ("script", "page.js")):
        templates.globals[name] = Markup((_TEMPLATES / file).read_text(encoding="utf-8"))
    return templates
