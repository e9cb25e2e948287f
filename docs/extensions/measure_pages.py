"""Write a page for every measure, from what ``nlbench show`` prints, with figures.

The pages are in ``docs/measures``, which git ignores. Values on the ladder are those of
``docs/planted_ladder.csv``, which ``docs/planted_ladder.py`` measures; a measure that has changed
its version since has no figure.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sphinx.application import Sphinx

import nlbench
from nlbench import registry
from nlbench.conformance.checks import Trial, check_invariances
from nlbench.measure import INVARIANCES, Measure
from nlbench.measure.contract import load_measure
from nlbench.options import resolve_options
from nlbench.question import load_questions
from nlbench.reports.population import find_population
from nlbench.reports.tables import RELATIVE, MeasureInfo

LADDER = Path(__file__).parents[1] / "planted_ladder.csv"
API = Path(__file__).parents[1] / "api.rst"
SECTIONS = ("Definition", "Units", "Undefined", "Cost", "Limits", "Published code", "Examples")
GREY, BLUE = "#808080", "#3b82c4"  # legible on a light and on a dark page


def write_pages(app: Sphinx) -> None:
    """Write all pages, and their index."""
    folder = Path(app.srcdir, "measures")
    folder.mkdir(exist_ok=True)
    names = sorted(
        name
        for name, entry in registry.entries("measures").items()
        if entry.claims[0].value.startswith("nlbench.measures.")
    )
    table = pd.read_csv(LADDER, dtype={"version": str})
    for name in names:
        measure = load_measure(name)
        drawings = {"ladder": ladder_figure(table, measure), "networks": population_figure(measure)}
        figures = {kind: drawing for kind, drawing in drawings.items() if drawing}
        for kind, figure in figures.items():
            save(figure, folder / f"{name}-{kind}.svg")
        write(folder / f"{name}.rst", "\n".join(page_lines(measure, figures)))
    for stale in folder.glob("*.rst"):
        if stale.stem not in (*names, "index"):
            stale.unlink()
    write(folder / "index.rst", "\n".join(index_lines(names)))


def index_lines(names: Sequence[str]) -> Iterator[str]:
    """Yield the index: a table of measures with their direction."""
    yield from title("A page for each measure", "=")
    yield from [".. list-table::", "   :header-rows: 1", "", "   * - measure", "     - definition"]
    yield from ["     - larger values", "     - observed at"]
    for name in names:
        measure = load_measure(name)
        summary = inspect.cleandoc(measure.__doc__ or "").partition("\n")[0]
        yield from [f"   * - :doc:`{name} <{name}>`", f"     - {summary}"]
        yield from [f"     - {measure.more_means}", f"     - {measure.probe}"]
    yield from ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name in names), ""]


def page_lines(measure: type[Measure], figures: Collection[str]) -> Iterator[str]:
    """Yield the lines of a measure's page."""
    sections = sections_of(measure.__doc__ or "")
    name, low, high = measure.name, *measure.bounds
    yield from [*title(name, "="), sections[""], ""]
    yield from [".. list-table::", "   :stub-columns: 1", "   :widths: 20 80", ""]
    yield from row("Larger values", measure.more_means)
    yield from row("Bounds", f"{low:g} to {high:g}".replace("inf", "∞"))
    yield from row("Units", sections.get("Units", ""))
    description = registry.load("probes", measure.probe).description
    yield from row("Probe", f"``{measure.probe}``: {description}")
    yield from row("Version", measure.version)
    for option, about in measure.options.items():
        yield from row("Option", f"``{name}.{option} = {about.default}``: {about.help}")
    for label, descriptions in invariances(measure).items():
        yield from row(label, "; ".join(descriptions))
    yield from [
        "",
        *use_lines(measure),
        *title("Definition", "-"),
        sections.get("Definition", ""),
        "",
    ]
    if "ladder" in figures:
        yield from [*title("Planted nonlinearity", "-"), f".. image:: {name}-ladder.svg", ""]
        yield "Initialised ``ladders/cnn`` with leaky ReLUs, from slope 1 (affine) to 0 (ReLU), on"
        yield "the digits: three seeds, and their mean."
    if "networks" in figures:
        yield from ["", *title("Reference networks", "-"), f".. image:: {name}-networks.svg", ""]
        yield "Initialised networks of torchvision, vgg8, and trained ones; see :doc:`/report`."
    if examples := "\n\n".join(examples_of(measure, sections)):
        yield from ["", *title("Reference values", "-")]
        yield from ["The tests run these lines. Values hold to the digits shown.", "", examples]
    for heading in ("Undefined", "Cost", "Limits", "Published code"):
        if heading in sections:
            yield from ["", *title(heading, "-"), sections[heading]]
    source = measure.source
    yield from [
        "",
        *title("Source", "-"),
        # An initial at the start of a line would begin a list.
        rf"\ {source.citation} {source.equation}".rstrip(),
    ]
    if source.bibtex:
        yield from ["", ".. code-block:: bibtex", "", indented(source.bibtex)]
    yield from ["", "How it is computed, and what it is tested against: :doc:`/measures`.", ""]


