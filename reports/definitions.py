"""Formulas of measures, from the docstrings of their plugins, as MathML."""

from __future__ import annotations

import re

import latex2mathml.converter
from markupsafe import Markup

from nlbench import registry
from nlbench.source_facts import measure_facts

from .tables import MeasureInfo

_FORMULA = re.compile(r"^\.\. math::\n\n((?: +.*\n?|\n)+)", re.M)
_SECTION = re.compile(r"^Definition\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.M | re.S)


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


def to_mathml(latex: str) -> Markup:
    r"""Convert a formula to MathML, or return LaTeX if that fails.

    Examples
    --------
    >>> "<mfrac>" in to_mathml(r"\frac{a}{b}")
    True
    """
    try:
        math = latex2mathml.converter.convert(latex.rstrip(" ,;."))
    except Exception:  # Each fault of LaTeX has an exception of its own.
        return Markup('<code class="formula">{}</code>').format(latex)
    return Markup('<span class="formula" tabindex="0">{}</span>').format(Markup(math))


def definition(measure: str, info: MeasureInfo) -> Markup:
    """Return the formula of a measure as MathML, or nothing if it has none."""
    latex = formula(measure, info.version)
    return to_mathml(latex) if latex else Markup()
