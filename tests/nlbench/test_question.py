from pathlib import Path

import pytest
from typer.testing import CliRunner

from nlbench import registry
from nlbench.cli.app import app
from nlbench.measure.contract import load_measure
from nlbench.question import load_questions, markdown_table, plain_text
from nlbench.source_facts import measure_facts

ROOT = Path(__file__).parents[2]


def test_questions_have_registered_measures():
    known = registry.entries("measures")
    for question in load_questions().values():
        assert set(question.measures) <= set(known)
        assert question.cost
        assert question.caution


def test_a_question_is_its_measures():
    names = registry.expand("measures", ["nlc", "@removal", "@function"])
    assert names == ["nlc", "substitution", *load_questions()["function"].measures[1:]]


def test_all_selects_every_measure():
    assert registry.expand("measures", ["@all"]) == list(registry.entries("measures"))


def test_readme_has_the_table_of_questions():
    table = "\n".join(markdown_table())
    assert f"<!-- questions -->\n{table}\n<!--" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_questions_fit_a_terminal():
    assert max(map(len, plain_text())) <= 80


def test_list_of_measures_opens_with_the_questions():
    result = CliRunner().invoke(app, ["list", "measures"])
    assert result.exit_code == 0
    assert result.stdout.index("@removal") < result.stdout.index("absdev    ")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", registry.entries("measures"))
def test_facts_of_source_are_those_of_class(name):
    facts = measure_facts(registry.find("measures", name))
    measure = load_measure(name)
    assert (facts["larger"], facts["probe"]) == (measure.more_means, measure.probe)