def use_lines(measure: type[Measure]) -> Iterator[str]:
    """Yield how to compute a measure, and the questions that it answers."""
    yield from [*title("Use", "-"), ".. code-block:: python", ""]
    yield f'   nlbench.evaluate(model, inputs, ["{measure.name}"])'
    yield from ["", ".. code-block:: sh", ""]
    yield f"   nlbench run --measures {measure.name} --model my_net.py:Net --data ./images"
    module = measure.__module__.rpartition(".")[2]
    functions = re.findall(rf"^   {module}\.(\w+)$", API.read_text(encoding="utf-8"), re.M)
    if functions:
        links = ", ".join(f":func:`{measure.__module__}.{function}`" for function in functions)
        yield from ["", f"As a function: {links}."]
    for question in load_questions().values():
        if measure.name in question.measures:
            yield from ["", f"Question: *{question.text}* Caution: {question.caution}."]
    yield ""


def title(text: str, line: str) -> list[str]:
    """Return a heading."""
    return [text, line * len(text), ""]


def row(label: str, text: str) -> list[str]:
    """Return a row of a list table."""
    return [f"   * - {label}", f"     - {' '.join(text.split())}"]


def indented(text: str) -> str:
    """Indent a block of code."""
    return "\n".join(f"   {line}" for line in text.splitlines())


def sections_of(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by title; the description has the title ''."""
    heading = re.compile(rf"^({'|'.join(SECTIONS)})\n-+\n", re.M)
    first, *rest = heading.split(inspect.cleandoc(docstring))
    texts = {name: text.strip() for name, text in zip(rest[::2], rest[1::2], strict=True)}
    return {"": first.strip(), **texts}


def examples_of(measure: type[Measure], sections: dict[str, str]) -> Iterator[str]:
    """Yield the examples of a measure and of the functions of its module."""
    if "Examples" in sections:
        yield sections["Examples"]
    module = importlib.import_module(measure.__module__)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and not name.startswith("_"):
            text = sections_of(function.__doc__ or "").get("Examples")
            if text:
                yield f"``{name}``:\n\n{text}"


def invariances(measure: type[Measure]) -> dict[str, list[str]]:
    """Return what changes the value and what doesn't, as ``nlbench check-measure`` finds it."""
    verdicts: dict[str, list[str]] = {}
    labels = {"kept": "Unchanged by", "not claimed": "Changed by"}
    checks = check_invariances(Trial(measure, {}), nlbench.Result({}))
    for check, description in zip(checks, INVARIANCES.values(), strict=True):
        if check.outcome in labels:
            verdicts.setdefault(labels[check.outcome], []).append(description)
    return verdicts


def ladder_figure(table: pd.DataFrame, measure: type[Measure]) -> Figure | None:
    """Draw the values of one measure against the slope; None if its version has no values."""
    rows = table[(table["measure"] == measure.name) & (table["version"] == measure.version)]
    if rows.empty:
        return None
    figure, axes = axes_of(measure.name, 2.4)
    axes.plot(rows["slope"], rows["value"], ".", color=GREY)
    means = rows.groupby("slope")["value"].mean()
    axes.plot(means.index, means, "-", color=BLUE)
    axes.invert_xaxis()
    axes.set_xlabel("slope below 0")
    return figure


def population_figure(measure: type[Measure]) -> Figure | None:
    """Draw the reference networks on a line; None if the measure has none."""
    info = MeasureInfo(
        version=measure.version,
        options=dict(resolve_options(measure.options, {}, owner=measure.name)),
        more_means=measure.more_means,
        base=measure.name,
    )
    # Networks are compared by the derived measure, if there is one.
    name = {base: derived for derived, (base, _) in RELATIVE.items()}.get(
        measure.name, measure.name
    )
    population = find_population(name, info)
    if population is None:
        return None
    figure, axes = axes_of("", 1.3)
    values = np.sort(population.values)
    axes.plot(values, np.zeros_like(values), "|", color=GREY, markersize=18)
    axes.plot(np.median(values), 0, "|", color=BLUE, markersize=24, markeredgewidth=2)
    if np.isfinite(population.affine):
        axes.axvline(population.affine, color=GREY, linestyle=":")
        axes.annotate("affine", (population.affine, 1.0), color=GREY, fontsize=8, ha="center",
                      xycoords=("data", "axes fraction"))  # fmt: skip
    axes.set_yticks([])
    axes.set_xlabel(f"{name}: {len(values)} networks, median {np.median(values):.3g}")
    return figure


def axes_of(label: str, height: float) -> tuple[Figure, Any]:
    """Return an empty figure whose colours fit a light and a dark page."""
    figure = Figure(figsize=(6, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=GREY)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=GREY)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(GREY)
    axes.set_ylabel(label)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Save a figure with text as text, the same bytes each time."""
    figure.savefig(path, metadata={"Date": None})


def write(path: Path, text: str) -> None:
    """Write a page if it changed, so that Sphinx reads only those."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx collects its sources."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
