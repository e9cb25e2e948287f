"""Comparison of two runs: differences between their cells and between their manifests.

`Comparison.broken` evaluates the conditions of ``nlbench compare --fail-if``.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import rich.box
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nlbench.errors import RequestError, nearest, one_line, shorten
from nlbench.serialization.files import make_folder, write_atomically

from .agreement import Correlation, rise_share
from .environment import environment
from .exports import markdown_table, to_csv
from .layout import Table
from .leaderboard import mean_interval
from .manifest import flatten, settings_of
from .tables import Scores, TableCell, TableSubject
from .text import column_decimals, count, number

if TYPE_CHECKING:
    from nlbench.store.run import Run

_CONDITION = re.compile(r"\s*(?P<measure>\S+)\s*(?P<sign>[<>])\s*(?P<bound>[+-]?[\d.]+(e-?\d+)?)\s*(?P<percent>%?)\s*")  # fmt: skip  # noqa: E501
_MIN_WIDE_COLUMNS = 110
_MAX_ROWS = 200
_SUBJECT_FACTS = ("weights_hash", "sample_hash", "samples", "split", "preprocessing", "parameters")


@dataclass(frozen=True)
class Difference:
    """The values of one cell in two runs.

    Parameters
    ----------
    before, after : float
        NaN if there is no value.
    low, high : float
        Bootstrap interval for the mean difference over places; NaN if fewer than two places have
        a value in both runs.
    share : Correlation
        Fraction of places at which the value rose, with its interval; a change within rounding
        is neither a rise nor a fall.
    fall_share : float
        Fraction of places at which the value fell; NaN without places.
    note : str
        Reason for a missing value.
    """

    subject: str
    measure: str
    before: float
    after: float
    low: float
    high: float
    share: Correlation
    fall_share: float
    note: str = ""

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.after - self.before

    @property
    def relative(self) -> float:
        """The change as a fraction of the first value; NaN if that is zero."""
        return self.change / abs(self.before) if self.before else math.nan


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs.

    Parameters
    ----------
    differences : tuple of Difference
        One per shared cell.
    explanations : tuple of (str, str, str)
        Manifest entries that differ: name, first value, second value.
    alone : tuple of (str, str)
        Cells in only one of the runs: the run's name and the cell.
    """

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    explanations: tuple[tuple[str, str, str], ...]
    alone: tuple[tuple[str, str], ...]

    def frame(self) -> pd.DataFrame:
        """Return the differences as a table, one row per cell."""
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
                    "share below zero": d.fall_share,
                    "note": d.note,
                }
                for d in self.differences
            ]
        )

    def _repr_html_(self) -> str:
        return str(self.frame().to_html(index=False))

    def broken(self, conditions: Sequence[str]) -> list[str]:
        """List the cells that meet a condition of ``--fail-if``.

        Parameters
        ----------
        conditions : sequence of str
            ``MEASURE > NUMBER`` or ``MEASURE > NUMBER%``, for the absolute change. With a sign,
            ``> +5%`` means a rise and ``< -5%`` a fall by more than 5 %. MEASURE may be a glob.

        Raises
        ------
        nlbench.RequestError
            If a condition can't be parsed or matches no measure.
        """
        return [line for condition in conditions for line in self._broken(condition)]

    def _broken(self, condition: str) -> Iterator[str]:
        parts = _CONDITION.fullmatch(condition)
        if not parts:
            raise RequestError(
                "--fail-if: expected a condition like 'absdev > 5%' or 'affinity > 0.01', "
                f"got '{shorten(condition)}'"
            )
        names = list(dict.fromkeys(d.measure for d in self.differences))
        matches = fnmatch.filter(names, parts["measure"])
        if not matches:
            hint = nearest(parts["measure"], names)
            raise RequestError(f"--fail-if: no shared measure matches '{parts['measure']}'{hint}")
        bound = float(parts["bound"]) / (100 if parts["percent"] else 1)
        if math.isinf(bound):
            raise RequestError(f"--fail-if: {shorten(parts['bound'])} is out of bounds")
        for d in self.differences:
            if d.measure not in matches:
                continue
            if math.isnan(d.after):
                if not math.isnan(d.before):
                    yield f"{d.measure}, {d.subject}: no longer has a value: {d.note}"
                continue
            if math.isnan(d.before):
                continue
            change = d.relative if parts["percent"] else d.change
            if math.isnan(change):  # relative to zero
                change = math.copysign(math.inf, d.change) if d.change else 0.0
            if not re.match("[+-]", parts["bound"]):
                change = abs(change)
            if change > bound if parts["sign"] == ">" else change < bound:
                text = f"{100 * d.relative:+.2f} %" if parts["percent"] else f"{d.change:+.6g}"
                yield f"{d.measure}, {d.subject}: {text} ({condition.strip()})"

    def print(self, console: Console) -> None:
        """Print the differences between the cells and between the manifests."""
        _line(
            console,
            f"{self.names[0]} and {self.names[1]}: {count(len(self.differences), 'shared cell')}",
        )
        if self.differences:
            head, rows = self._texts()
            hidden = len(rows) - _MAX_ROWS
            if hidden > 0:
                rows = [rows[i] for i in self._largest(_MAX_ROWS)]
            shown = len(head) if console.width >= _MIN_WIDE_COLUMNS else len(head) - 3
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
            if hidden > 0:
                _line(console, f"and {count(hidden, 'cell')} that changed less; -o FILE writes all")
            if shown < len(head):
                _line(
                    console,
                    "a wider terminal also shows intervals and the fractions of rises and falls",
                )
        console.print()
        remarks = [f"{d.measure}, {d.subject}: {d.note}" for d in self.differences if d.note]
        remarks += [f"only in {run}: {cell}" for run, cell in self.alone]
        for remark in remarks[:_MAX_ROWS]:
            _line(console, remark)
        if len(remarks) > _MAX_ROWS:
            more = count(len(remarks) - _MAX_ROWS, "more remark")
            _line(console, f"and {more}; -o FILE writes all")
        if self.explanations:
            _line(console, "differences between the manifests:")
            for name, first, second in self.explanations[:_MAX_ROWS]:
                _line(console, f"  {name}: {first or 'nothing'} → {second or 'nothing'}")
            if len(self.explanations) > _MAX_ROWS:
                more = count(len(self.explanations) - _MAX_ROWS, "more difference")
                _line(console, f"  and {more}; -o FILE writes all")
        else:
            _line(console, "the manifests do not differ")

    def _largest(self, limit: int) -> list[int]:
        """Return the indices of the largest relative changes, in the original order."""
        changes = [d.relative if math.isfinite(d.relative) else d.change for d in self.differences]
        order = sorted(range(len(changes)), key=lambda i: -abs(np.nan_to_num(changes[i])))
        return sorted(order[:limit])

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the printed table."""
        decimals = {
            name: column_decimals(
                [v for d in self.differences if d.measure == name for v in (d.before, d.after)]
            )
            for name in {d.measure for d in self.differences}
        }
        head = ["subject", "measure", self.names[0], self.names[1], "difference", "interval",
                "rose at", "fell at"]  # fmt: skip
        return head, [_row(d, decimals[d.measure]) for d in self.differences]

    def markdown(self) -> str:
        """Return the comparison as Markdown."""
        head, rows = self._texts()
        parts = [f"# {self.names[0]} and {self.names[1]}", markdown_table(head, rows).rstrip()]
        notes = [f"- {d.measure}, {d.subject}: {d.note}" for d in self.differences if d.note]
        notes += [f"- only in {run}: {cell}" for run, cell in self.alone]
        if notes:
            parts.append("\n".join(map(one_line, notes)))
        if self.explanations:
            table = markdown_table(["manifest", *self.names], self.explanations)
            parts.append(table.rstrip())
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Return the comparison as an HTML page."""
        head, rows = self._texts()
        return (
            environment()
            .get_template("compare.html.j2")
            .render(
                names=self.names,
                cells=Table(tuple(head), tuple(map(tuple, rows)), 2, True),
                notes=[(d.measure, d.subject, d.note) for d in self.differences if d.note],
                alone=self.alone,
                explanations=Table(("entry", *self.names), self.explanations),
            )
        )

    def write(self, output: Path) -> Path:
        """Write the comparison in the format given by the file's suffix.

        Raises
        ------
        nlbench.RequestError
            If the suffix isn't ``.html``, ``.csv`` or ``.md``.
        """
        writers: dict[str, Callable[[], str]] = {
            ".html": self.html, ".md": self.markdown, ".csv": lambda: to_csv(self.frame()),
        }  # fmt: skip
        if output.suffix not in writers:
            raise RequestError(f"{output}: expected a file name ending in {', '.join(writers)}")
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
    n = d.share.n
    shares = [f"{100 * s:.0f} % of {n}" if n else "–" for s in (d.share.value, d.fall_share)]
    return [one_line(d.subject), one_line(d.measure), text(d.before), text(d.after), change,
            interval, *shares]  # fmt: skip


