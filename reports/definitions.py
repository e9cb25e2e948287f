"""Formulas of measures, from the docstrings of their plugins, drawn as SVG."""

from __future__ import annotations

import io
import re

import matplotlib.mathtext
import matplotlib.style
from markupsafe import Markup
from matplotlib.font_manager import FontProperties

from nlbench import registry
from nlbench.source_facts import measure_facts

from .drawing import as_element
from .tables import MeasureInfo

_FORMULA = re.compile(r"^\.\. math::\n\n((?: +.*\n?|\n)+)", re.M)
_SECTION = re.compile(r"^Definition\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.M | re.S)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# LaTeX that matplotlib does not know, and what it draws instead.
_REPLACEMENTS = (
    (r"\\frac", r"\\dfrac"),
    (r"\\tfrac", r"\\frac"),
    (r"\\textstyle", ""),
    (r"\\([Bb]ig|[Bb]igg)l", r"\\left"),
    (r"\\([Bb]ig|[Bb]igg)r", r"\\right"),
    (r"\\dots", r"\\ldots"),
    (r"\\le\b", r"\\leq"),
    (r"\\ge\b", r"\\geq"),
    (r"(?<=\\operatorname\{arg)\\,max", "max"),
)
_PATHS = {"svg.fonttype": "path", "mathtext.fontset": "cm", "svg.hashsalt": "nlbench"}


def formula(measure: str, version: str) -> str:
    """Return the formula of a measure in LaTeX, or nothing if another version is installed.

    The plugin is not imported, since that would import PyTorch.

    Examples
    --------
    >>> formula("geometric-complexity", "0")
    ''
    """
    entry = registry.entries("measures").get(measure)
    if entry is None or not entry.claims:
        return ""
    facts = measure_facts(entry)
    section = _SECTION.search(facts["docstring"])
    found = _FORMULA.search(section[1]) if section else None
    return " ".join(found[1].split()) if found and facts["version"] == version else ""


def drawn_formula(latex: str, prefix: str) -> Markup:
    """Draw a formula as an SVG element in the colour of the text, or return LaTeX if that fails.

    `prefix` precedes every id, and is unique on the page.
    """
    text = latex.rstrip(" ,;.")
    text = _TEXT.sub(lambda match: r"\mathrm{" + match[1].replace(" ", r"\ ") + "}", text)
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    buffer = io.BytesIO()
    try:
        with matplotlib.style.context(["default", _PATHS]):
            matplotlib.mathtext.math_to_image(
                f"${text}$", buffer, prop=FontProperties(size=11), format="svg"
            )
    except ValueError:
        return Markup('<code class="formula">{}</code>').format(latex)
    svg = as_element(buffer.getvalue(), prefix=prefix, title=latex)
    svg = svg.replace("fill: #ffffff", "fill: none")
    return Markup('<span class="formula" tabindex="0">{}</span>').format(Markup(svg))


def definition(measure: str, info: MeasureInfo, prefix: str) -> Markup:
    """Return the drawn formula of a measure, or nothing if it has none."""
    latex = formula(measure, info.version)
    return drawn_formula(latex, prefix) if latex else Markup()
