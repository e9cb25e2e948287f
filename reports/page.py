"""HTML pages for one or several runs, and folders of pages."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nlbench.errors import RequestError
from nlbench.parsers import unique
from nlbench.question import load_questions
from nlbench.serialization.fields import to_plain
from nlbench.serialization.files import check_is_file, is_part
from nlbench.store.run import Run

from .agreement import agreement
from .definitions import definition
from .embedded import PageData, to_script
from .environment import is_replaceable, render, write_text
from .exports import latex_table
from .findings import DISAGREE, findings
from .leaderboard import CONFIDENCE, Row, is_training, leaderboard, sort_measure
from .linearised import tradeoffs
from .manifest import manifest_lines
from .pictures import load_planes
from .population import find_population
from .remarks import describe_scope, differences, gap_table, gaps
from .signatures import signature_maps
from .tables import MeasureInfo, Measures, NamedRun, Scores, read_measures
from .training import change_table, training_runs
from .views import bibtex, board_view, card_axis, cite_sentence, heatmaps, strip_fields

_SOURCE = '<meta name="nlbench-source" content="{}">'
MAX_BYTES = 5_000_000
"""Approximate maximum size of a page."""
BYTES_PER_SUBJECT = 500
BYTES_PER_CELL = 400


def write_page(runs: Run | Sequence[Run], output: str | os.PathLike[str]) -> Path:
    """Write runs atomically as a self-contained HTML file, and return its path.

    Missing folders are created; an existing file is replaced. With several runs, the rows are
    labelled with the run's name.
    """
    path = Path(output)
    if path.is_dir():
        raise RequestError(f"{path} is a folder; expected a file name")
    return write_text(path, render_page(runs))


def is_current_page(runs: Run | Sequence[Run], page: str | os.PathLike[str]) -> bool:
    """Return True if a page was made from the present content of runs, whatever its time."""
    try:
        check_is_file(Path(page))
        with Path(page).open("rb") as file:
            head = file.read(4096)
    except (OSError, RequestError):
        return False
    return _SOURCE.format(_source_hash(named_runs(runs))).encode() in head


def _source_hash(named: Sequence[NamedRun]) -> str:
    """Compute a hash of everything on a page that comes from its runs."""
    digest = hashlib.sha256(version("nlbench").encode())
    for run in named:
        facts = to_plain((run.name, run.manifest, run.planes))
        digest.update(repr(facts).encode("utf-8", "surrogatepass"))
        for record in run.records:
            facts = to_plain((record.identity, record.probe, record.costs))
            text = repr((facts, record.key, record.seconds, record.traceback, record.result))
            digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def write_site(runs: Run | Sequence[Run], output: str | os.PathLike[str]) -> Path:
    """Write runs as a folder of static pages, an index and one page per run. Return the index.

    The folder is new, empty, or that of an earlier site, whose pages are replaced.
    """
    folder = Path(output)
    members: list[Run] = list(runs) if isinstance(runs, Sequence) else [runs]
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; expected a folder")
    index = folder / "index.html"
    rows = []
    taken = {index.name}
    for named in named_runs(members):
        file = _file_name(named.name, taken)
        taken.add(file)
        rows.append({"file": file, **_index_row(named)})
    _check_site_folder(folder, taken)
    for run, row in zip(members, rows, strict=True):
        write_page(run, folder / row["file"])
    rows.sort(key=lambda row: str(row["created"]), reverse=True)
    return write_text(index, render("index.html.j2", rows=rows))


def _check_site_folder(folder: Path, pages: Iterable[str]) -> None:
    """Raise if a folder contains files of others, or one of the pages isn't a page of nlbench."""
    if not folder.exists():
        return
    # An interrupted site has pages and no index.
    required = set(pages)
    if not (folder / "index.html").exists():
        required |= {entry.name for entry in folder.iterdir() if not is_part(entry)}
    for name in sorted(required):
        check_page(folder / name, "folder")


def check_page(path: Path, other: str = "file") -> None:
    """Raise if a path exists and isn't a page that nlbench wrote."""
    if not is_replaceable(path, '<meta name="generator" content="nlbench">', 'id="data">'):
        raise RequestError(f"{path} was not written by nlbench; choose another {other}")


