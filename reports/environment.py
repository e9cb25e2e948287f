"""Jinja environment for the page templates, tables for them, and the files that are written."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from nlbench.errors import RequestError, strip_controls
from nlbench.serialization.files import make_folder, read_text, write_atomically

from .text import bounds_text, direction, number, plus_minus, settings_text, value_text

_TEMPLATES = Path(__file__).parent / "templates"


@cache
def environment() -> jinja2.Environment:
    """Create the environment, which escapes everything except style sheet, script and figures."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: strip_controls(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["slug"] = lambda text: quote(text.encode("utf-8", "replace"), safe="")
    for function in (bounds_text, direction, number, plus_minus, settings_text, value_text):
        templates.globals[function.__name__] = function
    for name, file in (("css", "page.css"), ("script", "page.js")):
        templates.globals[name] = Markup((_TEMPLATES / file).read_text(encoding="utf-8"))
    return templates


def render(template: str, **view: Any) -> str:
    """Render a template with its variables."""
    return environment().get_template(template).render(**view)


def write_text(file: Path, text: str) -> Path:
    """Write a file atomically, with replacements for surrogates, which UTF-8 can't encode."""
    make_folder(file.parent)
    write_atomically(file, text.encode("utf-8", errors="replace"))
    return file


def check_suffix(file: Path, suffixes: Iterable[str]) -> None:
    """Raise unless a file has one of the suffixes."""
    if file.suffix not in suffixes:
        raise RequestError(f"{file}: expected a file name ending in {', '.join(suffixes)}")


def is_replaceable(file: Path, *marks: str) -> bool:
    """Return True if a file doesn't exist, or contains one of the marks of nlbench."""
    if not os.path.lexists(file):
        return True
    try:
        text = read_text(file)
    except RequestError:
        return False
    return any(mark in text for mark in marks)


@dataclass(frozen=True)
class Table:
    """A table of strings.

    Parameters
    ----------
    names : int
        Number of leading columns that contain names.
    numbers : bool
        True if the other columns contain numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    numbers: bool = False
