"""Questions, each with the measures that answer it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from nlbench import registry
from nlbench.errors import PluginError


@dataclass(frozen=True)
class Question:
    """A question and its measures, which ``--measures @NAME`` selects.

    Parameters
    ----------
    text : str
        The question.
    measures : tuple of str
        Registered measures that answer it, the most suitable first.
    cost : str
        What measuring them costs.
    caution : str
        What to bear in mind when reading them.
    order : int
        Position in the list.
    """

    text: str
    measures: tuple[str, ...]
    cost: str = ""
    caution: str = ""
    order: int = 100


def load_questions() -> dict[str, Question]:
    """Load all registered questions, in their order."""
    questions = {}
    for name in registry.entries("questions"):
        question = registry.load("questions", name)
        if not isinstance(question, Question):
            raise PluginError(f"question '{name}' is {question!r}, expected an nlbench Question")
        questions[name] = question
    return dict(sorted(questions.items(), key=lambda item: item[1].order))


def markdown_table() -> Iterator[str]:
    """Yield the lines of the table of questions in Markdown."""
    yield "| question | `--measures` | measures | cost | caution |"
    yield "| --- | --- | --- | --- | --- |"
    for name, question in load_questions().items():
        measures = ", ".join(f"`{measure}`" for measure in question.measures)
        cells = (question.text, f"`@{name}`", measures, question.cost, question.caution)
        yield f"| {' | '.join(cells)} |"


def plain_text() -> Iterator[str]:
    """Yield the lines of the questions for a terminal of 80 columns."""
    for name, question in load_questions().items():
        yield f"{question.text:<42}--measures @{name}"
        yield f"  {', '.join(question.measures)}"
        notes = f"{question.cost}; {question.caution}".replace("`", "")
        yield from (f"  {line}" for line in textwrap.wrap(notes, 78))
