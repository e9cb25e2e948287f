"""Formulas on the page."""

import xml.etree.ElementTree as ET

import pytest

from nlbench import registry
from nlbench.measure.contract import load_measure
from nlbench.reports.definitions import definition, drawn_formula, formula
from nlbench.reports.tables import MeasureInfo

BUILT_IN = [
    name
    for name, entry in registry.entries("measures").items()
    if entry.claims[0].value.startswith("nlbench.measures.")
]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_formula_of_a_docstring_is_drawn(name):
    measure = load_measure(name)
    has_formula = ".. math::" in measure.__doc__.partition("Definition\n")[2].partition("Units")[0]
    latex = formula(name, measure.version)
    assert bool(latex) == has_formula
    if latex:
        drawn = drawn_formula(latex, "a")
        assert "<code" not in drawn
        root = ET.fromstring(str(drawn))
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert all(name.startswith("a-") for name in ids)
        assert latex in "".join(root.itertext())


def test_another_version_has_no_formula():
    assert formula("affinity", load_measure("affinity").version)
    assert formula("affinity", "0") == ""
    assert definition("nothing-registered", MeasureInfo(version="1"), "a") == ""


def test_undrawable_values_are_shown_as_text():
    assert drawn_formula(r"\begin{cases} <b> \end{cases}", "a") == (
        r'<code class="formula">\begin{cases} &lt;b&gt; \end{cases}</code>'
    )
