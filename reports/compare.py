"""Comparison of two runs: differences between their cells and between their manifests.

`Comparison.broken` evaluates the conditions of ``nlbench compare --fail-if``.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import rich.box
from markupsafe import Markup
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nlbench.errors import RequestError, nearest, one_line, shorten
from nlbench.serialization.files import make_folder, read_text, write_atomically

from .environment import environment
from .estimates import Change, Estimate, change, exceeding, relative_change
from .exports import markdown_table, to_csv
from .layout import Table
from .leaderboard import sense_of
from .manifest import flatten, settings_of
from .relative import has_relative, with_relative
from .tables import Measures, Score, Scores, TableSubject
from .text import (
    ERROR_LEGEND,
    count,
    functional_calls,
    percentage,
    place_text,
    plus_minus,
    range_noun,
)

if TYPE_CHECKING:
    from nlbench.store.run import Run

_CONDITION = re.compile(r"\s*(?P<measure>[^\s@<>]+)(@(?P<place>[^\s<>]+))?\s*(?P<sign>[<>])\s*(?P<bound>[+-]?[\d.]+(e-?\d+)?)\s*(?P<percent>%?)\s*")  # fmt: skip  # noqa: E501
_MIN_WIDE_COLUMNS = 110
_COLUMNS = ("subject", "measure", "place", "first", "second", "difference", "relative", "error", "low", "high", "changed", "note")  # fmt: skip  # noqa: E501
_MARKS = {
    ".html": '<meta name="generator" content="nlbench compare">',
    ".md": "<!-- nlbench compare -->",
    ".csv": ",".join(_COLUMNS),
}
"""Text in every comparison that was written, by the file's suffix."""
_MAX_ROWS = 200
_MAX_DRAWN = 24
_IDENTITY = ("model", "weights", "data", "seed")
_SUBJECT_FACTS = ("weights_hash", "sample_hash", "samples", "split", "preprocessing", "parameters")


