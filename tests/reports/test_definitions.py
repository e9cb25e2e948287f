"""Formulas on the page."""

import xml.etree.ElementTree as ET

import pytest

from nlbench import registry
from nlbench.measure.contract import load_measure
from nlbench.reports.definitions import definition, formula, to_mathml
from nlbench.reports.tables import MeasureInfo

BUILT_IN = [
    name
    for name, entry in registry.entries("measures").items()
    if entry.claims[0].value.startswith("nlbench.measures.")
]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_formula_of_a_docstring_is_shown(name):
    measure = load_measure(name)
    has_formula = ".. math::" in measure.__doc__.partition("Definition\n")[2].partition("Units")[0]
    latex = formula(name, measure.version)
    assert bool(latex) == has_formula
    if latex:
        root = ET.fromstring(str(to_mathml(latex)))
        assert root[0].tag.endswith("math")
        assert "\\" not in "".join(root.itertext())


def test_another_version_has_no_formula():
    assert formula("affinity", load_measure("affinity").version)
    assert formula("affinity", "0") == ""
    assert definition("nothing-registered", MeasureInfo(version="1")) == ""


def test_faulty_latex_is_shown_as_text():
    assert to_mathml(r"<b> \left(") == r'<code class="formula">&lt;b&gt; \left(</code>'