def compare_runs(first: Run, second: Run) -> Comparison:
    """Compare the cells and manifests of two runs.

    Parameters
    ----------
    first, second : nlbench.Run
        Cells are matched by model, weights, data, seed and measure, and checkpoints also by step
        and seed. If each run has a single subject, cells are matched by measure alone.

    Raises
    ------
    nlbench.RequestError
        If the runs have no cell in common.
    """
    names = _names(first, second)
    before, after = (
        Scores.of_records(run.records, run.manifest.get("measures", {})) for run in (first, second)
    )
    pairs = _match_checkpoints(before.subjects, after.subjects)
    measures = [name for name in before.measures if name in after.measures]
    differences, alone = [], []
    for old, new in pairs:
        for name in measures:
            cells = before[old.label, name], after[new.label, name]
            absent = [cell.status == "absent" for cell in cells]
            if not any(absent):
                differences.append(difference_of(_label(old, new), name, *cells))
            elif not all(absent):
                alone.append((names[int(absent[0])], f"{name}, {old.label}"))
    if not differences:
        raise RequestError(
            f"{names[0]} and {names[1]} have no cell in common; expected both to contain the same "
            "subject (model, weights, data, seed) and measure"
        )
    for run, scores, others in ((names[0], before, after), (names[1], after, before)):
        matched = {s.label for pair in pairs for s in pair}
        alone += [(run, s.label) for s in scores.subjects if s.label not in matched]
        alone += [
            (run, f"{m} of every subject") for m in scores.measures if m not in others.measures
        ]
    explanations = tuple(_explanations(first, second))
    return Comparison(names, tuple(differences), explanations, tuple(alone))


