"""Comparison of two runs: differences between their cells and between their manifests.

`Comparison.broken` evaluates the conditions of ``nlbench compare --fail-if``.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nlbench.errors import RequestError, nearest, one_line, shorten
from nlbench.parsers import unique
from nlbench.store.run import Run

from .environment import Table, check_suffix, is_replaceable, render, write_text
from .estimates import (
    Change,
    Estimate,
    all_exceed,
    change,
    contrast_error,
    exceeding,
    relative_change,
)
from .exports import markdown_table, to_csv
from .manifest import flatten, iter_settings
from .tables import MeasureInfo, Measures, NamedRun, Score, TableSubject, read_run
from .terminal import print_line
from .text import count, error_legend, functional_calls, percentage, place_text

if TYPE_CHECKING:
    import pandas as pd

_CONDITION = re.compile(r"\s*(?P<measure>[^\s@<>]+)(@(?P<place>[^\s<>]+))?\s*(?P<sign>[<>])\s*(?P<bound>[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e-?[0-9]+)?)\s*(?P<percent>%?)\s*")  # fmt: skip  # noqa: E501
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
_SUBJECT_FACTS = (
    "weights_hash", "sample_hash", "samples", "split", "preprocessing", "parameters", "batch_norm",
)  # fmt: skip


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

    @cached_property
    def estimate(self) -> Change:
        """The difference with its error."""
        return change(self.first, self.second)

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.estimate.value

    @property
    def error(self) -> float:
        """Standard error of the difference, or NaN if unknown."""
        return self.estimate.error

    @property
    def relative(self) -> float:
        """The change as a fraction of the first value, or NaN if that is zero."""
        return self.change / abs(self.first.value) if self.first.value else math.nan

    @property
    def ends(self) -> str:
        """The formatted values, with an arrow between them."""
        return f"{self.first.text} → {self.second.text}"

    @property
    def verdict(self) -> str:
        """Verdict on the change: ``yes``, ``no`` or ``unknown``, and how many places changed."""
        text = "yes" if self.is_significant else "no"
        if math.isnan(self.error) or math.isnan(self.change):
            text = "unknown"
        known = [place for place in self.places if math.isfinite(place.error)]
        if known:
            changed = sum(place.is_significant for place in known)
            text += f"; {changed} of {len(known)} layers"
        return text

    @property
    def most_changed(self) -> Difference | None:
        """The place that changed by more than all others, beyond the error, or None if unknown."""
        places = sorted(
            (place for place in self.places if math.isfinite(place.change)),
            key=lambda place: -abs(place.change),
        )
        margins = [_size_margin(places[0], other) for other in places[1:]]
        is_clear = all_exceed(margins) and places[0].is_significant
        return places[0] if is_clear else None

    def sentence(self, info: MeasureInfo) -> str:
        """Describe which places changed, and how the network did.

        Examples
        --------
        >>> def estimate(value):
        ...     return Estimate(value, (value - 0.005, value, value + 0.005), "a", "samples")
        >>> place = Difference("", "affinity", "relu", estimate(0.9), estimate(0.7), True)
        >>> network = replace(place, place="", is_significant=True, places=(place,))
        >>> network.sentence(MeasureInfo(probe="sites", more_means="less nonlinear"))
        'affinity: relu −0.2000 (more nonlinear); network 0.900 ± 0.006 → 0.700 ± 0.006, −0.2000'
        """
        noun = info.range_noun
        known = [place for place in self.places if math.isfinite(place.error)]
        changed = sorted(
            (place for place in known if place.is_significant), key=lambda d: -abs(d.change)
        )
        parts = []
        named = [f"{place_text(d.place)} {d.estimate.text}" for d in changed[:2]]
        if len(known) == 1 and changed:
            parts += named
        elif changed:
            parts.append(f"{len(changed)} of {len(known)} {noun} changed")
        elif known:
            parts.append(f"none of {len(known)} {noun} changed beyond its error")
        sense = info.sense
        signs = {d.change > 0 for d in changed}
        if changed and sense and len(signs) == 1:
            parts[0] += f" ({'more' if signs == {sense > 0} else 'less'} nonlinear)"
        if len(changed) > 1:
            parts.append(f"largest: {', '.join(named)}")
        if math.isfinite(self.change):
            parts.append(f"network {self.ends}, {self.estimate.text}")
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
        import pandas as pd

        rows = [
            (d.subject, d.measure, d.place, d.first.value, d.second.value, d.change, d.relative,
             d.error, *d.estimate.interval, d.is_significant, d.note)
            for d in self.rows()
        ]  # fmt: skip
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
        """
        return [line for condition in conditions for line in self._broken(condition)]

    def _broken(self, condition: str) -> Iterator[str]:
        parts = _CONDITION.fullmatch(condition)
        if not parts:
            raise RequestError(
                "--fail-if: expected a condition like 'absdev > 5%' or 'affinity@* > 0.01', "
                f"got '{shorten(condition)}'"
            )
        bound = float(parts["bound"]) / (100 if parts["percent"] else 1)
        if math.isinf(bound):
            raise RequestError(f"--fail-if: {shorten(parts['bound'])} is out of bounds")
        matched = _matching(self.differences, "measure", parts["measure"], "no shared measure")
        if parts["place"] is not None:
            places = [d for network in matched for d in network.places]
            matched = _matching(places, "place", parts["place"], f"no place of {parts['measure']}")
        sign = 1 if parts["sign"] == ">" else -1
        is_signed = parts["bound"][0] in "+-"
        tested = []
        for d in matched:
            name = f"{d.measure}@{d.place}" if d.place else d.measure
            where = f"{name}, {d.subject}"
            if math.isnan(d.second.value) and math.isfinite(d.first.value):
                yield f"{where}: no longer has a value: {d.note}"
            elif math.isfinite(d.change):
                direction = 1 if is_signed or d.change >= 0 else -1
                margin = _margin(d, direction * bound, is_relative=bool(parts["percent"]))
                # A change fulfils the condition if its margin is positive in this orientation.
                oriented = replace(margin, value=sign * direction * margin.value)
                tested.append((d, where, oriented))
        excesses = [oriented.excess() for *_, oriented in tested]
        clear = exceeding(excesses, [oriented.degrees for *_, oriented in tested])
        for index, (d, where, oriented) in enumerate(tested):
            excess = excesses[index]
            is_unknown = math.isnan(excess) and oriented.value > 0
            if is_unknown or (clear[index] and excess > 0):
                text = d.estimate.text
                if parts["percent"]:
                    moved = relative_change(d.first, d.second)
                    text = f"{percentage(moved.value, moved.error)} ({text})"
                note = ", error unknown" if is_unknown else ""
                yield f"{where}: {text}{note} ({condition.strip()})"

    def print(self, console: Console) -> None:
        """Print the differences between the cells and between the manifests."""
        shared = count(len(self.differences), "shared cell")
        print_line(console, f"{self.names[0]} and {self.names[1]}: {shared}")
        if self.differences:
            self._print_table(console)
        _print_lines(console, self._notes(), "remark")
        if self.explanations:
            print_line(console, "differences between the manifests:")
            texts = [f"{n}: {a or 'nothing'} → {b or 'nothing'}" for n, a, b in self.explanations]
            _print_lines(console, texts, "difference", "  ")
        else:
            print_line(console, "the manifests do not differ")

    def _notes(self) -> list[str]:
        """Return what values depend on, why some are missing, and the cells in only one run."""
        names = unique(d.measure for d in self.differences)
        notes = [f"{name} {scale}" for name in names if (scale := self.measures[name].scale)]
        notes += [f"{d.measure}, {d.subject}: {d.note}" for d in self.differences if d.note]
        return notes + [f"only in {run}: {cell}" for run, cell in self.alone]

    def _print_table(self, console: Console) -> None:
        every = list(self.rows())
        order = sorted(range(len(every)), key=lambda i: (bool(every[i].place), -_size(every[i])))
        rows = [every[i] for i in sorted(order[:_MAX_ROWS])]
        table = self._table(rows)
        columns = list(range(table.names, len(table.head)))
        if console.width < 110:
            columns.remove(table.head.index("relative"))
        printed = RichTable("", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
        printed.columns[0].overflow = "fold"
        for i in columns:
            printed.add_column(Text(table.head[i]), justify="right", no_wrap=True)
        for d, row in zip(rows, table.rows, strict=True):
            name = d.measure if self._is_single() else f"{d.subject}: {d.measure}"
            name = f"  {one_line(d.place)}" if d.place else one_line(name)
            printed.add_row(Text(name), *(Text(row[i]) for i in columns))
        console.print("", printed, "", sep="\n")
        if where := {d.place: d.where for d in rows if d.where}:
            print_line(console, functional_calls(where))
        if hidden := len(every) - len(rows):
            more = count(hidden, "value")
            print_line(console, f"and {more} that changed less; -o FILE writes all")
        for line in self.sentences()[:_MAX_ROWS]:
            print_line(console, line)
        if legend := _legend(rows):
            print_line(console, f"{legend}; changed: beyond it, by Holm's method at 5 %")

    def sentences(self) -> list[str]:
        """Describe the change in each network that has errors, one line per measure."""
        lines = []
        for d in self.differences:
            info = self.measures[d.measure]
            if info.relative or math.isnan(d.error):
                continue
            text = d.sentence(info)
            if text:
                lines.append(text if self._is_single() else f"{d.subject}: {text}")
        return lines

    def _is_single(self) -> bool:
        return len({d.subject for d in self.differences}) == 1

    def _table(self, rows: Iterable[Difference]) -> Table:
        """Return the differences as text, in the columns of the printed table."""
        texts = []
        for d in rows:
            relative = percentage(d.relative, relative_change(d.first, d.second).error)
            texts.append(
                (d.subject, d.measure, d.place_text or "network", d.first.text, d.second.text,
                 d.estimate.text, relative, d.verdict.partition(";")[0])
            )  # fmt: skip
        head = ("subject", "measure", "place", *self.names, "difference", "relative", "changed")
        start = 1 if self._is_single() else 0
        lines = [tuple(map(one_line, line[start:])) for line in texts]
        return Table(tuple(map(one_line, head[start:])), tuple(lines), 3 - start, True)

    def markdown(self) -> str:
        """Return the comparison as Markdown."""
        table = self._table(self.rows())
        parts = [f"# {self.names[0]} and {self.names[1]}", _markdown_list(self.sentences())]
        parts += [markdown_table(table.head, table.rows).rstrip(), _markdown_list(self._notes())]
        if self.explanations:
            head = ["manifest", *self.names]
            parts.append(markdown_table(head, self.explanations).rstrip())
        return "\n\n".join([*filter(None, parts), _MARKS[".md"]]) + "\n"

    def html(self) -> str:
        """Return the comparison as an HTML page."""
        drawn = [d for d in self.differences if sum(p.change == p.change for p in d.places) > 1]
        from .panels import comparison_panel  # imports matplotlib

        panels = []
        for index, d in enumerate(drawn[:_MAX_DRAWN]):
            title = d.measure if self._is_single() else f"{d.measure}, {d.subject}"
            plot = comparison_panel(d, self.names, self.measures[d.measure], index)
            panels.append({"title": title, "verdict": d.verdict, **plot})
        return render(
            "compare.html.j2",
            names=self.names,
            mark=Markup(_MARKS[".html"]),
            legend=_legend(self.rows()),
            sentences=self.sentences(),
            panels=panels,
            undrawn=len(drawn) - _MAX_DRAWN,
            cells=self._table(self.rows()),
            shared=len(self.differences),
            notes=self._notes(),
            explanations=Table(("entry", *self.names), self.explanations),
        )

    def write(self, output: Path) -> Path:
        """Write the comparison in the format given by the file's suffix.

        An existing file is replaced.
        """
        check_suffix(output, _MARKS)
        writers = {".html": self.html, ".md": self.markdown}
        writer = writers.get(output.suffix, lambda: to_csv(self.frame()))
        return write_text(output, writer())


def check_comparison_file(output: Path) -> None:
    """Raise unless a comparison can be written to a file that is new or an earlier comparison."""
    check_suffix(output, _MARKS)
    if not is_replaceable(output, _MARKS[output.suffix]):
        raise RequestError(f"{output} is not a comparison by nlbench; choose another file")


def _matching(
    differences: Sequence[Difference], field: str, pattern: str, missing: str
) -> list[Difference]:
    """Return the differences whose measure or place matches a glob, at least one."""
    names = unique(getattr(d, field) for d in differences)
    chosen = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise RequestError(f"--fail-if: {missing} matches '{pattern}'{nearest(pattern, names)}")
    return [d for d in differences if getattr(d, field) in chosen]


def _legend(differences: Iterable[Difference]) -> str:
    return error_legend(value for d in differences for value in (d.first, d.second))


def _size_margin(first: Difference, second: Difference) -> Change:
    """Subtract the sizes of two changes."""
    terms: list[tuple[float, Estimate]] = []
    for d, sign in ((first, 1.0), (second, -1.0)):
        weight = math.copysign(sign, sign * d.change)
        terms += [(weight, d.second), (-weight, d.first)]
    value = abs(first.change) - abs(second.change)
    tolerance = first.estimate.tolerance + second.estimate.tolerance
    return Change(value, *contrast_error(terms), tolerance)


def _margin(d: Difference, step: float, *, is_relative: bool) -> Change:
    """Return the change beyond a step, which may be a fraction of the first value.

    Unlike a ratio, a multiple of the first value has a good error even if that value is near 0.
    """
    if not is_relative:
        return replace(d.estimate, value=d.change - step)
    return change(d.first.scaled(1 + math.copysign(step, step * d.first.value)), d.second)


def _print_lines(console: Console, texts: Sequence[str], noun: str, indent: str = "") -> None:
    """Print texts, as many as fit into a terminal."""
    for text in texts[:_MAX_ROWS]:
        print_line(console, text, indent)
    if len(texts) > _MAX_ROWS:
        more = count(len(texts) - _MAX_ROWS, f"more {noun}")
        print_line(console, f"and {more}; -o FILE writes all", indent)


def _size(d: Difference) -> float:
    """Return the size of a change for sorting: relative to the value, if possible."""
    size = abs(d.relative if math.isfinite(d.relative) else d.change)
    return size if math.isfinite(size) else 0.0


def compare_runs(first: Run, second: Run) -> Comparison:
    """Compare the cells and manifests of two runs. See `nlbench.compare`.

    Checkpoints are also matched by step and seed.
    """
    names = str(first.name), str(second.name)
    if names[0] == names[1]:
        names = f"{names[0]} (1)", f"{names[1]} (2)"
    before = read_run(first)
    after = read_run(second)
    pairs = _match_checkpoints(before.subjects, after.subjects)
    measures = [name for name in before.measures if name in after.measures]
    calls = {record.identity: record.probe.facts.get("where", {}) for record in second.records}
    differences = []
    alone = []
    for old, new in pairs:
        for name in measures:
            cells = before[old.label, name], after[new.label, name]
            absent = [cell.status == "absent" for cell in cells]
            if not any(absent):
                where = calls.get((*new.identity, name), {})
                differences.append(compare_scores(_label(old, new), name, *cells, where))
            elif not all(absent):
                alone.append((names[int(absent[0])], f"{name}, {old.label}"))
    if not differences:
        raise RequestError(
            f"{names[0]} and {names[1]} have no cell in common; expected both to contain the same "
            "subject (model, weights, data, seed) and measure"
        )
    matched = {s.label for pair in pairs for s in pair}
    for run, scores in zip(names, (before, after), strict=True):
        alone += [(run, s.label) for s in scores.subjects if s.label not in matched]
        alone += [(run, f"{m} of every subject") for m in scores.measures if m not in measures]
    explanations = tuple(_explanations(first, second, pairs))
    tested = tuple(mark_significant(differences))
    return Comparison(names, tested, explanations, tuple(alone), before.measures)


def _markdown_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {one_line(line)}" for line in lines)


def _match_checkpoints(
    before: Sequence[TableSubject], after: Sequence[TableSubject]
) -> list[tuple[TableSubject, TableSubject]]:
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    known = {subject.identity: subject for subject in after}
    pairs = [(s, known[s.identity]) for s in before if s.identity in known]
    paired = {subject.identity for subject, _ in pairs}
    old = _index_by_step(s for s in before if s.identity not in paired)
    new = _index_by_step(s for s in after if s.identity not in paired)
    return pairs + [(subject, new[key]) for key, subject in old.items() if key in new]


def _index_by_step(subjects: Iterable[TableSubject]) -> dict[tuple[object, ...], TableSubject]:
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


def compare_scores(
    subject: str, measure: str, before: Score, after: Score, where: Mapping[str, str] | None = None
) -> Difference:
    """Compare two cells and the places that they have in common, in the order of the second.

    `where` tells where functional calls stand, by place.
    """
    notes = [
        f"{word}: {cell.status}: {cell.reason}"
        for word, cell in (("first", before), ("second", after))
        if cell.status != "ok"
    ]
    known = {place.name: place for place in before.places}
    places = []
    for place in after.places:
        if place.name in known:
            old = known[place.name]
            note = place.reason or old.reason
            position = (where or {}).get(place.name, "")
            places.append(
                Difference(subject, measure, place.name, old, place, note=note, where=position)
            )
    shared = sum(math.isfinite(place.change) for place in places)
    counts = len(before.place_values), len(after.place_values)
    if counts != (shared, shared) and not notes:
        notes.append(f"{shared} of {counts[0]} and {counts[1]} places are shared")
    kept = () if before.unit == "paths" else tuple(places)  # a path has no error of its own
    return Difference(subject, measure, "", before, after, note="; ".join(notes), places=kept)


def mark_significant(differences: Sequence[Difference]) -> list[Difference]:
    """Mark the networks and places that changed beyond their errors, by Holm's method over all."""
    flat = [row for d in differences for row in (d, *d.places)]
    changes = [row.estimate for row in flat]
    marks = exceeding([c.excess() for c in changes], [c.degrees for c in changes])
    marked = iter(
        [replace(row, is_significant=bool(mark)) for row, mark in zip(flat, marks, strict=True)]
    )
    result = []
    for d in differences:
        whole = next(marked)
        result.append(replace(whole, places=tuple(next(marked) for _ in d.places)))
    return result


def _explanations(
    first: Run, second: Run, pairs: Sequence[tuple[TableSubject, TableSubject]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the manifest entries that differ and can affect values."""
    shared = {
        kind: set(first.manifest.get(kind) or ()) & set(second.manifest.get(kind) or ())
        for kind in ("probes", "measures")
    }
    before, after = (_run_facts(run.manifest, shared) for run in (first, second))
    for key in unique([*before, *after]):
        if before.get(key) != after.get(key):
            yield key, before.get(key, ""), after.get(key, "")
    # Subjects with the same change share a line.
    changes: dict[tuple[str, str, str], list[str]] = {}
    known = [NamedRun(str(run.name), run.manifest).subjects for run in (first, second)]
    for pair in pairs:
        old, new = (facts.get(s.identity, {}) for facts, s in zip(known, pair, strict=True))
        for change_ in _differing_facts(old, new):
            changes.setdefault(change_, []).append(_label(*pair))
    for (name, old_text, new_text), labels in changes.items():
        prefix = "" if len(labels) == len(pairs) else f"{', '.join(labels)}: "
        yield f"{prefix}{name}", old_text, new_text


def _run_facts(manifest: Mapping[str, Any], shared: Mapping[str, set[str]]) -> dict[str, str]:
    """Return a run's settings, of its probes and measures those that both runs have."""
    kept = {
        kind: {name: entry for name, entry in (manifest.get(kind) or {}).items() if name in names}
        for kind, names in shared.items()
    }
    manifest = {**manifest, **kept}
    environment = flatten(manifest.get("environment") or {}, "environment.")
    return {name: str(value) for name, value in (*iter_settings(manifest), *environment)}


def _differing_facts(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield the facts of a subject that differ, without those that others imply."""
    names = [n for n in (*_IDENTITY, *_SUBJECT_FACTS) if old.get(n) != new.get(n)]
    if "weights" in names or "model" in names:
        names = [name for name in names if name != "weights_hash"]
    if "data" in names or "seed" in names:
        names = [name for name in names if name != "sample_hash"]
    for name in names:
        yield name.replace("_", " "), str(old.get(name, "")), str(new.get(name, ""))
    before, after = (_options_and_versions(facts) for facts in (old, new))
    # Other models and data have other options and files.
    is_same = not {"model", "data"}.intersection(names)
    for name in unique([*before, *after]):
        is_known = name in before and name in after
        is_option = name.startswith(("model.", "data."))
        if before.get(name) != after.get(name) and (is_known or (is_same and is_option)):
            yield name, before.get(name, ""), after.get(name, "")


def _options_and_versions(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a subject's model and data, and the versions of their files."""
    parts = {"arguments": "model.", "data_options": "data."}
    parts |= {"sources": "version of ", "files": "version of "}
    return {
        f"{prefix}{name}": str(value)
        for part, prefix in parts.items()
        for name, value in (facts.get(part) or {}).items()
    }