@dataclass(frozen=True)
class Difference:
    """A value in two runs: that of a network, or of one of its places.

    Parameters
    ----------
    place : str
        Empty for the network.
    first, second : Estimate
    is_significant : bool
        True if the difference exceeds its error, in a family of tests over all networks, measures
        and places of the comparison.
    note : str
        Reason for a missing value.
    places : tuple of Difference
        Of a network: its places in call order.
    where : str
        Of a functional call: where it stands, such as ``my_net.py:11, after conv1``.
    """

    subject: str
    measure: str
    place: str
    first: Estimate
    second: Estimate
    is_significant: bool = False
    note: str = ""
    places: tuple[Difference, ...] = ()
    where: str = ""

    @property
    def place_text(self) -> str:
        """The name of the place, and where it stands if it is a functional call."""
        return f"{self.place} ({self.where})" if self.where else self.place

    @property
    def where_text(self) -> str:
        """The measure, its place and the network, as in a message."""
        where = f"{self.measure}@{self.place}" if self.place else self.measure
        return f"{where}, {self.subject}"

    @property
    def before(self) -> float:
        """The first value, or NaN if there is none."""
        return self.first.value

    @property
    def after(self) -> float:
        """The second value, or NaN if there is none."""
        return self.second.value

    @property
    def estimate(self) -> Change:
        """The difference with its error."""
        return change(self.first, self.second)

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.after - self.before

    @property
    def error(self) -> float:
        """Standard error of the difference, or NaN if unknown."""
        return self.estimate.error

    @property
    def relative(self) -> float:
        """The change as a fraction of the first value; NaN if that is zero."""
        return self.change / abs(self.before) if self.before else math.nan

    @property
    def text(self) -> str:
        """The formatted difference with its error."""
        if math.isnan(self.change):
            return "–"
        return plus_minus(self.change, self.error, signed=True)

    @property
    def verdict(self) -> str:
        """Whether the value changed: ``yes``, ``no`` or ``unknown``, and how many places did."""
        text = "yes" if self.is_significant else "no"
        if math.isnan(self.error) or math.isnan(self.change):
            text = "unknown"
        known = [place for place in self.places if math.isfinite(place.error)]
        if known:
            changed = sum(place.is_significant for place in known)
            text += f"; {changed} of {len(known)} layers"
        return text

    def sentence(self, info: Mapping[str, Any]) -> str:
        """Describe which places changed, and how the network did.

        Examples
        --------
        >>> def estimate(value):
        ...     return Estimate(value, (value - 0.005, value, value + 0.005), "a", "samples")
        >>> place = Difference("", "affinity", "relu", estimate(0.9), estimate(0.7), True)
        >>> network = replace(place, place="", is_significant=True, places=(place,))
        >>> network.sentence({"more_means": "less nonlinear", "probe": "sites"})
        'affinity: relu −0.2000 (more nonlinear); network 0.900 ± 0.006 → 0.700 ± 0.006, −0.2000'
        """
        noun = range_noun(info)
        known = [place for place in self.places if math.isfinite(place.error)]
        changed = sorted(
            (place for place in known if place.is_significant), key=lambda d: -abs(d.change)
        )
        parts = []
        if len(known) == 1 and changed:
            parts.append(f"{place_text(changed[0].place)} {changed[0].text}")
        elif changed:
            whole = f"{len(changed)} of {len(known)}"
            parts.append(f"{whole} {noun} changed")
        elif known:
            parts.append(f"none of {len(known)} {noun} changed beyond its error")
        sense = sense_of(info)
        signs = {d.change > 0 for d in changed}
        if changed and sense and len(signs) == 1:
            parts[0] += f" ({'more' if signs == {sense > 0} else 'less'} nonlinear)"
        if len(changed) > 1:
            named = [f"{place_text(d.place)} {d.text}" for d in changed[:2]]
            parts.append(f"most {', '.join(named)}")
        if math.isfinite(self.change):
            ends = (plus_minus(e.value, e.error) for e in (self.first, self.second))
            parts.append(f"network {' → '.join(ends)}, {self.text}")
        return f"{self.measure}: {'; '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs.

    Parameters
    ----------
    differences : tuple of Difference
        One per shared cell, with those of its places.
    explanations : tuple of (str, str, str)
        Manifest entries that differ: name, first value, second value.
    alone : tuple of (str, str)
        Cells in only one of the runs: the run's name and the cell.
    measures : mapping of str to mapping
        Metadata of the measures.
    """

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    explanations: tuple[tuple[str, str, str], ...]
    alone: tuple[tuple[str, str], ...]
    measures: Measures

    def rows(self) -> Iterator[Difference]:
        """Yield each network's difference, followed by those of its places."""
        for difference in self.differences:
            yield difference
            yield from difference.places

    def frame(self) -> pd.DataFrame:
        """Return the differences as a table: a row per network and measure, and per place."""
        rows = [
            (
                *(d.subject, d.measure, d.place, d.before, d.after, d.change, d.relative, d.error),
                *d.estimate.interval,
                *(d.is_significant, d.note),
            )
            for d in self.rows()
        ]
        return pd.DataFrame(rows, columns=list(_COLUMNS))

    def _repr_html_(self) -> str:
        return str(self.frame().to_html(index=False))

    def broken(self, conditions: Iterable[str]) -> list[str]:
        """Return a line for each value whose change fulfils a condition beyond its error.

        Parameters
        ----------
        conditions : iterable of str
            ``MEASURE > 5%``, ``MEASURE > 0.01``, ``MEASURE@PLACE > 0.05``, …: the difference
            exceeds the bound in either direction; ``> +5%`` means a rise and ``< -5%`` a fall by
            more than 5 %. MEASURE and PLACE may be globs. Without a place, networks are compared.

        Raises
        ------
        nlbench.RequestError
            If a condition can't be parsed or matches nothing.
        """
        return [line for condition in conditions for line in self._broken(condition)]

    def _broken(self, condition: str) -> Iterator[str]:
        parts = _CONDITION.fullmatch(condition)
        if not parts:
            raise RequestError(
                "--fail-if: expected a condition like 'absdev > 5%' or 'affinity@* > 0.01', "
                f"got '{shorten(condition)}'"
            )
        try:
            bound = float(parts["bound"]) / (100 if parts["percent"] else 1)
        except ValueError:
            bound = math.inf
        if math.isinf(bound):
            raise RequestError(f"--fail-if: {shorten(parts['bound'])} is out of bounds")
        matched = self._matched(parts["measure"], parts["place"])
        for d in matched:
            if math.isnan(d.after) and math.isfinite(d.before):
                yield f"{d.where_text}: no longer has a value: {d.note}"
        known = [d for d in matched if math.isfinite(d.change)]
        is_signed = bool(re.match("[+-]", parts["bound"]))
        sign = 1 if parts["sign"] == ">" else -1
        changes = [
            relative_change(d.first, d.second) if parts["percent"] else d.estimate for d in known
        ]
        # A change fulfils the condition if it exceeds the bound in this orientation.
        oriented = [
            replace(c, value=sign * (c.value if is_signed else abs(c.value))) for c in changes
        ]
        excesses = [c.excess(sign * bound) for c in oriented]
        clear = exceeding(excesses, [c.degrees for c in changes]) if known else ()
        for index, d in enumerate(known):
            is_unknown = math.isnan(excesses[index]) and oriented[index].value > sign * bound
            if is_unknown or (clear[index] and excesses[index] > 0):
                text = d.text
                if parts["percent"]:
                    text = f"{percentage(changes[index].value, changes[index].error)} ({text})"
                note = ", error unknown" if is_unknown else ""
                yield f"{d.where_text}: {text}{note} ({condition.strip()})"

    def _matched(self, measure: str, place: str | None) -> list[Difference]:
        names = list(dict.fromkeys(d.measure for d in self.differences))
        matches = set(fnmatch.filter(names, measure))
        if not matches:
            hint = nearest(measure, names)
            raise RequestError(f"--fail-if: no shared measure matches '{measure}'{hint}")
        networks = [d for d in self.differences if d.measure in matches]
        if place is None:
            return networks
        places = [d for network in networks for d in network.places]
        known = list(dict.fromkeys(d.place for d in places))
        chosen = {name for name in known if name == place or fnmatch.fnmatchcase(name, place)}
        if not chosen:
            hint = nearest(place, known)
            raise RequestError(f"--fail-if: no place of {measure} matches '{place}'{hint}")
        return [d for d in places if d.place in chosen]

    def print(self, console: Console) -> None:
        """Print the differences between the cells and between the manifests."""
        _line(
            console,
            f"{self.names[0]} and {self.names[1]}: {count(len(self.differences), 'shared cell')}",
        )
        if self.differences:
            self._print_table(console)
        _lines(console, self._notes(), "remark")
        if self.explanations:
            _line(console, "differences between the manifests:")
            texts = [f"  {n}: {a or 'nothing'} → {b or 'nothing'}" for n, a, b in self.explanations]
            _lines(console, texts, "difference")
        else:
            _line(console, "the manifests do not differ")

    def _notes(self) -> list[str]:
        """Return the reasons for missing values, and the cells in only one of the runs."""
        notes = [f"{d.measure}, {d.subject}: {d.note}" for d in self.differences if d.note]
        return notes + [f"only in {run}: {cell}" for run, cell in self.alone]

    def _print_table(self, console: Console) -> None:
        rows = self._shown(_MAX_ROWS)
        table = RichTable(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
        head, texts = self._texts(rows)
        columns = [i for i, name in enumerate(head) if name not in ("subject", "measure", "place")]
        if console.width < _MIN_WIDE_COLUMNS:
            columns.remove(head.index("relative"))
        table.add_column(overflow="fold")
        for i in columns:
            table.add_column(Text(head[i]), justify="right", no_wrap=True)
        is_single = len(self._subjects()) == 1
        for d, row in zip(rows, texts, strict=True):
            name = d.measure if is_single else f"{d.subject}: {d.measure}"
            table.add_row(
                Text(f"  {one_line(d.place)}" if d.place else one_line(name)),
                *(Text(row[i]) for i in columns),
            )
        console.print()
        console.print(table)
        console.print()
        if where := {d.place: d.where for d in rows if d.where}:
            _line(console, functional_calls(where))
        hidden = sum(1 for _ in self.rows()) - len(rows)
        if hidden:
            _line(console, f"and {count(hidden, 'value')} that changed less; -o FILE writes all")
        for line in self.sentences()[:_MAX_ROWS]:
            _line(console, line)
        if any(d.error > 0 for d in rows):
            _line(console, f"{ERROR_LEGEND}; changed: beyond it, by Holm's method at 5 %")

    def sentences(self) -> list[str]:
        """Describe the change in each network that has errors, one line per measure."""
        lines = []
        for d in self.differences:
            if has_relative(d.measure, self.measures) or math.isnan(d.error):
                continue
            text = d.sentence(self.measures.get(d.measure, {}))
            if text:
                lines.append(f"{d.subject}: {text}" if len(self._subjects()) > 1 else text)
        return lines

    def _subjects(self) -> set[str]:
        return {d.subject for d in self.differences}

    def _shown(self, limit: int) -> list[Difference]:
        """Return up to `limit` rows in order: networks and the places that changed most."""
        rows = list(self.rows())
        order = sorted(range(len(rows)), key=lambda i: (bool(rows[i].place), -_size(rows[i])))
        return [rows[i] for i in sorted(order[:limit])]

    def _texts(self, rows: Iterable[Difference]) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the printed table."""
        head = ["measure", "place", *self.names, "difference", "relative", "changed"]
        texts = []
        for d in rows:
            values = [_value_text(estimate) for estimate in (d.first, d.second)]
            relative = percentage(d.relative, relative_change(d.first, d.second).error)
            place = d.place_text or "network"
            texts.append([d.measure, place, *values, d.text, relative, d.verdict.partition(";")[0]])
        if len(self._subjects()) > 1:
            head.insert(0, "subject")
            for d, line in zip(rows, texts, strict=True):
                line.insert(0, d.subject)
        return head, [[one_line(text) for text in line] for line in texts]

    def markdown(self) -> str:
        """Return the comparison as Markdown."""
        head, rows = self._texts(list(self.rows()))
        parts = [f"# {self.names[0]} and {self.names[1]}"]
        sentences = self.sentences()
        if sentences:
            parts.append("\n".join(f"- {one_line(line)}" for line in sentences))
        parts.append(markdown_table(head, rows).rstrip())
        if notes := self._notes():
            parts.append("\n".join(f"- {one_line(note)}" for note in notes))
        if self.explanations:
            table = markdown_table(["manifest", *self.names], self.explanations)
            parts.append(table.rstrip())
        return "\n\n".join([*parts, _MARKS[".md"]]) + "\n"

    def html(self) -> str:
        """Return the comparison as an HTML page."""
        head, rows = self._texts(list(self.rows()))
        drawn = [d for d in self.differences if sum(p.change == p.change for p in d.places) > 1]
        has_errors = any(d.error > 0 for d in self.rows())
        is_single = len(self._subjects()) == 1
        from .dumbbell import comparison_panel  # imports matplotlib

        return (
            environment()
            .get_template("compare.html.j2")
            .render(
                names=self.names,
                mark=Markup(_MARKS[".html"]),
                legend=ERROR_LEGEND if has_errors else "",
                sentences=self.sentences(),
                panels=[
                    {
                        "title": d.measure if is_single else f"{d.measure}, {d.subject}",
                        "verdict": d.verdict,
                        **comparison_panel(d, self.names, self.measures.get(d.measure, {}), index),
                    }
                    for index, d in enumerate(drawn[:_MAX_DRAWN])
                ],
                undrawn=len(drawn) - _MAX_DRAWN,
                cells=Table(tuple(head), tuple(map(tuple, rows)), len(head) - 5, True),
                shared=len(self.differences),
                notes=[(d.measure, d.subject, d.note) for d in self.differences if d.note],
                alone=self.alone,
                explanations=Table(("entry", *self.names), self.explanations),
            )
        )

    def write(self, output: Path) -> Path:
        """Write the comparison in the format given by the file's suffix.

        An existing file is replaced.

        Raises
        ------
        nlbench.RequestError
            If the suffix isn't ``.html``, ``.csv`` or ``.md``.
        """
        writers: dict[str, Callable[[], str]] = {
            ".html": self.html, ".md": self.markdown, ".csv": lambda: to_csv(self.frame()),
        }  # fmt: skip
        _check_suffix(output)
        make_folder(output.parent)
        write_atomically(output, writers[output.suffix]().encode("utf-8", errors="replace"))
        return output


def check_comparison_file(output: Path) -> None:
    """Raise unless a comparison can be written to a file that is new or an earlier comparison.

    Raises
    ------
    nlbench.RequestError
    """
    _check_suffix(output)
    if not os.path.lexists(output):
        return
    try:
        text = read_text(output)
    except RequestError:
        text = ""
    if _MARKS[output.suffix] not in text:
        raise RequestError(f"{output} is not a comparison by nlbench; choose another file")


def _check_suffix(output: Path) -> None:
    if output.suffix not in _MARKS:
        raise RequestError(f"{output}: expected a file name ending in {', '.join(_MARKS)}")


def _line(console: Console, text: str) -> None:
    lead = text[: len(text) - len(text.lstrip())]
    console.print(Text(lead + one_line(text)), soft_wrap=True)


def _lines(console: Console, texts: Sequence[str], noun: str) -> None:
    """Print texts, as many as fit into a terminal."""
    for text in texts[:_MAX_ROWS]:
        _line(console, text)
    if len(texts) > _MAX_ROWS:
        indent = texts[0][: len(texts[0]) - len(texts[0].lstrip())]
        more = count(len(texts) - _MAX_ROWS, f"more {noun}")
        _line(console, f"{indent}and {more}; -o FILE writes all")


def _value_text(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.value) else plus_minus(estimate.value, estimate.error)


def _size(d: Difference) -> float:
    """Return the size of a change for sorting: relative to the value, if possible."""
    size = abs(d.relative if math.isfinite(d.relative) else d.change)
    return size if math.isfinite(size) else 0.0


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
    described = [with_relative(run.manifest.get("measures") or {}) for run in (first, second)]
    before, after = (
        Scores({"": run.records}, known)
        for run, known in zip((first, second), described, strict=True)
    )
    pairs = _match_checkpoints(before.subjects, after.subjects)
    measures = [name for name in before.measures if name in after.measures]
    calls = {record.identity: record.probe.facts.get("where", {}) for record in second.records}
    differences, alone = [], []
    for old, new in pairs:
        for name in measures:
            cells = before[old.label, name], after[new.label, name]
            absent = [cell.status == "absent" for cell in cells]
            if not any(absent):
                where = calls.get((*new.identity, name), {})
                differences.append(difference_of(_label(old, new), name, *cells, where))
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
    explanations = tuple(_explanations(first, second, pairs))
    tested = tuple(mark_significant(differences))
    return Comparison(names, tested, explanations, tuple(alone), before.describe(described[0]))


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
    if before.identity == after.identity:
        return before.label
    if before.label == after.label:
        # The only networks of their runs are named by the model alone.
        return f"{before.label} · {before.weights_text} → {after.weights_text}"
    shared = f"{before.model} · " if before.model == after.model else ""
    return f"{before.label} → {after.label.removeprefix(shared)}"


def difference_of(
    subject: str,
    measure: str,
    before: Score,
    after: Score,
    where: Mapping[str, str] | None = None,
) -> Difference:
    """Compare two cells and the places that they have in common, in the order of the second.

    Parameters
    ----------
    where : mapping of str to str, optional
        Where functional calls stand, by place.
    """
    notes = [
        f"{word}: {cell.status}: {cell.reason}"
        for word, cell in (("first", before), ("second", after))
        if cell.status != "ok"
    ]
    known = {place.name: place for place in before.places}
    places = tuple(
        Difference(
            subject,
            measure,
            place.name,
            known[place.name],
            place,
            note=place.reason or known[place.name].reason,
            where=(where or {}).get(place.name, ""),
        )
        for place in after.places
        if place.name in known
    )
    shared = sum(math.isfinite(place.change) for place in places)
    counts = len(before.place_values), len(after.place_values)
    if counts != (shared, shared) and not notes:
        notes.append(f"{shared} of {counts[0]} and {counts[1]} places are shared")
    return Difference(
        subject,
        measure,
        "",
        before,
        after,
        note="; ".join(notes),
        places=() if before.unit == "paths" else places,  # a path has no error of its own
    )


def mark_significant(differences: Sequence[Difference]) -> list[Difference]:
    """Mark the networks and places that changed beyond their errors, by Holm's method over all."""
    flat = [row for d in differences for row in (d, *d.places)]
    changes = [row.estimate for row in flat]
    marks = exceeding([c.excess() for c in changes], [c.degrees for c in changes])
    marked = [
        replace(row, is_significant=bool(mark)) for row, mark in zip(flat, marks, strict=True)
    ]
    result = []
    position = 0
    for d in differences:
        end = position + 1 + len(d.places)
        result.append(replace(marked[position], places=tuple(marked[position + 1 : end])))
        position = end
    return result


def _explanations(
    first: Run, second: Run, pairs: Iterable[tuple[TableSubject, TableSubject]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the manifest entries that differ and can affect values."""
    before, after = (
        {name: str(value) for name, value in _run_facts(run.manifest)} for run in (first, second)
    )
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield key, before.get(key, ""), after.get(key, "")
    # Subjects with the same change share a line.
    changes: dict[tuple[str, str, str], list[str]] = {}
    known = [_subject_facts(run.manifest) for run in (first, second)]
    pairs = list(pairs)
    for pair in pairs:
        old, new = (facts.get(s.identity, {}) for facts, s in zip(known, pair, strict=True))
        for name in _differing_facts(old, new):
            change_ = (name.replace("_", " "), str(old.get(name, "")), str(new.get(name, "")))
            changes.setdefault(change_, []).append(_label(*pair))
    for (name, old_text, new_text), labels in changes.items():
        prefix = "" if len(labels) == len(pairs) else f"{', '.join(labels)}: "
        yield f"{prefix}{name}", old_text, new_text


def _run_facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from settings_of(manifest)
    yield from flatten(manifest.get("environment") or {}, "environment.")


def _subject_facts(manifest: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the manifest's entry for each subject, by model, weights, data and seed."""
    entries = manifest.get("subjects") or []
    return {tuple(entry.get(key) for key in _IDENTITY): entry for entry in entries}


def _differing_facts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the facts of a subject that differ, without those that others imply."""
    names = [n for n in (*_IDENTITY, *_SUBJECT_FACTS) if old.get(n) != new.get(n)]
    if "weights" in names or "model" in names:
        names = [name for name in names if name != "weights_hash"]
    if "data" in names or "seed" in names:
        names = [name for name in names if name != "sample_hash"]
    return names