def _names(first: Run, second: Run) -> tuple[str, str]:
    names = str(first.name), str(second.name)
    return (f"{names[0]} (1)", f"{names[1]} (2)") if names[0] == names[1] else names


def _match_checkpoints(
    before: Sequence[TableSubject], after: Sequence[TableSubject]
) -> list[tuple[TableSubject, TableSubject]]:
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    known = {subject.identity: subject for subject in after}
    pairs = [(s, known[s.identity]) for s in before if s.identity in known]
    paired = {subject.identity for subject, _ in pairs}
    old, new = (_by_step(s for s in side if s.identity not in paired) for side in (before, after))
    return pairs + [(subject, new[key]) for key, subject in old.items() if key in new]


def _by_step(subjects: Iterable[TableSubject]) -> dict[tuple[object, ...], TableSubject]:
    """Index checkpoints by model, data, seed and step, omitting ambiguous steps."""
    steps: dict[tuple[object, ...], list[TableSubject]] = {}
    for s in subjects:
        if s.checkpoint:
            key = (s.model, s.data, s.seed, s.training_seed, s.checkpoint.unit, s.checkpoint.step)
            steps.setdefault(key, []).append(s)
    return {key: group[0] for key, group in steps.items() if len(group) == 1}


def _label(before: TableSubject, after: TableSubject) -> str:
    same = before.identity == after.identity
    shared = f"{before.model} · " if before.model == after.model else ""
    return before.label if same else f"{before.label} → {after.label.removeprefix(shared)}"


def difference_of(subject: str, measure: str, before: TableCell, after: TableCell) -> Difference:
    """Compare two cells, paired over the places that they have in common."""
    notes = [
        f"{word}: {cell.status}: {cell.reason}"
        for word, cell in (("first", before), ("second", after))
        if cell.status != "ok"
    ]
    known = {place.name: place.value for place in before.places}
    shared = [(known[p.name], p.value) for p in after.places if p.name in known]
    pairs = np.array(shared, dtype=np.float64).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    steps = pairs[:, 1] - pairs[:, 0]
    low, high = mean_interval(steps, f"{subject}\0{measure}")
    counts = len(before.place_values), len(after.place_values)
    if counts != (len(steps), len(steps)) and not notes:
        # The values are means over different places; an interval over shared ones doesn't apply.
        notes.append(f"{len(steps)} of {counts[0]} and {counts[1]} places are shared")
        if len(steps) > 1:
            mean = f"{steps.mean():+.4g} ({low:+.4g} to {high:+.4g})"
            notes[0] += f"; their mean difference is {mean}"
        low = high = math.nan
    elif not _is_mean(steps, after.value - before.value):
        low = high = math.nan
    changes = _without_rounding(pairs)
    rises, falls = rise_share(changes), rise_share(-changes)
    values = before.value, after.value
    return Difference(subject, measure, *values, low, high, rises, falls.value, "; ".join(notes))


_TIE_TOLERANCE = 1e-9
"""Relative difference up to which two values are equal, as in the leaderboard's ranks."""


def _without_rounding(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the second value minus the first of each pair, or 0 if they agree up to rounding.

    A value that cancels to almost zero has the rounding of the other places.
    """
    steps = pairs[:, 1] - pairs[:, 0]
    largest = np.abs(pairs).max(axis=1, initial=0.0)
    tolerance = np.maximum(_TIE_TOLERANCE * largest, 1e-12 * largest.max(initial=0.0))
    return np.where(np.abs(steps) <= tolerance, 0.0, steps)


def _is_mean(steps: NDArray[np.float64], change: float) -> bool:
    """Return True if the change in the summary is the mean change over places."""
    if not len(steps):
        return False
    tolerance = 1e-9 * float(np.abs(steps).max())
    return math.isclose(float(steps.mean()), change, rel_tol=1e-6, abs_tol=tolerance)


def _explanations(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the manifest entries that differ and can affect values."""
    before, after = (
        {name: str(value) for name, value in _facts(run.manifest)} for run in (first, second)
    )
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield key, before.get(key, ""), after.get(key, "")


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from settings_of(manifest)
    yield from flatten(manifest.get("environment") or {}, "environment.")
    for subject in manifest.get("subjects") or []:
        keys = ("model", "weights", "data", "seed")
        label = " · ".join(str(subject.get(key, "")) for key in keys)
        for fact in _SUBJECT_FACTS:
            if fact in subject:
                yield f"{label}: {fact.replace('_', ' ')}", subject[fact]