def _file_name(name: str, taken: Container[str]) -> str:
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
    stem = stem.strip("-.")[:80] or "run"
    file = f"{stem}.html"
    number = 1
    while file in taken:
        number += 1
        file = f"{stem}-{number}.html"
    return file


def _index_row(run: NamedRun) -> dict[str, Any]:
    """Return a run's row in the index."""
    scores = read_runs([run])
    rows = leaderboard(scores)
    first = sort_measure(scores.measures)
    top = rows[0] if rows and first and rows[0].entries[first].status == "ok" else None
    cells = [score.status for _, _, score in scores.cells()]
    return {
        "name": run.name,
        "created": str(run.manifest.get("created") or ""),
        "networks": len(rows),
        "measures": ", ".join(scores.measures),
        "top": f"{top.label} by {first}" if top and len(rows) > 1 else "",
        "cells": ", ".join(f"{cells.count(status)} {status}" for status in unique(cells)),
        "unfinished": bool(run.manifest.get("unfinished")),
    }


def render_page(runs: Run | Sequence[Run], *, head: Markup | None = None, title: str = "") -> str:
    """Render runs as HTML text.

    A head stands above the leaderboard, and a title in place of the names of the runs. See
    `write_page`.
    """
    named = named_runs(runs)
    scores = read_runs(named)
    measures = scores.measures
    all_rows = leaderboard(scores)
    missing = gaps(named, scores)
    rows, left_out = _limit_rows(all_rows, scores)
    shown = scores.restrict(subjects=[subject for row in rows for subject in row.subjects])
    is_single = len(rows) == 1 and not head
    correlations = agreement(all_rows, scores)
    linearised = tradeoffs(named)
    sentences = findings(all_rows, scores, missing, correlations["spearman"])
    data = PageData(shown, rows, named)
    content = {
        **data.pack(),
        "single": is_single,
        "kindOrder": _kinds(named),
        "confidence": f"{100 * CONFIDENCE:g}",
        "maps": signature_maps(rows, shown),
        "trainings": [],
        "tradeoffs": [tradeoff.content for tradeoff in linearised],
    }
    changed = []
    positions = {row.label: index for index, row in enumerate(rows)}
    for training in training_runs(all_rows):
        changes = training.changes(scores)
        changed.append({"label": training.label, "table": change_table(changes)})
        content["trainings"].append(training.packed(positions, changes))
    names = ", ".join(run.name for run in named) if len(named) < 5 else f"{len(named)} runs"
    return render(
        "page.html.j2",
        source=_source_hash(named),
        title=title or (_network_title(rows[0]) if is_single else names),
        head=head or Markup(),
        measured=describe_scope(named, scores, all_rows),
        findings=sentences,
        disagree=any(DISAGREE in sentence for sentence in sentences),
        questions=load_questions().values(),
        names=measures,
        measures=measures,
        definition=definition,
        card_axis=card_axis,
        find_population=find_population,
        single=_single_view(rows[0], measures, data) if is_single else None,
        trainings=changed,
        cite=_citation(named, all_rows, measures),
        bibtex=bibtex(named, measures),
        latex=latex_table(rows, measures) if len(rows) <= 100 else "",
        left_out=[*left_out, *data.left_out()],
        confidence=content["confidence"],
        runs=named,
        differences=differences(named),
        agreement=heatmaps(correlations, list(measures)),
        maps=bool(content["maps"]),
        tradeoffs=linearised,
        gaps=gap_table(missing),
        manifest_lines=manifest_lines,
        max_lines=200,
        data=Markup(to_script(content)),
        **board_view(data, content, measures, rows),
    )


def _single_view(row: Row, measures: Measures, data: PageData) -> dict[str, Any]:
    """Return the strip and the cards for a page with one network."""
    sites = [
        name
        for name, entry in row.entries.items()
        if measures[name].probe == "sites" and len(entry.place_values)
    ]
    first = next((n for n in sites if measures[n].sense), sites[0] if sites else "")
    colours = data.colours.get(first)
    return {
        "strip_measure": first,
        "noun": measures[first].place_noun if first else "",
        "fields": strip_fields(row.entries[first], colours) if first else [],
        "colours": colours.legend() if colours else None,
        "row": row,
        "references": any(find_population(n, measures[n]) for n in row.entries),
    }


