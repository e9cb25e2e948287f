"""Two runs beside each other: what differs, cell by cell, and what could explain it."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rich.box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nlbench.errors import RequestError, nearest, one_line
from nlbench.serialization.files import make_folder, write_atomically

from .agreement import Correlation, paired_share
from .exports import markdown_table, to_csv
from .leaderboard import CONFIDENCE, REPEATS, resampled_means
from .manifest import flat
from .tables import Scores, TableCell, TableSubject
from .text import column_decimals, count, number

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = ["Comparison", "Difference", "compare_runs"]

_CONDITION = re.compile(r"\s*(?P<measure>\S+)\s*(?P<sign>[<>])\s*(?P<bound>[+-]?[\d.]+(e-?\d+)?)\s*(?P<percent>%?)\s*")  # fmt: skip  # noqa: E501
_WIDE = 110
_SUBJECT_FACTS = ("weights_hash", "sample_hash", "samples", "split", "preprocessing", "parameters")


@dataclass(frozen=True)
class Difference:
    """One cell in two runs.

    Parameters
    ----------
    subject, measure : str
    before, after : float
        NaN where there is no number.
    low, high : float
        Interval of the difference, with the places drawn again; NaN where no two places have
        a value in both.
    share : Correlation
        Share of the places at which the number rose, with its interval.
    note : str
        Why a number is missing.
    """

    subject: str
    measure: str
    before: float
    after: float
    low: float
    high: float
    share: Correlation
    note: str = ""

    @property
    def change(self) -> float:
        """What the number rose by."""
        return self.after - self.before

    @property
    def relative(self) -> float:
        """The change as a share of the first number; NaN where that is zero."""
        return self.change / abs(self.before) if self.before else math.nan


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    Parameters
    ----------
    names : pair of str
    differences : tuple of Difference
        Of the cells that both have.
    explanations : tuple of (str, str, str)
        What differs between the manifests: what, in the first, in the second.
    alone : tuple of (str, str)
        Cells that one run has alone: the run's name and the cell.
    """

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    explanations: tuple[tuple[str, str, str], ...]
    alone: tuple[tuple[str, str], ...]

    def frame(self) -> pd.DataFrame:
        """Give the differences as a table, one cell a row."""
        return pd.DataFrame(
            [
                {
                    "subject": d.subject,
                    "measure": d.measure,
                    "first": d.before,
                    "second": d.after,
                    "difference": d.change,
                    "relative": d.relative,
                    "low": d.low,
                    "high": d.high,
                    "places": d.share.n,
                    "share above zero": d.share.value,
                    "share low": d.share.low,
                    "share high": d.share.high,
                    "note": d.note,
                }
                for d in self.differences
            ]
        )

    def broken(self, conditions: Sequence[str]) -> list[str]:
        """Say which cells changed by more than they may.

        Parameters
        ----------
        conditions : sequence of str
            ``MEASURE > NUMBER`` or ``MEASURE > NUMBER%``: changed by more, either way; with a
            sign, ``> +5%`` rose by more and ``< -5%`` fell by more. The measure may be a glob.

        Raises
        ------
        nlbench.RequestError
            If a condition can't be read or no measure has its name.
        """
        return [line for condition in conditions for line in self._broken(condition)]

    def _broken(self, condition: str) -> Iterator[str]:
        parts = _CONDITION.fullmatch(condition)
        if not parts:
            raise RequestError(
                f"--fail-if: expected such as 'absdev > 5%' or 'affinity > 0.01', got '{condition}'"
            )
        names = list(dict.fromkeys(d.measure for d in self.differences))
        mine = fnmatch.filter(names, parts["measure"])
        if not mine:
            hint = nearest(parts["measure"], names)
            raise RequestError(f"--fail-if: the runs share no measure '{parts['measure']}'{hint}")
        bound = float(parts["bound"]) / (100 if parts["percent"] else 1)
        for d in self.differences:
            if d.measure not in mine:
                continue
            if math.isnan(d.after):
                if not math.isnan(d.before):
                    yield f"{d.measure}, {d.subject}: has no value any more: {d.note}"
                continue
            if math.isnan(d.before):
                continue
            change = d.relative if parts["percent"] else d.change
            if math.isnan(change):  # from zero, of which nothing is a share
                change = math.copysign(math.inf, d.change) if d.change else 0.0
            if not re.match("[+-]", parts["bound"]):
                change = abs(change)
            if change > bound if parts["sign"] == ">" else change < bound:
                text = f"{100 * d.relative:+.2f} %" if parts["percent"] else f"{d.change:+.6g}"
                yield f"{d.measure}, {d.subject}: {text} ({condition.strip()})"

    def print(self, console: Console) -> None:
        """Print the differences and what could explain them."""
        _line(
            console,
            f"{self.names[0]} and {self.names[1]}: {count(len(self.differences), 'cell')} in both",
        )
        if self.differences:
            head, rows = self._texts()
            shown = len(head) if console.width >= _WIDE else len(head) - 2
            table = RichTable(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
            for place, name in enumerate(head[:shown]):
                table.add_column(
                    Text(name), justify="left" if place < 2 else "right", no_wrap=place > 0,
                    overflow="fold",
                )  # fmt: skip
            for row in rows:
                table.add_row(*(Text(text) for text in row[:shown]))
            console.print()
            console.print(table)
            if shown < len(head):
                _line(
                    console, "a wider window shows intervals, and at how many places a number rose"
                )
        console.print()
        for d in self.differences:
            if d.note:
                _line(console, f"{d.measure}, {d.subject}: {d.note}")
        for run, cell in self.alone:
            _line(console, f"only in {run}: {cell}")
        if self.explanations:
            _line(console, "what differs between the manifests:")
            for what, first, second in self.explanations:
                _line(console, f"  {what}: {first or 'nothing'} → {second or 'nothing'}")
        else:
            _line(console, "the manifests tell no difference")

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the table that people read."""
        decimals = {
            name: column_decimals(
                [v for d in self.differences if d.measure == name for v in (d.before, d.after)]
            )
            for name in {d.measure for d in self.differences}
        }
        head = ["subject", "measure", self.names[0], self.names[1], "difference", "interval",
                "rose at"]  # fmt: skip
        return head, [_row(d, decimals[d.measure]) for d in self.differences]

    def markdown(self) -> str:
        """Write the differences and what could explain them as Markdown."""
        head, rows = self._texts()
        parts = [f"# {self.names[0]} and {self.names[1]}", markdown_table(head, rows).rstrip()]
        said = [f"- {d.measure}, {d.subject}: {d.note}" for d in self.differences if d.note]
        said += [f"- only in {run}: {cell}" for run, cell in self.alone]
        if said:
            parts.append("\n".join(map(one_line, said)))
        if self.explanations:
            table = markdown_table(["what differs", *self.names], self.explanations)
            parts.append(table.rstrip())
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Write the same as a page of its own."""
        from .page import environment

        head, rows = self._texts()
        return (
            environment()
            .get_template("compare.html.j2")
            .render(
                names=self.names,
                head=head,
                rows=list(zip(rows, self.differences, strict=True)),
                notes=[(d.measure, d.subject, d.note) for d in self.differences if d.note],
                alone=self.alone,
                explanations=self.explanations,
            )
        )

    def write(self, output: Path) -> Path:
        """Write a file; its ending says how.

        Raises
        ------
        nlbench.RequestError
            If it ends otherwise than in ``.html``, ``.csv`` or ``.md``.
        """
        writers: dict[str, Callable[[], str]] = {
            ".html": self.html, ".md": self.markdown, ".csv": lambda: to_csv(self.frame()),
        }  # fmt: skip
        if output.suffix not in writers:
            raise RequestError(f"{output}: expected a name that ends in {', '.join(writers)}")
        make_folder(output.parent)
        write_atomically(output, writers[output.suffix]().encode("utf-8", errors="replace"))
        return output


def _line(console: Console, text: str) -> None:
    lead = text[: len(text) - len(text.lstrip())]
    console.print(Text(lead + one_line(text)), soft_wrap=True)


def _row(d: Difference, decimals: int | None) -> list[str]:
    def text(value: float, sign: bool = False) -> str:
        if math.isnan(value):
            return "–"
        plus = "+" if sign and value > 0 else ""
        return plus + number(value, decimals)

    change = text(d.change, True)
    if not math.isnan(d.relative):
        change += f" ({100 * d.relative:+.1f} %)"
    interval = f"{text(d.low, True)} to {text(d.high, True)}" if math.isfinite(d.low) else "–"
    share = f"{100 * d.share.value:.0f} % of {d.share.n}" if d.share.n else "–"
    if d.low == d.high == 0:
        share = f"none of {d.share.n}"
    return [one_line(d.subject), one_line(d.measure), text(d.before), text(d.after), change,
            interval, share]  # fmt: skip


def compare_runs(first: Run, second: Run) -> Comparison:
    """Align the cells of two runs and work out what differs.

    Parameters
    ----------
    first, second : nlbench.store.run_folder.Run
        Cells are aligned by model, weights, data, seed and measure; where the runs have one
        subject each, by measure alone.

    Returns
    -------
    Comparison

    Raises
    ------
    nlbench.RequestError
        If the runs share no cell.
    """
    names = _names(first, second)
    one, other = (Scores(run.scores, run.manifest.get("measures", {})) for run in (first, second))
    pairs = _aligned(one.subjects, other.subjects)
    measures = [name for name in one.measures if name in other.measures]
    found, alone = [], []
    for mine, theirs in pairs:
        for name in measures:
            cells = one[mine.label, name], other[theirs.label, name]
            absent = [cell.status == "absent" for cell in cells]
            if not any(absent):
                found.append(_difference(_label(mine, theirs), name, *cells))
            elif not all(absent):
                alone.append((names[int(absent[0])], f"{name}, {mine.label}"))
    if not found:
        raise RequestError(
            f"{names[0]} and {names[1]} share no cell; expected a subject (model, weights, data, "
            "seed) and a measure in both"
        )
    for run, scores, others in ((names[0], one, other), (names[1], other, one)):
        matched = {s.label for pair in pairs for s in pair}
        alone += [(run, s.label) for s in scores.subjects if s.label not in matched]
        alone += [
            (run, f"{m} of every subject") for m in scores.measures if m not in others.measures
        ]
    return Comparison(names, tuple(found), tuple(_explanations(first, second)), tuple(alone))


def _names(first: Run, second: Run) -> tuple[str, str]:
    one, other = str(first.name), str(second.name)
    return (f"{one} (1)", f"{other} (2)") if one == other else (one, other)


def _aligned(
    one: Sequence[TableSubject], other: Sequence[TableSubject]
) -> list[tuple[TableSubject, TableSubject]]:
    known = {subject.identity: subject for subject in other}
    pairs = [(s, known[s.identity]) for s in one if s.identity in known]
    if not pairs and len(one) == len(other) == 1:
        return [(one[0], other[0])]
    return pairs


def _label(mine: TableSubject, theirs: TableSubject) -> str:
    return mine.label if mine.identity == theirs.identity else f"{mine.label} → {theirs.label}"


def _difference(subject: str, measure: str, before: TableCell, after: TableCell) -> Difference:
    notes = [
        f"{word}: {cell.status}: {cell.reason}"
        for word, cell in (("first", before), ("second", after))
        if cell.status != "ok"
    ]
    known = {place.name: place.value for place in before.places}
    steps = np.array([p.value - known[p.name] for p in after.places if p.name in known])
    steps = steps[np.isfinite(steps)]
    low = high = math.nan
    if len(steps) > 1:
        means = resampled_means(steps, REPEATS, f"{subject}\0{measure}")
        tail = 50 * (1 - CONFIDENCE)
        low, high = (float(end) for end in np.percentile(means, [tail, 100 - tail]))
    share = paired_share(steps)
    return Difference(
        subject, measure, before.value, after.value, low, high, share, "; ".join(notes)
    )


def _explanations(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """What differs between the manifests, of all that decides a number."""
    one, other = (
        {name: str(value) for name, value in _facts(run.manifest)} for run in (first, second)
    )
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            yield key, one.get(key, ""), other.get(key, "")


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("nlbench", "device", "dtype"):
        yield key, manifest.get(key, "")
    yield from flat(manifest.get("environment") or {}, "environment.")
    for name, options in (manifest.get("probes") or {}).items():
        yield from flat(options or {}, f"probe {name}.")
    for name, about in (manifest.get("measures") or {}).items():
        yield f"{name}.version", about.get("version", "")
        yield from flat(about.get("options") or {}, f"{name}.")
    for subject in manifest.get("subjects") or []:
        keys = ("model", "weights", "data", "seed")
        label = " · ".join(str(subject.get(key, "")) for key in keys)
        for fact in _SUBJECT_FACTS:
            if fact in subject:
                yield f"{label}: {fact.replace('_', ' ')}", subject[fact]