def _citation(runs: Sequence[NamedRun], rows: Sequence[Row], measures: Measures) -> str:
    """Return a sentence that cites the first network on a page, or the last step of training."""
    row = rows[-1 if is_training(rows) else 0] if rows else None
    if row is None or not any(entry.status == "ok" for entry in row.entries.values()):
        return ""
    subject = row.subjects[0]
    run = next((run for run in runs if run.name == subject.run), runs[0])
    facts = run.subjects.get(subject.identity, {})
    hashed = str(facts.get("weights_hash") or "")[:8]
    samples = facts.get("samples")
    return cite_sentence(
        row,
        measures,
        (
            f"n = {samples:,} samples" if isinstance(samples, int) else "",
            f"weights {hashed}" if hashed else "",
            f"nlbench {run.manifest.get('nlbench', '')}".strip(),
            f"run {run.name} of {str(run.manifest.get('created') or '')[:10]}",
            str(run.manifest.get("device") or ""),
        ),
    )


def _limit_rows(rows: Sequence[Row], scores: Scores) -> tuple[list[Row], list[str]]:
    """Return the rows that a page shows, and sentences on what it omits.

    With too many subjects, each row lists only its first seed (with the values for all seeds). If
    there are too many rows, only the most and the least nonlinear are shown.
    """
    limit = MAX_BYTES // (BYTES_PER_SUBJECT + BYTES_PER_CELL * len(scores.measures))
    subjects = len(scores.subjects)
    if subjects <= limit:
        return list(rows), []
    sentences = []
    folded = [replace(row, subjects=row.subjects[:1]) for row in rows]
    if subjects > len(rows):
        sentences.append("Values for individual seeds are only in scores.csv.")
    if len(rows) > limit:
        tail = limit // 4
        folded = folded[: limit - tail] + folded[-tail:]
        sentences.append(
            f"This page shows the {limit - tail:,} most and the {tail:,} least nonlinear of "
            f"{len(rows):,} networks; scores.csv contains all."
        )
    return folded, sentences


def _network_title(row: Row) -> str:
    """Return the title for a page with one network, such as ``vgg8 trained on digits``."""
    subject = row.subjects[0]
    if subject.data == "given":  # a model passed to `nlbench.evaluate`
        return subject.model
    weights = subject.weights_text
    words = weights if weights in ("trained", "calibrated") else f"({weights})"
    return f"{subject.model} {words} on {subject.data}"


def named_runs(runs: Run | Sequence[Run]) -> list[NamedRun]:
    """Name each run uniquely on the page."""
    members: list[Run] = list(runs) if isinstance(runs, Sequence) else [runs]
    if not members:
        raise RequestError("no runs to report; expected at least one")
    named: list[NamedRun] = []
    for run in members:
        name = str(run.name) or "run"
        taken = {other.name for other in named}
        number = 2
        while name in taken:
            name = f"{run.name} ({number})"
            number += 1
        # Each access to a manifest serializes the entry, so convert it once.
        planes = load_planes(run.path) if run.path else ()
        named.append(NamedRun(name, dict(run.manifest), tuple(run.records), planes))
    return named


def read_runs(runs: Sequence[NamedRun]) -> Scores:
    """Return the scores of runs, with each measure's metadata from the first run with it.

    Measures that share a probe are neighbours.
    """
    known: dict[str, MeasureInfo] = {}
    for run in runs:
        sites = (run.manifest.get("probes") or {}).get("sites") or {}
        nouns = {"activations": "activation", "blocks": "block", "spans": "span"}
        noun = nouns.get(sites.get("of", "activations").partition(":")[0], "module")
        for name, info in read_measures(run.manifest).items():
            known.setdefault(name, replace(info, noun=noun))
    probes = unique(info.probe for info in known.values())
    measures = dict(sorted(known.items(), key=lambda item: probes.index(item[1].probe)))
    records = {run.name if len(runs) > 1 else "": run.records for run in runs}
    return Scores(records, measures)


def _kinds(runs: Sequence[NamedRun]) -> list[str]:
    """Return the activation functions, most frequent first."""
    counted: Counter[str] = Counter()
    for run in runs:
        for subject in unique(record.subject.identity for record in run.records):
            counted.update(filter(None, run.kinds(subject).values()))
    return [kind for kind, _ in counted.most_common()]
